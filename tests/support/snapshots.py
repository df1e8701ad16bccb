"""Snapshots made by hand, for tests of the layers above the driver."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpuwarden.gpu.metrics import GpuReadings, MigReadings
from gpuwarden.gpu.snapshot import Gpu, GpuProcess, MigInstance, Snapshot
from gpuwarden.health.detector import Detector
from gpuwarden.nvml.identity import GpuIdentity, MigIdentity
from gpuwarden.nvml.session import DriverVersions
from gpuwarden.state import State

GIB = 2**30


def gpu(index: int, *, free: int = 10 * GIB, held: Mapping[int, int | None] | None = None, name: str = "H100") -> Gpu:
    """Make a GPU of 80 GiB with UUID GPU-<index>; `held` maps pids to bytes."""
    readings = {GpuReadings.memory_size_bytes: 80 * GIB, GpuReadings.memory_free_bytes: free}
    processes = tuple(GpuProcess(pid, "compute", memory) for pid, memory in (held or {}).items())
    identity = GpuIdentity(f"GPU-{index}", index, name, f"0000:{index:02x}:00.0", "")
    return Gpu(identity, None, readings=readings, processes=processes, last_success=1.0)


def mig_gpu(index: int, *, free: Sequence[int], held: Mapping[int, int] | None = None) -> Gpu:
    """Make a GPU with a MIG instance MIG-<index>-<n> for each entry of `free`; `held` maps pids to theirs."""
    whole = gpu(index, free=sum(free))
    mig = tuple(
        MigInstance(MigIdentity(f"MIG-{index}-{n}", n, 0, "1g.10gb"), {MigReadings.memory_free_bytes: size})
        for n, size in enumerate(free)
    )
    processes = tuple(GpuProcess(pid, "compute", GIB, f"MIG-{index}-{n}") for pid, n in (held or {}).items())
    return replace(whole, mig=mig, processes=processes)


def snapshot(*gpus: Gpu) -> Snapshot:
    """Make a snapshot of the GPUs."""
    return Snapshot(1.0, 0.001, None, DriverVersions("590.48.01", "13.1"), len(gpus), gpus, 1.0)


def detect(state: State) -> State:
    """Return a state with what the detector finds at its first poll."""
    return replace(state, detection=Detector().evaluate(state, 0.0))
