"""Allocators of the devices that this process trains on: memory, peaks, and out-of-memory errors."""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from gpuwarden.client.errors.classifier import error_from_exception, has_known_kind
from gpuwarden.client.frameworks import make_adapter
from gpuwarden.client.frameworks.tensorflow import list_physical_devices
from gpuwarden.client.guard import log
from gpuwarden.protocol.messages import DeviceMemory


def is_device_oom(error: BaseException, frameworks: Iterable[str]) -> bool:
    """Return whether an error is an out-of-memory of the device, by its text; takes some ms and keeps no reference.

    An error that was raised while an out-of-memory was handled does not count. Where none of the frameworks has a
    device with memory of its own, the CPU is the device, and the host's memory counts.
    """
    if not has_known_kind(error):
        return False
    memory = read_device_memory(frameworks)
    kind = error_from_exception(error, "train", 0, memory).kind
    return kind == "device_oom" or (kind == "host_oom" and not memory)


def free_memory(error: BaseException) -> None:
    """Free what an out-of-memory error keeps: the tensors in its frames, and the blocks that torch caches."""
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = error.__cause__ = error.__context__ = None
    gc.collect()  # some are in reference cycles
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        cuda.empty_cache()


def add_note(error: BaseException, text: str) -> None:
    """Log a text, and add it to an error that is about to be raised."""
    log.error(text)
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(text)


def read_device_memory(frameworks: Iterable[str]) -> dict[str, DeviceMemory]:
    """Return the memory of the devices that this process trains on; a device without statistics is absent.

    Without a GPU it is TensorFlow's CPU, if its allocator was given a limit.
    """
    found: dict[str, DeviceMemory] = {}
    for framework in filter(None, map(make_adapter, frameworks)):
        gpus = tuple(framework.list_devices())
        for device in gpus or ("CPU:0",):
            with contextlib.suppress(Exception):  # by framework, version and allocator: it has no statistics
                memory = framework.read_memory(device)
                if memory is not None and (gpus or memory.limit is not None):
                    found[device] = memory
    return found


def reset_peaks(backend: str) -> bool:
    """Reset the peaks of a framework's allocators; return False if it cannot (JAX)."""
    if backend == "tensorflow":
        _reset_tensorflow(sys.modules["tensorflow"])
    elif backend == "torch":
        _reset_torch(sys.modules["torch"].cuda)
    return backend in ("tensorflow", "torch")


def read_peak_ratio(backend: str) -> float | None:
    """Return the largest peak of a framework's device as a ratio of its allocator's limit; None if one has no limit."""
    found = read_device_memory([backend])
    if backend == "torch":
        found = _add_torch_limit(found)
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
    cuda = sys.modules["torch"].cuda
    return {
        device: replace(memory, limit=memory.limit or (memory.reserved or 0) + cuda.mem_get_info(int(device[4:]))[0])
        for device, memory in found.items()
    }
