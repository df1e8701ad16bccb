"""Activity of the units of an undivided GPU, or of a MIG instance, by GPM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from gpuwarden.metrics.model import Labels
from gpuwarden.nvml.constants import (
    GPM_DRAM_ACTIVE,
    GPM_GRAPHICS_ENGINE,
    GPM_PCIE,
    GPM_PIPES,
    GPM_SM_ACTIVE,
    GPM_SM_OCCUPANCY,
    GPM_TENSOR_OPERATIONS,
)


class Sampled(Protocol):
    """GPU or MIG instance with GPM samples."""

    def share(self, metric: int) -> float | None:
        """Return one metric as Gpm.share does. Raises NVMLError."""


def _share(metric: int) -> Callable[[Sampled], float | None]:
    return lambda subject: subject.share(metric)


def _shares(metrics: Mapping[str, int]) -> Callable[[Sampled], dict[Labels, float]]:
    def read(subject: Sampled) -> dict[Labels, float]:
        found = {(name,): subject.share(number) for name, number in metrics.items()}
        return {labels: share for labels, share in found.items() if share is not None}

    return read


graphics_engine = _share(GPM_GRAPHICS_ENGINE)
sm_active = _share(GPM_SM_ACTIVE)
sm_occupancy = _share(GPM_SM_OCCUPANCY)
dram = _share(GPM_DRAM_ACTIVE)
pipes = _shares(GPM_PIPES)
tensor_operations = _shares(GPM_TENSOR_OPERATIONS)
pcie = _shares(GPM_PCIE)  # bytes a second by direction
