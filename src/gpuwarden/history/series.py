"""Ring of the last ten minutes of GPUs, runs and host: a frame a second, and each poll of the last 30 s.

The charts of the status page read a point every five seconds from it; up to an hour ago there is a point every 30 s for
them. Incidents read all of the ring. A frame is one array of numbers: 3 MiB for 8 GPUs and 64 runs, with samples.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import nan
from typing import Literal

from gpuwarden.gpu.clock_reasons import FAULT_REASONS
from gpuwarden.gpu.metrics import GpuReadings, MigReadings
from gpuwarden.gpu.snapshot import Gpu, GpuProcess, MemorySample
from gpuwarden.nvml.constants import CLOCK_EVENT_REASONS
from gpuwarden.owners.resolver import Owners
from gpuwarden.state import State

WINDOW_SECONDS = 600.0
FRAME_SECONDS = 1.0  # between two frames
FAST_SECONDS = 30.0  # in which each poll has a frame
INTERVAL_SECONDS = 5.0  # minimum between two points of a chart
HOUR_SECONDS = 3600.0  # shown by charts
COARSE_SECONDS = 30.0  # between two points of charts that are older than the window
_MIN_COARSE_SECONDS = 0.9 * COARSE_SECONDS  # points are not exactly 5 s apart: one that is 29.9 s later counts, too
COARSE_POINTS = int((HOUR_SECONDS - WINDOW_SECONDS) / COARSE_SECONDS)
MAX_SUBJECTS = 256  # of a frame: GPUs, MIG instances, runs, and pairs of run and device; 6 MiB in all
MAX_FAST_FRAMES = 330  # with the shortest poll interval, and early polls
PACE_POINTS = 12  # over which steps per second are averaged: a minute

Key = tuple[str, ...]  # a UUID, or a run's id and a UUID
Kind = Literal["host", "gpus", "runs", "devices"]
Subject = tuple[Kind, Key]
COLUMNS: Mapping[Kind, tuple[str, ...]] = {
    "host": ("memory_available_bytes",),
    "gpus": (
        "memory_used_bytes",
        "memory_in_use_bytes",
        "utilization_ratio",
        "temperature_celsius",
        "memory_temperature_celsius",
        "power_watts",
        "sm_clock_hertz",
        "clock_events",  # mask of those CLOCK_EVENT_REASONS that throttle
    ),
    "runs": ("steps", "loss", "host_cpu_seconds"),
    "devices": ("memory_in_use_bytes", "headroom_bytes", "memory_reserved_bytes"),
}
Columns = dict[str, list[float | None]]
_REASONS = tuple(((name,), bit) for name, bit in CLOCK_EVENT_REASONS.items() if name in FAULT_REASONS)


@dataclass(slots=True)
class HistoryFrame:
    """Values of one poll; `time` is Unix time, `taken` monotonic. `processes` and `samples` are by UUID of the GPU.

    `values` are those of the subjects, in their order; NaN if unknown. `charted`: it is a point of the charts.
    """

    time: float
    taken: float
    subjects: tuple[Subject, ...]
    values: array[float]
    charted: bool
    processes: Mapping[str, tuple[GpuProcess, ...]]
    owners: Owners | None
    samples: Mapping[str, tuple[MemorySample, ...]]

    def thin(self) -> None:
        """Drop what only the last 30 s have."""
        self.processes, self.owners, self.samples = {}, None, {}


class HistorySeries:
    """Recorder of the ring. Used by one event loop; `now` is monotonic.

    A subject without a value at a frame has a gap. Above MAX_SUBJECTS subjects are dropped and counted.
    """

    def __init__(self) -> None:
        self.dropped = 0  # subjects, of the last frame
        self.points = 0  # of charts, recorded in total
        self._coarse: deque[HistoryFrame] = deque(maxlen=COARSE_POINTS)  # older than the window
        self._frames: deque[HistoryFrame] = deque()  # older than FAST_SECONDS
        self._fast: deque[HistoryFrame] = deque(maxlen=MAX_FAST_FRAMES)
        self._steps: dict[str, deque[tuple[float, float]]] = {}  # of runs at the last points: time and steps
        self._subjects: tuple[Subject, ...] = ()
        self._due = 0.0

    def add_poll(self, state: State, now: float) -> None:
        """Add a poll; about 100 µs for 8 GPUs and 8 runs."""
        is_due = now >= self._due
        frame = self._frame(state, now, charted=is_due)
        self._fast.append(frame)
        if is_due:
            self._due = now + INTERVAL_SECONDS * 0.9  # polls are not exactly periodic
            self.points += 1
            self._add_steps(state)
        while self._fast and self._fast[0].taken < now - FAST_SECONDS:
            self._keep(self._fast.popleft())
        while self._frames and self._frames[0].taken < now - WINDOW_SECONDS:
            frame = self._frames.popleft()
            if frame.charted and (not self._coarse or frame.taken - self._coarse[-1].taken >= _MIN_COARSE_SECONDS):
                self._coarse.append(frame)
        while self._coarse and self._coarse[0].taken < now - HOUR_SECONDS:
            self._coarse.popleft()

    def _frame(self, state: State, now: float, *, charted: bool) -> HistoryFrame:
        subjects, values = _poll_values(state)
        self.dropped = max(len(subjects) - MAX_SUBJECTS, 0)
        if self.dropped:
            del subjects[MAX_SUBJECTS:]
            del values[sum(len(COLUMNS[kind]) for kind, _key in subjects) :]
        if (present := tuple(subjects)) != self._subjects:
            self._subjects = present
        gpus = state.snapshot.gpus
        return HistoryFrame(
            state.snapshot.time,
            now,
            self._subjects,
            array("d", values),
            charted,
            {gpu.identity.uuid: gpu.processes for gpu in gpus if gpu.processes},
            state.owners,
            {gpu.identity.uuid: gpu.memory_samples for gpu in gpus if gpu.memory_samples},
        )

    def _keep(self, frame: HistoryFrame) -> None:
        """Keep a frame that is no longer of the last 30 s, unless there is one of that second."""
        if frame.charted or not self._frames or frame.taken - self._frames[-1].taken >= FRAME_SECONDS * 0.9:
            frame.thin()
            self._frames.append(frame)

    def _add_steps(self, state: State) -> None:
        present: dict[str, deque[tuple[float, float]]] = {}
        for run in state.runs[:MAX_SUBJECTS]:
            if run.up and run.report:
                known = self._steps.get(run.peer.run_id) or deque(maxlen=PACE_POINTS + 1)
                known.append((state.snapshot.time, run.report.steps))
                present[run.peer.run_id] = known
        self._steps = present

    def frames(self) -> list[HistoryFrame]:
        """Return all frames of the ring, the oldest first."""
        return [*self._frames, *self._fast]

    def chart(self, now: float) -> list[HistoryFrame]:
        """Return the frames of the points of charts within the last hour, the oldest first; `now` is Unix time.

        After the clock was set back, only the newer of points with the same time count.
        """
        points: list[HistoryFrame] = []
        later = float("inf")
        for frame in chain(reversed(self._fast), reversed(self._frames), reversed(self._coarse)):
            if frame.charted and now - HOUR_SECONDS <= frame.time <= now and frame.time < later:
                later = frame.time
                points.append(frame)
        points.reverse()
        return points

    def pace(self, run_id: str) -> float | None:
        """Return a run's steps per second over the last minute, or since its first point; None with only one point."""
        known = self._steps.get(run_id)
        if known is None or len(known) < 2:  # noqa: PLR2004
            return None
        (began, first), (ended, last) = known[0], known[-1]
        return (last - first) / (ended - began) if ended > began and last >= first else None


def read_columns(frames: Sequence[HistoryFrame], kind: Kind) -> dict[Key, Columns]:
    """Return the columns of each subject of a kind over some frames, without columns that have no value."""
    names = COLUMNS[kind]
    found: dict[Key, tuple[list[float | None], ...]] = {}
    for place, frame in enumerate(frames):
        at = 0
        for of, key in frame.subjects:
            if of == kind:
                columns = found.get(key)
                if columns is None:
                    columns = found[key] = tuple([None] * len(frames) for _ in names)
                for column, value in zip(columns, frame.values[at : at + len(names)], strict=True):
                    if value == value:  # noqa: PLR0124 - not NaN
                        column[place] = value
            at += len(COLUMNS[of])
    return {
        key: {name: column for name, column in zip(names, columns, strict=True) if column.count(None) < len(column)}
        for key, columns in found.items()
    }


@lru_cache(maxsize=4 * MAX_SUBJECTS)
def _subject(kind: Kind, *key: str) -> Subject:
    """Return a subject, the same object each time: frames share them."""
    return kind, key


def _poll_values(state: State) -> tuple[list[Subject], list[float]]:
    """Return the subjects of a poll, and the values of each in the order of its columns; NaN if unknown.

    The loops are flat for speed: with 64 runs they take half of the recorder's time.
    """
    available = state.host.memory_available
    subjects: list[Subject] = [_subject("host")]
    values: list[float] = [nan if available is None else available]
    in_use: dict[str, float] = {}
    run_subjects: list[Subject] = []
    run_values: list[float] = []
    for run in state.runs:
        for uuid, memory in run.memory.items():
            in_use[uuid] = in_use.get(uuid, 0) + memory.current
        if run.up:
            run_id, report, usage = run.peer.run_id, run.report, run.host_usage
            steps, loss = (report.steps, report.loss) if report else (nan, None)
            run_subjects.append(_subject("runs", run_id))
            run_values += (steps, nan if loss is None else loss, usage.cpu_seconds if usage else nan)
            for uuid, memory in run.memory.items():
                reserved = memory.reserved
                run_subjects.append(_subject("devices", run_id, uuid))
                run_values += (memory.current, run.headroom.get(uuid, nan), nan if reserved is None else reserved)
    for gpu in state.snapshot.gpus:
        subjects.append(_subject("gpus", gpu.identity.uuid))
        values += _gpu_values(gpu, in_use.get(gpu.identity.uuid, nan))
        for instance in gpu.mig:
            uuid, used = instance.identity.uuid, instance.value(MigReadings.memory_used_bytes)
            subjects.append(_subject("gpus", uuid))
            values += (nan if used is None else used, in_use.get(uuid, nan), nan, nan, nan, nan, nan, nan)
    return subjects + run_subjects, values + run_values


def _gpu_values(gpu: Gpu, in_use: float) -> list[float]:
    value = gpu.value
    known = (
        value(GpuReadings.memory_used_bytes),
        in_use,
        value(GpuReadings.utilization_ratio),
        value(GpuReadings.temperature_celsius, "core"),
        value(GpuReadings.temperature_celsius, "memory"),
        value(GpuReadings.power_usage_watts),
        value(GpuReadings.clock_hertz, "sm"),
        _clock_events(gpu),
    )
    return [nan if each is None else each for each in known]


def _clock_events(gpu: Gpu) -> float | None:
    active = gpu.values(GpuReadings.clock_event_active)
    return sum([bit for labels, bit in _REASONS if active.get(labels)]) if active else None


def clock_event_names(mask: float) -> Iterable[str]:
    """Return the names of the clock event reasons in a value of `clock_events`."""
    return [labels[0] for labels, bit in _REASONS if int(mask) & bit]
