"""How long steps took: counts by STEP_BUCKETS for the page, and finer ones for the median and the 95th percentile."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence

from gpuwarden.protocol import STEP_BUCKETS

_FINENESS = 16  # classes to a doubling, so a percentile is right to 2 %


class Durations:
    """Durations of steps in seconds, in bounded memory."""

    def __init__(self) -> None:
        self.total = 0.0
        self.buckets = [0] * (len(STEP_BUCKETS) + 1)
        self.count = 0
        self._classes: Counter[int] = Counter()

    def add(self, seconds: float, steps: int) -> None:
        """Note `steps` that took `seconds` together."""
        self.extend((seconds,), steps)

    def extend(self, executions: Sequence[float], steps: int) -> None:
        """Note executions of `steps` each, by the seconds each took. Costs by how much they differ, not by how many."""
        self.total += sum(executions)
        self.count += len(executions) * steps
        ordered = sorted(executions)
        done = 0
        while done < len(ordered):
            each = ordered[done] / steps
            bucket = bisect_left(STEP_BUCKETS, each)
            kind = math.floor(_FINENESS * math.log2(max(each, 1e-9)))
            # All that share this one's bucket and class, found by the bounds of both.
            bound = min(STEP_BUCKETS[bucket : bucket + 1] or (math.inf,)) * steps
            alike = bisect_right(ordered, min(bound, 2 ** ((kind + 1) / _FINENESS) * steps), done + 1)
            self.buckets[bucket] += (alike - done) * steps
            self._classes[kind] += (alike - done) * steps
            done = alike

    def percentiles(self, *shares: float) -> tuple[float | None, ...]:
        """Return the seconds that each share of the steps, rising and from 0 to 1, did not exceed; None without any."""
        found: list[float | None] = []
        classes = iter(sorted(self._classes.items()))
        reached, middle = 0, None
        for share in shares:
            while reached < max(share * self.count, 1) and (entry := next(classes, None)):
                reached += entry[1]
                middle = 2 ** ((entry[0] + 0.5) / _FINENESS)
            found.append(middle)
        return tuple(found)
