"""Run dashboard: memory risk, bottlenecks, advice and errors, of one run or several to compare."""

from __future__ import annotations

import summary
from alerts_table import alerts_table
from choices import choices
from classic import Json, Row, dashboard
from run_advice import advice
from run_host import host_use
from run_memory import limits, memory_in_use
from run_speed import loss, lost, step_time, throughput
from run_states import run_timeline
from run_table import run_table
from ways import ONE_RUN, marks, ways


def run() -> Json:
    """Return the dashboard."""
    return dashboard(
        ONE_RUN,
        "gpuwarden: run",
        "One training run, or several to compare: memory risk, bottlenecks, advice and errors.",
        [
            summary.least_headroom(1, 6),
            summary.next_out_of_memory(2, 6),
            summary.longest_input_wait(3, 6),
            summary.most_throttled(4, 6),
            alerts_table(5, height=7),  # with those of GPUs: a run does not report that its GPU is lost
            run_table(61, height=9),
            step_time(8),
            memory_in_use(8),
            loss(8),
            Row(10, "Memory risk", limits()),
            Row(20, "Bottlenecks", [*lost(), throughput(8), run_timeline(33, width=16)]),
            Row(30, "Pressure, advice and errors", advice()),
            Row(40, "Host", host_use()),
        ],
        variables=choices(one_box=True),
        links=ways(ONE_RUN),
        annotations=marks(),
    )
