"""Snapshot of one poll: the frozen readings of all GPUs, which every part above the driver reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuwarden.metrics.model import Metric, Readings
from gpuwarden.nvml.identity import GpuIdentity, MigIdentity
from gpuwarden.nvml.session import DriverVersions

HUNG = "timeout"  # the fault of a call that did not come back in time


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with a context on a GPU; `memory` in bytes, None where the driver does not tell.

    `instance` is the UUID of the MIG instance it is on, None where it is on none.
    """

    pid: int
    type: str  # "compute" or "graphics"; "compute" where the driver lists it as both
    memory: int | None
    instance: str | None = None


@dataclass(frozen=True, slots=True)
class MigInstance:
    """One MIG instance in one poll."""

    identity: MigIdentity
    readings: Readings = field(default_factory=dict)

    def value(self, row: Metric[Any], *labels: str) -> float | None:
        """Return one reading in base units; None where this poll does not have it."""
        return _value(self.readings, row, labels)


@dataclass(frozen=True, slots=True)
class XidCount:
    """Count of one XID on a GPU, as far as is known, and when it was last, in Unix time."""

    count: int
    last: float


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU in one poll. Did it not answer, `fault` names why and there are no readings: old ones never stand in.

    Nor are there where it was left alone (`asked` is false), which is no fault.
    `process_lists` names the types of processes that the driver listed. `last_success` is Unix time, None before the
    first; `errors` counts failed calls by name since the daemon started. `xids` are those known so far, by code.
    `taken` and `slow_taken` say when its readings, and those of the slow tier, were taken, in seconds of a clock whose
    zero means nothing.
    """

    identity: GpuIdentity
    fault: str | None
    readings: Readings = field(default_factory=dict)
    processes: tuple[GpuProcess, ...] = ()
    last_success: float | None = None
    errors: Mapping[str, int] = field(default_factory=dict)
    process_lists: tuple[str, ...] = ()
    asked: bool = True
    mig: tuple[MigInstance, ...] = ()
    xids: Mapping[int, XidCount] = field(default_factory=dict)
    taken: float = field(default=0.0, compare=False)
    slow_taken: float = field(default=0.0, compare=False)

    @property
    def up(self) -> bool:
        """True if the GPU answered in this poll."""
        return self.asked and self.fault is None

    def value(self, row: Metric[Any], *labels: str) -> float | None:
        """Return one reading in base units; None where this poll does not have it."""
        return _value(self.readings, row, labels)

    def instance(self, uuid: str) -> MigInstance | None:
        """Return the MIG instance of that UUID."""
        if not self.mig:  # most, and this is asked several times a poll of each run
            return None
        return next((instance for instance in self.mig if instance.identity.uuid == uuid), None)

    def holds(self, pid: int, uuid: str) -> GpuProcess | None:
        """Return the process as it is on the GPU or MIG instance of that UUID; None where the driver lists none there.

        One that is on no instance the driver names may be on any. Of a run only its own process counts: what a child of
        it holds is another process's pool, which the run's allocator cannot hand out.
        """
        where = (uuid, None) if self.mig else (None,)
        found = (each for each in self.processes if each.pid == pid and pid)  # one that has none may be any
        return next((each for each in found if each.instance in where), None)


def _value(readings: Readings, row: Metric[Any], labels: tuple[str, ...]) -> float | None:
    reading = readings.get(row)
    if isinstance(reading, (int, float)):  # asked first: most are, and whether it is a mapping takes far longer to tell
        return reading
    value = reading.get(labels) if isinstance(reading, Mapping) else None
    return value if isinstance(value, (int, float)) else None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One poll. `fault` names why the driver as a whole did not answer; each GPU carries its own health beside that.

    `time` and `last_success` are Unix time, `duration` seconds; `enumerated` is the driver's count of GPUs, None
    when it did not say; `errors` counts failures of the driver as a whole since the daemon started. `asked` is false
    where the driver was left alone: during a pause, until `paused_until`, or for the sake of GPUs that sleep. `asleep`
    says of each GPU whether it does, `asleep_count` counts those that have not said who they are as well; both are
    known only where GPUs are let sleep.
    """

    time: float
    duration: float
    fault: str | None
    driver: DriverVersions | None = None
    enumerated: int | None = None
    gpus: tuple[Gpu, ...] = ()
    last_success: float | None = None
    errors: Mapping[str, int] = field(default_factory=dict)
    asked: bool = True
    paused_until: float | None = None
    asleep: Mapping[str, bool] = field(default_factory=dict)
    asleep_count: int | None = None
    _by_uuid: Mapping[str, Gpu] = field(init=False, repr=False, compare=False)  # and by those of its MIG instances

    def __post_init__(self) -> None:
        by_uuid = {instance.identity.uuid: gpu for gpu in reversed(self.gpus) for instance in gpu.mig}
        by_uuid.update((gpu.identity.uuid, gpu) for gpu in reversed(self.gpus))  # of those with none the first
        object.__setattr__(self, "_by_uuid", by_uuid)

    @property
    def hung(self) -> bool:
        """True if nothing at all came back from the driver: the one state that a restart of the daemon may end.

        A driver that refuses, or is not there, has answered.
        """
        if self.gpus:
            return all(gpu.fault == HUNG for gpu in self.gpus)
        return self.fault == HUNG

    def gpu(self, uuid: str) -> Gpu | None:
        """Return the GPU of that UUID."""
        found = self._by_uuid.get(uuid)
        return found if found is not None and found.identity.uuid == uuid else None

    def gpu_with(self, uuid: str) -> Gpu | None:
        """Return the GPU of that UUID, or the one whose MIG instance has it."""
        return self._by_uuid.get(uuid)
