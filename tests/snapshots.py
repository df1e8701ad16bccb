"""Snapshots made by hand, for tests of what stands above the driver."""

from collections.abc import Mapping

from gpuwarden.gpu.snapshot import Driver, Gpu, GpuProcess, Identity, Snapshot
from gpuwarden.gpu.table import GpuReadings

GIB = 2**30


def gpu(index: int, *, free: int = 10 * GIB, held: Mapping[int, int | None] | None = None, name: str = "H100") -> Gpu:
    """Make a GPU of 80 GiB with UUID GPU-<index>; `held` maps pids to bytes."""
    readings = {GpuReadings.memory_size_bytes: 80 * GIB, GpuReadings.memory_free_bytes: free}
    processes = tuple(GpuProcess(pid, "compute", memory) for pid, memory in (held or {}).items())
    return Gpu(Identity(f"GPU-{index}", index, name, f"0000:{index:02x}:00.0", ""), None, readings, processes, 1.0)


def snapshot(*gpus: Gpu) -> Snapshot:
    """Make a snapshot of the GPUs."""
    return Snapshot(1.0, 0.001, None, Driver("590.48.01", "13.1"), len(gpus), gpus, 1.0)
