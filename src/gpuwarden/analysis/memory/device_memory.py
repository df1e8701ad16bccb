"""Memory that a run's allocators hold on each GPU or MIG instance, and what the run can still allocate there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from gpuwarden.analysis.memory.headroom import DeviceSpace, Overhead, headroom
from gpuwarden.gpu.metrics import GpuReadings, MigReadings
from gpuwarden.gpu.snapshot import Gpu, GpuProcess, Snapshot
from gpuwarden.protocol.messages import DeviceMemory, Hello, Report

# Why a device of a run has no headroom; docs/headroom.md says what to do about each.
HeadroomUnknown: TypeAlias = Literal[
    "device_unresolved",
    "free_memory_untold",
    "gpu_down",
    "no_allocator_figures",
    "no_report",
    "process_memory_untold",
    "process_unlisted",
    "report_expired",
]
HEADROOM_UNKNOWN: tuple[HeadroomUnknown, ...] = get_args(HeadroomUnknown)


@dataclass(frozen=True, slots=True)
class Headrooms:
    """Bytes by UUID: the headroom `now`, and `at_peak`, if the run used as much as at its peak; why it is `unknown`."""

    now: Mapping[str, float] = field(default_factory=dict)
    at_peak: Mapping[str, float] = field(default_factory=dict)
    unknown: Mapping[str, HeadroomUnknown] = field(default_factory=dict)


class HeadroomTracker:
    """Works out one run's headroom at each poll, and remembers what was measured. Used by one event loop."""

    def __init__(self, overhead: float) -> None:
        self._guess = overhead
        self._overheads: dict[str, Overhead] = {}
        self._basis: Mapping[str, DeviceMemory] = {}
        self.found = Headrooms()

    def look(self, pid: int, memory: Mapping[str, DeviceMemory], heard: float | None, snapshot: Snapshot) -> Headrooms:
        """Take a poll and what the run said last of its memory, in the report of the time `heard`."""
        now: dict[str, float] = {}
        at_peak: dict[str, float] = {}
        unknown: dict[str, HeadroomUnknown] = {}
        for uuid, device in memory.items():
            gpu = snapshot.gpu_with(uuid)
            if gpu is None or not gpu.up:
                unknown[uuid] = "gpu_down"
                continue
            space, process = _space(gpu, uuid), gpu.holds(pid, uuid)
            pool = self._pool(uuid, device, process, heard)
            left = headroom(space, pool, device.limit, device.current)
            if left is None:
                unknown[uuid] = _silence(space, process)
                continue
            now[uuid] = left
            at_peak[uuid] = headroom(space, pool, device.limit, device.peak) or 0
        self._basis = memory
        self.found = Headrooms(now, at_peak, unknown)
        return self.found

    def _pool(self, uuid: str, device: DeviceMemory, process: GpuProcess | None, heard: float | None) -> float | None:
        held = process.memory if process else None
        # An allocator that says less than it has handed out does not count it.
        reserved = device.reserved if device.reserved and device.reserved >= device.current else None
        overhead = self._overheads.get(uuid)
        if overhead is None:
            overhead = self._overheads[uuid] = Overhead(self._guess)
        overhead.see(held, reserved, heard)
        return reserved if held is None else held - overhead.bytes

    def since(self, memory: Mapping[str, DeviceMemory]) -> Headrooms:
        """Return the last poll's headroom less what the run's allocators have handed out since, as they say now.

        What was given back since is left out: when an allocation fails, what the step before it had is gone already.
        `at_peak` is the least it can have been meanwhile: the peak may have risen since the poll and fallen again.
        """
        now: dict[str, float] = {}
        least: dict[str, float] = {}
        for uuid, left in self.found.now.items():
            before, after = self._basis[uuid], memory.get(uuid)
            grown, most = (after.current, after.peak) if after else (before.current, before.peak)
            now[uuid] = max(0, left - max(0, grown - before.current))
            least[uuid] = max(0, left - max(0, most - before.current))
        return Headrooms(now, least)


def _space(gpu: Gpu, uuid: str) -> DeviceSpace:
    instance = gpu.instance(uuid)
    rows = MigReadings if instance else GpuReadings
    told = instance or gpu
    return DeviceSpace(told.value(rows.memory_free_bytes), told.value(rows.memory_size_bytes))


def _silence(space: DeviceSpace, process: GpuProcess | None) -> HeadroomUnknown:
    if space.free is None:
        return "free_memory_untold"
    return "process_memory_untold" if process else "process_unlisted"


def unknown_headroom(
    hello: Hello, report: Report | None, uuids: Mapping[str, str], before: Mapping[str, str], *, current: bool
) -> dict[str, HeadroomUnknown]:
    """Say why devices of a run have no figures of its allocators, by UUID; what is no certain GPU goes by "".

    `uuids` of its devices are those of now, `before` those known last. Where the run tells of some devices and not of
    others, it does not use the others.
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


def is_listed(own: Collection[int], uuid: str, snapshot: Snapshot) -> bool:
    """Tell whether the driver lists a run's `own` processes on a GPU or MIG instance, by the pids known here.

    Where it does not (another pid namespace, MPS), what it lists may be the run under another pid.
    """
    gpu = snapshot.gpu_with(uuid)
    if gpu is None or not gpu.up:
        return False
    where = (uuid, None) if gpu.mig else (None,)
    return any(process.pid and process.pid in own and process.instance in where for process in gpu.processes)


def held_by_others(own: Collection[int], uuid: str, snapshot: Snapshot) -> float | None:
    """Return the bytes that other processes than the run's `own` hold on a GPU or MIG instance; None where untold.

    It means something only where the run `is_listed`: else its own memory is among it.
    """
    gpu = snapshot.gpu_with(uuid)
    if gpu is None or not gpu.up:
        return None
    instance = gpu.instance(uuid)
    held = [
        process.memory
        for process in gpu.processes
        if process.pid not in own and (instance is None or process.instance == uuid)
    ]
    return None if None in held else float(sum(each or 0 for each in held))


def memory_by_gpu(memory: Mapping[str, DeviceMemory], uuids: Mapping[str, str]) -> dict[str, DeviceMemory]:
    """Sum a run's logical devices by the GPU they are parts of."""
    found: dict[str, DeviceMemory] = {}
    for device, part in memory.items():
        if (uuid := uuids.get(device)) is None:
            continue
        other = found.get(uuid)
        found[uuid] = part if other is None else _sum(part, other)
    return found


def _sum(one: DeviceMemory, other: DeviceMemory) -> DeviceMemory:
    return DeviceMemory(
        one.current + other.current,
        one.peak + other.peak,
        _both(one.limit, other.limit),
        _both(one.reserved, other.reserved),
    )


def _both(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
