"""Calls for the driver's process lists: one call per list, in the version that the driver supports.

nvidia-ml-py makes two calls, for length and list, which take milliseconds each (gpu/process_reader.py). It also creates
a type for each length, which only Python's full garbage collection frees, and supports only the newest version.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

from pynvml import (  # noqa: TID251 - return codes; nothing is called
    NVML_ERROR_FUNCTION_NOT_FOUND,
    NVML_ERROR_INSUFFICIENT_SIZE,
)

from gpuwarden.nvml.constants import NOT_AVAILABLE_LONG
from gpuwarden.nvml.interface import Handle
from gpuwarden.nvml.return_codes import NVMLError, code_of, nvml_error

_FORMS = ("_v3", "_v2")  # of drivers since R510, and since R470; with the same struct
_ENTRY = struct.Struct("=I4xQII")  # nvmlProcessInfo_v2_t: pid, memory, GPU instance, compute instance
_ROOM = 64  # processes on one GPU for which one call is enough
_ATTEMPTS = 4  # while the list outgrows its buffer


class ListedProcess(NamedTuple):
    """Implementation of `nvml.interface.ProcessInfo`."""

    pid: int
    usedGpuMemory: int | None  # noqa: N815 - the fields' names in nvidia-ml-py
    gpuInstanceId: int  # noqa: N815
    computeInstanceId: int  # noqa: N815


def listing_functions(module: Any) -> dict[str, Callable[[Handle], list[ListedProcess]]]:
    """Return the functions that list processes, by name; `module` is nvidia-ml-py."""
    names = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
    return {name: partial(_newest_form, module, name) for name in names}


def _newest_form(module: Any, name: str, handle: Handle) -> list[ListedProcess]:
    for form in _forms(module):
        try:
            return _listed(module._nvmlGetFunctionPointer(name + form), handle)  # noqa: SLF001 - the base of its functions
        except NVMLError as error:
            if code_of(error) != NVML_ERROR_FUNCTION_NOT_FOUND:
                raise
    raise nvml_error(NVML_ERROR_FUNCTION_NOT_FOUND)


@lru_cache(maxsize=1)  # the library stays the same for as long as the process lives
def _forms(module: Any) -> tuple[str, ...]:
    """Return the forms whose entries are _ENTRY.

    Drivers 535.43 to 535.86 have 8 bytes more per entry in the newest form, which 535.98 reverted: pids would be wrong,
    and memory overwritten. They have one of two functions that changed with it (XuehaiPan/nvitop, pulls 79 and 89).
    """
    wide = _has(module, "nvmlDeviceGetConfComputeMemSizeInfo") and not _has(
        module, "nvmlDeviceGetRunningProcessDetailList"
    )
    return _FORMS[1:] if wide else _FORMS


def _has(module: Any, function: str) -> bool:
    try:
        module._nvmlGetFunctionPointer(function)  # noqa: SLF001 - as above
    except NVMLError as error:
        if code_of(error) != NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        return False
    return True


def _listed(ask: Callable[..., int], handle: Handle) -> list[ListedProcess]:
    room = _ROOM
    for _ in range(_ATTEMPTS):
        count, entries = ctypes.c_uint(room), char_array(room * _ENTRY.size)()
        code = ask(handle, ctypes.byref(count), entries)
        if code == NVML_ERROR_INSUFFICIENT_SIZE:
            room = (
                1 << max(count.value, room).bit_length()
            )  # the next power of two: few types, and room for new processes
            continue
        if code:
            raise nvml_error(code)
        filled = memoryview(entries)[: count.value * _ENTRY.size]
        return [
            ListedProcess(pid, None if memory == NOT_AVAILABLE_LONG else memory, *instance)
            for pid, memory, *instance in _ENTRY.iter_unpack(filled)
        ]
    raise nvml_error(NVML_ERROR_INSUFFICIENT_SIZE)


@lru_cache(maxsize=128)  # ctypes drops a type with its last object, and making one is slow
def char_array(size: int) -> type[ctypes.Array[ctypes.c_char]]:
    """Return the type of a buffer of that many bytes."""
    return ctypes.c_char * size
