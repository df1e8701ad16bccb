"""What each run does, over time."""

from __future__ import annotations

from classic import Panel, Query
from looks import NO_RUN
from panels import timeline
from run_table import run_state, run_states
from series import series, with_run

# An hour is read by scrapes still; of a week a box's hundreds of runs would be read at two thousand times.
_STEPS = 960


def run_timeline(number: int, *, width: int) -> Panel:
    """Return the panel; `number` is its id."""
    return timeline(
        number,
        "Phase, stalls and ends",
        "What each run does, where it hangs in a step, and how it ended (docs/use/runs.md).",
        Query(
            f"max by (run_name, run_id, pid) ({with_run(run_state(series, with_phase=True))})", "{{run_name}} {{pid}}"
        ),
        width=width,
        mappings=run_states(),
        empty=NO_RUN,
        points=_STEPS,
    )
