"""Series of the last ten minutes of each GPU and run, with a point every five seconds, for charts.

Stored in arrays, 1 KiB a column: 64 KiB for 8 GPUs and 8 runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isnan, nan
from typing import Literal

from gpuwarden.gpu.metrics import GpuReadings, MigReadings
from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.state import State

WINDOW_SECONDS = 600.0
INTERVAL_SECONDS = 5.0  # minimum between two points
POINTS = int(WINDOW_SECONDS / INTERVAL_SECONDS)
MAX_SUBJECTS = 256  # GPUs, MIG instances, runs, and pairs of run and device: 1 MiB
PACE_POINTS = 12  # over which steps per second are averaged: a minute

Key = tuple[str, ...]  # a UUID, or a run's id and a UUID
_GPU = ("memory_used_bytes", "memory_in_use_bytes", "utilization_ratio", "temperature_celsius")
_DEVICE = ("memory_in_use_bytes", "headroom_bytes")
_RUN = ("steps",)
Kind = Literal["gpus", "runs", "devices"]
COLUMNS: Mapping[Kind, tuple[str, ...]] = {"gpus": _GPU, "runs": _RUN, "devices": _DEVICE}


def _unknown() -> array[float]:
    return array("d", (nan,)) * POINTS


class _Subject:
    """Columns of one subject; `seen` is the number of its last point."""

    __slots__ = ("columns", "seen")

    def __init__(self, columns: int) -> None:
        self.columns = tuple(_unknown() for _ in range(columns))
        self.seen = 0


class HistorySeries:
    """Recorder of the series. Used by one event loop; `now` is monotonic.

    A subject without a value at a point has a gap in its chart. It is dropped after ten minutes without a value; above
    MAX_SUBJECTS new subjects are dropped and counted.
    """

    def __init__(self) -> None:
        self.dropped = 0  # subjects, of the last point
        self.points = 0  # recorded in total
        self._times = _unknown()
        self._subjects: dict[tuple[Kind, Key], _Subject] = {}
        self._due = 0.0

    def update(self, state: State, now: float) -> None:
        """Record a point of this poll if one is due; about 50 µs for 8 GPUs."""
        if now < self._due:
            return
        self._due = now + INTERVAL_SECONDS * 0.9  # polls are not exactly periodic
        at = self.points % POINTS
        self.points += 1
        self._times[at] = state.snapshot.time
        for subject in self._subjects.values():
            for column in subject.columns:
                column[at] = nan
        self.dropped = 0
        for kind, key, values in _poll_values(state):
            self._put(kind, key, values, at)
        for old in [key for key, subject in self._subjects.items() if self.points - subject.seen >= POINTS]:
            del self._subjects[old]

    def _put(self, kind: Kind, key: Key, values: Sequence[float | None], at: int) -> None:
        subject = self._subjects.get((kind, key))
        if subject is None:
            if len(self._subjects) >= MAX_SUBJECTS:
                self.dropped += 1
                return
            subject = self._subjects[kind, key] = _Subject(len(values))
        subject.seen = self.points
        for column, value in zip(subject.columns, values, strict=True):
            if value is not None:
                column[at] = value

    def times(self, now: float) -> list[int]:
        """Return the indices of the points within the window, the oldest first; `now` is Unix time.

        After the clock was set back, only the newer of points with the same time count.
        """
        places: list[int] = []
        later = float("inf")
        for back in range(1, min(self.points, POINTS) + 1):
            place = (self.points - back) % POINTS
            at = self._times[place]
            if now - WINDOW_SECONDS <= at <= now and at < later:
                later = at
                places.append(place)
        places.reverse()
        return places

    def timestamps(self, places: Iterable[int]) -> list[float]:
        """Return the Unix times of the points at these indices."""
        return [self._times[place] for place in places]

    def read(self, kind: Kind, places: Sequence[int]) -> Iterator[tuple[Key, dict[str, list[float | None]]]]:
        """Yield each subject with its columns at these indices, without columns that have no value."""
        for (of, key), subject in self._subjects.items():
            if of == kind:
                columns = zip(COLUMNS[kind], subject.columns, strict=True)
                known = {name: [_finite_or_none(column[place]) for place in places] for name, column in columns}
                yield key, {name: values for name, values in known.items() if values.count(None) < len(values)}

    def pace(self, run_id: str) -> float | None:
        """Return a run's steps per second over the last minute, or since its first point; None with only one point."""
        subject = self._subjects.get(("runs", (run_id,)))
        if subject is None:
            return None
        (steps,) = subject.columns
        newest = min(self.points, PACE_POINTS + 1)
        known = [
            (self._times[place], steps[place])
            for place in ((self.points - back) % POINTS for back in range(newest, 0, -1))
            if not isnan(steps[place])
        ]
        if len(known) < 2:  # noqa: PLR2004
            return None
        (began, first), (ended, last) = known[0], known[-1]
        return (last - first) / (ended - began) if ended > began and last >= first else None


def _finite_or_none(value: float) -> float | None:
    return value if value == value else None  # noqa: PLR0124 - NaN


def _poll_values(state: State) -> Iterator[tuple[Kind, Key, Sequence[float | None]]]:
    """Yield the values of each subject at a poll, in the order of its columns."""
    in_use: dict[str, int] = {}
    for run in state.runs:
        for uuid, memory in run.memory.items():
            in_use[uuid] = in_use.get(uuid, 0) + memory.current
    for gpu in state.snapshot.gpus:
        yield from _gpu_values(gpu, in_use.get)
    for run in state.runs:
        if run.up:
            yield from _run_values(run)


def _gpu_values(gpu: Gpu, in_use: Callable[[str], int | None]) -> Iterator[tuple[Kind, Key, Sequence[float | None]]]:
    uuid = gpu.identity.uuid
    used, utilization = gpu.value(GpuReadings.memory_used_bytes), gpu.value(GpuReadings.utilization_ratio)
    yield "gpus", (uuid,), (used, in_use(uuid), utilization, gpu.value(GpuReadings.temperature_celsius, "core"))
    for instance in gpu.mig:
        uuid = instance.identity.uuid
        yield "gpus", (uuid,), (instance.value(MigReadings.memory_used_bytes), in_use(uuid), None, None)


def _run_values(run: RunSnapshot) -> Iterator[tuple[Kind, Key, Sequence[float | None]]]:
    yield "runs", (run.peer.run_id,), (run.report.steps if run.report else None,)
    for uuid, memory in run.memory.items():
        yield "devices", (run.peer.run_id, uuid), (memory.current, run.headroom.get(uuid))
