"""What every poll asks of each GPU, by the library's functions themselves.

nvidia-ml-py has code of its own for each function, and more of it behind each look at a struct's field. A poll a second
finds none of that in the processor's caches; one piece of code for all of them costs half.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

from gpuwarden.gpu.nvml import MEMORY_V2, Handle, nvml_error


class Memory(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class MemoryV2(ctypes.Structure):
    """nvmlMemory_v2_t."""

    _fields_ = [
        ("version", ctypes.c_uint),
        *((name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")),
    ]


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t."""

    _fields_ = [(name, ctypes.c_uint) for name in ("gpu", "memory")]


# Functions that answer with one number, which an argument or none precedes.
_NUMBERS: dict[str, type[Any]] = {
    "nvmlDeviceGetTemperature": ctypes.c_uint,
    "nvmlDeviceGetPowerUsage": ctypes.c_uint,
    "nvmlDeviceGetClockInfo": ctypes.c_uint,
    "nvmlDeviceGetCurrentClocksEventReasons": ctypes.c_ulonglong,
}


def often_asked(module: Any) -> dict[str, Callable[..., Any]]:
    """Return the functions by name, of those that nvidia-ml-py, which `module` is, has too."""
    functions: dict[str, Callable[..., Any]] = {
        name: _number(module, name, number) for name, number in _NUMBERS.items() if hasattr(module, name)
    }
    memory = _filled(module, "nvmlDeviceGetMemoryInfo", Memory)
    memory_v2 = _filled(module, "nvmlDeviceGetMemoryInfo_v2", partial(MemoryV2, MEMORY_V2))
    functions["nvmlDeviceGetMemoryInfo"] = lambda handle, version=None: (memory_v2 if version else memory)(handle)
    functions["nvmlDeviceGetUtilizationRates"] = _filled(module, "nvmlDeviceGetUtilizationRates", _Utilization)
    return functions


def _number(module: Any, name: str, new: Callable[[], Any]) -> Callable[..., int]:
    ask = _filled(module, name, new)
    return lambda handle, *which: ask(handle, *which).value


def _filled(module: Any, name: str, new: Callable[[], Any]) -> Callable[..., Any]:
    """Return a question whose answer is what the library has filled in. Raises NVMLError."""
    find = module._nvmlGetFunctionPointer  # noqa: SLF001 - what nvidia-ml-py's own functions rest on

    def ask(handle: Handle, *which: int) -> Any:
        answer = new()
        code = find(name)(handle, *which, ctypes.byref(answer))
        if code:
            raise nvml_error(code)
        return answer

    return ask
