"""Histogram of step durations: counts by STEP_BUCKETS for the page, finer ones for the median and 95th percentile."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from math import inf

from gpuwarden.protocol.messages import STEP_BUCKETS

_PER_DOUBLING = 16  # classes, so a percentile is right to 2 %
_CLASSES = tuple(
    2 ** (index / _PER_DOUBLING) for index in range(-30 * _PER_DOUBLING, 17 * _PER_DOUBLING)
)  # a nanosecond to a day


class StepHistogram:
    """Durations of steps in seconds, in bounded memory."""

    def __init__(self) -> None:
        self.total = 0.0
        self.buckets = [0] * (len(STEP_BUCKETS) + 1)
        self.count = 0
        self._least, self._most = inf, 0.0
        self._classes: Counter[int] = Counter()

    def add(self, seconds: float, steps: int) -> None:
        """Record `steps` that took `seconds` together."""
        self.extend((seconds,), steps)

    def extend(self, executions: Iterable[float], steps: int) -> None:
        """Record executions of `steps` each, by the seconds each took."""
        for execution in executions:
            seconds = execution / steps
            self.total += execution
            self.count += steps
            self._least, self._most = min(self._least, seconds), max(self._most, seconds)
            self.buckets[bisect_left(STEP_BUCKETS, seconds)] += steps
            self._classes[bisect_left(_CLASSES, seconds)] += steps

    def percentiles(self, *shares: float) -> tuple[float | None, ...]:
        """Return the seconds that each share of the steps, rising and from 0 to 1, did not exceed; None without any.

        Right to 2 %, and nothing that no step took: not less than the shortest, nor more than the longest.
        """
        found: list[float | None] = []
        classes = iter(sorted(self._classes.items()))
        reached, middle = 0, None
        for share in shares:
            while reached < max(share * self.count, 1) and (entry := next(classes, None)):
                reached += entry[1]
                middle = min(max(_compute_middle(entry[0]), self._least), self._most)
            found.append(middle)
        return tuple(found)


def _compute_middle(at: int) -> float:
    upper = _CLASSES[min(at, len(_CLASSES) - 1)]
    return upper * 2 ** (-0.5 / _PER_DOUBLING)
