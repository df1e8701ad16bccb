"""What a run's allocators hold on each GPU or MIG instance, and what the run can still allocate there."""

from __future__ import annotations

from collections.abc import Mapping

from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.gpu.table import GpuReadings, MigReadings
from gpuwarden.headroom import headroom
from gpuwarden.protocol import DeviceMemory


def headrooms(
    pid: int, memory: Mapping[str, DeviceMemory], snapshot: Snapshot, overhead: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the headroom in bytes by UUID, and what it would be if the run used as much as at its peak."""
    now: dict[str, float] = {}
    at_peak: dict[str, float] = {}
    for uuid, device in memory.items():
        gpu = snapshot.gpu_with(uuid)
        if gpu is None or not gpu.up:
            continue  # nothing is known of the device now
        instance = gpu.instance(uuid)
        row = MigReadings.memory_free_bytes if instance else GpuReadings.memory_free_bytes
        free, held = (instance or gpu).value(row), gpu.memory_of(pid)
        for found, in_use in ((now, device.current), (at_peak, device.peak)):
            left = headroom(free=free, held=held, in_use=in_use, limit=device.limit, overhead=overhead)
            if left is not None:
                found[uuid] = left
    return now, at_peak


def by_gpu(memory: Mapping[str, DeviceMemory], uuids: Mapping[str, str]) -> dict[str, DeviceMemory]:
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
