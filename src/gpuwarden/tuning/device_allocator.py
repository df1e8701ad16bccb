"""Allocators of the devices that this process trains on: memory, peaks, and out-of-memory errors."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from typing import Any

from gpuwarden.client.errors.classifier import error_from_exception, has_known_kind
from gpuwarden.client.frameworks import make_adapter
from gpuwarden.client.frameworks.tensorflow import list_physical_devices
from gpuwarden.client.keras_import import keras
from gpuwarden.protocol.messages import DeviceMemory


def is_device_oom(error: BaseException) -> bool:
    """Return whether an error is an out-of-memory of the device, by its text; takes some ms and keeps no reference.

    An error that was raised while an out-of-memory was handled does not count.
    """
    return has_known_kind(error) and error_from_exception(error, "train", 0, read_device_memory()).kind == "device_oom"


def read_device_memory() -> dict[str, DeviceMemory]:
    """Return the memory of the devices that this process trains on; a device without statistics is absent.

    Without a GPU it is TensorFlow's CPU, if its allocator was given a limit.
    """
    framework = make_adapter(keras.backend.backend())
    found: dict[str, DeviceMemory] = {}
    if framework is None:
        return found
    gpus = tuple(framework.list_devices())
    for device in gpus or ("CPU:0",):
        with contextlib.suppress(Exception):  # by framework, version and allocator: it has no statistics
            memory = framework.read_memory(device)
            if memory is not None and (gpus or memory.limit is not None):
                found[device] = memory
    return found


def reset_peaks() -> bool:
    """Reset the allocators' peaks; return False if the framework cannot (JAX)."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        _reset_tensorflow(sys.modules["tensorflow"])
    elif backend == "torch":
        _reset_torch(sys.modules["torch"].cuda)
    return backend in ("tensorflow", "torch")


def read_peak_ratio() -> float | None:
    """Return the largest peak of a device as a ratio of its allocator's limit; None if one has no limit."""
    found = _add_torch_limit(read_device_memory())
    if not found or not all(each.limit for each in found.values()):
        return None
    return max(each.peak / each.limit for each in found.values() if each.limit)


def _reset_tensorflow(tf: Any) -> None:
    for parts in (list_physical_devices("GPU") or list_physical_devices("CPU")).values():
        for part in parts:
            try:
                tf.config.experimental.reset_memory_stats(part)
            except Exception:  # noqa: BLE001 - by allocator: it has no statistics, and then there is no peak either
                return


def _reset_torch(cuda: Any) -> None:
    for index in range(cuda.device_count() if cuda.is_initialized() else 0):
        cuda.reset_peak_memory_stats(index)


def _add_torch_limit(found: dict[str, DeviceMemory]) -> dict[str, DeviceMemory]:
    """Add a limit to torch's figures that have none: its reserved bytes plus the GPU's free memory."""
    if keras.backend.backend() != "torch":
        return found
    cuda = sys.modules["torch"].cuda
    return {
        device: replace(memory, limit=memory.limit or (memory.reserved or 0) + cuda.mem_get_info(int(device[4:]))[0])
        for device, memory in found.items()
    }
