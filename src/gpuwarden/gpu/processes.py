"""Who the processes on the GPUs are: user and command by psutil, read once a process."""

from __future__ import annotations

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
        self._known: dict[int, tuple[psutil.Process, ProcessIdentity]] = {}

    def identify(self, pids: Iterable[int]) -> Mapping[int, ProcessIdentity]:
        """Return those of `pids` that are alive in this pid namespace. Reads /proc; does not block."""
        known = {pid: self._known.get(pid) for pid in pids}
        self._known = {
            pid: entry
            for pid, old in known.items()
            if (entry := old if old is not None and old[0].is_running() else _look_up(pid)) is not None
        }
        return {pid: identity for pid, (_process, identity) in self._known.items()}


def _look_up(pid: int) -> tuple[psutil.Process, ProcessIdentity] | None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            return process, ProcessIdentity(_or_empty(process.username), _or_empty(process.name))
    except (psutil.NoSuchProcess, ValueError):  # psutil refuses a pid of 0 or out of range with the latter
        return None


def _or_empty(question: object) -> str:
    assert callable(question)
    try:
        return str(question())
    except psutil.AccessDenied:
        return ""
