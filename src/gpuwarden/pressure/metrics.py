"""Metrics of pressure on GPUs."""

from __future__ import annotations

from gpuwarden.metrics.model import Metric, Table
from gpuwarden.pressure.levels import Pressure
from gpuwarden.protocol.messages import LEVEL_RANK


class PressureReadings(Table[Pressure], prefix="gpuwarden_gpu_"):
    """GPU pressure.

    [pressure.md](../understand/pressure.md) defines the levels.
    """

    # fmt: off
    pressure_level = Metric[Pressure](
        "gpuwarden_gpu_pressure_level", "gauge", "",
        "Pressure on a resource of the GPU or MIG instance: 0 = none, 1 = warning, 2 = critical; for memory that of the run with the highest level.",
        lambda pressure: {labels: LEVEL_RANK[level] for labels, level in pressure.levels.items()}, labels=("uuid", "resource"),
        source="docs/understand/pressure.md; gpuwarden_run_memory_headroom_bytes, gpuwarden_gpu_temperature_margin_celsius, gpuwarden_gpu_clock_event_active", profile="minimal")
    # fmt: on
