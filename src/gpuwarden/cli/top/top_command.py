"""Command `gpuwarden top`: GPUs, runs and problems in the terminal, live or once."""

from __future__ import annotations

import argparse
import io
import json
import os
import select
import signal
import socket
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.control import Control
from rich.segment import Segment, Segments
from rich.styled import Styled
from rich.text import Text

from gpuwarden.cli.common.api_client import daemon_url
from gpuwarden.cli.common.config_flags import load_config
from gpuwarden.cli.common.terminal import discard_output
from gpuwarden.cli.top.layout import render_box
from gpuwarden.cli.top.state_reader import fetch_state
from gpuwarden.cli.top.style import FREE, IN_USE, RESERVED, STYLES, text_cell
from gpuwarden.cli.top.view import HELP, ORDERS, View
from gpuwarden.config.schema import Config
from gpuwarden.config.value_types import Address
from gpuwarden.formatting import format_elapsed

POLL_SECONDS = 1.0
_MAX_KEYS = 1024
_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_HANDLED = (*_ENDING, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)


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


def run(parsed: argparse.Namespace) -> int:
    """Show the state live, or print it once. Raises OSError."""
    config = load_config(parsed)
    if parsed.once or parsed.json:
        _print_once(config, as_json=parsed.json)
    else:
        _show_live(config)
    return 0


def _print_once(config: Config, *, as_json: bool) -> None:
    """Print the state as tables or as JSON. Raises OSError."""
    state = fetch_state(config.api)
    if as_json:
        sys.stdout.write(json.dumps(state, indent=2) + "\n")
        return
    console = _console()
    console.print(render_box(state, console.width, None, time.time()), crop=False)


def _show_live(config: Config) -> None:
    """Show the state until q, Ctrl-C or SIGTERM, or until the terminal is closed. Raises OSError without a terminal."""
    console = _console()
    if not console.is_terminal or console.is_dumb_terminal:
        raise OSError(None, "top needs a terminal; use --once to print once, or --json in scripts")
    display = Display(console, f"connecting to {daemon_url(config.api)}")
    try:
        with _signals() as signals:
            while _show(display, config.api, signals):
                os.kill(os.getpid(), signal.SIGSTOP)
    except OSError:  # the terminal is closed
        discard_output(sys.stdout)


def _show(display: Display, api: Address | Path, signals: socket.socket) -> bool:
    """Show the state until it ends; return whether it is only stopped, by Ctrl-Z."""
    with _keyboard() as keys, display.console.screen():
        display.refresh(whole=True)
        due = 0.0
        while True:
            if time.monotonic() >= due:
                try:
                    display.state, display.at, display.fault = fetch_state(api), time.time(), ""
                except OSError as error:
                    display.fault = error.strerror or str(error)
                due = time.monotonic() + POLL_SECONDS
                display.refresh()
            ready, _, _ = select.select([signals.fileno(), *keys], [], [], max(due - time.monotonic(), 0.0))
            if signals.fileno() in ready:
                received = set(signals.recv(_MAX_KEYS))
                if received & _ENDING or signal.SIGTSTP in received:
                    return not received & _ENDING
            if set(keys) & set(ready):
                typed = os.read(keys[0], _MAX_KEYS)
                if not typed or not display.view.handle(typed):  # nothing: the terminal is closed
                    return False
            if ready:
                display.refresh(whole=True)  # also where a shell or another program has written over it


@contextmanager
def _signals() -> Iterator[socket.socket]:
    """Yield a socket with the numbers of signals: a handler could interrupt the drawing at an unsafe point."""
    reader, writer = socket.socketpair()
    writer.settimeout(0)
    before = {number: signal.signal(number, lambda *_: None) for number in _HANDLED}
    old = signal.set_wakeup_fd(writer.fileno())
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(old)
        for number, handler in before.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()


@contextmanager
def _keyboard() -> Iterator[list[int]]:
    """Yield the terminal, if any, in a mode that returns each key at once."""
    modes = {number: termios.tcgetattr(number) for number in (0,) if os.isatty(number)}
    for number in modes:
        tty.setcbreak(number)
    try:
        yield list(modes)
    finally:
        with suppress(termios.error):  # the terminal is closed
            for number, before in modes.items():
                termios.tcsetattr(number, termios.TCSADRAIN, before)


def _console() -> Console:
    """Return a console on standard output, with colors if that is a terminal and NO_COLOR is not set."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return Console(file=sys.stdout, markup=False, highlight=False, emoji=False)
