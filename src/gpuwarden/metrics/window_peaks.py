"""Peaks of a value over fixed windows: the same figure for every scraper, whenever it comes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

from gpuwarden.metrics.model import Labels

WINDOWS = {"1m": 60, "5m": 300}  # label -> seconds
_WINDOWS: dict[Labels, int] = {(label,): seconds for label, seconds in WINDOWS.items()}
_LONGEST = max(WINDOWS.values())


class WindowPeaks:
    """Takes looks at one value and knows the highest of each window, to a second. Used by one thread at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # (second, highest), values falling: a later second that is not lower makes the earlier ones needless.
        self._highest: deque[tuple[int, float]] = deque()

    def add(self, value: float) -> None:
        """Note one value."""
        second, kept = int(self._clock()), self._highest
        if kept and kept[-1][0] == second and kept[-1][1] >= value:
            return
        while kept and kept[-1][1] <= value:
            kept.pop()
        kept.append((second, value))
        while kept[0][0] < second - _LONGEST:
            kept.popleft()

    def maxima(self) -> Mapping[Labels, float]:
        """Return the highest value of each window by its label; nothing for a window without a look."""
        now = int(self._clock())
        found: dict[Labels, float] = {}
        for labels, seconds in _WINDOWS.items():
            for second, value in self._highest:
                if second >= now - seconds:
                    found[labels] = value
                    break
        return found
