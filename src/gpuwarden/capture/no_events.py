"""The functions of NVML's events, for sources that have none."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pynvml import NVML_ERROR_NOT_SUPPORTED  # noqa: TID251 - a return code; nothing is called

from gpuwarden.nvml.binding import nvml_error


def _refuse(*_arguments: object) -> None:
    raise nvml_error(NVML_ERROR_NOT_SUPPORTED)


UNSUPPORTED_EVENTS: Mapping[str, Callable[..., None]] = dict.fromkeys(
    ("nvmlEventSetCreate", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2", "nvmlEventSetFree"), _refuse
)
