"""What a run's memory will come to, on GPUs and on the host; one log line when it begins to grow, one when it ends."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gpuwarden.quantities import amount, foreseen, rate
from gpuwarden.runs.growth import Growth, GrowthWatch
from gpuwarden.runs.history import MemoryHistory
from gpuwarden.runs.ladder import Ladder
from gpuwarden.runs.process_tree import Present, Usage

log = logging.getLogger(__name__)

TOLD_GROWTHS = 20  # of a run, in the log
HOST = "the host"
URGENT_SECONDS = 120.0  # at the rate from look to look, until the host has no memory left


@dataclass(slots=True)
class Outlook:
    """Of one run. Used by one event loop; times are seconds since the run was first heard of."""

    _watches: dict[str, GrowthWatch] = field(default_factory=dict)  # by UUID
    _host: GrowthWatch = field(default_factory=GrowthWatch)
    _host_memory: Ladder = field(default_factory=Ladder)
    _usage: Usage | None = None  # that was looked at last
    _last_look: tuple[float, int] | None = None  # at the host: when, and bytes
    urgent: bool = False  # whether the host is to be looked at often, as its memory may not last for long
    _told: dict[str, Growth] = field(default_factory=dict)
    _failed: bool = False  # since growth was told last
    _logged: dict[str, bool] = field(default_factory=dict)  # whether a line told of what is in `_told`
    _lines: int = 0

    def on_gpus(
        self, histories: Mapping[str, MemoryHistory], current: Collection[str], who: tuple[str, str], now: float
    ) -> dict[str, Growth]:
        """Return by UUID what grows, of those that are current; `who` is the run's id and name."""
        found: dict[str, Growth] = {}
        for uuid in current:
            history = histories.get(uuid)
            if history is None:
                continue
            watch = self._watches.get(uuid)
            if watch is None:
                watch = self._watches[uuid] = GrowthWatch()
            growth = watch.look(history.ladder, now, history.phase_beside)
            if growth is not None:
                found[uuid] = growth
            self._tell(uuid, growth, who)
        if self._told:
            for uuid in self._told.keys() - found.keys() - {HOST}:
                if uuid not in current:  # the run has ended, or is silent: that its memory grows no more is no news
                    del self._told[uuid]
        return found

    def on_host(
        self,
        usage: Usage | None,
        available: float | None,
        histories: Mapping[str, MemoryHistory],
        who: tuple[str, str],
        now: float,
    ) -> Growth | None:
        """Return how the processes' memory grows; `available` is what the host has left, in bytes.

        It ends at the cgroup's limit where that has less left. `histories` tell the run's epochs.
        """
        present = usage.present if usage else None
        if present is None:
            self.urgent = False
            self._told.pop(HOST, None)
            return None
        if usage is not self._usage:
            self._usage = usage
            epochs = max((history.begun for history in histories.values()), default=0)
            self._look_at_host(present, _host_cap(present, available), epochs, now)
        growth = self._host.look(self._host_memory, now)
        self._tell(HOST, growth, who)
        return growth

    def known(self, where: str) -> Growth | None:
        """Return the growth that the last poll told of, on a GPU by UUID or on HOST."""
        return self._told.get(where)

    def fail(self) -> None:
        """Take note that the run met an out-of-memory: that its memory grows no more after that is no news."""
        self._failed = True

    def _look_at_host(self, present: Present, cap: float | None, epochs: int, now: float) -> None:
        memory = present.memory
        self._host_memory.hear(now, memory, memory, epochs=epochs, cap=cap)
        if cap is not None and self._last_look is not None:
            at, before = self._last_look
            self.urgent = (cap - memory) * (now - at) < URGENT_SECONDS * (memory - before)
        self._last_look = now, memory

    def _tell(self, where: str, growth: Growth | None, who: tuple[str, str]) -> None:
        before = self._told.get(where)
        if growth is None and before is None:
            return
        if growth is not None:
            self._told[where] = growth
            if before is None:
                self._failed = False
                self._logged[where] = self._lines < TOLD_GROWTHS
                if self._logged[where]:
                    self._lines += 1
                    log.warning("run=%s name=%r memory grows on %s: %s", *who, where, _line(growth))
        elif before is not None:
            del self._told[where]
            if self._logged[where] and not self._failed:
                log.info("run=%s name=%r memory grows no more on %s: it grew by %s", *who, where, amount(before.grown))


def _host_cap(present: Present, available: float | None) -> float | None:
    cgroup = present.cgroup_memory
    rooms = [] if available is None else [available]
    if cgroup is not None:
        rooms.append(max(cgroup.limit - cgroup.used, 0))
    return present.memory + min(rooms) if rooms else None


def _line(growth: Growth) -> str:
    """Say it in words: `12.3 MiB a minute, out of memory in about 14m10s (11m20s to 20m05s)`."""
    left = growth.left
    end = "" if left is None else f", out of memory {foreseen(left.seconds, left.lower, left.upper)}"
    return f"{rate(growth.bytes_per_second)}{end}"
