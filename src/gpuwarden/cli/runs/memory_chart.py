"""Charts for a terminal: of a run's memory on one device over its life, and of any values."""

from __future__ import annotations

import codecs
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import ceil

from gpuwarden.formatting import format_bytes, format_elapsed
from gpuwarden.records.record_parts import MemoryTimeline

HEIGHT = 8  # lines
LABEL_WIDTH = 9  # of the axis
MIN_WIDTH = 16  # columns of the chart itself

# Letters of a chart: cells from empty to full, then the peak.
BLOCKS = " ▁▂▃▄▅▆▇█─"
ASCII = " .:#-"


def choose_alphabet(encoding: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """Return the letters that the output and the locale can show: Python writes UTF-8 even in the C locale."""
    locale = environment.get("LC_ALL") or environment.get("LC_CTYPE") or environment.get("LANG") or ""
    if locale.partition(".")[0] in ("C", "POSIX") and "utf" not in locale.lower():
        return ASCII
    try:
        codecs.encode(BLOCKS, encoding or "ascii")
    except (LookupError, UnicodeError):
        return ASCII
    return BLOCKS


def render_chart(timeline: MemoryTimeline, seconds: float, width: int, letters: str) -> Iterator[str]:
    """Yield the lines of a chart of `seconds` in `width` columns; a column without a report is blank."""
    in_use, peaks = [0] * width, [0] * width
    per_column = seconds / width or 1.0
    for place, (began, ended) in enumerate(zip(timeline.began_seconds, timeline.ended_seconds, strict=True)):
        first = min(int(began / per_column), width - 1)
        for at in range(first, max(min(ceil(ended / per_column), width), first + 1)):
            in_use[at] = max(in_use[at], timeline.highest_bytes[place])
            peaks[at] = max(peaks[at], timeline.peak_bytes[place])
    yield from render_columns(in_use, peaks, letters, HEIGHT, format_bytes)
    yield f"{'0':>{LABEL_WIDTH}}+{'-' * width}"
    yield f"{format_elapsed(seconds):>{LABEL_WIDTH + 1 + width}}"


def render_columns(
    values: Sequence[float], peaks: Sequence[float], letters: str, height: int, label: Callable[[float], str]
) -> Iterator[str]:
    """Yield `height` lines of a chart from 0 up, a column for each value, with labels at the top and in the middle."""
    per_row = max(1, *values, *peaks) / height
    cells, peak_cell = letters[:-1], letters[-1]
    for row in reversed(range(height)):
        line = ""
        for value, peak in zip(values, peaks, strict=True):
            filled = cells[max(min(round((value / per_row - row) * (len(cells) - 1)), len(cells) - 1), 0)]
            line += peak_cell if filled == " " and ceil(peak / per_row) - 1 == row else filled
        text = label(per_row * (row + 1)) if row + 1 in (height, height // 2) else ""
        yield f"{text:>{LABEL_WIDTH}}|{line}".rstrip()
