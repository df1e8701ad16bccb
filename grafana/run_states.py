"""Timeline of the state of each run."""

from __future__ import annotations

from classic import Panel, Query
from looks import NO_RUN
from panels import timeline
from run_table import run_state, run_states
from series import join_run, series

# An hour keeps every scrape; for a week, hundreds of runs would be read at two thousand points.
_STEPS = 960


def run_timeline(number: int, *, width: int) -> Panel:
    """Return the panel; `number` is its id."""
    return timeline(
        number,
        "Phase, stalls and outcome",
        "Phase of each run, stalls, and how it ended (docs/use/runs.md).",
        Query(
            f"max by (run_name, run_id, pid) ({join_run(run_state(series, with_phase=True))})", "{{run_name}} {{pid}}"
        ),
        width=width,
        mappings=run_states(),
        empty=NO_RUN,
        points=_STEPS,
    )
