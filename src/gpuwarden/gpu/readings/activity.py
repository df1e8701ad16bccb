"""How busy the units of an undivided GPU are, by GPM; those of a divided one are sampled by instance."""

from __future__ import annotations

from collections.abc import Mapping

from gpuwarden.gpu.device import Device
from gpuwarden.gpu.mig import mig_enabled
from gpuwarden.gpu.nvml import (
    GPM_DRAM_ACTIVE,
    GPM_GRAPHICS_ENGINE,
    GPM_PCIE,
    GPM_PIPES,
    GPM_SM_ACTIVE,
    GPM_SM_OCCUPANCY,
    GPM_TENSOR_OPERATIONS,
)
from gpuwarden.metric import Labels


def graphics_engine(gpu: Device) -> float | None:
    """Return the share of the time with any work under way."""
    return _share(gpu, GPM_GRAPHICS_ENGINE)


def sm_active(gpu: Device) -> float | None:
    """Return the share of SMs that were busy."""
    return _share(gpu, GPM_SM_ACTIVE)


def sm_occupancy(gpu: Device) -> float | None:
    """Return active warps over the most that there can be."""
    return _share(gpu, GPM_SM_OCCUPANCY)


def pipes(gpu: Device) -> Mapping[Labels, float]:
    """Return the share of the time that each pipe was active."""
    return _shares(gpu, GPM_PIPES)


def tensor_operations(gpu: Device) -> Mapping[Labels, float]:
    """Return the share of the time that the tensor pipe did each operation."""
    return _shares(gpu, GPM_TENSOR_OPERATIONS)


def dram(gpu: Device) -> float | None:
    """Return device memory's bandwidth in use over its most."""
    return _share(gpu, GPM_DRAM_ACTIVE)


def pcie(gpu: Device) -> Mapping[Labels, float]:
    """Return bytes a second by direction."""
    return _shares(gpu, GPM_PCIE)


def _share(gpu: Device, metric: int) -> float | None:
    return gpu.gpm.share(gpu.handle, metric, divided=lambda: mig_enabled(gpu))


def _shares(gpu: Device, metrics: Mapping[str, int]) -> Mapping[Labels, float]:
    found = {(name,): _share(gpu, number) for name, number in metrics.items()}
    return {labels: share for labels, share in found.items() if share is not None}
