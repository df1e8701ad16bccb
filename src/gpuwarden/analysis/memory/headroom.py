"""Headroom: the bytes a run can still allocate on a GPU (docs/understand/headroom.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from types import MappingProxyType
from typing import Literal, TypeAlias

from gpuwarden.formatting import format_bytes
from gpuwarden.gpu.metrics import GpuReadings, MigReadings
from gpuwarden.gpu.snapshot import Gpu, GpuProcess, MemoryLimit, Snapshot
from gpuwarden.protocol.messages import DeviceMemory, Hello, Report

# Reasons why the headroom of a device is unknown; docs/understand/headroom.md has the fix for each.
HeadroomUnknown: TypeAlias = Literal[
    "device_unresolved",
    "free_memory_unreported",
    "gpu_down",
    "no_allocator_figures",
    "no_report",
    "process_memory_unreported",
    "process_unlisted",
    "report_expired",
]
# Of the limit that a run reaches first: the allocator's own, the process's as a client of MPS, a limit of its cgroup,
# or the device's memory.
HeadroomLimitKind: TypeAlias = Literal["allocator", "mps", "cgroup", "device"]
_LIMIT_TEXTS: Mapping[str | None, str] = {
    "allocator": "the allocator's own limit",
    "mps": "its MPS limit",
    "cgroup": "its cgroup's limit",
}


@dataclass(frozen=True, slots=True)
class HeadroomLimit:
    """Limit in bytes that a run reaches first; None for the device's memory. `used` is the memory charged to it."""

    kind: HeadroomLimitKind
    limit: float | None = None
    used: float | None = None

    @property
    def text(self) -> str:
        """Text to follow an amount of headroom; empty for the device's memory."""
        return headroom_limit_text(self.kind, self.limit)


def headroom_limit_text(kind: str | None, limit: float | None) -> str:
    """Return the text of a limit of that kind; empty for none, and for a kind that this version does not know."""
    return f" under {_LIMIT_TEXTS[kind]} of {format_bytes(limit)}" if kind in _LIMIT_TEXTS and limit is not None else ""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Limits on a run's memory on one device, in bytes.

    `allocator` is its allocator's own, `mps` its process's as a client of MPS, `cgroup` that of its cgroups with the
    least memory left. The last two include `overhead`, the memory outside the pool.
    """

    allocator: float | None = None
    mps: float | None = None
    cgroup: MemoryLimit | None = None
    overhead: float = 0.0


@dataclass(frozen=True, slots=True)
class DeviceSpace:
    """Memory of a GPU or MIG instance in bytes, in total and free; None where unknown."""

    free: float | None
    size: float | None


def read_space(gpu: Gpu, uuid: str) -> DeviceSpace:
    """Return the memory of a GPU, or of its MIG instance of that UUID."""
    instance = gpu.instance(uuid)
    rows = MigReadings if instance else GpuReadings
    device = instance or gpu
    return DeviceSpace(device.value(rows.memory_free_bytes), device.value(rows.memory_size_bytes))


def compute_headroom(
    space: DeviceSpace, pool: float | None, limits: RunLimits, in_use: float
) -> tuple[float, HeadroomLimit] | None:
    """Return bytes from 0 to the device's size, and the limit; None if neither the pool nor a limit is known.

    `pool` is the memory that the run's allocator has reserved on the device, `in_use` the part in tensors. With
    preallocation the headroom is the unused part of the pool; with memory growth it is the device's free memory, or
    what a cgroup has left.
    """
    own = None if pool is None else max(pool, in_use)
    cgroup = limits.cgroup
    # Each: the most memory in use that a limit allows, and of that limit the kind, the bytes, and the bytes charged.
    ceilings: list[tuple[float, HeadroomLimitKind, float | None, float | None]] = []
    if limits.allocator:
        ceilings.append((limits.allocator, "allocator", limits.allocator, None))
    if limits.mps is not None:
        ceilings.append((limits.mps - limits.overhead, "mps", limits.mps, None))
    if cgroup is not None and cgroup.hard is not None:
        # Without the pool: as if nothing else in the cgroup used the GPU.
        ceiling = cgroup.hard - limits.overhead if own is None else max(cgroup.hard - cgroup.used, 0) + own
        ceilings.append((ceiling, "cgroup", cgroup.hard, cgroup.used))
    if space.free is not None and own is not None:
        ceilings.append((space.free + own, "device", None, None))
    if not ceilings:
        return None
    if space.size is not None:
        ceilings.append((space.size, "device", None, None))
    ceiling, kind, limit, used = min(ceilings, key=itemgetter(0))
    return max(0, ceiling - in_use), HeadroomLimit(kind, limit, used)


@dataclass(slots=True)
class Overhead:
    """Memory of a run's process on one device outside its allocator's pool: CUDA context, cuBLAS, cuDNN.

    `bytes` is an estimate until it is measured. Used by one event loop.
    """

    bytes: float
    _held: float | None = None
    _reported_at: float | None = None

    def add_reading(self, held: float | None, reserved: float | None, reported_at: float | None) -> None:
        """Add the process's memory at a poll, and its allocator's pool in the last report, at `reported_at`.

        Measures if the driver's figure is the same before and after a report: then the pool has not changed between
        report and poll. A run that keeps growing, or is within one long step, is not measured.
        """
        if held is not None and reserved is not None and held == self._held and reported_at != self._reported_at:
            self.bytes = held - reserved
        self._held, self._reported_at = held, reported_at


@dataclass(frozen=True, slots=True)
class Headrooms:
    """Headroom of a run by UUID, in bytes: `now`, and `at_peak`, if memory in use were at its peak.

    `limits` are those reached first, also last known ones; `unknown` has the reason for devices without a value.
    """

    now: Mapping[str, float] = field(default_factory=dict)
    at_peak: Mapping[str, float] = field(default_factory=dict)
    limits: Mapping[str, HeadroomLimit] = field(default_factory=dict)
    unknown: Mapping[str, HeadroomUnknown] = field(default_factory=dict)


class HeadroomTracker:
    """Headroom of one run, computed at each poll with the measured overheads. Used by one event loop."""

    def __init__(self, overhead: float) -> None:
        self._guess = overhead
        self._overheads: dict[str, Overhead] = {}
        self._limits: dict[str, HeadroomLimit] = {}
        self._basis: Mapping[str, DeviceMemory] = {}
        self._last = Headrooms()

    def compute(
        self,
        pid: int,
        memory: Mapping[str, DeviceMemory],
        reported_at: float | None,
        snapshot: Snapshot,
        *,
        mps: Mapping[str, int] = MappingProxyType({}),
        cgroups: Sequence[str] = (),
    ) -> Headrooms:
        """Return the headroom by a poll and the run's last report of its memory, at `reported_at`.

        `mps` has the process's limits as a client of MPS by UUID, `cgroups` the folders of its cgroups.
        """
        now: dict[str, float] = {}
        at_peak: dict[str, float] = {}
        unknown: dict[str, HeadroomUnknown] = {}
        for uuid, device in memory.items():
            gpu = snapshot.gpu_with(uuid)
            if gpu is None or not gpu.up:
                unknown[uuid] = "gpu_down"
                continue
            space, process = read_space(gpu, uuid), gpu.holds(pid, uuid)
            pool = self._pool(uuid, device, process, reported_at)
            overhead = self._overheads[uuid].bytes
            limits = RunLimits(device.limit, mps.get(uuid), gpu.tightest_limit(cgroups), overhead)
            left = compute_headroom(space, pool, limits, device.current)
            if left is None:
                unknown[uuid] = _missing_figure(space, process)
                continue
            now[uuid], self._limits[uuid] = left
            highest = compute_headroom(space, pool, limits, device.peak)
            at_peak[uuid] = highest[0] if highest else 0
        self._basis = memory
        self._last = Headrooms(now, at_peak, dict(self._limits), unknown)
        return self._last

    def _pool(
        self, uuid: str, device: DeviceMemory, process: GpuProcess | None, reported_at: float | None
    ) -> float | None:
        held = process.memory if process else None
        # Below the memory in use, the figure does not count all of the pool.
        reserved = device.reserved if device.reserved and device.reserved >= device.current else None
        overhead = self._overheads.setdefault(uuid, Overhead(self._guess))
        overhead.add_reading(held, reserved, reported_at)
        return reserved if held is None else held - overhead.bytes

    def at_error(self, memory: Mapping[str, DeviceMemory]) -> Headrooms:
        """Return the last poll's headroom less the memory allocated since, by an error's figures.

        Freed memory is not added: when an allocation fails, the tensors of its step are already freed. `at_peak` is the
        lower bound since the poll, as memory in use may have been at the peak in between.
        """
        now: dict[str, float] = {}
        least: dict[str, float] = {}
        for uuid, left in self._last.now.items():
            before = self._basis[uuid]
            after = memory.get(uuid, before)
            now[uuid] = max(0, left - max(0, after.current - before.current))
            least[uuid] = max(0, left - max(0, after.peak - before.current))
        return Headrooms(now, least)


def _missing_figure(space: DeviceSpace, process: GpuProcess | None) -> HeadroomUnknown:
    if space.free is None:
        return "free_memory_unreported"
    return "process_memory_unreported" if process else "process_unlisted"


def find_unreported_devices(
    hello: Hello, report: Report | None, uuids: Mapping[str, str], before: Mapping[str, str], *, current: bool
) -> dict[str, HeadroomUnknown]:
    """Return why devices of a run have no allocator figures, by UUID; "" for a device not identified as a GPU.

    `uuids` are the current UUIDs of its devices, `before` the last known ones. A device left out of a report that has
    others is not used by the run.
    """
    reason: HeadroomUnknown | None = None
    if report is None:
        reason = "no_report"
    elif not current:
        reason = "report_expired"
    elif not report.memory:
        reason = "no_allocator_figures"
    found: dict[str, HeadroomUnknown] = {}
    for device in hello.devices:
        uuid = uuids.get(device)
        if uuid is not None:
            if reason:
                found[uuid] = reason
        elif device in before:
            found[before[device]] = "gpu_down"
        elif report is None or not report.memory or device in report.memory:
            found[""] = "device_unresolved"
    return found
