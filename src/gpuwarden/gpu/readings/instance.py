"""Identity, parts and memory of a MIG instance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuwarden.metrics.model import Labels
from gpuwarden.nvml.device import Device
from gpuwarden.nvml.identity import MigIdentity
from gpuwarden.nvml.interface import Attributes, Handle, MemoryInfo


@dataclass(eq=False, slots=True)
class MigDevice:
    """One MIG instance for the readers of its table; `memory` is of this reading, None if it did not answer."""

    gpu: Device
    gpu_uuid: str
    handle: Handle
    identity: MigIdentity
    attributes: Attributes | None
    memory: MemoryInfo | None = None

    def read_gpm_metric(self, metric: int) -> float | None:
        """Return a GPM metric of its GPU instance, as Gpm.read_metric does. Raises NVMLError."""
        return self.gpu.gpm.read_metric(self.gpu.handle, metric, self.identity.gpu_instance)


def info(mig: MigDevice) -> Mapping[Labels, float]:
    """Return its identity."""
    who = mig.identity
    return {(mig.gpu_uuid, str(who.gpu_instance), str(who.compute_instance), who.profile): 1}


def multiprocessors(mig: MigDevice) -> float | None:
    """Return its number of SMs."""
    return None if mig.attributes is None else mig.attributes.multiprocessorCount


def slices(mig: MigDevice) -> Mapping[Labels, float] | None:
    """Return its slices."""
    has = mig.attributes
    if has is None:
        return None
    return {("gpu",): has.gpuInstanceSliceCount, ("compute",): has.computeInstanceSliceCount}


def engines(mig: MigDevice) -> Mapping[Labels, float] | None:
    """Return its engines, which compute instances of a GPU instance share."""
    has = mig.attributes
    if has is None:
        return None
    return {
        ("copy",): has.sharedCopyEngineCount,
        ("decoder",): has.sharedDecoderCount,
        ("encoder",): has.sharedEncoderCount,
        ("jpeg",): has.sharedJpegCount,
        ("ofa",): has.sharedOfaCount,
    }


def memory_size(mig: MigDevice) -> float | None:
    """Return bytes."""
    return None if mig.memory is None else mig.memory.total


def memory_used(mig: MigDevice) -> float | None:
    """Return bytes."""
    return None if mig.memory is None else mig.memory.used


def memory_free(mig: MigDevice) -> float | None:
    """Return bytes."""
    return None if mig.memory is None else mig.memory.free


def memory_reserved(mig: MigDevice) -> float | None:
    """Return bytes; None if the driver has only version 1 of the memory call."""
    return getattr(mig.memory, "reserved", None)
