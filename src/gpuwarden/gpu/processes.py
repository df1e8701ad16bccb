"""Who the processes on the GPUs are: user and command by psutil, read once a process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """User and command name of a process; empty where the system hides them."""

    user: str
    comm: str


class ProcessNames:
    """Remembers who the present processes are; forgets each with its end, so that a reused pid is asked anew."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, ProcessIdentity]] = {}

    def identify(self, pids: Iterable[int]) -> Mapping[int, ProcessIdentity]:
        """Return those of `pids` that are alive in this pid namespace. Reads /proc; does not block."""
        known, self._known = self._known, {}
        for pid in dict.fromkeys(pids):
            inode = _inode(pid)
            old = known.get(pid)
            identity = old[1] if old and old[0] == inode else _look_up(pid)
            if inode and identity:
                self._known[pid] = inode, identity
        return {pid: identity for pid, (_inode, identity) in self._known.items()}


def _inode(pid: int) -> int | None:
    """Return the inode of the process's folder: /proc makes one anew for each process, so a reused pid has another.

    The kernel may also drop and remake it when memory is short; then a process is only looked up once more. Asking so
    costs a tenth of reading the start time, which psutil's is_running does.
    """
    try:
        return os.stat(f"/proc/{pid}").st_ino  # noqa: PTH116 - a Path would cost more than the call
    except (OSError, ValueError):
        return None


def _look_up(pid: int) -> ProcessIdentity | None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            return ProcessIdentity(_or_empty(process.username), _or_empty(process.name))
    except (psutil.NoSuchProcess, ValueError, OSError):
        return None  # ValueError: psutil refuses a pid of 0 or out of range; OSError: no file descriptor is left


def _or_empty(question: object) -> str:
    assert callable(question)
    try:
        return str(question())
    except psutil.AccessDenied:
        return ""
