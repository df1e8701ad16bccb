"""Rates of counters: DCGM exports traffic in bytes per second, the driver and gpuwarden's metrics count bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.metrics.model import Labels, Metric


@dataclass(frozen=True, slots=True)
class _Point:
    """Last read of a counter: `time` in seconds, `rate` since the previous read, None for the first."""

    time: float
    value: float
    rate: float | None = None

    def then(self, time: float, value: float) -> _Point:
        elapsed = time - self.time
        if not elapsed:
            return self  # a poll that repeats the last read
        forward = value >= self.value and elapsed > 0  # otherwise the driver was reloaded, and counts from 0
        return _Point(time, value, (value - self.value) / elapsed if forward else None)


class CounterRates:
    """Rates of counters between two reads, independent of scrapes."""

    def __init__(self, counters: tuple[Metric[Any], ...]) -> None:
        self._counters = counters
        self._points: dict[tuple[str, Metric[Any], Labels], _Point] = {}

    def add_readings(self, gpus: tuple[Gpu, ...]) -> None:
        """Add the readings of a poll; counters that it lacks are dropped."""
        old, self._points = self._points, {}
        for gpu in gpus:
            for counter in self._counters:
                taken = gpu.slow_taken if counter.tier == "slow" else gpu.taken
                for labels, value in gpu.values(counter).items():
                    key = gpu.identity.uuid, counter, labels
                    point = old.get(key)
                    self._points[key] = point.then(taken, value) if point else _Point(taken, value)

    def rate(self, uuid: str, counter: Metric[Any], *labels: str) -> float | None:
        """Return the rate of a counter per second; None before its second read."""
        point = self._points.get((uuid, counter, labels))
        return point.rate if point else None
