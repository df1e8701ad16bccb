"""Host dashboard: GPUs, their users, faults, runs, CPUs and memory."""

from __future__ import annotations

import summary
from alerts_table import alerts_table
from choices import choices, where_recorded
from classic import Json, Panel, Row, dashboard
from faults import faults
from gpu_table import gpu_table
from gpus import gpus
from host import host
from run_states import run_timeline
from run_table import run_table
from ways import BOX, marks, ways


def box() -> Json:
    """Return the dashboard."""
    return dashboard(
        BOX,
        "gpuwarden: host",
        "One GPU host: its GPUs and their users, faults, runs, CPUs and memory.",
        [
            summary.gpus_up(1, 5),
            summary.least_headroom(2, 7),
            summary.next_out_of_memory(6, 7),
            summary.least_margin(3, 5),
            alerts_table(4, height=7),
            gpu_table(5, height=10),
            Row(10, "GPUs of $instance", gpus(), repeat="instance"),
            Row(55, "Faults of $instance", faults(), repeat="instance"),
            Row(30, "Runs on $instance", _runs(), repeat="instance"),
            Row(40, "CPUs and memory of $instance", host(), repeat="instance"),
        ],
        variables=[*choices(one_box=True), where_recorded()],
        links=ways(BOX),
        annotations=marks(),
    )


def _runs() -> list[Panel]:
    return [run_table(61, height=8), run_timeline(33, width=24)]
