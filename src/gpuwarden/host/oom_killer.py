"""Kills of the kernel's OOM killer, from the kernel log (Linux, mm/oom_kill.c)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpuwarden.host.kernel_log import KernelRecord

# The choice of a process is logged before the kill. Older kernels log no choice, and no reason for the kill.
PREFIXES = (b"oom-kill:", b"Out of memory", b"Memory cgroup out of memory", b"Killed process ")

# A process can have any name, so pids are read from places that a name cannot fake: the end of the line, or before it.
_CHOICE = re.compile(rb"oom-kill:constraint=CONSTRAINT_(\w{1,40}),.*,pid=(\d{1,10}),uid=\d{1,10}", re.DOTALL)
_KILL = re.compile(rb"(?:(Memory cgroup )?[Oo]ut of memory[^:]{0,40}: )?Killed process (\d{1,10})\b")


@dataclass(frozen=True, slots=True)
class OomKill:
    """Kill of a process between `earliest` and `latest` (monotonic); `pid` is in the initial pid namespace.

    `in_cgroup`: because of its cgroup's limit, not of the host's memory; None if the kernel does not log it.
    """

    pid: int
    in_cgroup: bool | None
    earliest: float
    latest: float


def parse_oom_kills(records: Iterable[KernelRecord]) -> Iterator[OomKill]:
    """Return the kills among the records; most are logged twice."""
    for record in records:
        if match := _CHOICE.fullmatch(record.message):
            yield OomKill(int(match[2]), match[1] == b"MEMCG", record.earliest, record.latest)
        elif match := _KILL.match(record.message):
            named = None if record.message.startswith(b"Killed") else match[1] is not None
            yield OomKill(int(match[2]), named, record.earliest, record.latest)
