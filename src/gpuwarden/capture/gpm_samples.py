"""Plain stand-ins for nvidia-ml-py's GPM structs, whose ctypes fields cannot hold the samples of a source in Python."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class PlainGpmMetric:
    """Stand-in for a GPM metric (`nvml.binding.GpmMetric`)."""

    metricId: int = 0  # noqa: N815 - the fields' names in nvidia-ml-py
    nvmlReturn: int = 0  # noqa: N815
    value: float = 0.0


@dataclass(slots=True)
class PlainGpmRequest:
    """Stand-in for a GPM request (`nvml.binding.GpmRequest`), under nvidia-ml-py's name c_nvmlGpmMetricsGet_t."""

    version: int = 0
    numMetrics: int = 0  # noqa: N815 - the field's name in nvidia-ml-py
    sample1: Any = None
    sample2: Any = None
    metrics: defaultdict[int, PlainGpmMetric] = field(default_factory=lambda: defaultdict(PlainGpmMetric))

    def wanted(self) -> list[PlainGpmMetric]:
        """Return the metrics that are asked for."""
        return [self.metrics[position] for position in range(self.numMetrics)]
