"""Read XIDs from the kernel log, where the driver writes all of them: NVML tells of some neither then nor later.

/dev/kmsg (Linux, Documentation/ABI/testing/dev-kmsg) gives one record a read, from the oldest that the kernel still
has, so XIDs from before the daemon's start are seen with their own time. Reading it never blocks.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

KMSG = Path("/dev/kmsg")
MAX_RECORDS = 5000  # in one `read`: some 15 ms where none is an XID
MAX_RECORD_BYTES = 8192  # the kernel's own limit
MAX_BYTES = 2**20  # in one `read`, about twice what so many records take: another file may give a hundred in one go
RETRY_SECONDS = 60.0  # between attempts to open a log that may not be read

# What the driver prints (open-gpu-kernel-modules, kernel_rc.c): the address without its function, on a MIG GPU the
# instances, and mostly pid= and name=, which are a user's to choose and so are not looked at. Drivers before R300
# leave out "PCI:". Anchored: nobody but the kernel and root can begin a record.
_ADDRESS = rb"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})(?:\.[0-7])?"
_XID = re.compile(rb"NVRM: Xid \((?:PCI:)?" + _ADDRESS + rb"[^)]{0,40}\): (\d{1,9})\b", re.IGNORECASE)
# Told beside XID 79, or, where the GPU is gone before it is initialised, without one (NVIDIA/NVSentinel#155).
_OFF_THE_BUS = re.compile(
    rb"NVRM: (?:The NVIDIA )?GPU (?:at )?(?:PCI:)?" + _ADDRESS + rb".{0,200}?fallen off the bus", re.IGNORECASE
)
FALLEN_OFF_THE_BUS = 79
_HEADER = re.compile(rb"\d{1,9},(\d{1,18}),(\d{1,18}),")  # priority, number, microseconds since boot

PciAddress: TypeAlias = tuple[int, int, int]  # domain, bus, device
Told: TypeAlias = Literal["kernel_log", "kernel_log_text"]


@dataclass(frozen=True, slots=True)
class KernelXid:
    """An XID as the kernel log tells it; it came between `earliest` and `latest` (monotonic), at Unix time `time`."""

    pci: PciAddress
    code: int
    told: Told
    earliest: float
    latest: float
    time: float


def pci_address(text: str) -> PciAddress | None:
    """Read an address as NVML or the kernel writes it, with any number of zeros in the domain; None if it is none."""
    match = re.fullmatch(_ADDRESS, text.encode(), re.IGNORECASE)
    return _address(match) if match else None


def _address(match: re.Match[bytes]) -> PciAddress:
    return int(match[1], 16), int(match[2], 16), int(match[3], 16)


class KernelLog:
    """The kernel log from its oldest record on. One event loop uses it."""

    def __init__(self, path: Path = KMSG, read: Callable[[int, int], bytes] = os.read) -> None:
        self.lost = 0  # records that the kernel overwrote before they were read
        self._path = path
        self._read_some = read
        self._file: int | None = None
        self._retry_at = 0.0
        self._last: int | None = None  # number of the last record read
        self._caught_up: float | None = None  # when nothing was left to read; None: what is read may be old

    @property
    def readable(self) -> bool:
        """Whether the log could be opened and read."""
        return self._file is not None

    def read(self) -> list[KernelXid]:
        """Return the XIDs logged since the last call, of MAX_RECORDS records at most; the next call goes on there.

        Of a file that gives many records at once, they are those of MAX_BYTES.
        """
        if self._file is None and not self._open():
            return []
        found: list[KernelXid] = []
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

    def _parse(self, record: bytes) -> Iterator[KernelXid]:
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
        if not message.startswith(b"NVRM: "):
            return
        told: Told = "kernel_log"
        microseconds = int(match[2])
        match = _XID.match(message)
        code = int(match[4]) if match else FALLEN_OFF_THE_BUS
        if match is None:
            match, told = _OFF_THE_BUS.match(message), "kernel_log_text"
        if match:
            yield self._dated(_address(match), code, told, microseconds / 1e6)

    def _dated(self, pci: PciAddress, code: int, told: Told, moment: float) -> KernelXid:
        """Date a record. The log's clock drifts from the monotonic one, but a new record came since the last read."""
        now = time.monotonic()
        earliest = self._caught_up
        moment = min(moment if earliest is None else max(moment, earliest), now)
        if earliest is None:
            return KernelXid(pci, code, told, moment, moment, time.time() - (now - moment))
        return KernelXid(pci, code, told, earliest, now, time.time() - (now - moment))
