"""Table of a listing command, one line a row, fitted to the terminal."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence

from rich.cells import cell_len, set_cell_size


def render_list(
    rows: Sequence[Mapping[str, str]],
    width: int,
    flexible: str,
    min_width: int,
    *,
    hidden: Collection[str] = (),
    right: Collection[str] = (),
) -> Iterator[str]:
    """Yield the heading and the rows, without the `hidden` columns.

    The `flexible` column has at most the space that is left, but `min_width`; the others are never cut.
    """
    titles = [title for title in rows[0] if title not in hidden]
    widths = {title: max(len(title), *(cell_len(row[title]) for row in rows)) for title in titles}
    others = sum(widths.values()) - widths[flexible] + 2 * (len(titles) - 1)
    widths[flexible] = min(widths[flexible], max(width - others, min_width))
    for row in [{title: title for title in titles}, *rows]:
        yield "  ".join(_fit(row[title], widths[title], right=title in right) for title in titles).rstrip()


def format_start(seconds: float) -> str:
    """Format the time of a start today and the day of an earlier one, like ps."""
    start, today = time.localtime(seconds), time.localtime()
    return time.strftime("%H:%M" if start[:3] == today[:3] else "%m-%d", start)


def _fit(text: str, width: int, *, right: bool) -> str:
    if right:
        return f"{text:>{width}}"
    return set_cell_size(text, width) if cell_len(text) <= width else f"{set_cell_size(text, width - 1)}…"
