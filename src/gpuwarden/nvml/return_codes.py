"""Return codes of NVML: their exceptions, names, and the groups that gpuwarden distinguishes."""

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
NOT_FOUND: int = pynvml.NVML_ERROR_NOT_FOUND
# The device or driver does not have this function, whatever its arguments.
NO_FUNCTION = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})
# The device or driver does not have this reading: no sample, no error.
UNSUPPORTED = NO_FUNCTION | frozenset(
    {
        pynvml.NVML_ERROR_DEPRECATED,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,  # thresholds and clocks that this model does not have
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    }
)
# Answers for an index without a MIG device: profiles occupy several indices.
NO_MIG_DEVICE = UNSUPPORTED | {NOT_FOUND}
# The GPU itself does not answer: further calls for it fail too.
GPU_GONE = frozenset(
    {
        pynvml.NVML_ERROR_GPU_IS_LOST,
        pynvml.NVML_ERROR_RESET_REQUIRED,
        28,  # NVML_ERROR_GPU_NOT_FOUND, unnamed in older releases of nvidia-ml-py
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
# The loaded library and the kernel module have different driver versions.
LIBRARY_MISMATCH: int = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
NO_PERMISSION: int = pynvml.NVML_ERROR_NO_PERMISSION  # for a GPU whose device file the daemon may not open
NO_EVENT: int = pynvml.NVML_ERROR_TIMEOUT  # result of a wait without an event


def code_of(error: BaseException) -> int:
    """Return NVML's return code."""
    return int(getattr(error, "value", pynvml.NVML_ERROR_UNKNOWN))


def error_name(error: BaseException) -> str:
    """Return the error's name in NVML, in lower case: the value of the label `error`."""
    return _ERROR_NAMES.get(code_of(error), f"code_{code_of(error)}")


def nvml_error(code: int) -> Exception:
    """Return the exception that nvidia-ml-py raises for a return code."""
    return NVMLError(code)


def if_supported(ask: Callable[[], T]) -> T | None:
    """Call the driver; return None where it does not support the call. Raises NVMLError for any other error."""
    try:
        return ask()
    except NVMLError as error:
        if code_of(error) in UNSUPPORTED:
            return None
        raise
