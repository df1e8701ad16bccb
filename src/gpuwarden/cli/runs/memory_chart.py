"""Chart of a run's memory on one device for a terminal: bytes in use, and the allocator's peak, over the run's life."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator, Mapping
from math import ceil

from gpuwarden.formatting import format_bytes, format_elapsed
from gpuwarden.records.record import MemoryTimeline

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


def render_chart(story: MemoryTimeline, seconds: float, width: int, letters: str) -> Iterator[str]:
    """Yield the lines of a chart of `seconds` in `width` columns; a column without a report is blank."""
    in_use, peaks = [0] * width, [0] * width
    per_column = seconds / width or 1.0
    for place, (began, ended) in enumerate(zip(story.began_seconds, story.ended_seconds, strict=True)):
        first = min(int(began / per_column), width - 1)
        for at in range(first, max(min(ceil(ended / per_column), width), first + 1)):
            in_use[at] = max(in_use[at], story.highest_bytes[place])
            peaks[at] = max(peaks[at], story.peak_bytes[place])
    per_row = max(1, *in_use, *peaks) / HEIGHT
    cells, peak_cell = letters[:-1], letters[-1]
    for row in reversed(range(HEIGHT)):
        line = ""
        for used, peak in zip(in_use, peaks, strict=True):
            filled = cells[max(min(round((used / per_row - row) * (len(cells) - 1)), len(cells) - 1), 0)]
            line += peak_cell if filled == " " and ceil(peak / per_row) - 1 == row else filled
        label = format_bytes(per_row * (row + 1)) if row + 1 in (HEIGHT, HEIGHT // 2) else ""
        yield f"{label:>{LABEL_WIDTH}}|{line}".rstrip()
    yield f"{'0':>{LABEL_WIDTH}}+{'-' * width}"
    yield f"{format_elapsed(seconds):>{LABEL_WIDTH + 1 + width}}"
