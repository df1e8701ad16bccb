"""Peak of an allocator, as a ratio of its limit, since the last reset; unknown is None."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from gpuwarden.client.frameworks.tensorflow import list_physical_devices
from gpuwarden.client.keras_import import keras
from gpuwarden.protocol.messages import DeviceMemory
from gpuwarden.tuning.device_oom import read_device_memory


def reset_peaks() -> bool:
    """Have the allocators forget their peaks; False where they cannot: JAX's."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        _forget_tensorflow(sys.modules["tensorflow"])
    elif backend == "torch":
        _forget_torch(sys.modules["torch"].cuda)
    return backend in ("tensorflow", "torch")


def read_peak_ratio() -> float | None:
    """Give the largest peak of a device as a share of what its allocator may take; None where one has no limit."""
    found = _with_room_of_torch(read_device_memory())
    if not found or not all(each.limit for each in found.values()):
        return None
    return max(each.peak / each.limit for each in found.values() if each.limit)


def _forget_tensorflow(tf: Any) -> None:
    for parts in (list_physical_devices("GPU") or list_physical_devices("CPU")).values():
        for part in parts:
            try:
                tf.config.experimental.reset_memory_stats(part)
            except Exception:  # noqa: BLE001 - by allocator: it has no statistics, and then share() has none either
                return


def _forget_torch(cuda: Any) -> None:
    for index in range(cuda.device_count() if cuda.is_initialized() else 0):
        cuda.reset_peak_memory_stats(index)


def _with_room_of_torch(found: dict[str, DeviceMemory]) -> dict[str, DeviceMemory]:
    """Add what torch's allocator may take where it has no limit: what it holds, and what is free on the GPU."""
    if keras.backend.backend() != "torch":
        return found
    cuda = sys.modules["torch"].cuda
    return {
        device: replace(said, limit=said.limit or (said.reserved or 0) + cuda.mem_get_info(int(device[4:]))[0])
        for device, said in found.items()
    }
