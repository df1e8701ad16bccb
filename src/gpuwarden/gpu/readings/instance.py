"""Identity, parts and memory of a MIG instance."""

from __future__ import annotations

from collections.abc import Mapping

from gpuwarden.gpu.mig import Instance
from gpuwarden.metrics.model import Labels


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
