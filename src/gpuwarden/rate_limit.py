"""Token bucket rate limit."""

from __future__ import annotations


class RateLimit:
    """Token bucket: `burst` uses in a row, and one per `seconds` in the long run; times are monotonic."""

    def __init__(self, burst: int, seconds: float) -> None:
        self._ahead = (burst - 1) * seconds
        self._seconds = seconds
        self._paid_until = 0.0
        self.consumed = 0

    def next_allowed(self, now: float) -> float:
        """Return the time of the next allowed use: `now` or later."""
        return max(now, self._paid_until - self._ahead)

    def is_unused(self, now: float) -> bool:
        """Return whether no use still counts: a new limit would allow the same."""
        return self._paid_until <= now

    def consume(self, now: float) -> None:
        """Record one use."""
        self._paid_until = max(now, self._paid_until) + self._seconds
        self.consumed += 1
