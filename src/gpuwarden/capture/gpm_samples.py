"""What stands for nvidia-ml-py's GPM structs where a source is not the driver: ctypes would not hold its samples."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class PlainGpmMetric:
    """See nvml.GpmMetric."""

    metricId: int = 0  # noqa: N815 - the fields' names in nvidia-ml-py
    nvmlReturn: int = 0  # noqa: N815
    value: float = 0.0


@dataclass(slots=True)
class PlainGpmRequest:
    """See nvml.GpmRequest; to be used by nvidia-ml-py's name of it, c_nvmlGpmMetricsGet_t."""

    version: int = 0
    numMetrics: int = 0  # noqa: N815 - the field's name in nvidia-ml-py
    sample1: Any = None
    sample2: Any = None
    metrics: defaultdict[int, PlainGpmMetric] = field(default_factory=lambda: defaultdict(PlainGpmMetric))

    def wanted(self) -> list[PlainGpmMetric]:
        """Return the metrics that are asked for."""
        return [self.metrics[position] for position in range(self.numMetrics)]
