"""The highest device memory in use over fixed windows: the same figure for every scraper, whenever it comes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

from gpuwarden.metric import Labels

WINDOWS = {"1m": 60.0, "5m": 300.0}  # label -> seconds
_STEP_SECONDS = 1.0  # of which the highest value is kept
_LONGEST = max(WINDOWS.values()) / _STEP_SECONDS


class Peaks:
    """Takes looks at one value and knows the highest of each window, to a second. Threads share it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # (step, highest), values falling: a later step that is not lower makes the earlier ones needless.
        self._steps: deque[tuple[int, float]] = deque()

    def look(self, value: float) -> None:
        """Note one value."""
        step = int(self._clock() / _STEP_SECONDS)
        with self._lock:
            steps = self._steps
            if steps and steps[-1][0] == step and steps[-1][1] >= value:
                return
            while steps and steps[-1][1] <= value:
                steps.pop()
            steps.append((step, value))
            while steps[0][0] < step - _LONGEST:
                steps.popleft()

    def highest(self) -> Mapping[Labels, float]:
        """Return the highest value of each window by its label; nothing for a window without a look."""
        now = int(self._clock() / _STEP_SECONDS)
        found: dict[Labels, float] = {}
        with self._lock:
            for label, seconds in WINDOWS.items():
                begin = now - seconds / _STEP_SECONDS
                highest = next((value for step, value in self._steps if step >= begin), None)
                if highest is not None:
                    found[label,] = highest
        return found
