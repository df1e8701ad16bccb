"""What may be done out of turn is a few times in a row, and seldom in the long run."""

from __future__ import annotations

from gpuwarden.fairness.rate_limit import RateLimit


def done(allowance: RateLimit, begin: float, end: float) -> list[float]:
    """Do it as early as may be, again and again; return when."""
    times: list[float] = []
    while (at := allowance.next_allowed(times[-1] if times else begin)) <= end:
        allowance.consume(at)
        times.append(at)
    return times


def test_burst_and_long_run() -> None:
    """Three times at once, then once every two seconds; after a rest a burst again, but no larger one."""
    allowance = RateLimit(3, 2.0)
    assert done(allowance, 100.0, 105.0) == [100.0, 100.0, 100.0, 102.0, 104.0]
    assert done(allowance, 1000.0, 1003.0) == [1000.0, 1000.0, 1000.0, 1002.0]
    assert allowance.consumed == 9
