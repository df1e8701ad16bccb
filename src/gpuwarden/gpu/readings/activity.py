"""Activity of the units of an undivided GPU or a MIG instance, by GPM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from gpuwarden.gpu.readings.instance import MigDevice
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
from gpuwarden.nvml.device import Device

GpmSubject: TypeAlias = Device | MigDevice


def _read_one(metric: int) -> Callable[[GpmSubject], float | None]:
    return lambda subject: subject.read_gpm_metric(metric)


def _read_labeled(metrics: Mapping[str, int]) -> Callable[[GpmSubject], dict[Labels, float]]:
    def read(subject: GpmSubject) -> dict[Labels, float]:
        found = {(name,): subject.read_gpm_metric(number) for name, number in metrics.items()}
        return {labels: value for labels, value in found.items() if value is not None}

    return read


graphics_engine = _read_one(GPM_GRAPHICS_ENGINE)
sm_active = _read_one(GPM_SM_ACTIVE)
sm_occupancy = _read_one(GPM_SM_OCCUPANCY)
dram = _read_one(GPM_DRAM_ACTIVE)
pipes = _read_labeled(GPM_PIPES)
tensor_operations = _read_labeled(GPM_TENSOR_OPERATIONS)
pcie = _read_labeled(GPM_PCIE)  # bytes per second, by direction
