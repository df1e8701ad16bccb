"""TensorFlow's devices and the memory that its allocators report.

Use it only in a process that computes with TensorFlow already: the first call creates its devices and freezes their
options. Peaks are never reset: the user may read them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from gpuwarden.client.frameworks import Framework, cuda_devices
from gpuwarden.protocol.messages import DeviceMemory

MEBIBYTE = 1 << 20  # TensorFlow writes MB: bfc_allocator's users in process_state.cc and gpu_device.cc shift by 20
DEFAULT_CPU_LIMIT_MEBIBYTES = 1 << 16  # process_state.cc


class TensorFlow(Framework):
    """TensorFlow as a source of device memory; a device is named by its physical name."""

    name = "tensorflow"

    def __init__(self) -> None:
        self._tf = sys.modules["tensorflow"]
        self._info = self._tf.config.experimental.get_memory_info
        self._parts = list_physical_devices("GPU")
        self._limits: dict[str, int | None] = {}

    def list_devices(self) -> Mapping[str, str | None]:
        """Return the visible GPUs, each with its UUID if known.

        The number in a physical name is CUDA's index (ListPhysicalDevices in gpu_device.cc), regardless of visibility.
        """
        known = {f"GPU:{index}": uuid for index, uuid in enumerate(cuda_devices.read_uuids() or ())}
        return {name: known.get(name) for name in self._parts}

    def read_memory(self, device: str) -> DeviceMemory:
        """Read the allocator, about 1 µs; raises ValueError, InternalError or KeyError if it has no statistics."""
        if device not in self._limits:
            self._limits[device] = _read_limit(self._tf, device)
        current = peak = 0
        for name in self._parts.get(device, (device,)):
            info = self._info(name)
            current += info["current"]
            peak += info["peak"]
        return DeviceMemory(current, peak, self._limits[device])


def list_physical_devices(kind: str) -> dict[str, tuple[str, ...]]:
    """Map the visible physical devices to their logical ones.

    A logical index does not identify the GPU: set_visible_devices([gpus[3]]) makes GPU 3 logical GPU:0, and a GPU may
    be split into several. The daemon resolves GPUs, so reports use the physical name.
    """
    tf = sys.modules["tensorflow"]
    devices: dict[str, tuple[str, ...]] = {}
    count = 0
    for device in tf.config.get_visible_devices(kind):
        parts = len(_list_parts(tf, device)) or 1
        devices[_shorten_name(device.name)] = tuple(f"{kind}:{index}" for index in range(count, count + parts))
        count += parts
    return devices


def _shorten_name(name: str) -> str:
    """Shorten "/physical_device:GPU:0" and the like to "GPU:0"."""
    return name.rpartition("device:")[2]


def _list_parts(tf: Any, device: Any) -> list[Any]:
    return tf.config.get_logical_device_configuration(device) or []


def _read_limit(tf: Any, name: str) -> int | None:
    """Return the allocator's limit in bytes; None if the run has set none."""
    if name.startswith("CPU:"):
        return _read_cpu_limit(os.environ)
    for device in tf.config.get_visible_devices():
        if _shorten_name(device.name) == name:
            limits = [part.memory_limit for part in _list_parts(tf, device)]
            return sum(limits) * MEBIBYTE if limits and all(limits) else None
    return None


def _read_cpu_limit(environ: Mapping[str, str]) -> int | None:
    if environ.get("TF_CPU_ALLOCATOR_USE_BFC", "").lower() not in ("1", "true"):
        return None
    try:
        return int(environ.get("TF_CPU_BFC_MEM_LIMIT_IN_MB") or DEFAULT_CPU_LIMIT_MEBIBYTES) * MEBIBYTE
    except ValueError:
        return None
