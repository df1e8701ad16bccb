"""How a few points rise over time, by ranks: pure statistics that no single point can spoil.

The slope is Theil's and Sen's, the median of the slopes of all pairs, and its interval Sen's (Journal of the American
Statistical Association 63, 1968); the share of pairs that rise is what Mann's and Kendall's test counts.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import combinations
from math import sqrt
from typing import NamedTuple

FEWEST_POINTS = 3
MOST_POINTS = 24  # of which 276 pairs take some 40 µs

_Z = 1.645  # standard deviations that hold nine tenths


def median(values: Iterable[float]) -> float:
    """Return the middle one of at least one value, or the mean of the two.

    The statistics module has it too, but takes 0.7 MiB of memory, as it loads random and decimal.
    """
    return _middle(sorted(values))


def _middle(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


class Trend(NamedTuple):
    """`slope` a second, which lies between `lower` and `upper` with nine tenths' confidence.

    `rising` is the share of rising pairs among those whose two values differ; 0.5 is no trend.
    """

    slope: float
    lower: float
    upper: float
    rising: float


def trend(points: Sequence[tuple[float, float]]) -> Trend | None:
    """Return how the points (seconds, value) rise; None of fewer than three. Their times rise, and differ.

    Raises ValueError for more than MOST_POINTS: the cost is quadratic.
    """
    if len(points) > MOST_POINTS:
        raise ValueError(f"at most {MOST_POINTS} points")
    if len(points) < FEWEST_POINTS:
        return None
    slopes = [(value - before) / (at - then) for (then, before), (at, value) in combinations(points, 2)]
    slopes.sort()
    falling, rising = bisect_left(slopes, 0), len(slopes) - bisect_right(slopes, 0)
    lower, upper = _interval(len(points), len(slopes))
    return Trend(
        slope=_middle(slopes),
        lower=slopes[lower],
        upper=slopes[upper],
        rising=rising / (rising + falling) if rising + falling else 0.5,
    )


def _interval(points: int, pairs: int) -> tuple[int, int]:
    """Return the ranks, from 0, of the slopes that bound the interval."""
    spread = _Z * sqrt(points * (points - 1) * (2 * points + 5) / 18)
    lower = max(int((pairs - spread) / 2), 0)
    return lower, pairs - 1 - lower
