"""Who else holds memory on each device, from poll to poll: what an out-of-memory may be the work of.

The process lists are as old as `gpu.process_lists` lets them be: those of compute processes are of this poll whenever
memory in use has changed, graphics processes of the slow tier.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpuwarden.gpu.owners import UNKNOWN, Owners
from gpuwarden.gpu.snapshot import GpuProcess, Snapshot
from gpuwarden.runs.case import Taken

MOST_MARKS = 32  # of a process: where its memory changed
MOST_PROCESSES = 256  # of a device, those that hold most


class Mark(NamedTuple):
    """From this time on, monotonic, a process held so many bytes."""

    at: float
    memory: int


@dataclass(slots=True)
class _Process:
    """One that holds memory on one device."""

    marks: list[Mark] = field(default_factory=list)
    was_there: bool = False  # when the device was first seen: then its first mark is no growth

    def note(self, now: float, memory: int) -> None:
        self.marks.append(Mark(now, memory))
        if len(self.marks) > MOST_MARKS:
            del self.marks[1:-1:2]  # the first and the last stay, between them time gets coarser

    def held_at(self, then: float | None) -> int:
        """Return what it held then; None is before anything was there."""
        if then is None:
            return 0
        before = [mark.memory for mark in self.marks if mark.at <= then]
        if before:
            return before[-1]
        return self.marks[0].memory if self.was_there else 0

    def grew_at(self, then: float | None) -> float:
        """Return when it began to grow after `then`."""
        if then is None:
            return self.marks[0].at
        held = self.held_at(then)
        return next((mark.at for mark in self.marks if mark.at > then and mark.memory > held), self.marks[-1].at)


class Neighbours:
    """The processes on all devices; used by one event loop. What has ended is forgotten: its memory is free again."""

    def __init__(self) -> None:
        self._devices: dict[str, dict[int, _Process]] = {}
        self._seen: dict[str, tuple[GpuProcess, ...]] = {}  # by GPU, when it was last looked at
        self._owners = Owners()

    def see(self, snapshot: Snapshot, owners: Owners, now: float) -> None:
        """Take the processes of a poll and who they are; costs next to nothing where none has changed."""
        self._owners = owners
        for gpu in snapshot.gpus:
            uuid = gpu.identity.uuid
            if not gpu.up or self._seen.get(uuid) is gpu.processes:
                continue
            first = uuid not in self._seen
            self._seen[uuid] = gpu.processes
            if not gpu.mig:
                self._update(uuid, gpu.processes, now, first=first)
                continue
            for device in (uuid, *(instance.identity.uuid for instance in gpu.mig)):
                on_it = [process for process in gpu.processes if (process.instance or uuid) == device]
                self._update(device, on_it, now, first=first)

    def _update(self, device: str, processes: Sequence[GpuProcess], now: float, *, first: bool) -> None:
        if len(processes) > MOST_PROCESSES:
            processes = sorted(processes, key=lambda process: -(process.memory or 0))[:MOST_PROCESSES]
        known = self._devices.get(device, {})
        kept = self._devices[device] = {}
        for process in processes:
            memory = process.memory
            if memory is None:
                continue
            entry = kept[process.pid] = known.get(process.pid) or _Process(was_there=first)
            if not entry.marks or entry.marks[-1].memory != memory:
                entry.note(now, memory)

    def taken(self, device: str, own: Collection[int], then: float | None, now: float) -> tuple[Taken, ...]:
        """Return what processes other than a run's `own` took of a device since `then`, those that took most first.

        Since None is all that they hold, for as long as that has been seen.
        """
        return tuple(sorted(self._taken(device, own, then, now), key=lambda each: -each.taken))

    def _taken(self, device: str, own: Collection[int], then: float | None, now: float) -> Iterator[Taken]:
        for other, process in self._devices.get(device, {}).items():
            grown = process.marks[-1].memory - process.held_at(then)
            if other not in own and grown > 0:
                yield Taken(
                    other, _who(other, self._owners), grown, process.marks[-1].memory, now - process.grew_at(then)
                )


def _who(pid: int, owners: Owners) -> str:
    """Say in words who a process is."""
    holder, identity = owners.holders.get(pid), owners.identities.get(pid)
    comm = f"{identity.comm} " if identity and identity.comm else ""
    words = [f"{comm}process {pid}" if comm else f"process {pid}"]
    if holder is None:
        return words[0]
    if holder.user != UNKNOWN:
        words.append(f"of {holder.user}")
    where: Mapping[str, str] = {
        "run": holder.run,
        "job": holder.slurm_job,
        "container": holder.container or holder.pod,
    }
    named = [f"{kind} {name}" for kind, name in where.items() if name]
    return " ".join(words) + (f" ({', '.join(named)})" if named else "")
