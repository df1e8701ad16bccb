"""Return codes of NVML: the exceptions they become, their names, and the groups that gpuwarden tells apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pynvml

T = TypeVar("T")

NVMLError: type[Exception] = pynvml.NVMLError

_ERROR_NAMES: dict[int, str] = {
    number: name.removeprefix("NVML_ERROR_").lower()
    for name, number in vars(pynvml).items()
    if name.startswith("NVML_ERROR_")
}
# The device or driver does not have this reading: no sample, no error.
UNSUPPORTED = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_DEPRECATED,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,  # thresholds and clocks that this model does not know
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    }
)
# What an index of a MIG device answers where there is none: profiles take up several.
NO_MIG_DEVICE = UNSUPPORTED | {pynvml.NVML_ERROR_NOT_FOUND}
# The GPU itself does not answer: asking it for more is in vain.
GPU_GONE = frozenset(
    {
        pynvml.NVML_ERROR_GPU_IS_LOST,
        pynvml.NVML_ERROR_RESET_REQUIRED,
        28,  # NVML_ERROR_GPU_NOT_FOUND, which older releases of nvidia-ml-py do not name
    }
)
# The driver below all GPUs went away, or was replaced: only a new nvmlInit helps.
DRIVER_GONE = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
    }
)
# The library that is loaded and the kernel module are of different versions of the driver.
LIBRARY_MISMATCH: int = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
NO_EVENT: int = pynvml.NVML_ERROR_TIMEOUT  # what a wait says that ended without an event


def code_of(error: BaseException) -> int:
    """Return NVML's return code."""
    return int(getattr(error, "value", pynvml.NVML_ERROR_UNKNOWN))


def error_name(error: BaseException) -> str:
    """Return the error's name in NVML, in lower case: the value of the label `error`."""
    return _ERROR_NAMES.get(code_of(error), f"code_{code_of(error)}")


def nvml_error(code: int) -> Exception:
    """Make the exception that nvidia-ml-py raises for a return code."""
    return NVMLError(code)


def if_supported(ask: Callable[[], T]) -> T | None:
    """Call the driver; return None where it does not support the call. Raises NVMLError for any other error."""
    try:
        return ask()
    except NVMLError as error:
        if code_of(error) in UNSUPPORTED:
            return None
        raise
