"""Utilization of the units of a GPU, as the driver samples it."""

from __future__ import annotations

from collections.abc import Callable

from gpuwarden.metrics.model import Labels, Metric
from gpuwarden.nvml.constants import NOT_AVAILABLE
from gpuwarden.nvml.device import Device, require_value


def kernels(gpu: Device) -> float:
    """Ratio of the sample period with a kernel running."""
    return require_value(gpu.query(gpu.nvml.nvmlDeviceGetUtilizationRates).gpu) / 100


def busy_seconds(utilization: Metric[Device]) -> Callable[[Device], float]:
    """Return a reader of the seconds with a kernel running: the row `utilization`, integrated over the polls."""
    return lambda gpu: gpu.integrate("busy", gpu.require_reading(utilization))


def bandwidth(gpu: Device) -> float:
    """Ratio of the sample period with device memory being read or written."""
    return require_value(gpu.query(gpu.nvml.nvmlDeviceGetUtilizationRates).memory) / 100


def engines(gpu: Device) -> dict[Labels, float]:
    """Busy ratio of each fixed-function engine, in its sample period."""
    asks = {
        ("encoder",): gpu.nvml.nvmlDeviceGetEncoderUtilization,
        ("decoder",): gpu.nvml.nvmlDeviceGetDecoderUtilization,
        ("jpeg",): gpu.nvml.nvmlDeviceGetJpgUtilization,
        ("ofa",): gpu.nvml.nvmlDeviceGetOfaUtilization,
    }
    return {
        labels: found[0] / 100
        for labels, ask in asks.items()
        if (found := gpu.try_query(ask)) is not None and found[0] != NOT_AVAILABLE
    }


def encoder_sessions(gpu: Device) -> float | None:
    """Return the number of video encoding sessions."""
    stats = gpu.try_query(gpu.nvml.nvmlDeviceGetEncoderStats)
    return None if stats is None else stats[0]


def encoder_rate(gpu: Device) -> float | None:
    """Average frames per second of an encoding session; None without a session."""
    stats = gpu.try_query(gpu.nvml.nvmlDeviceGetEncoderStats)
    return stats[1] if stats and stats[0] else None


def encoder_latency(gpu: Device) -> float | None:
    """Average seconds to encode a frame; None without a session."""
    stats = gpu.try_query(gpu.nvml.nvmlDeviceGetEncoderStats)
    return stats[2] / 1e6 if stats and stats[0] else None
