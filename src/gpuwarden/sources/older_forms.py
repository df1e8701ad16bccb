"""Functions of nvidia-ml-py that know only the newest form of a question, asked in the form that the driver has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pynvml import NVML_ERROR_FUNCTION_NOT_FOUND  # noqa: TID251 - a return code; nothing is called

from gpuwarden.gpu.nvml import Handle, NVMLError, code_of, nvml_error

_FORMS = ("_v3", "_v2")  # of drivers since R510, and of those since R470


def older_forms(module: object) -> dict[str, Callable[..., Any]]:
    """Return, by name, the functions that fall back on the older forms of `module`.

    nvidia-ml-py's own raise NVMLLibraryMismatchError there, which is no NVMLError.
    """
    names = ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
    found = {name: [getattr(module, name + form) for form in _FORMS if hasattr(module, name + form)] for name in names}
    return {name: partial(_newest, forms) for name, forms in found.items()}


def _newest(forms: list[Callable[[Handle], Any]], handle: Handle) -> Any:
    for ask in tuple(forms):
        try:
            return ask(handle)
        except NVMLError as error:
            if code_of(error) != NVML_ERROR_FUNCTION_NOT_FOUND:
                raise
    raise nvml_error(NVML_ERROR_FUNCTION_NOT_FOUND)
