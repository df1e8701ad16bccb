"""End of a program's standard error, kept by a process that passes it on.

A terminal stays a terminal for the program: of the same size, and with the order of its output, since standard output
goes the same way where it is the same file. Processes that the program leaves behind can go on writing.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import signal
import struct
import termios
import time
from pathlib import Path

TAIL_BYTES = 64 << 10
_DRAIN_SECONDS = 0.3  # at the end, where a process that the program left behind still holds the stream
_COUNT = struct.Struct("Q")  # of all bytes, at the start of the shared memory
_TO_GROUP = (  # signals to the process group, which the other processes of it handle
    *(signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM, signal.SIGTSTP, signal.SIGTTOU, signal.SIGUSR1),
    *(signal.SIGUSR2, signal.SIGALRM, signal.SIGPIPE),
)


class StderrTail:
    """Standard error of a program to be started, and the process that reads it; make it in a process of one thread."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, _COUNT.size + TAIL_BYTES)
        self._streams = (1, 2) if os.path.sameopenfile(1, 2) else (2,)
        if os.isatty(2):
            reader, self._writer = os.openpty()
            attributes = termios.tcgetattr(2)
            attributes[1] &= ~termios.OPOST  # the terminal itself does it
            termios.tcsetattr(self._writer, termios.TCSANOW, attributes)
            self.resize()
        else:
            reader, self._writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self._relay(reader)
            finally:
                os._exit(0)
        os.close(reader)

    def attach(self) -> None:
        """Make this the stream of the process that calls it, which becomes the program."""
        for stream in self._streams:
            os.dup2(self._writer, stream)

    def resize(self) -> None:
        """Give the program's terminal the size of the one that shows it."""
        with contextlib.suppress(OSError):  # they are none
            fcntl.ioctl(self._writer, termios.TIOCSWINSZ, fcntl.ioctl(2, termios.TIOCGWINSZ, bytes(8)))

    def read(self) -> bytes:
        """Return the end of what the program wrote, once that is passed on; call it once, after the program's end."""
        os.close(self._writer)
        end = time.monotonic() + _DRAIN_SECONDS
        while not os.waitpid(self._pid, os.WNOHANG)[0] and time.monotonic() < end:
            time.sleep(0.002)
        (count,) = _COUNT.unpack_from(self._shared)
        kept, at = self._shared[_COUNT.size :], count % TAIL_BYTES
        return kept[at:] + kept[:at] if count > TAIL_BYTES else kept[:count]

    def _relay(self, reader: int) -> None:
        """Pass on what is written, until no process can write or the reader has gone."""
        for each in _TO_GROUP:
            signal.signal(each, signal.SIG_IGN)
        os.dup2(reader, 0)
        os.dup2(2, 1)
        # Not closerange, which takes minutes where the limit is high and Linux old.
        for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
            if descriptor > 2:  # noqa: PLR2004 - of the standard streams
                with contextlib.suppress(OSError):  # that of the listing
                    os.close(descriptor)
        while data := os.read(0, TAIL_BYTES):  # of a terminal without a writer: OSError
            self._keep(data)
            while data:
                try:
                    data = data[os.write(2, data) :]
                except BlockingIOError:  # another program has made it so
                    select.select([], [2], [])

    def _keep(self, data: bytes) -> None:
        (count,) = _COUNT.unpack_from(self._shared)
        at = count % TAIL_BYTES
        first = data[: TAIL_BYTES - at]
        start = _COUNT.size + at
        self._shared[start : start + len(first)] = first
        rest = data[len(first) :]
        self._shared[_COUNT.size : _COUNT.size + len(rest)] = rest
        _COUNT.pack_into(self._shared, 0, count + len(data))
