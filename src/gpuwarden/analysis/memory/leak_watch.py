"""Leaks of a run, on its GPUs and on the host; logs when a leak starts and when it ends."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gpuwarden.analysis.memory.downsampling import Downsampled
from gpuwarden.analysis.memory.leak_detector import Leak, LeakDetector
from gpuwarden.analysis.memory.memory_history import MemoryHistory, MemoryWindow, window_from_sample
from gpuwarden.formatting import format_bytes, format_fields, format_forecast, format_growth
from gpuwarden.host.process_tree import HostUsage, PresentProcesses
from gpuwarden.protocol.messages import DeviceMemory

log = logging.getLogger(__name__)

HOST = "host"
URGENT_SECONDS = 120.0  # at the rate from sample to sample, until the host has no memory left


@dataclass(slots=True)
class _Place:
    """One GPU, or the host: its detector, and the leak that is reported there."""

    detector: LeakDetector = field(default_factory=LeakDetector)
    reported: Leak | None = None


@dataclass(slots=True)
class LeakWatch:
    """Leaks of one run, by place. Used by one event loop; times are seconds since the run's first message.

    `urgent`: the host's memory is to be sampled often, as it may not last for long.
    """

    urgent: bool = False
    _places: defaultdict[str, _Place] = field(default_factory=lambda: defaultdict(_Place))  # by UUID, or HOST
    _host_memory: Downsampled[MemoryWindow] = field(default_factory=Downsampled)
    _usage: HostUsage | None = None  # the last sample of the host
    _out_of_memory: bool = False  # since a leak was reported last

    def evaluate_gpus(
        self, histories: Mapping[str, MemoryHistory], current: Collection[str], who: tuple[str, str], now: float
    ) -> dict[str, Leak]:
        """Return the leaks by UUID, of the GPUs that are current; `who` is the run's id and name."""
        for uuid in self._places.keys() - {HOST}:
            if uuid not in current:  # the run has ended, or is silent: that its memory stopped growing is no news
                self._places[uuid].reported = None
        found: dict[str, Leak] = {}
        for uuid in current:
            history = histories.get(uuid)
            if history is None or history.training_began is None:
                continue
            leak = self._places[uuid].detector.evaluate(history.series, now, history.training_began)
            self._report(uuid, leak, who)
            if leak is not None:
                found[uuid] = leak
        return found

    def evaluate_host(
        self, usage: HostUsage | None, available: float | None, who: tuple[str, str], now: float
    ) -> Leak | None:
        """Return the leak of the processes' memory; `available` is what the host has left, in bytes.

        The limit is the cgroup's where that has less left.
        """
        present = usage.present if usage else None
        if present is None:
            self.urgent = False
            self._places[HOST].reported = None
            return None
        if usage is not self._usage:
            self._usage = usage
            self._sample_host(present.memory, _host_limit(present, available), now)
        leak = self._places[HOST].detector.evaluate(self._host_memory, now)
        self._report(HOST, leak, who)
        return leak

    @property
    def reported(self) -> dict[str, Leak]:
        """Leaks that the last poll found, by the GPU's UUID or HOST."""
        return {where: place.reported for where, place in self._places.items() if place.reported is not None}

    def handle_oom(self) -> None:
        """Record an out-of-memory of the run: that its memory stops growing after that is not logged."""
        self._out_of_memory = True

    def _sample_host(self, memory: int, limit: float | None, now: float) -> None:
        before = self._host_memory.newest
        if limit is not None and before is not None:
            self.urgent = (limit - memory) * (now - before.ended) < URGENT_SECONDS * (memory - before.highest)
        since = now if before is None else before.ended
        self._host_memory.append(window_from_sample(now, DeviceMemory(memory, memory), since=since, limit=limit))

    def _report(self, where: str, leak: Leak | None, who: tuple[str, str]) -> None:
        place = self._places[where]
        before, place.reported = place.reported, leak
        fields = {"run": who[0], "name": who[1], "device": where}
        if leak is not None and before is None:
            self._out_of_memory = False
            left = leak.left
            forecast = format_forecast(left.seconds, left.lower, left.upper) if left else None
            growth = format_growth(leak.bytes_per_second)
            log.warning("memory leak %s", format_fields(**fields, growth=growth, out_of_memory=forecast))
        elif before is not None and leak is None and not self._out_of_memory:
            log.info("memory leak ended %s", format_fields(**fields, grown=format_bytes(before.grown)))


def _host_limit(present: PresentProcesses, available: float | None) -> float | None:
    cgroup = present.cgroup_memory
    left = [] if available is None else [available]
    if cgroup is not None:
        left.append(max(cgroup.limit - cgroup.used, 0))
    return present.memory + min(left) if left else None
