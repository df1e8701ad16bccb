"""The dashboard of a run: will it survive, what holds it up, and how does it compare with another."""

from __future__ import annotations

import summary
from alerts_table import alerts_table
from choices import choices
from classic import Json, Row, dashboard
from run_advice import advice, errors
from run_host import on_host
from run_memory import ahead, in_use, limits
from run_speed import loss, lost, speed, step_time
from run_states import run_timeline
from run_table import run_table
from ways import ONE_RUN, marks, ways


def run() -> Json:
    """Return the dashboard."""
    return dashboard(
        ONE_RUN,
        "gpuwarden: run",
        "Training runs: one, or several side by side.",
        [
            summary.least_headroom(1, 7),
            summary.next_out_of_memory(2, 6),
            alerts_table(5, width=11, height=8),  # a GPU that is lost takes its runs along, which do not tell of it
            summary.longest_input_wait(3, 7),
            summary.most_throttled(4, 6),
            run_table(61, height=9),
            step_time(8),
            in_use(8),
            loss(8),
            Row(10, "Will it survive", [*ahead(), *limits()]),
            Row(20, "What holds it up", [*lost(), *speed(), run_timeline(33, width=24)]),
            Row(30, "Pressure, advice and errors", [*advice(), *errors()]),
            Row(40, "On the host", on_host()),
        ],
        variables=choices(one_box=True),
        links=ways(ONE_RUN),
        annotations=marks(),
    )
