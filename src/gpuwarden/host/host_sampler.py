"""Sampler of the host and of the runs' processes, each slow interval, and more often for new or urgent runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpuwarden.host.host_reader import Host, HostReader, try_read_host_memory
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.host.process_tree import HostUsage, ProcessTrees

# Interval while a run is new, so that the record of a short run has some samples.
NEW_RUN_INTERVAL_SECONDS = 5.0
NEW_RUN_SECONDS = 60.0  # age up to which a run is new, if poll.slow_interval is longer


@dataclass(frozen=True, slots=True)
class HostSample:
    """Last sample: the host, the bytes available when the runs' processes were read, and the processes' usage."""

    host: Host = field(default_factory=Host)
    available: int | None = None
    usages: Mapping[ProcessKey, HostUsage] = field(default_factory=dict)


class HostSampler:
    """Sampler of the host. Used by one event loop, which it blocks for some milliseconds per sample."""

    def __init__(self, slow_interval: float) -> None:
        self._slow_interval = slow_interval
        self._reader = HostReader()
        self._trees = ProcessTrees()
        self._slow_due = 0.0  # monotonic
        self._new_due = 0.0  # monotonic
        self._sample = HostSample()

    @property
    def dropped(self) -> int:
        """Processes left out because their run has too many."""
        return self._trees.dropped

    @property
    def io_allowed(self) -> bool | None:
        """True if the daemon may read the I/O counters of processes; None while there was no process to try."""
        return self._trees.io_allowed

    def sample(self, runs: Sequence[ProcessKey], now: float, *, newest_age: float, urgent: bool) -> HostSample:
        """Return the sample for a poll, a new one if it is due; `now` is monotonic.

        `newest_age` is the age in seconds of the newest live run. `urgent`: a run allocates host memory so fast that
        every poll needs a sample.
        """
        is_new = newest_age <= min(self._slow_interval, NEW_RUN_SECONDS)
        if now >= self._slow_due:
            self._slow_due = now + self._slow_interval
            host = self._reader.read()
            self._sample = HostSample(host, host.memory_available, self._trees.read(runs))
        elif urgent or (is_new and now >= self._new_due):
            self._new_due = now + NEW_RUN_INTERVAL_SECONDS
            memory = try_read_host_memory()
            available = memory.available if memory else None
            self._sample = HostSample(self._sample.host, available, self._trees.read(runs))
        return self._sample
