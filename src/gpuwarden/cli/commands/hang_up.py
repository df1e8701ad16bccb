"""Entry point of `gpuwarden serve`: handles SIGHUP before the daemon's modules load, which takes most of the start."""

from __future__ import annotations

import argparse
import logging
import os
import signal

from gpuwarden.cli.common.entry_points import load_function

log = logging.getLogger("gpuwarden")

_had_terminal = False


def serve(parsed: argparse.Namespace) -> int:
    """Run the daemon; SIGHUP ends it only where its terminal was closed."""
    global _had_terminal  # noqa: PLW0603 - a fact about the process, set once
    _had_terminal = _has_terminal()
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup sets it
        signal.signal(signal.SIGHUP, lambda *_: _hang_up_early())
    status: int = load_function("cli.commands.serve_command:serve")(parsed)
    return status


def is_terminal_closed() -> bool:
    """Return whether the daemon was started in a terminal that is closed now."""
    return _had_terminal and not _has_terminal()


def _hang_up_early() -> None:
    """Stop where the terminal is gone; otherwise ignore a request to reload: the configuration is being read."""
    if is_terminal_closed():
        signal.raise_signal(signal.SIGTERM)
    else:
        log.warning("SIGHUP ignored, the daemon is starting")


def _has_terminal() -> bool:
    """Return whether this process has a controlling terminal that has not hung up (tty(4))."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
