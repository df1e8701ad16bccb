"""Table of training runs, a line a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.cells import cell_len, set_cell_size

from gpuwarden.cli.common.terminal import sanitize
from gpuwarden.formatting import format_bytes, format_count, format_elapsed
from gpuwarden.records.record import RunRecord

MIN_NAME_WIDTH = 16  # columns


def _fit(text: str, width: int) -> str:
    """Cut or pad a text to so many columns."""
    return set_cell_size(text, width) if cell_len(text) <= width else f"{set_cell_size(text, width - 1)}…"


def _peak(record: RunRecord) -> str:
    peaks = [each.memory_peak_bytes for each in record.devices if each.memory_peak_bytes is not None]
    return format_bytes(max(peaks)) if peaks else ""


def _began(seconds: float) -> str:
    """Write the time of a run of today and the day of an earlier one, as ps does: the line has little room."""
    began, today = time.localtime(seconds), time.localtime()
    return time.strftime("%H:%M" if began[:3] == today[:3] else "%m-%d", began)


def state_text(record: RunRecord) -> str:
    """Return the run's state in words: running, stalled, finished, out of memory."""
    return (record.state or record.outcome or "running").replace("_", " ")


_COLUMNS: Mapping[str, Callable[[RunRecord], str]] = {
    "RUN": lambda record: record.run_id,
    "STATE": state_text,
    "BEGAN": lambda record: _began(record.began_timestamp_seconds),
    "FOR": lambda record: format_elapsed(record.duration_seconds),
    "STEPS": lambda record: "" if record.steps is None else format_count(record.steps),
    "PEAK": _peak,
}
_RIGHT = ("FOR", "STEPS", "PEAK")


def render_table(records: Sequence[RunRecord], width: int) -> Iterator[str]:
    """Render the runs in lines of a width in columns; names take the space that is left, and ids are never cut."""
    columns = {title: [sanitize(write(each)) for each in records] for title, write in _COLUMNS.items()}
    widths = {title: max(len(title), *map(cell_len, texts)) for title, texts in columns.items()}
    left = max(width - sum(widths.values()) - 2 * len(widths), MIN_NAME_WIDTH)
    names = [sanitize(each.name) for each in records]
    room = min(left, max(len("NAME"), *map(cell_len, names)))
    for row in range(-1, len(records)):
        cells = []
        for title in _COLUMNS:
            text = title if row < 0 else columns[title][row]
            cells.append(f"{text:>{widths[title]}}" if title in _RIGHT else _fit(text, widths[title]))
        cells.insert(1, _fit("NAME" if row < 0 else names[row], room))
        yield "  ".join(cells).rstrip()
