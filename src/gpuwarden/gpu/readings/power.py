"""Power and energy."""

from __future__ import annotations

from gpuwarden.gpu.readings.shapes import present
from gpuwarden.metrics.model import Labels
from gpuwarden.nvml import fields
from gpuwarden.nvml.device import Device


def usage(gpu: Device) -> float:
    """Watts drawn: over the last second on average from Ampere on, but for GA100 (arXiv 2312.02741)."""
    return gpu.query(gpu.nvml.nvmlDeviceGetPowerUsage) / 1000


def instant(gpu: Device) -> dict[Labels, float]:
    """Watts at the moment, of the GPU and of what is around it; 0 is a sensor that is not there."""
    return _read_scopes(gpu, fields.POWER_INSTANT)


def average(gpu: Device) -> dict[Labels, float]:
    """Watts over the last second on average, likewise."""
    return _read_scopes(gpu, fields.POWER_AVERAGE)


def _read_scopes(gpu: Device, number: int) -> dict[Labels, float]:
    scopes = fields.POWER_SCOPES
    milliwatts = gpu.fields((number, scope) for scope in scopes.values())
    return present(scopes, (value or None for value in milliwatts), 0.001)


def limits(gpu: Device) -> dict[Labels, float]:
    """Watts: the limit enforced, the one asked for, the board's default, and the range that can be asked for."""
    least, most = gpu.try_query(gpu.nvml.nvmlDeviceGetPowerManagementLimitConstraints) or (None, None)
    found = {
        "enforced": gpu.try_query(gpu.nvml.nvmlDeviceGetEnforcedPowerLimit),
        "requested": gpu.try_query(gpu.nvml.nvmlDeviceGetPowerManagementLimit),
        "default": gpu.try_query(gpu.nvml.nvmlDeviceGetPowerManagementDefaultLimit),
        "min": least,
        "max": most,
    }
    return present(found, (value or None for value in found.values()), 0.001)


def energy(gpu: Device) -> float:
    """Joules since the driver loaded."""
    return gpu.query(gpu.nvml.nvmlDeviceGetTotalEnergyConsumption) / 1000
