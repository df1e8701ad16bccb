"""Power and energy."""

from __future__ import annotations

from gpuwarden.gpu.readings.shapes import present
from gpuwarden.metrics.model import Labels
from gpuwarden.nvml import fields
from gpuwarden.nvml.device import Device


def usage(gpu: Device) -> float:
    """Watts: the average of the last second since Ampere, except GA100 (arXiv 2312.02741)."""
    return gpu.query(gpu.nvml.nvmlDeviceGetPowerUsage) / 1000


def instant(gpu: Device) -> dict[Labels, float]:
    """Watts of GPU, module and memory at the moment; 0 means no sensor."""
    return _read_scopes(gpu, fields.POWER_INSTANT)


def average(gpu: Device) -> dict[Labels, float]:
    """Average watts of the last second, of GPU, module and memory."""
    return _read_scopes(gpu, fields.POWER_AVERAGE)


def _read_scopes(gpu: Device, number: int) -> dict[Labels, float]:
    scopes = fields.POWER_SCOPES
    milliwatts = gpu.fields((number, scope) for scope in scopes.values())
    return present(scopes, (value or None for value in milliwatts), 0.001)


def limits(gpu: Device) -> dict[Labels, float]:
    """Watts: the enforced, the requested and the default limit, and the range of requests."""
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
