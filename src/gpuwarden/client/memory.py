"""What TensorFlow's allocators say of this process's devices.

Only for a process that computes with TensorFlow already: the first question asked here creates its devices, and from
then on their options are frozen. Peaks are never reset: they are the user's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from gpuwarden.protocol import MAX_DEVICES, DeviceMemory

MEBIBYTE = 1 << 20  # TensorFlow writes MB: bfc_allocator's users in process_state.cc and gpu_device.cc shift by 20
DEFAULT_CPU_LIMIT = 1 << 16  # mebibytes; process_state.cc


class _Device:
    """One watched device: the logical devices it consists of and their latest figures."""

    __slots__ = ("current", "limit", "logical", "name", "peak")

    def __init__(self, name: str, logical: tuple[str, ...], limit: int | None, peak: int) -> None:
        self.name = name
        self.logical = logical
        self.limit = limit
        self.current = 0
        self.peak = peak


class Memory:
    """Allocator figures of the watched devices; a device whose allocator has none is absent."""

    def __init__(self) -> None:
        self._devices: list[_Device] = []
        self._info: Any = None

    def watch(self, names: Iterable[str]) -> None:
        """Watch these devices instead of the last ones; a peak once seen stays."""
        tf = sys.modules["tensorflow"]
        self._info = tf.config.experimental.get_memory_info
        parts = physical_devices("GPU")
        peaks = {device.name: device.peak for device in self._devices}
        self._devices = [
            _Device(name, parts.get(name, (name,)), _limit(tf, name), peaks.get(name, 0)) for name in names
        ]
        self.sample()

    def sample(self) -> None:
        """Ask the allocators, about 1 µs a device; one that fails is not asked again."""
        info = self._info
        for device in self._devices:
            try:
                current = peak = 0
                for name in device.logical:
                    answer = info(name)
                    current += answer["current"]
                    peak += answer["peak"]
            except Exception:  # noqa: BLE001 - ValueError, InternalError, KeyError by version and allocator: no statistics
                self._devices = [each for each in self._devices if each is not device]
                continue
            device.current = current
            device.peak = max(device.peak, peak)  # the allocator's falls where the user resets it

    def reading(self) -> dict[str, DeviceMemory]:
        """Give each device's latest figures."""
        return {each.name: DeviceMemory(each.current, each.peak, each.limit) for each in self._devices}


def device_names(named: Mapping[str, str]) -> dict[str, str | None]:
    """Give the devices to watch, all visible GPUs and those `named`, each with the GPU it was said to stand for."""
    devices: dict[str, str | None] = dict.fromkeys(physical_devices("GPU"))
    devices.update(named)
    return dict(list(devices.items())[:MAX_DEVICES])


def physical_devices(kind: str) -> dict[str, tuple[str, ...]]:
    """Map the visible physical devices to their logical ones.

    A logical index says nothing of the GPU behind it: set_visible_devices([gpus[3]]) makes GPU 3 logical GPU:0, and one
    GPU may be cut in several. The daemon resolves GPUs, so everything reported goes by the physical name.
    """
    tf = sys.modules["tensorflow"]
    devices: dict[str, tuple[str, ...]] = {}
    count = 0
    for device in tf.config.get_visible_devices(kind):
        parts = len(_cuts(tf, device)) or 1
        devices[_short(device.name)] = tuple(f"{kind}:{index}" for index in range(count, count + parts))
        count += parts
    return devices


def _short(name: str) -> str:
    """Cut "/physical_device:GPU:0" and its like down to "GPU:0"."""
    return name.rpartition("device:")[2]


def _cuts(tf: Any, device: Any) -> list[Any]:
    return tf.config.get_logical_device_configuration(device) or []


def _limit(tf: Any, name: str) -> int | None:
    """Say how much the allocator may take, in bytes, where the run has set it."""
    if name.startswith("CPU:"):
        return _cpu_limit(os.environ)
    for device in tf.config.get_visible_devices():
        if _short(device.name) == name:
            limits = [cut.memory_limit for cut in _cuts(tf, device)]
            return sum(limits) * MEBIBYTE if limits and all(limits) else None
    return None


def _cpu_limit(environ: Mapping[str, str]) -> int | None:
    if environ.get("TF_CPU_ALLOCATOR_USE_BFC", "").lower() not in ("1", "true"):
        return None
    try:
        return int(environ.get("TF_CPU_BFC_MEM_LIMIT_IN_MB") or DEFAULT_CPU_LIMIT) * MEBIBYTE
    except ValueError:
        return None
