"""By how much each process on a GPU has grown of late, so that a run beside it can be told who takes what was free.

A growth begins where the process last held less, and is over once it has not grown for a while.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuwarden.gpu.snapshot import GpuProcess, Snapshot

REST_SECONDS = 60.0  # without growth, after which what comes is another growth


@dataclass(slots=True)
class Growth:
    """One process on one GPU or MIG instance; bytes, and monotonic times."""

    base: int  # what it held before it began to grow,
    since: float  # when it last held that,
    held: int  # what it holds,
    rose: float  # and when that last became more

    @property
    def grown(self) -> int:
        """By how much it has grown."""
        return self.held - self.base

    def see(self, held: int, now: float) -> None:
        """Take what it holds now."""
        if held > self.held:
            self.rose = now
        if held <= self.base or now - self.rose >= REST_SECONDS:
            self.base, self.since = held, now
        self.held = held


class NeighbourGrowth:
    """Follows the processes from poll to poll. Used by one event loop."""

    def __init__(self) -> None:
        self._places: dict[str, dict[int, Growth]] = {}  # by UUID of a GPU or MIG instance, and pid
        self._grown: dict[str, list[tuple[int, Growth]]] = {}  # of each place, those that grew most first
        self._last = 0.0

    def see(self, snapshot: Snapshot, now: float) -> None:
        """Take a poll. Of a GPU that the last one did not know nothing is said yet: all may be as it was for long."""
        before, self._places = self._places, {}
        for gpu in snapshot.gpus:
            if gpu.up and gpu.process_lists:
                for uuid in (gpu.identity.uuid, *(each.identity.uuid for each in gpu.mig)):
                    here = [each for each in gpu.processes if (each.instance or gpu.identity.uuid) == uuid]
                    self._places[uuid] = self._followed(here, before.get(uuid), now)
        self._grown = {uuid: _largest_first(there) for uuid, there in self._places.items()}
        self._last = now

    def _followed(self, processes: list[GpuProcess], before: dict[int, Growth] | None, now: float) -> dict[int, Growth]:
        found: dict[int, Growth] = {}
        for process in processes:
            if process.memory is None or not process.pid:  # without a pid it may be anybody, the run itself too
                continue
            if before is None:
                growth = Growth(process.memory, now, process.memory, now)
            else:
                growth = before.get(process.pid) or Growth(0, self._last, 0, now)
            growth.see(process.memory, now)
            found[process.pid] = growth
        return found

    def forget(self) -> None:
        """Begin anew with the next poll."""
        self._places, self._grown = {}, {}

    def grown(self, uuid: str) -> Sequence[tuple[int, Growth]]:
        """Return the processes that have grown on a GPU or MIG instance by pid, the one that grew most first."""
        return self._grown.get(uuid, ())


def _largest_first(there: Mapping[int, Growth]) -> list[tuple[int, Growth]]:
    grown = [(pid, growth) for pid, growth in there.items() if growth.held > growth.base]
    grown.sort(key=lambda each: each[1].grown, reverse=True)
    return grown
