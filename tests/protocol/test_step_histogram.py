"""Percentiles of step times."""

from __future__ import annotations

import pytest

from gpuwarden.protocol.step_histogram import StepHistogram


def test_percentiles() -> None:
    """Percentiles are accurate to a few per cent; without steps there are none."""
    durations = StepHistogram()
    assert durations.percentiles(0.5, 0.95) == (None, None)
    for milliseconds in range(1, 101):
        durations.add(milliseconds / 1000, 1)
    median, p95 = durations.percentiles(0.5, 0.95)
    assert median == pytest.approx(0.05, rel=0.03)
    assert p95 == pytest.approx(0.095, rel=0.03)


def test_percentiles_of_one() -> None:
    """Every percentile of one step is that step, even with an impossible duration of 0."""
    durations = StepHistogram()
    durations.add(0.0, 1)
    median, p95 = durations.percentiles(0.5, 0.95)
    assert median == p95
    assert median is not None
    assert median < 1e-8


@pytest.mark.parametrize("seconds", [0.1, 0.0503, 0.007])
def test_percentiles_of_equal_steps(seconds: float) -> None:
    """If all steps took the same time, every percentile is that time, not the middle of its bucket."""
    durations = StepHistogram()
    durations.extend([seconds] * 10, 1)
    durations.add(4 * seconds, 4)
    assert durations.percentiles(0.5, 0.95) == (seconds, seconds)
