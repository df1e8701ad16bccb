"""Reader of the kernel log, to which the driver writes all XIDs, and the kernel its OOM killer's kills.

/dev/kmsg (Linux, Documentation/ABI/testing/dev-kmsg) gives one record a read, from the oldest that the kernel still
has, so what was logged before the daemon's start is seen with its own time. Reading it never blocks.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

KMSG = Path("/dev/kmsg")
MAX_RECORDS = 5000  # in one `read`: some 15 ms where none is wanted
MAX_RECORD_BYTES = 8192  # the kernel's own limit
MAX_BYTES = 2**20  # in one `read`, about twice what so many records take: another file may give a hundred in one go
RETRY_SECONDS = 60.0  # between attempts to open a log that may not be read

_HEADER = re.compile(rb"\d{1,9},(\d{1,18}),(\d{1,18}),")  # priority, number, microseconds since boot


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """A message of the kernel; it was logged between `earliest` and `latest` (monotonic), at Unix time `time`."""

    message: bytes
    earliest: float
    latest: float
    time: float


class KernelLog:
    """The kernel log from its oldest record on, of which only messages that begin like one of `prefixes` are given.

    Nobody but the kernel and root can begin a message. One event loop uses it.
    """

    def __init__(
        self, prefixes: tuple[bytes, ...], path: Path = KMSG, read: Callable[[int, int], bytes] = os.read
    ) -> None:
        self.lost = 0  # records that the kernel overwrote before they were read
        self._prefixes = prefixes
        self._path = path
        self._read_some = read
        self._file: int | None = None
        self._retry_at = 0.0
        self._last: int | None = None  # number of the last record read
        self._caught_up: float | None = None  # when nothing was left to read; None: what is read may be old

    @property
    def readable(self) -> bool:
        """True if the log could be opened and read."""
        return self._file is not None

    def read(self) -> list[KernelRecord]:
        """Return what was logged since the last call, of MAX_RECORDS records at most; the next call goes on there.

        Of a file that gives many records at once, they are those of MAX_BYTES.
        """
        if self._file is None and not self._open():
            return []
        found: list[KernelRecord] = []
        left = MAX_BYTES
        for _ in range(MAX_RECORDS):
            if left <= 0:
                break
            try:
                text = self._read_some(self._file or 0, MAX_RECORD_BYTES)
            except BlockingIOError:
                text = b""
            except OSError as error:
                if error.errno in {errno.EPIPE, errno.EINVAL}:  # overwritten, or too long: the next read goes on
                    continue
                self.close()
                break
            if not text:
                self._caught_up = time.monotonic()
                break
            left -= len(text)
            for record in text.split(b"\n"):
                found += self._parse(record)
        return found

    def close(self) -> None:
        """Let go of the log; `read` opens it again, and goes on behind the last record."""
        if self._file is not None:
            os.close(self._file)
        self._file, self._caught_up, self._retry_at = None, None, time.monotonic() + RETRY_SECONDS

    def _open(self) -> bool:
        if time.monotonic() < self._retry_at:
            return False
        try:
            self._file = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            self._retry_at = time.monotonic() + RETRY_SECONDS
            return False
        return True

    def _parse(self, record: bytes) -> Iterator[KernelRecord]:
        """Take one line "priority,number,microseconds,flags;message"; further lines of a record begin with a space."""
        header, semicolon, message = record.partition(b";")
        match = _HEADER.match(header) if semicolon else None
        if match is None:
            return
        number = int(match[1])
        if self._last is not None:
            if number <= self._last:
                return  # the log was opened anew
            self.lost += number - self._last - 1
        self._last = number
        if message.startswith(self._prefixes):
            yield self._dated(message, int(match[2]) / 1e6)

    def _dated(self, message: bytes, moment: float) -> KernelRecord:
        """Date a record. The log's clock drifts from the monotonic one, but a new record came since the last read."""
        now = time.monotonic()
        earliest = self._caught_up
        moment = min(moment if earliest is None else max(moment, earliest), now)
        if earliest is None:
            return KernelRecord(message, moment, moment, time.time() - (now - moment))
        return KernelRecord(message, earliest, now, time.time() - (now - moment))
