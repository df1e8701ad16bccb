"""A program in a real pseudo-terminal, and the visible screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from struct import pack
from typing import Any

import pyte
from commands import ForkedProcess

ALTERNATE_ON, ALTERNATE_OFF, CURSOR_ON = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"


class Terminal:
    """A terminal of this size with `gpuwarden ARGUMENTS` in it."""

    def __init__(self, *arguments: str, columns: int, lines: int, env: Mapping[str, str] | None = None) -> None:
        self._ours, self._theirs = pty.openpty()
        self.resize(columns, lines)
        own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
        environment = {**own, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", "TZ": "UTC", **(env or {})}
        self.modes = termios.tcgetattr(self._theirs)
        self.process = ForkedProcess(arguments, [os.ttyname(self._theirs)] * 3, environment)
        self.written = b""
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self._open = True

    def resize(self, columns: int, lines: int) -> None:
        """Make it larger or smaller, as a person does."""
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, pack("HHHH", lines, columns, 0, 0))
        if hasattr(self, "_screen"):
            self._screen.resize(lines, columns)

    def _read_within(self, seconds: float) -> bool:
        """Read the output within that time; return whether there may be more."""
        ready, _, _ = select.select([self._ours], [], [], seconds)
        if not ready:
            return True
        try:
            read = os.read(self._ours, 65536)
        except OSError:  # the other end is closed: how Linux ends a terminal
            return False
        self.written += read
        self._stream.feed(read)
        return bool(read)

    def read_output(self) -> None:
        """Read the output up to now."""
        while self._read_within(0) and select.select([self._ours], [], [], 0)[0]:
            pass

    def lines(self) -> list[str]:
        """Return the current screen, by lines."""
        return [line.rstrip() for line in self._screen.display]

    def text(self) -> str:
        """Return the current screen, as one text."""
        return "\n".join(self.lines())

    def colors(self) -> set[str]:
        """Return the colors of the current screen."""
        buffer: Any = self._screen.buffer
        return {buffer[y][x].fg for y in range(self._screen.lines) for x in range(self._screen.columns)} - {"default"}

    def wait_until(self, condition: Callable[[str], object], what: str, limit: float = 60.0) -> list[str]:
        """Wait for it to show something, and return the lines; fail after `limit` seconds."""
        end = time.monotonic() + limit
        while not condition(self.text()):
            if time.monotonic() > end or not self._read_within(0.1):
                raise AssertionError(f"not seen: {what}\n{self.text()}")
        return self.lines()

    def press(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._ours, keys)

    def wait(self) -> int:
        """Wait for the program to end; return its exit status."""
        end = time.monotonic() + 60
        while self.process.poll() is None:
            self._read_within(0.05)
            assert time.monotonic() < end, self.text()
        self.read_output()
        return self.process.wait()

    def read_modes(self) -> list[Any]:
        """Return how the terminal is set."""
        return termios.tcgetattr(self._theirs)

    def close(self) -> None:
        """Close its window."""
        if self._open:
            self._open = False
            os.close(self._theirs)
            os.close(self._ours)


@contextmanager
def terminal(
    *arguments: str, columns: int = 80, lines: int = 24, env: Mapping[str, str] | None = None
) -> Iterator[Terminal]:
    """Run a program in a terminal; it ends with the context."""
    made = Terminal(*arguments, columns=columns, lines=lines, env=env)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.process.kill()
        made.process.wait()
        made.close()


def list_control_sequences(written: bytes) -> set[bytes]:
    """Return the kinds of control sequences in it, without their numbers."""
    return set(re.findall(rb"\x1b(?:\[[?]?)?[0-9;]*(.)", written))
