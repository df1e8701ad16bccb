"""Colors and signs by severity, and the parts that all tables share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

STYLES: Mapping[str, str] = {"ok": "green", "warning": "yellow", "critical": "bold red", "unknown": "dim"}
RANK: Mapping[str, int] = {"critical": 0, "warning": 1, "unknown": 2, "ok": 3}
IN_USE, RESERVED, FREE = "█▒░"
MIN_FLEXIBLE_WIDTH = 24  # columns: most names, so that the table does not jump with each new one
MIN_SHARED_WIDTH = 8  # columns; on a narrower terminal the last columns are cut
_MARKS: Mapping[str, str] = {"critical": "✖", "warning": "▲"}


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a table; one without a width takes the space that is left."""

    title: str
    width: int | None = None
    right: bool = False


def text_cell(words: str, style: str = "") -> Text:
    """Return a cell of untrusted text: markup in it is not interpreted, and the column cuts it."""
    return Text(words, style, no_wrap=True, overflow="ellipsis")


def number_cell(value: float | None, write: Callable[[float], str], style: str = "") -> Text:
    """Return a cell with a number, or a dash if it is unknown."""
    return Text("-", "dim") if value is None else Text(write(value), style)


def condition_mark(condition: str) -> Text:
    """Return the sign of a row."""
    return Text(_MARKS.get(condition, " "), STYLES.get(condition, ""))


def draw_table(columns: Sequence[Column], rows: Sequence[Sequence[Text]], width: int, *, fill: bool = False) -> Text:
    """Draw a table without lines, at most `width` wide; cells of a row beyond the columns are left out.

    A column without a width gets the space of its longest cell, so that the cells of a row stay together; if that does
    not fit, or with `fill`, such columns share the space that is left. With rich's Table `gpuwarden top` would take 2.5
    times the CPU time.
    """
    heading = [[Text(column.title, "bold") for column in columns]] if any(column.title for column in columns) else []
    widths = _find_widths(columns, rows, width, fill=fill)
    lines = [_draw_row(columns, widths, row) for row in (*heading, *rows)]
    return Text("\n", no_wrap=True, overflow="crop").join(lines)


def _find_widths(columns: Sequence[Column], rows: Sequence[Sequence[Text]], width: int, *, fill: bool) -> list[int]:
    left = width - sum(column.width or 0 for column in columns) - len(columns) + 1
    flexible = [number for number, column in enumerate(columns) if not column.width]
    needed = {n: max([MIN_FLEXIBLE_WIDTH, *(row[n].cell_len for row in rows)]) for n in flexible}
    if fill or sum(needed.values()) > left:
        shared, rest = divmod(max(left, MIN_SHARED_WIDTH * len(flexible)), len(flexible))
        needed = {n: shared + (place < rest) for place, n in enumerate(flexible)}
    return [column.width or needed[number] for number, column in enumerate(columns)]


def _draw_row(columns: Sequence[Column], widths: Sequence[int], row: Sequence[Text]) -> Text:
    line = Text()
    for column, width, cell in zip(columns, widths, row, strict=False):
        shown = cell
        if cell.cell_len > width:
            shown = cell.copy()
            shown.truncate(width, overflow=cell.overflow or "crop")
        space = " " * (width - shown.cell_len)
        before, after = (space, " ") if column.right else ("", space + " ")
        line.append(before).append_text(shown).append(after)
    line.right_crop(1)
    return line


def pressure_style(level: str) -> str:
    """Return the style of a pressure level; none if it is unknown."""
    return STYLES.get("ok" if level == "none" else level, "")


def memory_bar(width: int, size: float | None, in_use: float | None, used: float | None, style: str) -> Text:
    """Return a bar of memory: in use by allocators, reserved by processes beyond that, and free."""
    if size is None or size <= 0 or in_use is used is None:  # unknown is not free
        return Text(" " * width)
    shares = [min(max(part or 0.0, 0.0), size) / size for part in (in_use, used)]
    full = round(shares[0] * width)
    reserved = max(round(max(shares) * width) - full, 0)
    return Text(IN_USE * full + RESERVED * reserved, style).append(FREE * (width - full - reserved), "dim")
