"""Clock that a test moves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Clock:
    """Monotonic clock that is moved by the test."""

    now: float = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Move it."""
        self.now += seconds
