"""Peaks of fixed windows."""

import random

import pytest
from moved_clock import Clock

from gpuwarden.metrics.window_peaks import WINDOWS, WindowPeaks


@pytest.fixture
def clock() -> Clock:
    """Make a clock."""
    return Clock()


def test_nothing_seen_is_nothing_told(clock: Clock) -> None:
    """Before the first sample there is no peak."""
    assert WindowPeaks(clock).maxima() == {}


def test_a_peak_leaves_each_window_in_its_time(clock: Clock) -> None:
    """A peak between polls is in the one-minute and the five-minute window."""
    peaks = WindowPeaks(clock)
    peaks.add(5)
    peaks.add(9)
    peaks.add(4)
    clock.now += 59
    peaks.add(4)
    assert peaks.maxima() == {("1m",): 9, ("5m",): 9}
    clock.now += 3
    peaks.add(3)
    assert peaks.maxima() == {("1m",): 4, ("5m",): 9}
    clock.now += 240
    peaks.add(2)
    assert peaks.maxima() == {("1m",): 2, ("5m",): 4}


def test_an_old_peak_is_not_told_without_new_looks(clock: Clock) -> None:
    """A window without a sample has no peak, rather than an old one."""
    peaks = WindowPeaks(clock)
    peaks.add(7)
    clock.now += 100
    assert peaks.maxima() == {("5m",): 7}
    clock.now += 300
    assert peaks.maxima() == {}


def test_peaks_equal_those_of_all_looks(clock: Clock) -> None:
    """For any samples, the peaks are those within the window, and few values are kept."""
    rng, looks = random.Random(1), list[tuple[float, float]]()  # noqa: S311 - no secret
    peaks = WindowPeaks(clock)
    for number in range(3000):
        clock.now += rng.choice([0.1, 0.1, 0.5, 7.0])
        value = rng.randrange(1000) * (1 + (clock.now % 300 < 150))
        looks.append((clock.now, value))
        peaks.add(value)
        if number % 7:
            continue
        expected = {
            (label,): max(value for moment, value in looks if int(moment) >= int(clock.now) - seconds)
            for label, seconds in WINDOWS.items()
        }
        assert peaks.maxima() == expected
    assert len(peaks._highest) <= max(WINDOWS.values()) + 1
