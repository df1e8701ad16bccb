"""Stand-ins for parts of nvidia-ml-py, for sources other than the driver.

GPM structs without ctypes, which can hold samples that are Python objects; and event functions that are unsupported.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pynvml import NVML_ERROR_NOT_SUPPORTED  # noqa: TID251 - a return code; nothing is called

from gpuwarden.nvml.return_codes import nvml_error


@dataclass(slots=True)
class PlainGpmMetric:
    """Stand-in for a GPM metric (`nvml.interface.GpmMetric`)."""

    metricId: int = 0  # noqa: N815 - the fields' names in nvidia-ml-py
    nvmlReturn: int = 0  # noqa: N815
    value: float = 0.0


@dataclass(slots=True)
class PlainGpmRequest:
    """Stand-in for a GPM request (`nvml.interface.GpmRequest`), under nvidia-ml-py's name c_nvmlGpmMetricsGet_t."""

    version: int = 0
    numMetrics: int = 0  # noqa: N815 - the field's name in nvidia-ml-py
    sample1: Any = None
    sample2: Any = None
    metrics: defaultdict[int, PlainGpmMetric] = field(default_factory=lambda: defaultdict(PlainGpmMetric))

    def wanted(self) -> list[PlainGpmMetric]:
        """Return the requested metrics."""
        return [self.metrics[position] for position in range(self.numMetrics)]


def _refuse(*_arguments: object) -> None:
    raise nvml_error(NVML_ERROR_NOT_SUPPORTED)


UNSUPPORTED_EVENTS: Mapping[str, Callable[..., None]] = dict.fromkeys(
    (
        *("nvmlEventSetCreate", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2", "nvmlEventSetFree"),
        *("nvmlSystemEventSetCreate", "nvmlSystemRegisterEvents", "nvmlSystemEventSetWait", "nvmlSystemEventSetFree"),
    ),
    _refuse,
)
