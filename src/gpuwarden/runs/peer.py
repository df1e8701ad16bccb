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

    run_id: str = field(init=False, compare=False)
    """The run's identity on this box: the same after a reconnect and after a restart of the daemon."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "run_id", f"{self.pid}-{self.start}")
