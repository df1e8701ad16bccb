"""Detection of an out-of-memory of the device that this process trains on."""

from __future__ import annotations

import contextlib

from gpuwarden.client.errors.classifier import describe, is_own_error
from gpuwarden.client.frameworks import make_adapter
from gpuwarden.client.keras_import import keras
from gpuwarden.protocol.messages import DeviceMemory


def is_device_oom(error: BaseException) -> bool:
    """Tell it by the error's words (errors.py); takes some ms, and keeps nothing of the error.

    An error that was raised while an out-of-memory was handled is another one.
    """
    return is_own_error(error) and describe(error, "train", 0, read_device_memory()).kind == "device_oom"


def read_device_memory() -> dict[str, DeviceMemory]:
    """Ask the allocators of the devices that this process trains on; one without statistics is absent.

    Without a GPU that is TensorFlow's CPU, where its allocator was given a limit as a GPU's has.
    """
    framework = make_adapter(keras.backend.backend())
    found: dict[str, DeviceMemory] = {}
    if framework is None:
        return found
    gpus = tuple(framework.devices())
    for device in gpus or ("CPU:0",):
        with contextlib.suppress(Exception):  # by framework, version and allocator: it has no statistics
            said = framework.memory(device)
            if said is not None and (gpus or said.limit is not None):
                found[device] = said
    return found
