"""Device memory of a run: sums by GPU, and the memory of other processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.protocol.messages import DeviceMemory


def sum_by_gpu(memory: Mapping[str, DeviceMemory], uuids: Mapping[str, str]) -> dict[str, DeviceMemory]:
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
        None if one.limit is None or other.limit is None else one.limit + other.limit,
        None if one.reserved is None or other.reserved is None else one.reserved + other.reserved,
    )


def is_listed(own: Collection[int], uuid: str, snapshot: Snapshot) -> bool:
    """Return True if the driver lists a run's `own` processes on a GPU or MIG instance, by the pids known here.

    If not (another pid namespace, MPS), a listed process may be the run under another pid.
    """
    gpu = snapshot.gpu_with(uuid)
    if gpu is None or not gpu.up:
        return False
    where = (uuid, None) if gpu.mig else (None,)
    return any(process.pid and process.pid in own and process.instance in where for process in gpu.processes)


def sum_held_by_others(own: Collection[int], uuid: str, snapshot: Snapshot) -> float | None:
    """Return the bytes of processes other than the run's `own` on a GPU or MIG instance; None if unknown.

    Only meaningful if the run `is_listed`: else its own memory is included.
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
