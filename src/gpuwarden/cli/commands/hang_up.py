"""Entry point of `gpuwarden serve`: handles SIGHUP before the daemon's modules load, which takes most of the start."""

from __future__ import annotations

import argparse
import logging
import os
import signal

from gpuwarden.cli.common.entry_points import load_function

log = logging.getLogger("gpuwarden")


def serve(parsed: argparse.Namespace) -> int:
    """Run the daemon; SIGHUP ends it only where its terminal was closed."""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup sets it
        had_terminal = _has_terminal()
        signal.signal(signal.SIGHUP, lambda *_: _hang_up(had_terminal=had_terminal))
    status: int = load_function("cli.commands.serve_command:serve")(parsed)
    return status


def _hang_up(*, had_terminal: bool) -> None:
    """Stop where the terminal is gone; otherwise ignore SIGHUP, which asks other daemons to reload."""
    if had_terminal and not _has_terminal():
        signal.raise_signal(signal.SIGTERM)
    else:
        log.warning("SIGHUP ignored, the configuration is read at start only; restart to apply it")


def _has_terminal() -> bool:
    """Return whether this process has a controlling terminal that has not hung up (tty(4))."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
