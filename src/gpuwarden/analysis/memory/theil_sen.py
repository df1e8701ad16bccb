"""Trend of a few points over time by ranks, which no single point can spoil.

The slope is Theil's and Sen's, the median of the slopes of all pairs, and its interval Sen's (Journal of the American
Statistical Association 63, 1968).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from math import sqrt
from typing import TypeVar

MIN_TREND_POINTS = 3
DEVIATIONS_OF_NINE_TENTHS = 1.645  # of the normal distribution

Number = TypeVar("Number", bound=float)


def median(values: Iterable[float]) -> float:
    """Return the middle one of at least one value, or the mean of the two.

    The statistics module has it too, but loads random and decimal, 0.7 MiB of memory.
    """
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def running_minimum(values: Sequence[Number]) -> list[Number]:
    """Return at each place the least value from there to the end: a floor that never falls."""
    return list(accumulate(reversed(values), min))[::-1]


@dataclass(frozen=True, slots=True)
class Trend:
    """`slope` a second, which lies between `lower` and `upper` with nine tenths' confidence."""

    slope: float
    lower: float
    upper: float


def fit_trend(points: Sequence[tuple[float, float]]) -> Trend | None:
    """Return how the points (seconds, value) rise; None of fewer than three. Their times rise, and differ.

    The cost grows with the square of their number: a dozen take some 20 µs.
    """
    count = len(points)
    if count < MIN_TREND_POINTS:
        return None
    slopes = sorted((value - before) / (at - then) for (then, before), (at, value) in combinations(points, 2))
    spread = DEVIATIONS_OF_NINE_TENTHS * sqrt(count * (count - 1) * (2 * count + 5) / 18)
    lower = max(int((len(slopes) - spread) / 2), 0)
    return Trend(median(slopes), slopes[lower], slopes[-1 - lower])
