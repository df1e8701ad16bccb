"""Table of training runs, one line per run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpuwarden.cli.common.list_table import format_start, render_list
from gpuwarden.formatting import format_bytes, format_count, format_elapsed, sanitize
from gpuwarden.records.record import RunRecord

MIN_NAME_WIDTH = 12  # columns
MIN_WIDE_COLUMNS = 100  # columns of a terminal from which GPUs and users are shown
MIN_CAUSE_COLUMNS = 130  # from which causes are


def render_table(records: Sequence[RunRecord], gpus: Mapping[str, str], width: int) -> Iterator[str]:
    """Return the lines of the table. Names take the space that is left, and IDs are never cut.

    `gpus` has the numbers of GPUs by UUID.
    """
    rows = [_row(each, gpus) for each in records]
    hidden = ("USER", "GPU") if width < MIN_WIDE_COLUMNS else () if gpus else ("GPU",)
    hidden = hidden if width >= MIN_CAUSE_COLUMNS else (*hidden, "CAUSE")
    return render_list(rows, width, "NAME", MIN_NAME_WIDTH, hidden=hidden, right=("TIME", "STEPS", "PEAK"))


def state_text(record: RunRecord) -> str:
    """Return the run's state in words: running, stalled, finished, out of memory."""
    return record.state.replace("_", " ")


def _row(record: RunRecord, gpus: Mapping[str, str]) -> dict[str, str]:
    peak = max((each.highest_peak_bytes or 0 for each in record.devices), default=0)  # of the fullest GPU
    cells = {
        "RUN": record.run_id,
        "NAME": record.name,
        "STATE": _marked_state(record),
        "USER": record.user or str(record.uid),
        "GPU": ",".join(sorted(gpus[each.uuid] for each in record.devices if each.uuid in gpus)),
        "START": format_start(record.began_timestamp_seconds),
        "TIME": format_elapsed(record.duration_seconds),
        "STEPS": "" if record.steps is None else format_count(record.steps),
        "PEAK": format_bytes(peak) if peak else "",
        "CAUSE": record.headline.name.replace("_", " ") if record.headline else "",
    }
    return {title: sanitize(text) for title, text in cells.items()}


def _marked_state(record: RunRecord) -> str:
    """Return the state, marked where it hides what went wrong; there is room for one mark."""
    state = state_text(record)
    if state not in ("running", "stalled", "finished"):
        return state
    return f"{state}, NaN" if record.nonfinite_loss else f"{state}, CPU" if record.no_gpu else state
