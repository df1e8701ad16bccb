"""Colors and signs by severity, and the parts that all tables share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

STYLES: Mapping[str, str] = {"ok": "green", "warning": "yellow", "critical": "bold red", "unknown": "dim"}
RANK: Mapping[str, int] = {"critical": 0, "warning": 1, "unknown": 2, "ok": 3}
IN_USE, RESERVED, FREE = "█▒░"
MIN_FLEXIBLE_WIDTH = 24  # columns: most names, so that the table does not jump with each new one
_PRESSURE_STYLES: Mapping[str, str] = {
    "none": STYLES["ok"],
    "warning": STYLES["warning"],
    "critical": STYLES["critical"],
}
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


def make_table(*columns: Column) -> Table:
    """Return an empty table without lines, as wide as the terminal."""
    made = Table(box=None, expand=True, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in columns:
        made.add_column(
            Text(column.title, no_wrap=True, overflow="crop"),
            justify="right" if column.right else "left",
            width=column.width,
            ratio=None if column.width else 1,
            no_wrap=True,
            overflow="crop",
        )
    return made


def narrow(made: Table, width: int) -> Table:
    """Narrow columns that take the space left to their longest cell, so that the cells of a row stay together."""
    flexible = [column for column in made.columns if column.ratio]
    needed = [max([MIN_FLEXIBLE_WIDTH, *(cell_len(str(cell)) for cell in column.cells)]) for column in flexible]
    fixed = sum(column.width or 0 for column in made.columns) + len(made.columns) - 1
    if fixed + sum(needed) <= width:
        made.expand = False
        for column, own in zip(flexible, needed, strict=True):
            column.ratio, column.width = None, own
    return made


def pressure_style(level: str) -> str:
    """Return the style of a pressure level; none if it is unknown."""
    return _PRESSURE_STYLES.get(level, "")


def memory_bar(width: int, size: float | None, in_use: float | None, used: float | None, style: str) -> Text:
    """Return a bar of memory: in use by allocators, reserved by processes beyond that, and free."""
    if size is None or size <= 0 or in_use is used is None:  # unknown is not free
        return Text(" " * width)
    shares = [min(max(part or 0.0, 0.0), size) / size for part in (in_use, used)]
    full = round(shares[0] * width)
    reserved = max(round(max(shares) * width) - full, 0)
    return Text(IN_USE * full + RESERVED * reserved, style).append(FREE * (width - full - reserved), "dim")
