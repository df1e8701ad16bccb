"""Memory in use on a GPU that no listed process explains: a process of another container, or one that has ended."""

from __future__ import annotations

from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu

MAX_UNLISTED_BYTES = 1 << 30  # beyond contexts of the driver itself


def unlisted_memory(gpu: Gpu) -> float | str:
    """Return the bytes in use beyond those of the listed processes, or why they are unknown."""
    used = gpu.value(GpuReadings.memory_used_bytes)
    if gpu.mig:
        return "MIG is on"
    if used is None or gpu.value(GpuReadings.memory_unified):
        return "the GPU has no memory of its own"
    if "compute" not in gpu.process_lists or any(process.memory is None for process in gpu.processes):
        return "the driver does not report the memory of processes"
    return max(used - sum(process.memory or 0 for process in gpu.processes), 0.0)
