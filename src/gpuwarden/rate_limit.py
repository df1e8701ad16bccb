"""Rate limit with bursts."""

from __future__ import annotations


class RateLimit:
    """Token bucket: `burst` times in a row, and one every `seconds` in the long run; times are monotonic."""

    def __init__(self, burst: int, seconds: float) -> None:
        self._ahead = (burst - 1) * seconds
        self._seconds = seconds
        self._paid_until = 0.0
        self.consumed = 0

    def next_allowed(self, now: float) -> float:
        """Return when it may be done next: now, or some time later."""
        return max(now, self._paid_until - self._ahead)

    def consume(self, now: float) -> None:
        """Count that it was done once."""
        self._paid_until = max(now, self._paid_until) + self._seconds
        self.consumed += 1
