"""How things look in the terminal: letters by the locale, colors by how grave something is; none stands alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from rich.table import Table
from rich.text import Text

from gpuwarden import thresholds

STYLES: Mapping[str, str] = {"ok": "green", "warning": "yellow", "critical": "bold red", "unknown": "dim"}
RANK: Mapping[str, int] = {"critical": 0, "warning": 1, "unknown": 2, "ok": 3}


class Letters(NamedTuple):
    """What a picture is drawn with; `marks` stand before what is critical, or needs a look."""

    in_use: str
    held: str
    free: str
    marks: Mapping[str, str]


class Column(NamedTuple):
    """A column of a table; one without a width takes the room that is left."""

    title: str
    width: int | None = None
    right: bool = False


UNICODE = Letters("█", "▒", "░", {"critical": "✖", "warning": "▲"})
ASCII = Letters("#", "+", ".", {"critical": "X", "warning": "!"})


def text(said: str, letters: Letters, style: str = "") -> Text:
    """Write what strangers chose: markup in it is no markup, and its column cuts it."""
    if letters is ASCII:  # before it is measured: a letter of two columns becomes one of one
        said = said.replace("°", "").encode("ascii", errors="replace").decode()
    return Text(said, style, no_wrap=True, overflow="crop" if letters is ASCII else "ellipsis")


def said(value: float | None, write: Callable[[float], str], style: str = "") -> Text:
    """Write a number; a dash where it is not known."""
    return Text("-", "dim") if value is None else Text(write(value), style)


def mark(condition: str, letters: Letters) -> Text:
    """Write the sign before a row."""
    return Text(letters.marks.get(condition, " "), STYLES.get(condition, ""))


def table(*columns: Column) -> Table:
    """Begin a table without lines, as wide as the terminal."""
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


def by_share(share: float | None) -> str:
    """Color memory by the part of it that can still be allocated."""
    if share is None:
        return ""
    if share <= thresholds.NEAR_OUT_OF_MEMORY:
        return STYLES["critical"]
    return STYLES["warning"] if share <= thresholds.LITTLE_MEMORY else STYLES["ok"]


def by_margin(margin: float | None) -> str:
    """Color a temperature by the degrees left before the device slows itself down."""
    if margin is None or margin > thresholds.NEAR_SLOWDOWN:
        return ""
    return STYLES["critical"] if margin <= thresholds.SLOWDOWN else STYLES["warning"]


def by_time(seconds: float) -> str:
    """Color the time to out-of-memory."""
    if seconds <= thresholds.OUT_OF_MEMORY_SOON_SECONDS:
        return STYLES["critical"]
    return STYLES["warning"] if seconds <= thresholds.OUT_OF_MEMORY_AHEAD_SECONDS else ""


def bar(width: int, size: float | None, parts: tuple[float | None, float | None], style: str, letters: Letters) -> Text:
    """Draw memory: what allocators have handed out, and what is held beside that, of all there is."""
    if size is None or size <= 0 or parts == (None, None):  # nothing is known: that is not all free
        return Text(" " * width)
    in_use, used = (min(max(part or 0.0, 0.0), size) for part in parts)
    full = round(in_use / size * width)
    held = max(round(max(used, in_use) / size * width) - full, 0)
    drawn = Text(letters.in_use * full + letters.held * held, style)
    return drawn.append(letters.free * (width - full - held), "dim")
