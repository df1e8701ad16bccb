"""Peaks of a value over fixed windows, the same for every scraper at any time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

from gpuwarden.metrics.model import Labels

WINDOWS = {"1m": 60, "5m": 300}  # label -> seconds
_WINDOWS: dict[Labels, int] = {(label,): seconds for label, seconds in WINDOWS.items()}
_MAX_WINDOW_SECONDS = max(WINDOWS.values())


class WindowPeaks:
    """Highest value of each window, with a resolution of one second. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # (second, highest) with falling values: a later value that is not lower replaces the earlier ones.
        self._highest: deque[tuple[int, float]] = deque()

    def add(self, value: float) -> None:
        """Add a sample."""
        second, kept = int(self._clock()), self._highest
        if kept and kept[-1][0] == second and kept[-1][1] >= value:
            return
        while kept and kept[-1][1] <= value:
            kept.pop()
        kept.append((second, value))
        while kept[0][0] < second - _MAX_WINDOW_SECONDS:
            kept.popleft()

    def maxima(self) -> Mapping[Labels, float]:
        """Return the highest value of each window by its label, without windows that have no sample."""
        now = int(self._clock())
        found: dict[Labels, float] = {}
        for labels, seconds in _WINDOWS.items():
            for second, value in self._highest:
                if second >= now - seconds:
                    found[labels] = value
                    break
        return found
