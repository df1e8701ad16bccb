"""What a MIG instance is and has, and how busy it is."""

from __future__ import annotations

from collections.abc import Mapping

from gpuwarden.gpu.mig import Instance
from gpuwarden.gpu.nvml import (
    GPM_DRAM_ACTIVE,
    GPM_GRAPHICS_ENGINE,
    GPM_PCIE,
    GPM_PIPES,
    GPM_SM_ACTIVE,
    GPM_SM_OCCUPANCY,
)
from gpuwarden.metric import Labels


def info(mig: Instance) -> Mapping[Labels, float]:
    """Return who it is."""
    who = mig.identity
    return {(mig.gpu_uuid, str(who.gpu_instance), str(who.compute_instance), who.profile): 1}


def multiprocessors(mig: Instance) -> float | None:
    """Return its number of SMs."""
    return None if mig.attributes is None else mig.attributes.multiprocessorCount


def slices(mig: Instance) -> Mapping[Labels, float] | None:
    """Return the slices that it has."""
    has = mig.attributes
    if has is None:
        return None
    return {("gpu",): has.gpuInstanceSliceCount, ("compute",): has.computeInstanceSliceCount}


def engines(mig: Instance) -> Mapping[Labels, float] | None:
    """Return the engines that it can use."""
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


def memory_size(mig: Instance) -> float | None:
    """Return bytes."""
    return None if mig.memory is None else mig.memory.total


def memory_used(mig: Instance) -> float | None:
    """Return bytes."""
    return None if mig.memory is None else mig.memory.used


def memory_free(mig: Instance) -> float | None:
    """Return bytes."""
    return None if mig.memory is None else mig.memory.free


def memory_reserved(mig: Instance) -> float | None:
    """Return bytes; None where the driver has only the older memory call."""
    return getattr(mig.memory, "reserved", None)


def graphics_engine(mig: Instance) -> float | None:
    """Return the share of the time with any work under way."""
    return mig.share(GPM_GRAPHICS_ENGINE)


def sm_active(mig: Instance) -> float | None:
    """Return the share of SMs that were busy."""
    return mig.share(GPM_SM_ACTIVE)


def sm_occupancy(mig: Instance) -> float | None:
    """Return active warps over the most that there can be."""
    return mig.share(GPM_SM_OCCUPANCY)


def pipes(mig: Instance) -> Mapping[Labels, float]:
    """Return the share of the time that each pipe was active."""
    return _shares(mig, GPM_PIPES)


def pcie(mig: Instance) -> Mapping[Labels, float]:
    """Return bytes a second by direction."""
    return _shares(mig, GPM_PCIE)


def dram(mig: Instance) -> float | None:
    """Return device memory's bandwidth in use over its most."""
    return mig.share(GPM_DRAM_ACTIVE)


def _shares(mig: Instance, metrics: Mapping[str, int]) -> Mapping[Labels, float]:
    found = {(name,): mig.share(number) for name, number in metrics.items()}
    return {labels: share for labels, share in found.items() if share is not None}
