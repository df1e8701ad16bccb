"""Temperatures, how far they are from what the device allows, and its fans."""

from __future__ import annotations

from gpuwarden.gpu.readings.shapes import labelled_fields, present
from gpuwarden.metrics.model import Labels
from gpuwarden.nvml import fields
from gpuwarden.nvml.constants import NOT_AVAILABLE, TEMPERATURE_CORE, TEMPERATURE_THRESHOLDS
from gpuwarden.nvml.device import Device

_MAX_FANS = 32  # that are asked for, whatever the driver says


margin_thresholds = labelled_fields(fields.MARGIN_THRESHOLDS)  # what newer GPUs have in place of thresholds in celsius


def temperatures(gpu: Device) -> dict[Labels, float]:
    """Degrees by sensor. Boards whose memory has none answer 0 for it (DCGM shows it so), which no chip is at."""
    core = gpu.query(gpu.nvml.nvmlDeviceGetTemperature, TEMPERATURE_CORE)
    memory = gpu.query_slowly("memory temperature", lambda: gpu.attempt(lambda: gpu.field(fields.MEMORY_TEMPERATURE)))
    return {("core",): core, ("memory",): memory} if memory else {("core",): core}


def thresholds(gpu: Device) -> dict[Labels, float]:
    """Degrees at which the device does something about its heat; 0 stands for one that is not set."""
    return {(name,): celsius for name in TEMPERATURE_THRESHOLDS if (celsius := _threshold(gpu, name))}


def _threshold(gpu: Device, name: str) -> int | None:
    return gpu.query_once(gpu.nvml.nvmlDeviceGetTemperatureThreshold, TEMPERATURE_THRESHOLDS[name])


def margin(gpu: Device) -> float | None:
    """Degrees left before slowdown: the driver's own margin, else the distance to the slowdown threshold.

    A margin of 0 or less is reported by healthy H100 boards (leptonai/gpud), so then the threshold decides.
    """
    own = gpu.try_query(gpu.nvml.nvmlDeviceGetMarginTemperature)
    if own is not None and own > 0:
        return own
    slowdown = _threshold(gpu, "slowdown")
    return slowdown - gpu.query(gpu.nvml.nvmlDeviceGetTemperature, TEMPERATURE_CORE) if slowdown else None


def fan_speeds(gpu: Device) -> dict[Labels, float]:
    """Ratio of each fan's full speed that it is told to run at."""
    fans = min(gpu.query_once(gpu.nvml.nvmlDeviceGetNumFans) or 0, _MAX_FANS)
    speeds = [gpu.try_query(gpu.nvml.nvmlDeviceGetFanSpeed_v2, fan) for fan in range(fans)]
    return present(map(str, range(fans)), (None if speed == NOT_AVAILABLE else speed for speed in speeds), 0.01)
