"""Kills by the kernel's OOM killer while a program runs, which the daemon misses if it ends before the next poll."""

from __future__ import annotations

import os
from dataclasses import dataclass

from gpuwarden.host import oom_killer
from gpuwarden.host.cgroup_limits import CgroupReader, OomKillCounter
from gpuwarden.host.kernel_log import KernelLog
from gpuwarden.host.oom_killer import OomKill, parse_oom_kills


@dataclass(frozen=True, slots=True)
class HostKills:
    """Kills since `watch`: that of the program, and the count of those in the cgroup that it was started in."""

    of_program: OomKill | None
    in_cgroup: int


class HostKillWatch:
    """Watch of the kernel log, where it may be read, and of this process's cgroup. Nothing here blocks or raises."""

    def __init__(self) -> None:
        self._log = KernelLog(oom_killer.PREFIXES)
        while self._log.read():  # what is from before
            pass
        reader = CgroupReader()
        reader.begin()
        self._counter: OomKillCounter | None = reader.limits(os.getpid()).oom_kills

    def find(self, pid: int) -> HostKills:
        """Return the kills until now; `pid` is the program's."""
        own = None
        while records := self._log.read():
            own = next((each for each in parse_oom_kills(records) if each.pid == pid), own)
        self._log.close()
        return HostKills(own, self._counter.since() if self._counter else 0)
