"""Meter of one GPU: differences of its readings and of its own counters from one poll to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.metrics.model import Labels

# Clock event reasons that slow a run down, as opposed to those that say how a GPU was set up or that it has no work.
SLOWDOWNS = ("sw_power_cap", "hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")

_LABELS: Mapping[str, Labels] = {reason: (reason,) for reason in SLOWDOWNS}


@dataclass(frozen=True, slots=True)
class Lapse:
    """Activity of a GPU from its last reading to this one."""

    seconds: float
    busy: float | None
    joules: float | None  # by its power
    active: tuple[str, ...]  # slowdowns that are there now


@dataclass(frozen=True, slots=True)
class Window:
    """Increase of a GPU's own counters between two readings of them."""

    seconds: float
    joules: float | None = None
    throttled: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Counters:
    """Counters of a GPU at its last readings, with the times of these."""

    taken: float
    slow_taken: float
    busy: float | None
    joules: float | None
    throttled: Mapping[str, float]


class Meter:
    """Turns one GPU's readings into differences: `lapse` and `window` are what has come with the last one."""

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._before: _Counters | None = None
        self.counts_joules = False
        self.lapse: Lapse | None = None
        self.window: Window | None = None

    def read(self, gpu: Gpu) -> None:
        """Add a poll's reading. After one that failed the driver's counters have gone on, and nothing else."""
        self.lapse = self.window = None
        before = self._before
        if not gpu.up:
            self._before = before and replace(before, taken=float("-inf"))
            return
        looks = before is None or gpu.slow_taken > before.slow_taken
        self._before = now = _Counters(
            gpu.taken,
            gpu.slow_taken,
            gpu.value(GpuReadings.busy_seconds_total),
            gpu.value(GpuReadings.energy_joules_total),
            throttled_seconds(gpu) if before is None or looks else before.throttled,
        )
        self.counts_joules |= now.joules is not None
        if before is None:
            return
        seconds = now.taken - before.taken
        if 0 < seconds <= self._longest:
            watts = gpu.value(GpuReadings.power_usage_watts)
            busy = _rise(now.busy, before.busy)
            self.lapse = Lapse(
                seconds,
                None if busy is None else min(busy, seconds),
                None if watts is None else watts * seconds,
                _active(gpu),
            )
        if looks:
            self.window = self._between(now, before)

    def _between(self, now: _Counters, before: _Counters) -> Window:
        seconds = now.slow_taken - before.slow_taken
        if seconds > self._longest:
            return Window(seconds)
        risen = {reason: _rise(value, before.throttled.get(reason)) for reason, value in now.throttled.items()}
        throttled = {reason: min(rise, seconds) for reason, rise in risen.items() if rise is not None}
        return Window(seconds, _rise(now.joules, before.joules), throttled)


def _rise(new: float | None, old: float | None) -> float | None:
    """Return by how much a counter has risen; None where it is not known, or has begun anew."""
    return None if new is None or old is None or new < old else new - old


def throttled_seconds(gpu: Gpu) -> dict[str, float]:
    """Return the seconds that each slowdown has been there, of those that the GPU tells."""
    row = GpuReadings.clock_event_seconds_total
    return {reason: value for reason, labels in _LABELS.items() if (value := gpu.value(row, *labels)) is not None}


def _active(gpu: Gpu) -> tuple[str, ...]:
    events = gpu.readings.get(GpuReadings.clock_event_active)
    if not isinstance(events, Mapping):
        return ()
    return tuple(reason for reason, labels in _LABELS.items() if events.get(labels))
