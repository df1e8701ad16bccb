"""Downsampling of a series: bounded size, with its extremes and its start kept."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from memory_shapes import MemorySeries

from gpuwarden.analysis.memory.downsampling import MAX_WINDOWS_PER_LEVEL


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=400), st.sampled_from([0.1, 0.5, 3.0]))
def test_extremes_are_kept(values: list[int], spacing: float) -> None:
    """The lowest and highest values are kept, and windows are contiguous."""
    memory = MemorySeries()
    for number, value in enumerate(values):
        memory.add_report(number * spacing, value)
    windows = list(memory)
    assert min(each.lowest for each in windows) == min(values)
    assert max(each.highest for each in windows) == max(values)
    assert all(one.ended == other.began for one, other in pairwise(windows))
    assert all(each.began <= each.lowest_at <= each.ended for each in windows)
    assert windows[-1].highest >= values[-1] >= windows[-1].lowest
    assert memory.closed >= len(windows) - 1


def test_a_long_series_stays_small() -> None:
    """A week of values fits a few hundred windows, none longer than a 30th of it."""
    memory = MemorySeries()
    for number in range(50_000):
        memory.add_report(number * 13.0, 5 if number == 33_333 else 1000 + number % 7)
    windows = list(memory)
    assert len(windows) <= MAX_WINDOWS_PER_LEVEL * 14
    assert min(windows, key=lambda each: each.lowest).lowest_at == 33_333 * 13.0
    assert windows[0].began == 0
    assert max(each.ended - each.began for each in windows) <= 50_000 * 13.0 / 30
