"""Metrics of pressure on GPUs."""

from __future__ import annotations

from gpuwarden.metrics.model import Metric, Table
from gpuwarden.pressure.levels import RANK, Pressure


class PressureReadings(Table[Pressure], prefix="gpuwarden_gpu_"):
    """Pressure on GPUs and on the runs on them: [pressure.md](../understand/pressure.md)."""

    # fmt: off
    pressure_level = Metric[Pressure](
        "gpuwarden_gpu_pressure_level", "gauge", "",
        "Pressure on a resource of a GPU or MIG instance: 0 none, 1 warning, 2 critical; memory's is that of the run there that is worst off.",
        lambda pressure: {labels: RANK[level] for labels, level in pressure.levels.items()}, labels=("uuid", "resource"),
        source="docs/understand/pressure.md; gpuwarden_run_memory_headroom_bytes, gpuwarden_gpu_temperature_margin_celsius, gpuwarden_gpu_clock_event_active")
    # fmt: on
