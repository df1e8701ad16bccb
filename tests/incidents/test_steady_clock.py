"""Clock that was set: times of before and after on one scale."""

from __future__ import annotations

import pytest

from gpuwarden.incidents.steady_clock import SteadyClock

HOUR = 3600.0


def clock_of(*steps: float) -> SteadyClock:
    """Return a clock that ran for ten minutes from 100,000, and for ten more after each step by which it was set."""
    clock, at, uptime = SteadyClock(), 100_000.0, 5_000.0
    for step in (0.0, *steps):
        at += step
        for _ in range(601):
            clock.add_reading(at, uptime)
            at, uptime = at + 1.0, uptime + 1.0
    return clock


def test_clock_that_was_not_set_leaves_times_as_they_are() -> None:
    """Without a step each time is returned, also one of long ago and one to come; NTP's small corrections are none."""
    clock = clock_of(0.001, -0.5)
    assert not clock.has_stepped
    assert [clock.corrected(at) for at in (0.1, 100_000.3, 1e9)] == [0.1, 100_000.3, 1e9]


@pytest.mark.parametrize("step", [HOUR, -HOUR, 400 * 24 * HOUR])
def test_times_before_a_step_are_moved_by_it(step: float) -> None:
    """A time of before the step is moved, that of the poll after the last one too; a time since then is not."""
    clock = clock_of(step)
    assert clock.has_stepped
    assert clock.corrected(100_300.0) == pytest.approx(100_300.0 + step)
    assert clock.corrected(100_600.9) == pytest.approx(100_600.9 + step)
    assert clock.corrected(100_605.0 + step) == pytest.approx(100_605.0 + step)


def test_clock_that_is_set_back_and_forth() -> None:
    """Times of before two steps that cancel out stay, and those between them are moved."""
    clock = clock_of(HOUR, -HOUR)
    assert clock.corrected(100_300.0) == pytest.approx(100_300.0)
    assert clock.corrected(100_700.0 + HOUR) == pytest.approx(100_700.0)
