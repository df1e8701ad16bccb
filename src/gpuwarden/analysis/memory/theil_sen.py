"""Trend of a few points over time by ranks, robust against outliers.

The slope is that of Theil and Sen, the median of the slopes of all pairs, and its interval Sen's (Journal of the
American Statistical Association 63, 1968).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from statistics import median

MIN_TREND_POINTS = 3
DEVIATIONS_OF_NINE_TENTHS = 1.645  # of the normal distribution


@dataclass(frozen=True, slots=True)
class Trend:
    """Slope per second, between `lower` and `upper` with 90 % confidence."""

    slope: float
    lower: float
    upper: float


def fit_trend(points: Sequence[tuple[float, float]]) -> Trend | None:
    """Return the trend of points (seconds, value) with rising, distinct times; None for fewer than three.

    The cost grows with the square of their number: about 20 µs for a dozen.
    """
    count = len(points)
    if count < MIN_TREND_POINTS:
        return None
    slopes = sorted((value - before) / (at - then) for (then, before), (at, value) in combinations(points, 2))
    spread = DEVIATIONS_OF_NINE_TENTHS * sqrt(count * (count - 1) * (2 * count + 5) / 18)
    lower = max(int((len(slopes) - spread) / 2), 0)
    return Trend(median(slopes), slopes[lower], slopes[-1 - lower])
