"""Memory of every process on each device over time: what an out-of-memory, or little headroom, may be the work of.

The process lists are as old as `gpu.process_lists` lets them be: those of compute processes are of this poll whenever
memory in use has changed, graphics processes of the slow tier.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class CoTenant:
    """One process on one device; bytes, and monotonic times.

    It held `base` until `since`, before it began to grow, and grew last when it `rose`. Before its first change is
    known it held `initial`.
    """

    initial: int
    base: int
    since: float
    rose: float
    changes: tuple[Change, ...] = ()

    @property
    def held(self) -> int:
        """Bytes that it holds now."""
        return self.changes[-1].memory if self.changes else 0

    @property
    def grown(self) -> int:
        """Bytes by which it has grown without a rest."""
        return self.held - self.base

    def updated(self, memory: int, now: float) -> CoTenant:
        """Return it as of a poll that finds it to hold so much."""
        rose = now if memory > self.held else self.rose
        base, since = (memory, now) if memory <= self.base or now - rose >= REST_SECONDS else (self.base, self.since)
        changes = self.changes
        if not changes or memory != self.held:
            changes = (*changes, Change(now, memory))
        if len(changes) > MAX_CHANGES:  # the first and the last stay, between them time gets coarser
            changes = (changes[0], *changes[2:-1:2], changes[-1])
        return CoTenant(self.initial, base, since, rose, changes)

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


@dataclass(frozen=True, slots=True)
class CoTenants:
    """Processes on all devices at a poll, by the device's UUID and by pid, and who they are."""

    devices: Mapping[str, Mapping[int, CoTenant]] = field(default_factory=dict)
    owners: Owners = field(default_factory=Owners)

    def grown(self, device: str) -> list[tuple[int, CoTenant]]:
        """Return the processes that grow by pid, the one that grew most first; those without a pid are left out."""
        there = self.devices.get(device, {}).items()
        return sorted(((pid, each) for pid, each in there if pid and each.grown), key=lambda each: -each[1].grown)

    def taken(self, device: str, own: Collection[int], then: float | None, now: float) -> tuple[CoTenantMemory, ...]:
        """Return what processes other than a run's `own` took of a device since `then`, those that took most first.

        Since None is all that they hold, for as long as that has been seen.
        """
        return tuple(sorted(self._taken(device, own, then, now), key=lambda each: -each.grown))

    def _taken(self, device: str, own: Collection[int], then: float | None, now: float) -> Iterator[CoTenantMemory]:
        for pid, each in self.devices.get(device, {}).items():
            grown = each.held - each.held_at(then)
            if pid not in own and grown > 0:
                yield CoTenantMemory(pid, _who(pid, self.owners), grown, each.held, now - each.grew_at(then))


class CoTenantTracker:
    """Tracker of all processes, from poll to poll. Used by one event loop.

    A process that has ended is dropped, as its memory is free again.
    """

    def __init__(self) -> None:
        self._devices: Mapping[str, Mapping[int, CoTenant]] = {}
        self._last = 0.0  # poll

    def update(self, snapshot: Snapshot, owners: Owners, now: float) -> CoTenants:
        """Return the processes of a poll with what they held before; those of a GPU that is not up stay as they were.

        `now` is monotonic.
        """
        devices = dict(self._devices)
        for gpu in snapshot.gpus:
            if gpu.up:
                whole = gpu.identity.uuid
                for device in (whole, *(each.identity.uuid for each in gpu.mig)):
                    processes = [each for each in gpu.processes if (each.instance or whole) == device]
                    devices[device] = self._updated(devices.get(device), processes, now)
        self._devices, self._last = devices, now
        return CoTenants(devices, owners)

    def _updated(
        self, known: Mapping[int, CoTenant] | None, processes: Sequence[GpuProcess], now: float
    ) -> dict[int, CoTenant]:
        """Update one device: all that is there when it is first seen may have been so for long, and is no growth."""
        if len(processes) > MAX_PROCESSES:
            processes = sorted(processes, key=lambda process: -(process.memory or 0))[:MAX_PROCESSES]
        updated: dict[int, CoTenant] = {}
        for process in processes:
            memory = process.memory
            if memory is None:
                continue
            if known is None:
                before = CoTenant(memory, memory, now, now)
            else:
                before = known.get(process.pid) or CoTenant(0, 0, self._last, now)
            updated[process.pid] = before.updated(memory, now)
        return updated


def _who(pid: int, owners: Owners) -> str:
    """Return in words who a process is."""
    named, identity = owners.by_pid.get(pid), owners.identities.get(pid)
    comm = f"{identity.comm} " if identity and identity.comm else ""
    words = [f"{comm}process {pid}" if comm else f"process {pid}"]
    if named is None:
        return words[0]
    if (user := named.get("user", UNKNOWN)) != UNKNOWN:
        words.append(f"of {user}")
    what = [f"{kind.text} {named[kind.name]}" for kind in BY_PRIORITY if not kind.fallback and kind.name in named]
    return " ".join(words) + (f" ({', '.join(what)})" if what else "")
