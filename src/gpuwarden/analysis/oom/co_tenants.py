"""Memory of every process on each device over time, to find the one that used up a run's memory.

Compute processes are listed at every poll in which memory in use has changed, graphics processes in the slow tier
(`gpu.process_lists`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from gpuwarden.analysis.oom.context import CoTenantMemory
from gpuwarden.gpu.snapshot import GpuProcess, Snapshot
from gpuwarden.owners.kinds import BY_PRIORITY
from gpuwarden.owners.resolver import UNKNOWN, Owners

MAX_CHANGES = 32  # of a process that are kept
MAX_PROCESSES = 256  # of a device, those with the most memory
NO_NAMES: Mapping[str, str] = MappingProxyType({})
REST_SECONDS = 60.0  # without growth, after which new growth counts separately


@dataclass(frozen=True, slots=True)
class Change:
    """Memory of a process in bytes from a time on (monotonic)."""

    at: float
    memory: int


@dataclass(frozen=True, slots=True)
class CoTenant:
    """One process on one device; bytes, and monotonic times.

    It had `base` until `since`, when it started to grow; its last growth was at `rose`. Before its first known change
    it had `initial`.
    """

    initial: int
    base: int
    since: float
    rose: float
    changes: tuple[Change, ...] = ()

    @property
    def held(self) -> int:
        """Bytes that it has now."""
        return self.changes[-1].memory if self.changes else 0

    @property
    def grown(self) -> int:
        """Bytes by which it has grown without a pause of REST_SECONDS."""
        return self.held - self.base

    def updated(self, memory: int, now: float) -> CoTenant:
        """Return it updated with its memory at a poll."""
        rose = now if memory > self.held else self.rose
        base, since = (memory, now) if memory <= self.base or now - rose >= REST_SECONDS else (self.base, self.since)
        changes = self.changes
        if not changes or memory != self.held:
            changes = (*changes, Change(now, memory))
        if len(changes) > MAX_CHANGES:  # keep the first and the last, thin out the others
            changes = (changes[0], *changes[2:-1:2], changes[-1])
        return CoTenant(self.initial, base, since, rose, changes)

    def held_at(self, then: float | None) -> int:
        """Return its bytes at a time; None is before the process was seen."""
        if then is None:
            return 0
        return next((each.memory for each in reversed(self.changes) if each.at <= then), self.initial)

    def grew_at(self, then: float | None) -> float:
        """Return when it started to grow after `then`."""
        if then is None:
            return self.changes[0].at
        held = self.held_at(then)
        return next((each.at for each in self.changes if each.at > then and each.memory > held), self.changes[-1].at)


@dataclass(frozen=True, slots=True)
class CoTenants:
    """Processes on all devices at a poll, by the device's UUID and by pid, their owners, and names of runs by id."""

    devices: Mapping[str, Mapping[int, CoTenant]] = field(default_factory=dict)
    owners: Owners = field(default_factory=Owners)
    run_names: Mapping[str, str] = field(default_factory=dict)

    def grown(self, device: str) -> list[tuple[int, CoTenant]]:
        """Return the growing processes with their pids, the largest growth first; those without a pid are left out."""
        there = self.devices.get(device, {}).items()
        return sorted(((pid, each) for pid, each in there if pid and each.grown), key=lambda each: -each[1].grown)

    def taken(self, device: str, own: Collection[int], then: float | None, now: float) -> tuple[CoTenantMemory, ...]:
        """Return the growth of processes other than a run's `own` on a device since `then`, largest first.

        With None it is all of their memory.
        """
        return tuple(sorted(self._taken(device, own, then, now), key=lambda each: -each.grown))

    def _taken(self, device: str, own: Collection[int], then: float | None, now: float) -> Iterator[CoTenantMemory]:
        for pid, each in self.devices.get(device, {}).items():
            grown = each.held - each.held_at(then)
            if pid not in own and grown > 0:
                yield CoTenantMemory(pid, self._describe(pid), grown, each.held, now - each.grew_at(then))

    def _describe(self, pid: int) -> str:
        """Describe a process: run, or command and pid; user, container or job."""
        named, identity = self.owners.by_pid.get(pid, NO_NAMES), self.owners.identities.get(pid)
        comm = f"{identity.comm} " if identity and identity.comm else ""
        run_id = named.get("run", "")
        run = self.run_names.get(run_id)
        words = [f"{comm}process {pid}" if run is None else f"run {run} ({run_id})"]
        if (user := named.get("user", UNKNOWN)) != UNKNOWN:
            words.append(f"of {user}")
        kinds = [kind for kind in BY_PRIORITY if not kind.fallback and (run is None or kind.name != "run")]
        what = [f"{kind.text} {named[kind.name]}" for kind in kinds if kind.name in named]
        return " ".join(words) + (f" ({', '.join(what)})" if what else "")


class CoTenantTracker:
    """Tracker of all processes from poll to poll. Used by one event loop. Ended processes are dropped."""

    def __init__(self) -> None:
        self._devices: Mapping[str, Mapping[int, CoTenant]] = {}
        self._last = 0.0  # poll

    def add_poll(
        self, snapshot: Snapshot, owners: Owners, now: float, run_names: Mapping[str, str] = NO_NAMES
    ) -> CoTenants:
        """Add a poll; return its processes with their past memory; on a GPU that is not up they stay unchanged.

        `now` is monotonic; `run_names` are by run id.
        """
        devices = dict(self._devices)
        for gpu in snapshot.gpus:
            if gpu.up:
                whole = gpu.identity.uuid
                for device in (whole, *(each.identity.uuid for each in gpu.mig)):
                    processes = [each for each in gpu.processes if (each.instance or whole) == device]
                    devices[device] = self._updated(devices.get(device), processes, now)
        self._devices, self._last = devices, now
        return CoTenants(devices, owners, run_names)

    def _updated(
        self, known: Mapping[int, CoTenant] | None, processes: Sequence[GpuProcess], now: float
    ) -> dict[int, CoTenant]:
        """Update one device. Memory at the first poll of a device counts as no growth: it may be old."""
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
