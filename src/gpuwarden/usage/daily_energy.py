"""Energy of all GPUs since midnight, from their energy counters, else from power."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.usage.gpu_meter import MAX_GAP_INTERVALS, Meter


@dataclass(frozen=True, slots=True)
class Energy:
    """Energy in joules since a Unix time."""

    joules: float
    since: float


class DailyEnergy:
    """Energy since local midnight, or since the daemon started on that day. Used by one event loop."""

    def __init__(self, longest_interval: float) -> None:
        self._max_gap = MAX_GAP_INTERVALS * longest_interval
        self._meters: dict[str, Meter] = {}
        self._day = (0, 0)
        self._since = 0.0
        self._joules = 0.0

    def add_poll(self, snapshot: Snapshot) -> Energy | None:
        """Add a poll; return the energy of the day, or None while none is known.

        The energy of a counter window that spans midnight is of the new day.
        """
        local = time.localtime(snapshot.time)
        if (day := (local.tm_year, local.tm_yday)) != self._day:
            self._day, self._since, self._joules = day, snapshot.time, 0.0
        self._meters = {
            gpu.identity.uuid: self._meters.get(gpu.identity.uuid) or Meter(self._max_gap) for gpu in snapshot.gpus
        }
        for gpu in snapshot.gpus:
            meter = self._meters[gpu.identity.uuid]
            meter.read(gpu)
            used = meter.window if meter.counts_joules else meter.lapse
            if used is not None and used.joules is not None:
                self._joules += used.joules
        return Energy(self._joules, self._since) if self._joules else None
