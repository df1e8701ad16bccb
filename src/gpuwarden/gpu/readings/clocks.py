"""Clocks, and the reasons and times that limited them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from gpuwarden.metrics.model import Labels
from gpuwarden.nvml import fields
from gpuwarden.nvml.constants import CLOCK_EVENT_REASONS, CLOCKS, PERFORMANCE_STATE_UNKNOWN
from gpuwarden.nvml.device import Device
from gpuwarden.nvml.interface import Handle

_MEGA = 1e6
_ALL_REASONS: int = sum(CLOCK_EVENT_REASONS.values())
_CLOCKS: dict[Labels, int] = {(name,): number for name, number in CLOCKS.items()}
# Remembered about clock events: the supported reasons, that they were read, and those that the driver counts.
_REASONS, _READ, _COUNTED = "clock event reasons", "clock events read", "clock events counted"


def current(gpu: Device) -> dict[Labels, float]:
    """Hertz by clock."""
    return _read_clocks(gpu, gpu.nvml.nvmlDeviceGetClockInfo)


def highest(gpu: Device) -> dict[Labels, float]:
    """Hertz that this device can reach, by clock."""
    return _read_clocks(gpu, gpu.nvml.nvmlDeviceGetMaxClockInfo)


def _read_clocks(gpu: Device, ask: Callable[[Handle, int], int]) -> dict[Labels, float]:
    return {
        labels: megahertz * _MEGA
        for labels, number in _CLOCKS.items()
        if (megahertz := gpu.try_query(ask, number)) is not None
    }


def applications(gpu: Device) -> dict[Labels, float]:
    """Hertz that applications are given, by clock and by setting; newer drivers have deprecated them."""
    found: dict[Labels, int | None] = {}
    for clock in ("graphics", "memory"):
        found[clock, "current"] = gpu.try_query(gpu.nvml.nvmlDeviceGetApplicationsClock, CLOCKS[clock])
        # A millisecond each on an H200, for a value that does not change.
        found[clock, "default"] = gpu.query_once(gpu.nvml.nvmlDeviceGetDefaultApplicationsClock, CLOCKS[clock])
    return {labels: megahertz * _MEGA for labels, megahertz in found.items() if megahertz}


def _active(gpu: Device) -> int:
    # Drivers before R535 have the same bits under the older name.
    active = gpu.try_query(gpu.nvml.nvmlDeviceGetCurrentClocksEventReasons)
    return gpu.query(gpu.nvml.nvmlDeviceGetCurrentClocksThrottleReasons) if active is None else active


def _known(gpu: Device) -> int:
    """Return the reasons that this device can report, as a mask."""
    bits = gpu.try_query(gpu.nvml.nvmlDeviceGetSupportedClocksEventReasons)
    if bits is None:
        bits = gpu.try_query(gpu.nvml.nvmlDeviceGetSupportedClocksThrottleReasons)
    return _ALL_REASONS if bits is None else bits & _ALL_REASONS


def events(gpu: Device) -> Mapping[Labels, float]:
    """Read the clock event reasons that limit the clocks, and integrate the time of each for `event_seconds`."""
    active = _active(gpu)
    known = gpu.remember(_REASONS, lambda: _known(gpu))
    gpu.remember(_READ, lambda: True)
    if active & known:
        for name in _names(active & known):
            gpu.integrate(("clock event", name), 1.0)
    return _events(active & known, known)


@lru_cache(maxsize=64)  # GPUs are idle, or at their power limit: few different answers
def _events(active: int, known: int) -> Mapping[Labels, float]:
    return {(name,): float(bool(active & CLOCK_EVENT_REASONS[name])) for name in _names(known)}


@lru_cache(maxsize=64)
def _names(mask: int) -> tuple[str, ...]:
    return tuple(name for name, bit in CLOCK_EVENT_REASONS.items() if mask & bit)


def event_seconds(gpu: Device) -> dict[Labels, float]:
    """Seconds that each reason has limited the clocks: the driver's count if it has one, otherwise ours.

    The driver counts nanoseconds since it was loaded; ours starts with the daemon and has the resolution of polls.
    """
    numbers = fields.CLOCK_EVENT_NANOSECONDS
    counted = dict(zip(numbers, gpu.fields((number, 0) for number in numbers.values()), strict=True))
    known = gpu.remember(_REASONS, lambda: _known(gpu))
    by_driver = gpu.remember(_COUNTED, lambda: [name for name, value in counted.items() if value is not None])
    seen = _names(known) if gpu.is_remembered(_READ) else ()
    ours = {name: gpu.integrated(("clock event", name)) for name in seen if name not in by_driver}
    theirs = {name: nanoseconds / 1e9 for name in by_driver if (nanoseconds := counted[name]) is not None}
    return {(name,): seconds for name, seconds in (ours | theirs).items()}


def performance_state(gpu: Device) -> int | None:
    """From 0, the fastest, to 15."""
    state = gpu.query(gpu.nvml.nvmlDeviceGetPerformanceState)
    return None if state == PERFORMANCE_STATE_UNKNOWN else state
