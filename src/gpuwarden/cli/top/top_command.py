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
from pathlib import Path

from rich.console import Console

from gpuwarden.cli.common.api_client import daemon_url
from gpuwarden.cli.common.config_flags import load_config
from gpuwarden.cli.common.terminal import discard_output
from gpuwarden.cli.top.display import Display
from gpuwarden.cli.top.layout import render_box
from gpuwarden.cli.top.state_reader import fetch_state
from gpuwarden.config.schema import Config
from gpuwarden.config.value_types import Address

POLL_SECONDS = 1.0
_MAX_KEYS = 1024
_ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_HANDLED = (*_ENDING, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)


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
