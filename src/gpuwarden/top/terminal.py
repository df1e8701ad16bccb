"""A terminal as a full screen program has it: keys at once, signals as events, and left as it was found."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_KEY_BYTES = 1024


class Terminal:
    """Gives keys and signals to one thread, and lets others wake that. `sys.stdin` need be no terminal."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        for each in (self._ours, self._theirs):
            each.settimeout(0)
        self._stdin: int | None = None
        self._modes: list[Any] = []
        self._signals: set[int] = set()
        self._gone = False  # the terminal is

    def wake(self) -> None:
        """Have `wait` return. Any thread may."""
        with suppress(OSError):  # full: it is awake already
            self._theirs.send(b"\0")

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take keys without waiting for a line's end, and signals, until the context ends."""
        before: dict[int, Any] = {
            each: signal.signal(each, self._note) for each in (*ENDS, signal.SIGWINCH, signal.SIGTSTP)
        }
        woken = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        self._take_keys()
        try:
            yield
        except OSError:  # writing to it
            self._gone = True
            raise
        finally:
            self._give_back()
            signal.set_wakeup_fd(woken)
            for each, handler in before.items():
                # A terminal that is closed shows its end before the kernel sends SIGHUP: that may come after this.
                ignored = self._gone and each == signal.SIGHUP
                signal.signal(each, signal.SIG_IGN if ignored else handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._signals.add(number)

    def _take_keys(self) -> None:
        try:
            number = sys.stdin.fileno()
            self._modes = termios.tcgetattr(number)
            tty.setcbreak(number)
        except (OSError, ValueError, AttributeError, termios.error):  # closed, or no terminal
            return
        self._stdin = number

    def _give_back(self) -> None:
        if self._stdin is not None:
            with suppress(OSError, termios.error):  # it is gone
                termios.tcsetattr(self._stdin, termios.TCSADRAIN, self._modes)

    def stop(self) -> None:
        """Stop as Ctrl-Z does, with the terminal as it was found; return when the shell has this go on."""
        self._give_back()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._take_keys()

    def wait(self, seconds: float) -> str | None:
        """Wait for keys, a signal or somebody to wake this: return the keys, None where it is to end."""
        watched: list[Any] = [self._ours, *([] if self._stdin is None else [self._stdin])]
        ready, _, _ = select.select(watched, [], [], seconds)
        with suppress(BlockingIOError):
            while self._ours.recv(_KEY_BYTES):
                pass
        if self._signals.intersection(ENDS):
            return None
        if self._stdin not in ready or self._stdin is None:
            return ""
        try:
            keys = os.read(self._stdin, _KEY_BYTES)
        except OSError:
            keys = b""
        self._gone = not keys  # the end of a file: the terminal is closed
        return keys.decode(errors="replace") or None

    def told_to_stop(self) -> bool:
        """Tell, once, whether Ctrl-Z was pressed."""
        stopped = signal.SIGTSTP in self._signals
        self._signals.discard(signal.SIGTSTP)
        return stopped
