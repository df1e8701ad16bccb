"""User of a uid: a subordinate uid (subuid(5)) of a user namespace counts as the user who owns its range."""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path

CHECK_SECONDS = 1.0  # between two checks of the file: each new run compares the users of all runs

_Range = tuple[int, int, int]  # first uid, first uid after the range, and the user's uid


class SubordinateUids:
    """Ranges of subordinate uids in a file such as /etc/subuid, read again within a second of a change."""

    def __init__(
        self,
        ranges: Path = Path("/etc/subuid"),
        users: Path = Path("/etc/passwd"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = ranges, users
        self._clock = clock
        self._check_due = 0.0
        self._changed: object = None
        self._ranges: list[_Range] = []

    def find_user(self, uid: int) -> int:
        """Return the user that a uid belongs to: the uid itself unless it is a subordinate one. Takes about 1 µs."""
        if (now := self._clock()) >= self._check_due:
            self._check_due = now + CHECK_SECONDS
            self._read_changed()
        place = bisect_right(self._ranges, uid, key=itemgetter(0))
        _first, end, user = self._ranges[place - 1] if place else (0, 0, uid)
        return user if uid < end else uid

    def _read_changed(self) -> None:
        changed = _modified(self._files[0])
        if changed != self._changed:
            self._changed, self._ranges = changed, sorted(self._read())

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


def _modified(file: Path) -> object:
    try:
        found = os.stat(file)  # noqa: PTH116 - speed
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


find_user = SubordinateUids().find_user
