"""Memory of a run on one device over its whole life, as a downsampled series."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from gpuwarden.analysis.memory.downsampling import Downsampled
from gpuwarden.protocol.messages import DeviceMemory, Phase, Report

MIN_RISING_REPORTS = 4  # in a row, over at least a second; the first steps of a training have fewer

NumberT = TypeVar("NumberT", int, float)


@dataclass(frozen=True, slots=True)
class MemoryWindow:
    """Memory of a run in a time window, from `began` to `ended` in seconds since its first message.

    Bytes: `lowest` and `highest` in use at reports, which come between steps; `peak` is the allocator's own peak at the
    end, reached within steps, and `peak_at_lowest` that peak when the lowest was reported, at `lowest_at`. `headroom`
    is the minimum of all polls, `others` the maximum memory of other processes on the device, `limit` the memory
    available to the run at the end; None if unknown. `steps`, `phase` and `epoch` are those at the end. `batch_size`
    is the largest, if reported.
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
    lowest_at: float = 0.0
    peak_at_lowest: int = 0
    limit: float | None = None

    def joined(self, other: MemoryWindow) -> MemoryWindow:
        """Return this window joined with the next."""
        low = other if other.lowest <= self.lowest else self
        return replace(
            other,
            began=self.began,
            lowest=low.lowest,
            highest=max(self.highest, other.highest),
            peak=max(self.peak, other.peak),
            headroom=_combine(min, self.headroom, other.headroom),
            others=_combine(max, self.others, other.others),
            batch_size=_combine(max, self.batch_size, other.batch_size),
            lowest_at=low.lowest_at,
            peak_at_lowest=low.peak_at_lowest,
        )


def window_from_sample(
    at: float, memory: DeviceMemory, *, since: float, limit: float | None, report: Report | None = None
) -> MemoryWindow:
    """Return the window of one report, or of one sample of memory without a report."""
    return MemoryWindow(
        began=since,
        ended=at,
        steps=report.steps if report else 0,
        phase=report.phase if report else "train",
        epoch=report.epoch if report else None,
        lowest=memory.current,
        highest=memory.current,
        peak=memory.peak,
        batch_size=report.batch_size if report else None,
        lowest_at=at,
        peak_at_lowest=memory.peak,
        limit=limit,
    )


@dataclass(slots=True)
class MemoryHistory:
    """Memory of one run on one device. Used by one event loop; times are seconds since the run's first message.

    `training_peak` is the allocator's own peak when it last rose in training, in bytes. `training_began` is the time of
    the first step or evaluation: before it the model is built. `limit` is the memory available to the run at the last
    poll, if its headroom was known. `rises` counts the last reports with new steps in which both memory in use between
    steps and the peak were higher than in the one before.
    """

    series: Downsampled[MemoryWindow] = field(default_factory=Downsampled)
    training_peak: int | None = None
    last: DeviceMemory | None = None
    rises: int = 0
    limit: float | None = None
    training_began: float | None = None
    _phase: Phase | None = None  # of the last report
    _steps: int = 0  # likewise

    @property
    def grows_in_steps(self) -> bool:
        """True if the peak is that of the last steps: it rises from report to report with the memory in use."""
        return self.rises >= MIN_RISING_REPORTS

    @property
    def windows(self) -> list[MemoryWindow]:
        """All windows, oldest first; the last one still grows."""
        return list(self.series)

    def add_report(self, memory: DeviceMemory, report: Report, at: float) -> None:
        """Add a report. An increase since the previous report belongs to that report's phase."""
        phase = report.phase if self._phase is None else self._phase
        if phase == "train" and (self.last is None or memory.peak > self.last.peak):
            self.training_peak = memory.peak
        if report.steps > self._steps:
            has_risen = self.last is not None and memory.current > self.last.current and memory.peak > self.last.peak
            self.rises = self.rises + 1 if has_risen else 0
        self._phase, self._steps, self.last = report.phase, report.steps, memory
        if self.training_began is None and (report.steps or report.phase in ("test", "predict")):
            self.training_began = at
        newest = self.series.newest
        since = at if newest is None else newest.ended
        self.series.append(window_from_sample(at, memory, since=since, limit=self.limit, report=report))

    def add_poll(self, headroom: float | None, others: float | None) -> None:
        """Add the headroom at a poll, and the memory of other processes on the device; bytes."""
        newest = self.series.newest
        if newest is None or self.last is None:
            return
        self.limit = None if headroom is None else headroom + self.last.current
        self.series.newest = replace(
            newest, headroom=_combine(min, newest.headroom, headroom), others=_combine(max, newest.others, others)
        )


def _combine(
    choose: Callable[[NumberT, NumberT], NumberT], one: NumberT | None, other: NumberT | None
) -> NumberT | None:
    return one if other is None else other if one is None else choose(one, other)
