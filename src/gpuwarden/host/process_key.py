"""Identity of the process at the other end of a connection, from the kernel."""

from __future__ import annotations

import os
import re
import socket
import time
from dataclasses import dataclass, field

from gpuwarden.host import procfs

_SO_PEERPIDFD = 77  # Linux 6.5; not yet in Python's socket module (include/uapi/asm-generic/socket.h)


@dataclass(frozen=True, slots=True)
class ProcessKey:
    """Process; `start` is its start time in clock ticks since boot, which distinguishes a reused pid.

    `since` is the same in Unix time, if known. Pid 0 is a process outside this pid namespace: its reports count, but
    nothing can be joined to it.
    """

    pid: int
    uid: int
    start: int
    since: float | None = field(default=None, compare=False)

    run_id: str = field(init=False, compare=False)
    """Id of the run on this machine, which a reconnect or a restart of the daemon does not change."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "run_id", f"{self.pid}-{self.start}")


def parse_run_id(run_id: str) -> tuple[int, int] | None:
    """Return pid and start of `ProcessKey.run_id`; None for another text."""
    match = re.fullmatch("([0-9]{1,20})-([0-9]{1,20})", run_id)
    return (int(match[1]), int(match[2])) if match else None


def identify_peer(connection: socket.socket, pid: int, uid: int) -> tuple[ProcessKey, int | None]:
    """Return the process and its pidfd, None if the process is gone. Its start is 0 if hidden."""
    pidfd = open_pidfd(connection, pid)
    stat = procfs.read_stat(pid)
    start = stat.start if stat else 0
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return ProcessKey(pid, uid, start, booted + start / os.sysconf("SC_CLK_TCK") if start else None), pidfd


def open_pidfd(connection: socket.socket, pid: int) -> int | None:
    """Return a pidfd of the process that connected; None if it is gone."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)  # no race with a reused pid
    except OSError:
        pass
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
