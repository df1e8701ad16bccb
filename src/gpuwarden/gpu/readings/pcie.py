"""PCI Express link of a GPU."""

from __future__ import annotations

from gpuwarden.gpu.readings.shapes import field, labeled_fields, present
from gpuwarden.metrics.model import Labels
from gpuwarden.nvml import fields
from gpuwarden.nvml.constants import NOT_AVAILABLE, PCIE_DIRECTIONS
from gpuwarden.nvml.device import Device

_BITS_32 = 1 << 32


replays = field(fields.PCIE_REPLAYS)
errors = labeled_fields(fields.PCIE_ERRORS)


def generation(gpu: Device) -> float | None:
    """Return the current generation of the link, which an idle GPU lowers."""
    return _if_known(gpu.try_query(gpu.nvml.nvmlDeviceGetCurrPcieLinkGeneration))


def width(gpu: Device) -> float | None:
    """Lanes in use."""
    return _if_known(gpu.try_query(gpu.nvml.nvmlDeviceGetCurrPcieLinkWidth))


def highest_generation(gpu: Device) -> dict[Labels, float]:
    """Highest generation of the GPU, and of its link in this machine."""
    own = _if_known(gpu.try_query(gpu.nvml.nvmlDeviceGetGpuMaxPcieLinkGeneration))
    here = _if_known(gpu.try_query(gpu.nvml.nvmlDeviceGetMaxPcieLinkGeneration))
    return present(("gpu", "link"), (own, here))


def highest_width(gpu: Device) -> float | None:
    """Lanes of the link."""
    return _if_known(gpu.try_query(gpu.nvml.nvmlDeviceGetMaxPcieLinkWidth))


def _if_known(answer: int | None) -> int | None:
    return None if answer == NOT_AVAILABLE else answer or None  # a link has no 0 lanes


def transferred(gpu: Device) -> dict[Labels, float]:
    """Bytes since the driver loaded, by direction, if the counter has more than 32 bits.

    nvml.h says that it can wrap, which a 32-bit counter does ten times a second on a busy link. So it is used only once
    a value exceeded 32 bits, which a wider counter reaches in the first seconds of work.
    """
    directions = fields.PCIE_BYTES
    counted = present(directions, gpu.fields((number, 0) for number in directions.values()))
    for direction, value in counted.items():
        if value >= _BITS_32:
            gpu.remember(("wide counter", direction), lambda: True)
    return {direction: value for direction, value in counted.items() if gpu.is_remembered(("wide counter", direction))}


def throughput(gpu: Device) -> dict[Labels, float]:
    """Bytes per second by direction. Each call blocks for 20 ms, in which the driver counts."""
    ask = gpu.nvml.nvmlDeviceGetPcieThroughput
    return present(PCIE_DIRECTIONS, (gpu.try_query(ask, number) for number in PCIE_DIRECTIONS.values()), 1000)
