"""Temperatures, margins to the device's limits, and fans."""

from __future__ import annotations

from gpuwarden.gpu.readings.shapes import labeled_fields, present
from gpuwarden.metrics.model import Labels
from gpuwarden.nvml import fields
from gpuwarden.nvml.constants import NOT_AVAILABLE, TEMPERATURE_CORE, TEMPERATURE_THRESHOLDS
from gpuwarden.nvml.device import Device

_MAX_FANS = 32  # read at most, whatever count the driver returns


margin_thresholds = labeled_fields(fields.MARGIN_THRESHOLDS)  # newer GPUs have these instead of thresholds in celsius


def temperatures(gpu: Device) -> dict[Labels, float]:
    """Celsius by sensor. Boards without a memory sensor return 0 for it (DCGM exports that 0)."""
    core = gpu.query(gpu.nvml.nvmlDeviceGetTemperature, TEMPERATURE_CORE)
    memory = gpu.query_slowly("memory temperature", lambda: gpu.attempt(lambda: gpu.field(fields.MEMORY_TEMPERATURE)))
    return {("core",): core, ("memory",): memory} if memory else {("core",): core}


def thresholds(gpu: Device) -> dict[Labels, float]:
    """Temperature thresholds of the device in celsius; 0 means not set."""
    return {(name,): celsius for name in TEMPERATURE_THRESHOLDS if (celsius := _threshold(gpu, name))}


def _threshold(gpu: Device, name: str) -> int | None:
    return gpu.query_once(gpu.nvml.nvmlDeviceGetTemperatureThreshold, TEMPERATURE_THRESHOLDS[name])


def margin(gpu: Device) -> float | None:
    """Celsius left before slowdown: the driver's margin, else the distance to the slowdown threshold.

    Healthy H100 boards report a margin of 0 or less (leptonai/gpud), so then the threshold is used.
    """
    own = gpu.try_query(gpu.nvml.nvmlDeviceGetMarginTemperature)
    if own is not None and own > 0:
        return own
    slowdown = _threshold(gpu, "slowdown")
    return slowdown - gpu.query(gpu.nvml.nvmlDeviceGetTemperature, TEMPERATURE_CORE) if slowdown else None


def fan_speeds(gpu: Device) -> dict[Labels, float]:
    """Intended speed of each fan, as a ratio of its maximum."""
    fans = min(gpu.query_once(gpu.nvml.nvmlDeviceGetNumFans) or 0, _MAX_FANS)
    speeds = [gpu.try_query(gpu.nvml.nvmlDeviceGetFanSpeed_v2, fan) for fan in range(fans)]
    return present(map(str, range(fans)), (None if speed == NOT_AVAILABLE else speed for speed in speeds), 0.01)
