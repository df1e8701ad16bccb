"""User of a uid: a subordinate uid (subuid(5)) of a user namespace counts as the user who owns its range."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path

READ_SECONDS = 60.0  # between two readings of the files: each new run compares the users of all runs

_Range = tuple[int, int, int]  # first uid, first uid after the range, and the user's uid


class SubordinateUids:
    """Ranges of subordinate uids in a file such as /etc/subuid, read again each minute."""

    def __init__(
        self,
        ranges: Path = Path("/etc/subuid"),
        users: Path = Path("/etc/passwd"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = ranges, users
        self._clock = clock
        self._due = 0.0
        self._ranges: list[_Range] = []

    def find_user(self, uid: int) -> int:
        """Return the user that a uid belongs to: the uid itself unless it is a subordinate one. Takes about 1 µs."""
        if (now := self._clock()) >= self._due:
            self._due = now + READ_SECONDS
            self._ranges = sorted(self._read())
        place = bisect_right(self._ranges, uid, key=itemgetter(0))
        _first, end, user = self._ranges[place - 1] if place else (0, 0, uid)
        return user if uid < end else uid

    def _read(self) -> Iterator[_Range]:
        """Yield the ranges. A user that is not in the file of users, such as a directory server's, is its first uid."""
        uids = {name: int(number) for name, _, number, *_ in _fields(self._files[1]) if number.isdecimal()}
        for name, first, count, *_ in _fields(self._files[0]):
            if first.isdecimal() and count.isdecimal():
                user = int(name) if name.isdecimal() else uids.get(name, int(first))
                yield int(first), int(first) + int(count), user


def _fields(file: Path) -> Iterator[list[str]]:
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        if len(fields := line.strip().split(":")) >= 3:  # noqa: PLR2004 - both files have three
            yield fields


find_user = SubordinateUids().find_user
