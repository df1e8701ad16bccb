"""Theil-Sen trend: slope and confidence interval."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.analysis.memory.running_minimum import running_minimum
from gpuwarden.analysis.memory.theil_sen import MIN_TREND_POINTS, fit_trend

VALUES = st.lists(st.integers(-(10**6), 10**6), min_size=MIN_TREND_POINTS, max_size=24)


def test_a_line_has_an_exact_slope() -> None:
    """Slope and bounds of points on a line are equal."""
    found = fit_trend([(at, 5 + 3 * at) for at in range(10)])
    assert found is not None
    assert (found.slope, found.lower, found.upper) == (3, 3, 3)


def test_a_few_outliers_do_not_matter() -> None:
    """Two outliers of twelve points do not change the slope."""
    points = [(float(at), 100.0 * at) for at in range(12)]
    points[3], points[8] = (3.0, 90_000.0), (8.0, -90_000.0)
    found = fit_trend(points)
    assert found is not None
    assert found.slope == pytest.approx(100)
    assert found.lower <= 100 <= found.upper


def test_the_interval_has_its_confidence() -> None:
    """About 90 % of many noisy lines have their true slope within the bounds."""
    rng = random.Random(1)  # noqa: S311 - repeatable
    within_bounds = 0
    for _ in range(400):
        found = fit_trend([(float(at), 2.0 * at + rng.gauss(0, 5)) for at in range(12)])
        assert found is not None
        within_bounds += found.lower <= 2 <= found.upper
    assert 0.86 <= within_bounds / 400 <= 0.97


def test_equal_values_have_no_trend() -> None:
    """The slope of equal values is 0, and that of too few points is unknown."""
    found = fit_trend([(at, 7) for at in range(5)])
    assert found is not None
    assert (found.slope, found.lower, found.upper) == (0, 0, 0)
    assert fit_trend([(0, 1), (1, 2)]) is None


def test_the_running_minimum_is_never_freed_memory() -> None:
    """Each value is the minimum from there to the end."""
    assert running_minimum([3, 5, 4, 9, 6]) == [3, 4, 4, 6, 6]


@given(VALUES, st.integers(-(10**6), 10**6), st.sampled_from([0.25, 2.0, 64.0]))
def test_shift_and_scale(values: list[int], shift: int, scale: float) -> None:
    """The slope does not depend on the origin of values and times, and scales with their units."""
    points = [(float(at), float(value)) for at, value in enumerate(values)]
    found, moved = fit_trend(points), fit_trend([(at * 2 + 64, (value + shift) * scale) for at, value in points])
    assert found is not None
    assert moved is not None
    assert moved.slope == found.slope * scale / 2
    assert (moved.lower, moved.upper) == (found.lower * scale / 2, found.upper * scale / 2)


@given(VALUES)
def test_backwards(values: list[int]) -> None:
    """Reversed values have the negated slope."""
    points = [(float(at), float(value)) for at, value in enumerate(values)]
    found, back = (
        fit_trend(points),
        fit_trend([(at, value) for (at, _), (_, value) in zip(points, reversed(points), strict=True)]),
    )
    assert found is not None
    assert back is not None
    assert (back.slope, back.lower, back.upper) == (-found.slope, -found.upper, -found.lower)
