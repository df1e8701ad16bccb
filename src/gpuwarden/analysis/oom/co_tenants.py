"""Memory of every process on each device over time: what an out-of-memory, or little headroom, may be the work of.

The process lists are as old as `gpu.process_lists` lets them be: those of compute processes are of this poll whenever
memory in use has changed, graphics processes of the slow tier.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from gpuwarden.analysis.oom.context import CoTenantMemory
from gpuwarden.gpu.snapshot import GpuProcess, Snapshot
from gpuwarden.owners.kinds import BY_PRIORITY
from gpuwarden.owners.resolver import UNKNOWN, Owners

MAX_CHANGES = 32  # of a process that are kept
MAX_PROCESSES = 256  # of a device, those that hold most
REST_SECONDS = 60.0  # without growth, after which what comes is another growth


@dataclass(frozen=True, slots=True)
class Change:
    """From this time on, monotonic, a process held so many bytes."""

    at: float
    memory: int


@dataclass(slots=True)
class CoTenant:
    """One process on one device; bytes, and monotonic times.

    It held `base` until `since`, before it began to grow, and grew last when it `rose`. Before its first change is
    known it held `initial`.
    """

    initial: int
    base: int
    since: float
    rose: float
    changes: list[Change] = field(default_factory=list)

    @property
    def held(self) -> int:
        """Bytes that it holds now."""
        return self.changes[-1].memory if self.changes else 0

    @property
    def grown(self) -> int:
        """Bytes by which it has grown without a rest."""
        return self.held - self.base

    def update(self, memory: int, now: float) -> None:
        """Take what it holds at a poll."""
        if memory > self.held:
            self.rose = now
        if memory <= self.base or now - self.rose >= REST_SECONDS:
            self.base, self.since = memory, now
        if not self.changes or memory != self.held:
            self.changes.append(Change(now, memory))
        if len(self.changes) > MAX_CHANGES:
            del self.changes[1:-1:2]  # the first and the last stay, between them time gets coarser

    def held_at(self, then: float | None) -> int:
        """Return what it held then; None is before anything was there."""
        if then is None:
            return 0
        return next((each.memory for each in reversed(self.changes) if each.at <= then), self.initial)

    def grew_at(self, then: float | None) -> float:
        """Return when it began to grow after `then`."""
        if then is None:
            return self.changes[0].at
        held = self.held_at(then)
        return next((each.at for each in self.changes if each.at > then and each.memory > held), self.changes[-1].at)


class CoTenants:
    """The processes on all devices; used by one event loop. What has ended is forgotten: its memory is free again."""

    def __init__(self) -> None:
        self._devices: dict[str, dict[int, CoTenant]] = {}
        self._last = 0.0  # poll
        self._owners = Owners()

    def see(self, snapshot: Snapshot, owners: Owners, now: float) -> None:
        """Take the processes of a poll and who they are."""
        self._owners = owners
        for gpu in snapshot.gpus:
            if gpu.up:
                whole = gpu.identity.uuid
                for device in (whole, *(each.identity.uuid for each in gpu.mig)):
                    self._update(device, [each for each in gpu.processes if (each.instance or whole) == device], now)
        self._last = now

    def _update(self, device: str, processes: Sequence[GpuProcess], now: float) -> None:
        """Update one device: all that is there when it is first seen may have been so for long, and is no growth."""
        if len(processes) > MAX_PROCESSES:
            processes = sorted(processes, key=lambda process: -(process.memory or 0))[:MAX_PROCESSES]
        known = self._devices.get(device)
        kept = self._devices[device] = {}
        for process in processes:
            memory = process.memory
            if memory is None:
                continue
            if known is None:
                neighbour = CoTenant(memory, memory, now, now)
            else:
                neighbour = known.get(process.pid) or CoTenant(0, 0, self._last, now)
            neighbour.update(memory, now)
            kept[process.pid] = neighbour

    def grown(self, device: str) -> list[tuple[int, CoTenant]]:
        """Return the processes that grow by pid, the one that grew most first; those without a pid are left out."""
        there = self._devices.get(device, {}).items()
        return sorted(((pid, each) for pid, each in there if pid and each.grown), key=lambda each: -each[1].grown)

    def taken(self, device: str, own: Collection[int], then: float | None, now: float) -> tuple[CoTenantMemory, ...]:
        """Return what processes other than a run's `own` took of a device since `then`, those that took most first.

        Since None is all that they hold, for as long as that has been seen.
        """
        return tuple(sorted(self._taken(device, own, then, now), key=lambda each: -each.grown))

    def _taken(self, device: str, own: Collection[int], then: float | None, now: float) -> Iterator[CoTenantMemory]:
        for pid, each in self._devices.get(device, {}).items():
            grown = each.held - each.held_at(then)
            if pid not in own and grown > 0:
                yield CoTenantMemory(pid, _who(pid, self._owners), grown, each.held, now - each.grew_at(then))


def _who(pid: int, owners: Owners) -> str:
    """Say in words who a process is."""
    named, identity = owners.by_pid.get(pid), owners.identities.get(pid)
    comm = f"{identity.comm} " if identity and identity.comm else ""
    words = [f"{comm}process {pid}" if comm else f"process {pid}"]
    if named is None:
        return words[0]
    if (user := named.get("user", UNKNOWN)) != UNKNOWN:
        words.append(f"of {user}")
    what = [f"{kind.text} {named[kind.name]}" for kind in BY_PRIORITY if not kind.fallback and kind.name in named]
    return " ".join(words) + (f" ({', '.join(what)})" if what else "")
