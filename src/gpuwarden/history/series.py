"""The last ten minutes of each GPU and run as small series, a point each five seconds, for charts.

Numbers lie in arrays, 1 KiB a column: a box of 8 GPUs and 8 runs has 64 KiB of them.
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

WINDOW_SECONDS = 600.0  # that are kept
INTERVAL_SECONDS = 5.0  # between two points, at least
POINTS = int(WINDOW_SECONDS / INTERVAL_SECONDS)
MAX_SUBJECTS = 256  # GPUs, MIG instances, runs, and these on each of those: 1 MiB
PACE_POINTS = 12  # over which steps a second are taken: a minute

Key = tuple[str, ...]  # a UUID, or a run's id and a UUID
_GPU = ("memory_used_bytes", "memory_in_use_bytes", "utilization_ratio", "temperature_celsius")
_DEVICE = ("memory_in_use_bytes", "headroom_bytes")
_RUN = ("steps",)
Kind = Literal["gpus", "runs", "devices"]
COLUMNS: Mapping[Kind, tuple[str, ...]] = {"gpus": _GPU, "runs": _RUN, "devices": _DEVICE}


def _unknown() -> array[float]:
    return array("d", (nan,)) * POINTS


class _Subject:
    """The columns of one subject; `seen` is the number of its last point."""

    __slots__ = ("columns", "seen")

    def __init__(self, columns: int) -> None:
        self.columns = tuple(_unknown() for _ in range(columns))
        self.seen = 0


class HistorySeries:
    """Recorder of a point every five seconds. Used by one event loop; `now` is monotonic.

    A subject without a value at a point has a gap in its chart. A subject is dropped after ten minutes without a value;
    above MAX_SUBJECTS new ones are left out, and counted.
    """

    def __init__(self) -> None:
        self.dropped = 0  # subjects, of the last point
        self.points = 0  # taken so far
        self._times = _unknown()
        self._subjects: dict[tuple[Kind, Key], _Subject] = {}
        self._due = 0.0

    def update(self, state: State, now: float) -> None:
        """Record a point of this poll if one is due: some 50 µs for a box of 8 GPUs."""
        if now < self._due:
            return
        self._due = now + INTERVAL_SECONDS * 0.9  # polls come a little early or late
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
        """Return the places of the points that are not too old, the oldest first; `now` is Unix time.

        Of times that have come twice, as the clock was set back, the later points count.
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
        """Return when the points at these places were taken, in Unix time."""
        return [self._times[place] for place in places]

    def read(self, kind: Kind, places: Sequence[int]) -> Iterator[tuple[Key, dict[str, list[float | None]]]]:
        """Give each subject with its columns at these places, without those that know nothing."""
        for (of, key), subject in self._subjects.items():
            if of == kind:
                columns = zip(COLUMNS[kind], subject.columns, strict=True)
                known = {name: [_finite_or_none(column[place]) for place in places] for name, column in columns}
                yield key, {name: values for name, values in known.items() if values.count(None) < len(values)}

    def pace(self, run_id: str) -> float | None:
        """Return a run's steps a second over the last minute, or since its first point; None while there is but one."""
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
        if len(known) < 2:  # noqa: PLR2004 - two make a stretch
            return None
        (began, first), (ended, last) = known[0], known[-1]
        return (last - first) / (ended - began) if ended > began and last >= first else None


def _finite_or_none(value: float) -> float | None:
    return value if value == value else None  # noqa: PLR0124 - what is no number does not equal itself


def _poll_values(state: State) -> Iterator[tuple[Kind, Key, Sequence[float | None]]]:
    """Give what a poll knows of each subject, in the order of its columns."""
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
