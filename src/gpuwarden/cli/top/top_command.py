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
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.styled import Styled
from rich.text import Text

from gpuwarden.cli.common.api_client import daemon_url
from gpuwarden.cli.common.config_flags import load_config
from gpuwarden.cli.common.terminal import discard_output
from gpuwarden.cli.top.layout import render_box
from gpuwarden.cli.top.state_reader import fetch_state
from gpuwarden.cli.top.style import STYLES, text_cell
from gpuwarden.config.schema import Config
from gpuwarden.config.value_types import Address
from gpuwarden.formatting import format_elapsed

POLL_SECONDS = 1.0
REDRAWS_PER_SECOND = 2  # so that a resized window and ages are soon correct
_MAX_KEYS = 1024
_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


@dataclass(frozen=True, slots=True)
class LastAnswer:
    """Last answer of the daemon, `at` a Unix time; `trouble` is the error of a later request, or empty."""

    state: Any = None
    at: float = 0.0
    trouble: str = ""


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
    state = fetch_state(config.web.listen)
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
    try:
        _show(console, config.web.listen)
    except OSError:  # the terminal is closed
        discard_output(sys.stdout)


def _show(console: Console, listen: Address) -> None:
    answer = LastAnswer()

    def draw() -> RenderableType:
        return _draw(answer, listen, console)

    screen = Live(console=console, get_renderable=draw, screen=True, refresh_per_second=REDRAWS_PER_SECOND)
    with _signals() as signals, _keyboard(screen) as keys, screen:
        while True:
            try:
                answer = LastAnswer(fetch_state(listen), time.time())
            except OSError as error:
                answer = replace(answer, trouble=error.strerror or str(error))
            screen.refresh()
            ready, _, _ = select.select([signals.fileno(), *keys], [], [], POLL_SECONDS)
            if signals.fileno() in ready and _ENDING & set(signals.recv(_MAX_KEYS)):
                return
            if set(keys) & set(ready):
                pressed = os.read(keys[0], _MAX_KEYS)
                if not pressed or b"q" in pressed.lower():  # nothing: the terminal is closed
                    return


@contextmanager
def _signals() -> Iterator[socket.socket]:
    """Yield a socket with the numbers of signals: a handler could interrupt the drawing at an unsafe point."""
    reader, writer = socket.socketpair()
    writer.settimeout(0)
    before = {number: signal.signal(number, lambda *_: None) for number in _ENDING}
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
def _keyboard(screen: Live) -> Iterator[list[int]]:
    """Yield the terminal, if any, in a mode that returns each key at once; Ctrl-Z restores it while stopped."""
    modes = {number: termios.tcgetattr(number) for number in (0,) if os.isatty(number)}

    def acquire() -> None:
        for number in modes:
            tty.setcbreak(number)

    def restore() -> None:
        with suppress(termios.error):  # the terminal is closed
            for number, before in modes.items():
                termios.tcsetattr(number, termios.TCSADRAIN, before)

    def stop(*_: object) -> None:
        screen.stop()
        restore()
        os.kill(os.getpid(), signal.SIGSTOP)
        acquire()
        screen.start()

    signal.signal(signal.SIGTSTP, stop)
    acquire()
    try:
        yield list(modes)
    finally:
        restore()


def _console() -> Console:
    """Return a console on standard output, with colors if that is a terminal and NO_COLOR is not set."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    return Console(file=sys.stdout, markup=False, highlight=False, emoji=False)


def _draw(answer: LastAnswer, listen: Address, console: Console) -> RenderableType:
    """Draw the last answer; if a later request failed, in gray below the error."""
    if answer.state is None:
        return text_cell(
            answer.trouble or f"connecting to {daemon_url(listen)}", STYLES["warning"] if answer.trouble else ""
        )
    now = time.time()
    if not answer.trouble:
        return Group(render_box(answer.state, console.width, console.height - 1, now), Text("q quit", "dim"))
    age = Text(f"State of {format_elapsed(max(now - answer.at, 0.0))} ago:", STYLES["warning"])
    before = render_box(answer.state, console.width, console.height - 2, now)
    return Group(text_cell(f"Retrying: {answer.trouble}", STYLES["critical"]), age, Styled(before, "dim"))
