"""Token bucket rate limits: a single one, and one for each key."""

from __future__ import annotations

from collections.abc import Hashable


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


class RateLimits:
    """Rate limit of each key, such as a user."""

    def __init__(self, burst: int, seconds: float) -> None:
        self._burst = burst
        self._seconds = seconds
        self._limits: dict[Hashable, RateLimit] = {}

    def allows(self, key: Hashable, now: float) -> bool:
        """Return whether a use is allowed now."""
        limit = self._limits.get(key)
        return limit is None or limit.next_allowed(now) <= now

    def consume(self, key: Hashable, now: float) -> None:
        """Record one use."""
        self._limits.setdefault(key, RateLimit(self._burst, self._seconds)).consume(now)

    def expire(self, now: float) -> None:
        """Drop the limits that no use counts for."""
        self._limits = {key: limit for key, limit in self._limits.items() if not limit.is_unused(now)}
