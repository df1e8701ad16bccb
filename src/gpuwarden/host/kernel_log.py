"""Reader of the kernel log, in which the driver logs all XIDs, and the kernel the kills of its OOM killer.

/dev/kmsg (Linux, Documentation/ABI/testing/dev-kmsg) returns one record per read, from the oldest that the kernel has,
so records from before the daemon's start are included, with their own time. Reading it never blocks.
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
MAX_RECORDS = 5000  # in one `read`: about 15 ms if none matches
MAX_RECORD_BYTES = 8192  # the kernel's own limit
MAX_BYTES = 2**20  # in one `read`, about twice the size of that many records: another file may return a hundred at once
RETRY_SECONDS = 60.0  # between attempts to open a log without permission

_HEADER = re.compile(rb"\d{1,9},(\d{1,18}),(\d{1,18}),")  # priority, number, microseconds since boot


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """Message of the kernel, logged between `earliest` and `latest` (monotonic), at Unix time `time`."""

    message: bytes
    earliest: float
    latest: float
    time: float


class KernelLog:
    """Kernel log from its oldest record on; only messages with one of `prefixes` are returned.

    Only the kernel and root can write the start of a message. Used by one event loop.
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
        self._caught_up: float | None = None  # when the log was last read to its end; None: records may be old

    @property
    def readable(self) -> bool:
        """True if the log could be opened and read."""
        return self._file is not None

    def read(self) -> list[KernelRecord]:
        """Return the matching ones of the next MAX_RECORDS records, or MAX_BYTES; the next call continues there."""
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
                if error.errno in {errno.EPIPE, errno.EINVAL}:  # overwritten, or too long: continue with the next
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
        """Close the log; `read` opens it again and continues after the last record."""
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
        """Parse a line "priority,number,microseconds,flags;message"; further lines of a record start with a space."""
        header, semicolon, message = record.partition(b";")
        match = _HEADER.match(header) if semicolon else None
        if match is None:
            return
        number = int(match[1])
        if self._last is not None:
            if number <= self._last:
                return  # read before the log was opened again
            self.lost += number - self._last - 1
        self._last = number
        if message.startswith(self._prefixes):
            yield self._dated(message, int(match[2]) / 1e6)

    def _dated(self, message: bytes, moment: float) -> KernelRecord:
        """Add times to a record. The log's clock drifts, but a new record is newer than the last read."""
        now = time.monotonic()
        earliest = self._caught_up
        moment = min(moment if earliest is None else max(moment, earliest), now)
        if earliest is None:
            return KernelRecord(message, moment, moment, time.time() - (now - moment))
        return KernelRecord(message, earliest, now, time.time() - (now - moment))
