"""A run's memory on one device as a chart of letters: in use, peak, and the ceiling that its headroom ends at.

Pure: what it draws with fits the terminal's alphabet, blocks or ASCII, and holds no codes that a terminal would obey.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import NamedTuple

from gpuwarden.quantities import amount, lasting
from gpuwarden.runs.receipt import MemoryStory

LABEL_WIDTH = 9  # of the axis
LEAST_WIDTH = 16  # columns of the chart itself
_FAR = 3.0  # times the peak, where a ceiling is too far to be drawn
_ABOVE = 1.15  # of the highest, where the axis ends then
_SEEN = 0.5  # of a cell, below which a difference would only be restless
_ENDS, _MIDDLE = 32, 64  # columns from which the axis of time has a middle, and quarters


class Alphabet(NamedTuple):
    """What a chart is drawn with; `parts` are the heights of a bar that does not fill its cell, the lowest first."""

    full: str
    parts: str
    between: str
    peak: str
    ceiling: str
    side: str
    axis: str
    corner: str
    floor: str
    tick: str


BLOCKS = Alphabet("█", "▁▂▃▄▅▆▇", "▒", "─", "┄", "│", "┤", "└", "─", "┴")
ASCII = Alphabet("#", ".:", "%", "-", "=", "|", "+", "+", "-", "+")


def alphabet(encoding: str | None, environment: Mapping[str, str] = os.environ) -> Alphabet:
    """Choose what the output and the locale can show: Python writes UTF-8 in the C locale too, which is ASCII."""
    locale = environment.get("LC_ALL") or environment.get("LC_CTYPE") or environment.get("LANG") or ""
    if locale.partition(".")[0] in ("C", "POSIX") and "utf" not in locale.lower():
        return ASCII
    try:
        codecs.encode(f"{BLOCKS.full}{BLOCKS.parts}{BLOCKS.between}{BLOCKS.ceiling}", encoding or "ascii")
    except (LookupError, UnicodeError):
        return ASCII
    return BLOCKS


class Column(NamedTuple):
    """What was so in a column's stretch of time, in bytes."""

    lowest: int
    highest: int
    peak: int
    ceiling: float | None  # in use and headroom
    phase: str


def columns(story: MemoryStory, seconds: float, width: int) -> list[Column | None]:
    """Share `seconds` out among so many columns; None where no report came from."""
    headrooms = _known_throughout(story.headroom_bytes)
    found: list[Column | None] = [None] * width
    for place, (began, ended) in enumerate(zip(story.began_seconds, story.ended_seconds, strict=True)):
        headroom = headrooms[place] if headrooms else None
        highest = story.highest_bytes[place]
        column = Column(
            story.lowest_bytes[place],
            highest,
            story.peak_bytes[place],
            None if headroom is None else highest + headroom,
            story.phase[place],
        )
        first = column_of(began, seconds, width)
        last = max(first, ceil(ended / seconds * width) - 1) if seconds else first
        for at in range(first, min(last, width - 1) + 1):
            other = found[at]
            found[at] = column if other is None else _both(other, column)
    return found


def _known_throughout(headrooms: Sequence[float | None]) -> list[float | None]:
    """Fill what is not known by what was known before, or first: polls are rarer than a short run's reports."""
    last = next((each for each in headrooms if each is not None), None)
    found = []
    for each in headrooms:
        last = last if each is None else each
        found.append(last)
    return found


def column_of(at: float, seconds: float, width: int) -> int:
    """Return the column that a time is in."""
    return min(max(int(at / seconds * width), 0), width - 1) if seconds else 0


def _both(one: Column, other: Column) -> Column:
    ceilings = [each.ceiling for each in (one, other) if each.ceiling is not None]
    return Column(
        min(one.lowest, other.lowest),
        max(one.highest, other.highest),
        max(one.peak, other.peak),
        min(ceilings, default=None),
        other.phase,
    )


def chart(shown: Sequence[Column | None], seconds: float, height: int, letters: Alphabet) -> Iterator[str]:
    """Draw the columns over an axis of time; each line is as wide as they are many, and its label."""
    top = _top(shown)
    cells = [_cells(column, top, height, letters) for column in shown]
    for row in reversed(range(height)):
        label = amount(top) if row == height - 1 else amount(top / 2) if row == height // 2 - 1 else ""
        line = "".join(cell[row] for cell in cells)
        yield f"{label:>{LABEL_WIDTH}}{letters.axis if label else letters.side}{line}".rstrip()
    yield from _axis(len(shown), seconds, letters)


def _top(shown: Sequence[Column | None]) -> float:
    """Return where the axis of bytes ends: at the ceiling, unless that is so far off that nothing could be seen."""
    known = [column for column in shown if column is not None]
    most = float(max((max(column.highest, column.peak) for column in known), default=0) or 1)
    ceilings = [column.ceiling for column in known if column.ceiling is not None]
    if min(ceilings, default=most) > _FAR * most:
        return most * _ABOVE
    return max(most, min(max(ceilings, default=most), _FAR * most))


def _cells(column: Column | None, top: float, height: int, letters: Alphabet) -> list[str]:
    """Draw one column, from below."""
    if column is None:
        return [" "] * height
    each = top / height
    varies = column.highest - column.lowest >= each * _SEEN
    solid = column.lowest if varies else column.highest
    found = []
    for row in range(height):
        filled = solid / each - row
        if filled >= 1:
            found.append(letters.full)
        elif varies and column.highest / each - row >= _SEEN:
            found.append(letters.between)
        else:
            part = int(filled * (len(letters.parts) + 1)) if filled > 0 else 0
            found.append(letters.parts[part - 1] if part else " ")
    for value, letter in ((column.ceiling, letters.ceiling), (column.peak, letters.peak)):
        if value is not None and value <= top:
            row = min(max(ceil(value / each) - 1, 0), height - 1)
            if found[row] in (" ", letters.ceiling):
                found[row] = letter
    return found


def _axis(width: int, seconds: float, letters: Alphabet) -> Iterator[str]:
    parts = 4 if width >= _MIDDLE else 2 if width >= _ENDS else 1
    places = [min(width * part // parts, width - 1) for part in range(1, parts + 1)]
    line = "".join(letters.tick if at in places else letters.floor for at in range(width))
    yield f"{'0':>{LABEL_WIDTH}}{letters.corner}{line}"
    written = ""
    for part, place in enumerate(places, 1):
        text = lasting(seconds * part / parts)
        start = min(place - len(text) // 2, width - len(text))
        written = f"{written:<{start}}{text}"
    yield " " * (LABEL_WIDTH + 1) + written


def lane(label: str, letters: Mapping[int, str]) -> str:
    """Write a line below a chart: letters by the columns they stand in."""
    line = "".join(letters.get(at, " ") for at in range(max(letters, default=-1) + 1))
    return f"{label:>{LABEL_WIDTH}} {line}".rstrip()
