"""Who is at the other end of a connection, by the kernel's word."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Peer:
    """A process; `start` is its start time in clock ticks since boot, which tells a reused pid apart.

    `since` is the same in Unix time, where it is known.

    A pid of 0 stands for a process outside this pid namespace: its reports count, but nothing can be joined to it.
    """

    pid: int
    uid: int
    start: int
    since: float | None = field(default=None, compare=False)

    @property
    def run_id(self) -> str:
        """The run's identity on this box: the same after a reconnect and after a restart of the daemon."""
        return f"{self.pid}-{self.start}"
