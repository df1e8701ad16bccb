"""Steady clock: Unix times read before the wall clock was set, converted to the clock as it is now."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MAX_PERIODS = 16  # between two steps of the clock; older ones are dropped
MIN_STEP_SECONDS = 1.0  # smaller ones are the gradual corrections of NTP


@dataclass(slots=True)
class _Period:
    """Period in which the clock was not set: `offset` is Unix time less time since boot, the others are since boot."""

    offset: float
    began: float
    ended: float

    def distance(self, at: float) -> float:
        """Return by how many seconds a Unix time is outside of the period."""
        uptime = at - self.offset
        return max(self.began - uptime, uptime - self.ended, 0.0)


class SteadyClock:
    """Wall clock that knows when it was set. A time belongs to the period that it is nearest to."""

    def __init__(self) -> None:
        self._periods: deque[_Period] = deque(maxlen=MAX_PERIODS)

    def add_reading(self, at: float, uptime: float) -> None:
        """Add a Unix time and the seconds since boot (CLOCK_BOOTTIME, which goes on while the host sleeps)."""
        if not self._periods or abs(at - uptime - self._periods[-1].offset) >= MIN_STEP_SECONDS:
            self._periods.append(_Period(at - uptime, uptime, uptime))
        else:
            self._periods[-1].offset, self._periods[-1].ended = at - uptime, uptime

    @property
    def has_stepped(self) -> bool:
        """True if the clock was set."""
        return len(self._periods) > 1

    def corrected(self, at: float) -> float:
        """Return what the clock, as it is set now, would have shown at a Unix time read earlier."""
        if not self.has_stepped:
            return at
        last = self._periods[-1]
        period = min(reversed(self._periods), key=lambda period: period.distance(at))
        return at if period is last else at - period.offset + last.offset
