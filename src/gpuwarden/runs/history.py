"""What a run's allocator held on one device over its whole life, in a bounded number of windows.

Windows begin as long as a report, and the shortest are joined whenever they are too many: so a run of a minute is known
to the second, and one of a day to some minutes. Its epochs are kept likewise. Whatever looks back on a run (growth,
verdicts, the story of a run) reads this and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from gpuwarden.protocol import PHASES, DeviceMemory, Phase, Report
from gpuwarden.runs.ladder import Ladder

MOST_WINDOWS = 128
ENOUGH_WINDOWS = MOST_WINDOWS * 3 // 4  # that are left when they are joined
COARSER = 1.5  # times as long as before windows get, where they are too many
MOST_EPOCHS = 128
FIRST_SECONDS = 0.5  # that a window lasts at first


class Window(NamedTuple):
    """A stretch of a run's life: from `began` to `ended` in seconds since the run was first heard of.

    Bytes: `lowest` and `highest` of what was in use at reports, which come between steps; `peak` is the allocator's own
    mark at the stretch's end, which lies within steps. `headroom` is the least of any poll, `others` the most that
    other processes held on the device; None where no poll told. `steps` is how many the run had made at its end,
    `phase` and `epoch` are those of its end. `batch_size` is the largest of it, where the run knows.
    """

    began: float
    ended: float
    steps: int
    phase: Phase
    epoch: int | None
    lowest: int
    highest: int
    peak: int
    headroom: float | None = None
    others: float | None = None
    batch_size: int | None = None
    reports: int = 1


@dataclass(slots=True)
class PhaseMemory:
    """What the run did in one phase, in bytes.

    `grown` is by how much more was in use at the ends of its stays there than at their begins, `peak` the allocator's
    own mark when it last rose within one.
    """

    grown: int = 0
    peak: int | None = None


class _UnderWay:
    """A window that still grows: changed in place, as every report of every run does it."""

    __slots__ = (
        "batch_size",
        "began",
        "ended",
        "epoch",
        "headroom",
        "highest",
        "lowest",
        "others",
        "peak",
        "phase",
        "reports",
        "steps",
    )

    def __init__(self, began: float, at: float, memory: DeviceMemory, report: Report) -> None:
        self.began, self.ended = began, at
        self.steps, self.phase, self.epoch = report.steps, report.phase, report.epoch
        self.lowest = self.highest = memory.current
        self.peak = memory.peak
        self.headroom: float | None = None
        self.others: float | None = None
        self.batch_size = report.batch_size
        self.reports = 1

    def hear(self, at: float, memory: DeviceMemory, report: Report) -> None:
        current, batch_size = memory.current, report.batch_size
        self.ended = at
        self.steps, self.phase, self.epoch = report.steps, report.phase, report.epoch
        if current < self.lowest:
            self.lowest = current
        elif current > self.highest:
            self.highest = current
        if memory.peak > self.peak:  # noqa: PLR1730 - max takes longer than all the rest
            self.peak = memory.peak
        if batch_size is not None and (self.batch_size is None or batch_size > self.batch_size):
            self.batch_size = batch_size
        self.reports += 1

    def see(self, headroom: float | None, others: float | None) -> None:
        if headroom is not None and (self.headroom is None or headroom < self.headroom):
            self.headroom = headroom
        if others is not None and (self.others is None or others > self.others):
            self.others = others

    def window(self) -> Window:
        return Window(
            self.began,
            self.ended,
            self.steps,
            self.phase,
            self.epoch,
            self.lowest,
            self.highest,
            self.peak,
            self.headroom,
            self.others,
            self.batch_size,
            self.reports,
        )


@dataclass(slots=True)
class MemoryHistory:
    """One run on one device. Used by one event loop; times are seconds since the run was first heard of.

    `epochs` are those that have ended, oldest first. `ladder` has the least that was in use, finely for what is recent.
    `cap` is what the run could have had in use at most, by the last poll that knew its headroom.
    """

    epochs: list[Window] = field(default_factory=list)
    phases: dict[Phase, PhaseMemory] = field(default_factory=dict)
    seconds: float = FIRST_SECONDS  # that a window lasts now
    last: DeviceMemory | None = None
    ladder: Ladder = field(default_factory=Ladder)
    cap: float | None = None
    begun: int = 0  # epochs
    _closed: list[Window] = field(default_factory=list)
    _window: _UnderWay | None = None
    _phase: Phase | None = None  # of the last report
    _stay: PhaseMemory = field(default_factory=PhaseMemory)  # of that phase
    _beside: int = 0  # bytes grown in other phases than training
    _epoch: _UnderWay | None = None
    _epochs_each: int = 1  # epochs that an entry of `epochs` stands for
    _epochs_in: int = 0  # epochs in its last entry

    @property
    def windows(self) -> list[Window]:
        """All windows, oldest first; the last one still grows."""
        return [*self._closed, self._window.window()] if self._window else self._closed

    def phase_beside(self) -> Phase:
        """Return the phase other than training in which it has grown most."""
        return max((phase for phase in PHASES if phase != "train"), key=self._grown_in)

    def _grown_in(self, phase: Phase) -> int:
        known = self.phases.get(phase)
        return known.grown if known else 0

    def hear(self, memory: DeviceMemory, report: Report, at: float) -> None:
        """Take one report."""
        phase, epoch, last, under_way = report.phase, report.epoch, self.last, self._epoch
        if last is not None:
            self._note_change(memory, last)
        if phase != self._phase:
            self._enter(phase, memory)
        self.last = memory
        if epoch is None or phase == "idle":
            pass
        elif under_way is not None and under_way.epoch == epoch:
            under_way.hear(at, memory, report)
        else:
            self._begin_epoch(memory, report, at)
        window = self._window
        if window is not None and at - window.began < self.seconds and window.epoch == epoch:
            window.hear(at, memory, report)
        else:
            self._begin_window(memory, report, at)
        if report.steps or phase in ("test", "predict"):  # before that a model is only being made
            self.ladder.hear(at, memory.current, memory.peak, epochs=self.begun, beside=self._beside, cap=self.cap)

    def see(self, headroom: float | None, others: float | None) -> None:
        """Take what a poll knows: bytes of headroom, and what other processes hold on the device."""
        if self._window:
            self._window.see(headroom, others)
        if self._epoch:
            self._epoch.see(headroom, others)
        if self.last is not None:
            self.cap = None if headroom is None else headroom + self.last.current

    def _note_change(self, memory: DeviceMemory, last: DeviceMemory) -> None:
        """Lay what happened since the last report to the phase it told of: a new phase is reported as it begins."""
        stay, grown = self._stay, memory.current - last.current
        if grown:
            stay.grown += grown
            if self._phase != "train":
                self._beside += grown
        if memory.peak > last.peak:
            stay.peak = memory.peak

    def _enter(self, phase: Phase, memory: DeviceMemory) -> None:
        self._phase = phase
        self._stay = self.phases.setdefault(phase, PhaseMemory())
        if self.last is None:
            self._stay.peak = memory.peak

    def _begin_window(self, memory: DeviceMemory, report: Report, at: float) -> None:
        before = self._window
        if before is not None:
            self._closed.append(before.window())
        self._window = _UnderWay(at if before is None else before.ended, at, memory, report)
        if len(self._closed) >= MOST_WINDOWS:
            self._thin_out()

    def _thin_out(self) -> None:
        """Join what is short for the time of all: epochs begin windows of their own, however short they are."""
        while len(self._closed) > ENOUGH_WINDOWS:
            self._closed[:] = _no_shorter_than(self.seconds, self._closed)
            if len(self._closed) > ENOUGH_WINDOWS:
                self.seconds *= COARSER

    def _begin_epoch(self, memory: DeviceMemory, report: Report, at: float) -> None:
        under_way = self._epoch
        self.begun += 1
        self._epoch = _UnderWay(at if under_way is None else under_way.ended, at, memory, report)
        if under_way is None:
            return
        if self.epochs and self._epochs_in < self._epochs_each:
            self.epochs[-1] = joined(self.epochs[-1], under_way.window())
            self._epochs_in += 1
        else:
            self.epochs.append(under_way.window())
            self._epochs_in = 1
        if len(self.epochs) > MOST_EPOCHS:
            self.epochs[:] = _in_pairs(self.epochs)
            self._epochs_each *= 2


def joined(one: Window, other: Window) -> Window:
    """Join a window with the one after it."""
    return Window(
        one.began,
        other.ended,
        other.steps,
        other.phase,
        other.epoch,
        min(one.lowest, other.lowest),
        max(one.highest, other.highest),
        max(one.peak, other.peak),
        _least(one.headroom, other.headroom),
        _most(one.others, other.others),
        _largest(one.batch_size, other.batch_size),
        one.reports + other.reports,
    )


def _no_shorter_than(seconds: float, windows: list[Window]) -> list[Window]:
    """Join neighbours as long as together they do not last longer; one that is longer, with a gap before it, stays."""
    found = windows[:1]
    for window in windows[1:]:
        if window.ended - found[-1].began <= seconds:
            found[-1] = joined(found[-1], window)
        else:
            found.append(window)
    return found


def _in_pairs(windows: list[Window]) -> list[Window]:
    pairs = [joined(*windows[at : at + 2]) for at in range(0, len(windows) - 1, 2)]
    return pairs + windows[2 * len(pairs) :]


def _least(one: float | None, other: float | None) -> float | None:
    return one if other is None else other if one is None else min(one, other)


def _most(one: float | None, other: float | None) -> float | None:
    return one if other is None else other if one is None else max(one, other)


def _largest(one: int | None, other: int | None) -> int | None:
    return one if other is None else other if one is None else max(one, other)
