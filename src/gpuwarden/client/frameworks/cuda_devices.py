"""UUIDs of this process's CUDA devices, in CUDA's order, from a driver library that the process has already loaded.

CUDA orders devices by speed or by PCI address, leaves out those that CUDA_VISIBLE_DEVICES hides, and treats a MIG
instance as a device; NVML does none of this. Only CUDA, in this process, knows which GPU its device 0 is.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from uuid import UUID

from gpuwarden.protocol.validators import MAX_DEVICES

_LIBRARY = "libcuda.so.1"
_UUID_BYTES = 16


def read_uuids() -> tuple[str, ...] | None:
    """Return the UUID of each device as NVML writes it; None if CUDA is not loaded, not set up, or fails.

    Loads and sets up nothing: cuInit would break a process that still forks or sets options.
    """
    driver = _find_driver()
    try:
        return None if driver is None else _read_all(driver)
    except AttributeError:  # a library of that name that lacks a function
        return None


def _find_driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(_LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None


def _read_all(driver: ctypes.CDLL) -> tuple[str, ...] | None:
    # Every driver function returns 0 for success, and 3 if cuInit was not called in this process.
    count = ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)):
        return None
    found: list[str] = []
    for ordinal in range(min(count.value, MAX_DEVICES)):
        device = ctypes.c_int()
        if driver.cuDeviceGet(ctypes.byref(device), ctypes.c_int(ordinal)):
            return None
        uuid = _read_uuid(driver, device)
        if uuid is None:
            return None
        found.append(uuid)
    return tuple(found)


def _read_uuid(driver: ctypes.CDLL, device: ctypes.c_int) -> str | None:
    """Read one device's UUID.

    For a MIG instance, the second version of the function (driver 470 and later) returns its own UUID, the first one
    its GPU's (CUDA Driver API, Device Management). So a device for which they differ is an instance.
    """
    gpu = _call_for_uuid(driver.cuDeviceGetUuid, device)
    second = getattr(driver, "cuDeviceGetUuid_v2", None)
    own = gpu if second is None else _call_for_uuid(second, device)
    if gpu is None or own is None:
        return None
    return f"GPU-{own}" if own == gpu else f"MIG-{own}"


def _call_for_uuid(function: Callable[..., int], device: ctypes.c_int) -> UUID | None:
    buffer = ctypes.create_string_buffer(_UUID_BYTES)
    return None if function(buffer, device) else UUID(bytes=buffer.raw)
