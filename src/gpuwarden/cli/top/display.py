"""Display of `gpuwarden top`: the last answer in the user's view, with the keys in the last line."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.segment import Segment, Segments
from rich.styled import Styled
from rich.text import Text

from gpuwarden.cli.top.layout import render_box
from gpuwarden.cli.top.style import FREE, IN_USE, RESERVED, STYLES, text_cell
from gpuwarden.cli.top.view import HELP, ORDERS, View
from gpuwarden.formatting import format_elapsed


@dataclass
class Display:
    """Display on a console. `fault` is the error of a request after the last answer, or empty.

    `state` is the last answer of the daemon, received `at` a Unix time.
    """

    console: Console
    fault: str = ""
    state: Any = None
    at: float = 0.0
    view: View = field(default_factory=View)
    _lines: list[list[Segment]] = field(default_factory=list)  # on the screen

    def refresh(self, *, whole: bool = False) -> None:
        """Write the lines that have changed on the screen, or all of them. Raises OSError without a terminal."""
        lines = self.console.render_lines(self.draw(), self.console.options.update(height=self.console.height))
        on_screen = [] if whole or len(lines) != len(self._lines) else self._lines
        changed = [number for number, line in enumerate(lines) if not on_screen or line != on_screen[number]]
        self._lines = lines
        segments = (part for number in changed for part in (Control.move_to(0, number).segment, *lines[number]))
        self.console.print(Segments(segments), end="", crop=False)

    def draw(self) -> RenderableType:
        """Draw the help, or the last answer; if a later request failed, in gray below the error."""
        keys = Text(
            f"q quit  s sort: {self.view.order}  \u2191\u2193 scroll  ? help", "dim", no_wrap=True, overflow="crop"
        )
        if self.view.shows_help:
            text = HELP.format(orders=", ".join(ORDERS), in_use=IN_USE, reserved=RESERVED, free=FREE)
            return Group(Text(text), Text(""), keys)
        if self.state is None:
            return text_cell(self.fault, STYLES["warning"])
        if not self.fault:
            return Group(self._draw_box(self.console.height - 1), keys)
        age = Text(f"State of {format_elapsed(max(time.time() - self.at, 0.0))} ago:", STYLES["warning"])
        before = Styled(self._draw_box(self.console.height - 2), "dim")
        return Group(text_cell(f"Retrying: {self.fault}", STYLES["critical"]), age, before)

    def _draw_box(self, height: int) -> RenderableType:
        """Draw what fits best; once the user has scrolled, a part of the whole."""
        if not self.view.first:
            return render_box(self.state, self.console.width, height, time.time(), self.view.order)
        whole = render_box(self.state, self.console.width, None, time.time(), self.view.order)
        lines = self.console.render_lines(whole, self.console.options.update(height=None))
        self.view.first = min(self.view.first, max(len(lines) - height, 0))
        shown = lines[self.view.first : self.view.first + height]
        return Segments(segment for line in shown for segment in (*line, Segment.line()))
