"""Snapshot of one poll: the frozen readings of all GPUs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from gpuwarden.metrics.model import Labels, Metric, Readings, Tier
from gpuwarden.nvml.events.model import DriverBinding
from gpuwarden.nvml.identity import GpuIdentity, MigIdentity
from gpuwarden.nvml.session import DriverVersions

HUNG = "timeout"  # fault of a call that timed out
GPUS_HIDDEN = "gpus_hidden"  # fault of a driver that lists no GPU although the kernel module has some
UNBOUND = "driver_unbound"  # fault of a GPU that the driver was unbound from

OperationalKind: TypeAlias = "tuple[str, str, str]"  # severity, category and role of an operational event
MemorySample: TypeAlias = "tuple[float, int]"  # monotonic time, and bytes in use


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with a context on a GPU; `memory` in bytes, None where the driver does not report it.

    `instance` is the UUID of the MIG instance it is on, None where it is on none.
    """

    pid: int
    type: str  # "compute" or "graphics"; "compute" where the driver lists it as both
    memory: int | None
    instance: str | None = None


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Limits of a cgroup's memory on one GPU in bytes, and the memory charged to it.

    Beyond `hard` allocations fail; None for no such limit. Beyond `soft` the driver may end processes under pressure.
    """

    hard: int | None
    soft: int
    used: int


@dataclass(frozen=True, slots=True)
class MigInstance:
    """One MIG instance in one poll."""

    identity: MigIdentity
    readings: Readings = field(default_factory=dict)

    def value(self, row: Metric[Any], *labels: str) -> float | None:
        """Return one reading in base units; None where this poll does not have it."""
        return _value(self.readings, row, labels)


@dataclass(frozen=True, slots=True)
class EventCount:
    """Count of one XID or kind of operational event on a GPU, as far as known, and the Unix time of the last one.

    `by_severity` has the time of the last one of each severity; empty if all had that of their code.
    """

    count: int
    last: float
    by_severity: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuAnswers:
    """Answers of one GPU in one poll.

    `process_lists` has the types of processes that the driver listed: for another type nothing is known, not even 0.
    `memory_limits` of cgroups are by folder. `taken` and `slow_taken` are the times of the readings and of the slow
    tier, in seconds of a clock with an arbitrary zero; two readings of the same state are equal, whatever their times.
    `memory_samples` are those since the previous poll. `tier_seconds` is the time that each tier took in this poll.
    """

    readings: Readings = field(default_factory=dict)
    processes: tuple[GpuProcess, ...] = ()
    process_lists: tuple[str, ...] = ()
    mig: tuple[MigInstance, ...] = ()
    memory_limits: Mapping[str, MemoryLimit] = field(default_factory=dict)
    taken: float = field(default=0.0, compare=False)
    slow_taken: float = field(default=0.0, compare=False)
    memory_samples: tuple[MemorySample, ...] = field(default=(), compare=False)
    tier_seconds: Mapping[Tier, float] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class Gpu(GpuAnswers):
    """One GPU in one poll. If it did not answer, `fault` has the error and there are no readings: never old ones.

    There are none either, and no fault, if it was not polled (`asked` is false). `last_success` is Unix time, None
    before the first answer; `errors` counts failed calls by name since the daemon started. `xids` are by code,
    `operational` events by kind.
    """

    identity: GpuIdentity
    fault: str | None
    last_success: float | None = None
    errors: Mapping[str, int] = field(default_factory=dict)
    asked: bool = True
    xids: Mapping[int, EventCount] = field(default_factory=dict)
    operational: Mapping[OperationalKind, EventCount] = field(default_factory=dict)

    @property
    def up(self) -> bool:
        """True if the GPU answered in this poll."""
        return self.asked and self.fault is None

    def value(self, row: Metric[Any], *labels: str) -> float | None:
        """Return one reading in base units; None where this poll does not have it."""
        return _value(self.readings, row, labels)

    def values(self, row: Metric[Any]) -> Mapping[Labels, float]:
        """Return the values of a reading with labels, by these; empty where this poll does not have it."""
        reading = self.readings.get(row)
        return cast("Mapping[Labels, float]", reading) if isinstance(reading, Mapping) else {}

    def active(self, row: Metric[Any]) -> list[str]:
        """Return which states of a reading hold, by its first label."""
        return [labels[0] for labels, holds in self.values(row).items() if holds]

    def instance(self, uuid: str) -> MigInstance | None:
        """Return the MIG instance of that UUID."""
        if not self.mig:  # most GPUs; called several times per run and poll
            return None
        return next((instance for instance in self.mig if instance.identity.uuid == uuid), None)

    def tightest_limit(self, folders: Iterable[str]) -> MemoryLimit | None:
        """Return the limit with the least memory left of a process's cgroup and its parents."""
        limits = (self.memory_limits.get(folder) for folder in folders)
        hard = [(limit.hard - limit.used, limit) for limit in limits if limit is not None and limit.hard is not None]
        return min(hard, key=lambda each: each[0])[1] if hard else None

    def holds(self, pid: int, uuid: str) -> GpuProcess | None:
        """Return the process on the GPU or MIG instance of that UUID; None if the driver lists none there.

        A process without a known instance may be on any. Only the run's own process counts: memory of a child belongs
        to another process's pool, which the run's allocator cannot use.
        """
        where = (uuid, None) if self.mig else (None,)
        found = (each for each in self.processes if each.pid == pid and pid)  # pid 0 is unknown, and may be any process
        return next((each for each in found if each.instance in where), None)


def _value(readings: Readings, row: Metric[Any], labels: tuple[str, ...]) -> float | None:
    reading = readings.get(row)
    if isinstance(reading, (int, float)):  # first: most are, and a check for a mapping is far slower
        return reading
    value = reading.get(labels) if isinstance(reading, Mapping) else None
    return value if isinstance(value, (int, float)) else None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One poll. `fault` is the error of the driver as a whole; each GPU also has its own.

    `time`, `last_success` and `paused_until` are Unix times, `duration` is in seconds. `enumerated` is the driver's
    count of GPUs, None if it did not answer. `errors` counts failures of the driver as a whole since the start.
    `asked` is false if the driver was not called: during a pause, to let GPUs suspend, or while NVML closes. `asleep`
    says by UUID which GPUs are suspended, `asleep_count` includes those not identified; both need gpus.let_sleep.
    `bindings` are the driver's changes since the last poll.
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
    bindings: tuple[DriverBinding, ...] = ()
    _by_uuid: Mapping[str, Gpu] = field(init=False, repr=False, compare=False)  # the MIG instances' UUIDs included

    def __post_init__(self) -> None:
        by_uuid = {instance.identity.uuid: gpu for gpu in reversed(self.gpus) for instance in gpu.mig}
        by_uuid.update((gpu.identity.uuid, gpu) for gpu in reversed(self.gpus))  # of GPUs without a UUID the first
        object.__setattr__(self, "_by_uuid", by_uuid)

    @property
    def hung(self) -> bool:
        """True if no driver call returned: the one state that a restart of the daemon may end.

        An error, such as for a missing driver, is an answer.
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
