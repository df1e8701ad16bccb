"""Kills of the kernel's OOM killer, from the kernel log (Linux, mm/oom_kill.c)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpuwarden.host.kernel_log import KernelRecord

# The choice, logged before the kill; then the kill. Older kernels write no choice, and the kill without its reason.
PREFIXES = (b"oom-kill:", b"Out of memory", b"Memory cgroup out of memory", b"Killed process ")

# A process bears any name, so pids are read where no name can be in their place: at the line's end, or before it.
_CHOICE = re.compile(rb"oom-kill:constraint=CONSTRAINT_(\w{1,40}),.*,pid=(\d{1,10}),uid=\d{1,10}", re.DOTALL)
_KILL = re.compile(rb"(?:(Memory cgroup )?[Oo]ut of memory[^:]{0,40}: )?Killed process (\d{1,10})\b")


@dataclass(frozen=True, slots=True)
class OomKill:
    """A process of that pid, as the machine itself counts pids, was killed between `earliest` and `latest` (monotonic).

    `in_cgroup`: for its cgroup's limit, not for the host's memory; None where the kernel does not say.
    """

    pid: int
    in_cgroup: bool | None
    earliest: float
    latest: float


def parse_oom_kills(records: Iterable[KernelRecord]) -> Iterator[OomKill]:
    """Return the kills among the records; most are told twice."""
    for record in records:
        if match := _CHOICE.fullmatch(record.message):
            yield OomKill(int(match[2]), match[1] == b"MEMCG", record.earliest, record.latest)
        elif match := _KILL.match(record.message):
            named = None if record.message.startswith(b"Killed") else match[1] is not None
            yield OomKill(int(match[2]), named, record.earliest, record.latest)
