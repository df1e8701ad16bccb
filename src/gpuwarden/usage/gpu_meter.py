"""Meter of one GPU: increases of its readings and counters from one poll to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.metrics.model import Labels

MAX_GAP_INTERVALS = 3  # between two readings; a longer gap is not counted

# Clock event reasons that slow a run down; the others are settings, or an idle GPU.
SLOWDOWNS = ("sw_power_cap", "hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")

_LABELS: Mapping[str, Labels] = {reason: (reason,) for reason in SLOWDOWNS}


@dataclass(frozen=True, slots=True)
class Lapse:
    """Activity of a GPU between two polls."""

    seconds: float
    busy: float | None
    joules: float | None  # power x time
    active: tuple[str, ...]  # throttle reasons active now


@dataclass(frozen=True, slots=True)
class Window:
    """Increase of a GPU's counters of the slow tier between two of their readings."""

    seconds: float
    joules: float | None = None
    throttled: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Counters:
    """Counters of a GPU at its last readings, with their times."""

    taken: float
    slow_taken: float
    busy: float | None
    joules: float | None
    throttled: Mapping[str, float]


class Meter:
    """Converts one GPU's readings to increases: `lapse` and `window` are those of the last reading."""

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._before: _Counters | None = None
        self.counts_joules = False
        self.lapse: Lapse | None = None
        self.window: Window | None = None

    def read(self, gpu: Gpu) -> None:
        """Add a poll's reading. After a failed one only the driver's own counters have continued."""
        self.lapse = self.window = None
        before = self._before
        if not gpu.up:
            self._before = before and replace(before, taken=float("-inf"))
            return
        is_slow_tier = before is None or gpu.slow_taken > before.slow_taken
        self._before = now = _Counters(
            gpu.taken,
            gpu.slow_taken,
            gpu.value(GpuReadings.busy_seconds_total),
            gpu.value(GpuReadings.energy_joules_total),
            throttled_seconds(gpu) if before is None or is_slow_tier else before.throttled,
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
        if is_slow_tier:
            self.window = self._between(now, before)

    def _between(self, now: _Counters, before: _Counters) -> Window:
        seconds = now.slow_taken - before.slow_taken
        if seconds > self._longest:
            return Window(seconds)
        risen = {reason: _rise(value, before.throttled.get(reason)) for reason, value in now.throttled.items()}
        throttled = {reason: min(rise, seconds) for reason, rise in risen.items() if rise is not None}
        return Window(seconds, _rise(now.joules, before.joules), throttled)


def _rise(new: float | None, old: float | None) -> float | None:
    """Return the increase of a counter; None if unknown, or if it was reset."""
    return None if new is None or old is None or new < old else new - old


def throttled_seconds(gpu: Gpu) -> dict[str, float]:
    """Return the seconds of each throttle reason that the GPU counts."""
    row = GpuReadings.clock_event_seconds_total
    return {reason: value for reason, labels in _LABELS.items() if (value := gpu.value(row, *labels)) is not None}


def _active(gpu: Gpu) -> tuple[str, ...]:
    events = gpu.values(GpuReadings.clock_event_active)
    return tuple(reason for reason, labels in _LABELS.items() if events.get(labels))
