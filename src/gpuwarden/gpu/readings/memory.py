"""Device memory, and its part that the CPU can map (BAR1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpuwarden.metrics.model import Labels, Metric
from gpuwarden.nvml.constants import MEMORY_V2
from gpuwarden.nvml.device import Device, require_value
from gpuwarden.nvml.interface import Bar1Memory, MemoryInfo


def _memory(gpu: Device) -> MemoryInfo | None:
    # Version 2 separates the driver's reserved memory; drivers before R510 have version 1 only.
    ask = gpu.nvml.nvmlDeviceGetMemoryInfo
    memory = gpu.try_query(ask, MEMORY_V2) or gpu.try_query(ask)
    if memory is not None:
        require_value(memory.used)  # the other fields are of the same answer
    return memory


def size(gpu: Device) -> float:
    """Bytes installed; the machine's for a device without its own memory."""
    memory = _memory(gpu)
    return gpu.host_memory().size if memory is None else memory.total


def used(gpu: Device) -> float:
    """Bytes in use; by all programs of the machine for a device without its own memory."""
    memory = _memory(gpu)
    if memory is not None:
        return memory.used
    host = gpu.host_memory()
    return host.size - host.available


def free(gpu: Device) -> float:
    """Free bytes; what Linux calls available for a device without its own memory."""
    memory = _memory(gpu)
    return gpu.host_memory().available if memory is None else memory.free


def reserved(gpu: Device) -> float | None:
    """Bytes reserved by the driver."""
    memory = gpu.try_query(gpu.nvml.nvmlDeviceGetMemoryInfo, MEMORY_V2)
    return None if memory is None else memory.reserved


def unified(gpu: Device) -> float | None:
    """Return 1 if the device has no memory of its own; None if the driver returns a memory of 0 bytes."""
    memory = _memory(gpu)
    return float(memory is None) if memory is None or memory.total else None


def peaks(used_row: Metric[Device]) -> Callable[[Device], Mapping[Labels, float]]:
    """Return a reader of the peak bytes in use, by window: of the row `used_row`, and of the samples between polls."""

    def read(gpu: Device) -> Mapping[Labels, float]:
        gpu.peaks.add(gpu.require_reading(used_row))
        return gpu.peaks.maxima()

    return read


def bar1(gpu: Device) -> Bar1Memory | None:
    """Return the BAR1 memory; None if its size is 0."""
    window = gpu.try_query(gpu.nvml.nvmlDeviceGetBAR1MemoryInfo)
    return window if window is not None and window.bar1Total else None


def bar1_size(gpu: Device) -> float | None:
    """Bytes that can be mapped."""
    window = bar1(gpu)
    return None if window is None else window.bar1Total


def bar1_used(gpu: Device) -> float | None:
    """Bytes that are mapped."""
    window = bar1(gpu)
    return None if window is None else window.bar1Used


def bus_width(gpu: Device) -> float | None:
    """Bytes that the bus to device memory moves at once."""
    bits = gpu.try_query(gpu.nvml.nvmlDeviceGetMemoryBusWidth)
    return bits / 8 if bits else None


def numa_node(gpu: Device) -> float | None:
    """NUMA node of device memory, on machines where Linux has one."""
    node = gpu.try_query(gpu.nvml.nvmlDeviceGetNumaNodeId)
    return None if node is None or node < 0 else node
