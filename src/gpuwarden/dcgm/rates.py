"""Rates of counters: DCGM shows traffic as bytes a second, where the driver and our page count bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.metrics.model import Labels, Metric


@dataclass(frozen=True, slots=True)
class _Point:
    """A counter's last read: `time` in seconds, `rate` since the read before, None for the first."""

    time: float
    value: float
    rate: float | None = None

    def then(self, time: float, value: float) -> _Point:
        elapsed = time - self.time
        if not elapsed:
            return self  # a poll that repeats what was read last
        forward = value >= self.value and elapsed > 0  # else the driver was loaded anew, and counts from 0
        return _Point(time, value, (value - self.value) / elapsed if forward else None)


class CounterRates:
    """Watches counters over the polls: a rate is that between two reads of the counter, whoever scrapes and when."""

    def __init__(self, counters: tuple[Metric[Any], ...]) -> None:
        self._counters = counters
        self._points: dict[tuple[str, Metric[Any], Labels], _Point] = {}

    def update(self, gpus: tuple[Gpu, ...]) -> None:
        """Take in a poll; a counter that it does not show is forgotten."""
        old, self._points = self._points, {}
        for gpu in gpus:
            for counter in self._counters:
                reading = gpu.readings.get(counter)
                taken = gpu.slow_taken if counter.tier == "slow" else gpu.taken
                for labels, value in reading.items() if isinstance(reading, Mapping) else ():
                    if isinstance(value, (int, float)):
                        key = gpu.identity.uuid, counter, labels
                        point = old.get(key)
                        self._points[key] = point.then(taken, value) if point else _Point(taken, value)

    def rate(self, uuid: str, counter: Metric[Any], *labels: str) -> float | None:
        """Return a counter's rate a second; None where it has not been read twice."""
        point = self._points.get((uuid, counter, labels))
        return point.rate if point else None
