"""Leak detection and OOM forecasts on simulated memory series: leaks are found in time, and nothing else is."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from operator import ne
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_shapes import MIB, POLL_SECONDS, MemorySeries, Training, detect_leaks

from gpuwarden.analysis.memory.leak_detector import MIN_LASTING_SECONDS, Leak, LeakDetector, find_leak

GIB = 1 << 30


def _buckets(seed: int) -> Training:
    chance = random.Random(seed)  # noqa: S311 - repeatable shapes
    first = sorted(chance.expovariate(1 / 12) for _ in range(8))
    return Training(kept=lambda at: sum(8 * MIB for each in first if each < at))


LEAK_FREE = {
    "flat": Training(),
    "prefetched batches": Training(noise=40 * MIB),
    "variable batches": Training(noise=60 * MIB, varied=0.8, epoch=7.0, seconds=200),
    "one step": Training(kept=lambda at: 120 * MIB * (at > 20)),
    "two steps": Training(kept=lambda at: 90 * MIB * (at > 20) + 60 * MIB * (at > 50)),
    "three steps": Training(kept=lambda at: 40 * MIB * ((at > 20) + (at > 33) + (at > 70))),
    "unfreezing": Training(kept=lambda at: 20 * MIB * sum(at > each for each in (10, 20, 40, 60))),
    "buckets": _buckets(1),
    "other buckets": _buckets(2),
    "saw within an epoch": Training(kept=lambda at: 40 * MIB * (at % 2) / 2),
    "large saw within an epoch": Training(kept=lambda at: 110 * MIB * (at % 6) / 6, epoch=6.0),
    "saw over five epochs": Training(kept=lambda at: 90 * MIB * (at % 10) / 10, seconds=200),
    "long saw": Training(kept=lambda at: 90 * MIB * (at % 30) / 30, seconds=200),
    "saw without epochs": Training(kept=lambda at: 90 * MIB * (at % 12) / 12, epoch=1e9, seconds=200),
    "nearly full": Training(base=478 * MIB, transient=20 * MIB, noise=4 * MIB),
    "nearly full, with a step": Training(base=466 * MIB, transient=20 * MIB, kept=lambda at: 12 * MIB * (at > 40)),
    "saturating": Training(kept=lambda at: 80 * MIB * (1 - math.exp(-at / 15)), seconds=200),
    "filling a cache at first": Training(kept=lambda at: 80 * MIB * min(at / 8, 1), epoch=10.0),
    "validation holds more": Training(kept=lambda at: 50 * MIB * (at % 5 > 4), epoch=4.0, validation=1.0),
    "freed once": Training(kept=lambda at: 150 * MIB * (at < 40)),
    "80 GiB, variable": Training(
        cap=80 * GIB, base=20 * GIB, transient=30 * GIB, noise=2 * GIB, varied=0.5, epoch=60.0, seconds=600
    ),
    "80 GiB, drifting": Training(
        cap=80 * GIB, base=20 * GIB, transient=10 * GIB, step=0.2, epoch=60.0, seconds=3000,
        kept=lambda at: GIB * min(at / 2500, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("drift", [0, MIB // 2, -MIB // 2])
def test_only_the_first_tooth_of_a_high_saw_is_reported(drift: int) -> None:
    """Memory that was freed once is not reported as a leak when it is allocated again, to the byte or not."""
    saw = Training(kept=lambda at: 250 * MIB * (at % 50) / 50 + drift * (at // 50), base=154 * MIB, seconds=400)
    result = detect_leaks(saw)
    assert result.ended is None
    assert [at for at, _ in result.leaks if at > 60] == []


def test_leak_free() -> None:
    """None of these is ever reported as a leak."""
    result = {name: detect_leaks(training) for name, training in LEAK_FREE.items()}
    assert [name for name, each in result.items() if each.ended is not None or each.leaks] == []


LEAKS = {
    "each step, 20 s": Training(kept=lambda at: 15 * MIB * at),
    "each step": Training(kept=lambda at: 5 * MIB * at),
    "each step, one epoch": Training(kept=lambda at: 5 * MIB * at, epoch=1e9),
    "variable batches": Training(kept=lambda at: 3 * MIB * at, noise=40 * MIB, varied=0.4),
    "each epoch": Training(kept=lambda at: 15 * MIB * (at // 4), epoch=4.0),
    "each fold": Training(kept=lambda at: 40 * MIB * (at // 8), epoch=4.0),
    "in validations": Training(epoch=3.0, validation=1.0, leaked=12 * MIB, seconds=300),
    "with a saw": Training(kept=lambda at: 40 * MIB * (at % 4) / 4 + 2 * MIB * at, epoch=4.0, seconds=200),
    "with a saw over epochs": Training(kept=lambda at: 60 * MIB * (at % 10) / 10 + 1.5 * MIB * at, seconds=800),
    "from a time on": Training(kept=lambda at: 4 * MIB * max(at - 60, 0), seconds=400),
    "after a step": Training(kept=lambda at: 90 * MIB * (at > 20) + 3 * MIB * max(at - 40, 0)),
    "hours": Training(cap=80 * GIB, base=10 * GIB, transient=10 * GIB, noise=GIB, step=0.5, epoch=300.0, seconds=20000,
                      kept=lambda at: 5 * MIB * at),
    "steps of 8 s": Training(cap=80 * GIB, base=10 * GIB, transient=10 * GIB, step=8, epoch=400.0, seconds=8000,
                             kept=lambda at: 20 * MIB * at),
}  # fmt: skip
SLOW = {"hours"}  # seconds of computing
LEAK_STARTS = {"from a time on": 60.0, "after a step": 40.0}
TOOTH_SECONDS = {"with a saw": 4.0, "with a saw over epochs": 10.0}  # of a tooth; the run fails at the top of one


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in LEAKS]
)
def test_a_leak_is_reported_in_its_second_half(name: str) -> None:
    """Each poll of the second half has the leak, and a time left within its bounds and 25 % of the true one."""
    result = detect_leaks(LEAKS[name])
    assert result.ended is not None
    half = (LEAK_STARTS.get(name, 0.0) + result.ended) / 2
    late = [(at, leak.left) for at, leak in result.polls if at >= half and leak and leak.left]
    assert len(late) == sum(at >= half for at, _ in result.polls)
    near = max(0.1 * (result.ended - half), 2 * POLL_SECONDS)
    true = [result.ended - at for at, _ in late]
    held = [
        seconds_left.lower <= was + 1 and was - 1 <= (seconds_left.upper or math.inf)
        for (_, seconds_left), was in zip(late, true, strict=True)
    ]
    errors = [
        max(abs(seconds_left.seconds - was) - TOOTH_SECONDS.get(name, 0.0), 0.0) / was
        for (_, seconds_left), was in zip(late, true, strict=True)
        if was > near
    ]
    assert median(errors) < 0.15
    assert sum(error <= 0.25 for error in errors) >= 0.9 * len(errors)
    assert sum(held) >= 0.9 * len(late)


def test_leak_that_stops_is_cleared_soon() -> None:
    """A leak of 40 s is cleared within a tenth of that after it stops."""
    reported = [at for at, _ in detect_leaks(Training(kept=lambda at: 5 * MIB * min(at, 40))).leaks]
    assert min(reported) < 30
    assert max(reported) <= 46


def test_the_rate_is_that_of_the_last_part() -> None:
    """A leak that becomes six times as fast is reported at its present rate."""
    result = detect_leaks(Training(kept=lambda at: MIB * at + 6 * MIB * max(at - 60, 0), seconds=200))
    assert result.ended is not None
    assert result.leaks[-1][1].bytes_per_second == pytest.approx(7 * MIB, rel=0.1)


def test_a_fast_leak_after_hours_is_found_early() -> None:
    """Hours of history do not delay detection: a leak of a minute is reported before half of it."""
    training = Training(
        cap=80 * GIB, base=10 * GIB, transient=10 * GIB, step=0.25, epoch=300.0, seconds=9000,
        kept=lambda at: GIB * max(at - 7200, 0),
    )  # fmt: skip
    result = detect_leaks(training)
    assert result.ended is not None
    assert 7200 < result.leaks[0][0] < (7200 + result.ended) / 2


def leaking(seconds: float, limit: Callable[[float], float | None], *, step: int = 50 * MIB) -> MemorySeries:
    """Make the series of a run that leaks 5 MiB a second from 100 MiB on, with four reports a second."""
    memory = MemorySeries()
    for number in range(int(seconds * 4)):
        held = int((100 + 5 * number / 4) * MIB)
        memory.add_report(number / 4, held, held + step, limit(number / 4))
    return memory


def seconds_left(leak: Leak | None) -> float:
    """Return the seconds until the limit."""
    assert leak is not None
    assert leak.left is not None
    return leak.left.seconds


def test_co_tenants_that_grow_shorten_the_time() -> None:
    """Half the time is left if the available memory falls as fast as the leak grows."""
    room = 600 - 100 - 200 - 50
    for others, seconds in ((0, room / 5), (5, (room - 200) / 10)):
        memory = leaking(40, lambda at, others=others: (600 - others * at) * MIB)  # type: ignore[misc] # a default
        assert seconds_left(find_leak(list(memory), 40.0)) == pytest.approx(seconds, rel=0.1)


def test_part_of_a_step_does_not_fit() -> None:
    """A sixteenth of a step's memory is subtracted under steady growth: an allocator cannot use the last pieces."""
    memory = leaking(40, lambda _at: 600 * MIB, step=64 * MIB)
    assert seconds_left(find_leak(list(memory), 40.0)) == pytest.approx((600 - 100 - 200 - 64 - 4) / 5, rel=0.005)


def test_page_cache_is_no_leak() -> None:
    """Pages of a mapped file grow the process, but leave the host's available memory as it is."""
    memory = MemorySeries()
    for number in range(100):
        memory.add_report(number * 5.0, (100 + 20 * number) * MIB, limit=(1100 + 20 * number) * MIB)
    assert find_leak(list(memory), 500.0) is None


@pytest.mark.parametrize(("before", "since"), [(600, 800), (800, 600), (600, 1000)])
def test_one_change_by_co_tenants_is_no_trend(before: int, since: int) -> None:
    """A single change by co-tenants changes the limit and leaves the rate as it is."""
    memory = leaking(55, lambda at: (before if at < 45 else since) * MIB)
    assert seconds_left(find_leak(list(memory), 55.0, reported=True)) == pytest.approx((since - 150) / 5 - 55, rel=0.05)


# Seconds of epochs on a busy host, first those that free their memory, then those that leak: measured, and two
# random walks of the load.
MEASURED = (
    (2.5, 2.5, 1.6, 2.3, 2.9, 3.6, 3.6),
    (1.3, 2.1, 5.6, 2.5, 1.8, 4.7, 3.4, 2.9, 1.3, 2.5, 1.5, 1.5, 2.5, 1.3, 1.3, 1.3, 1.2, 1.2, 1.3, 1.4),
)
SLOWER_FOR_A_WHILE = (
    (1.3, 1.2, 0.8, 0.7, 0.9, 1.0, 0.7),
    (0.9, 1.8, 2.6, 3.8, 2.7, 3.0, 6.4, 3.5, 6.3, 8.0, 4.8, 5.3, 5.7, 8.0, 3.7, 3.1, 3.1, 0.9, 1.0, 0.9),
)
PAUSES = (
    (1.2, 2.1, 2.1, 1.4, 2.1, 1.4, 1.6),
    (2.1, 2.2, 1.6, 0.9, 0.7, 0.7, 0.7, 0.7, 1.6, 1.3, 1.1, 1.5, 2.3, 3.8, 6.6, 3.0, 3.9, 2.6, 1.8, 2.3),
)


@pytest.mark.parametrize(
    ("begin", "epochs"),
    [(4.9, MEASURED), (5.8, MEASURED), (5.9, MEASURED), (5.0, SLOWER_FOR_A_WHILE), (5.0, PAUSES)],
)
def test_a_leak_at_an_uneven_pace_is_reported_once(
    begin: float, epochs: tuple[tuple[float, ...], tuple[float, ...]]
) -> None:
    """A leak in epochs of varying length is reported once, until the end."""
    kept, leaks = epochs
    ends = list(accumulate(kept + leaks, initial=begin))
    memory, detector, reported = MemorySeries(), LeakDetector(), []
    for number in range(int(ends[-1] * 4)):
        ended = bisect_right(ends, number / 4)
        current = (26 if ended < len(kept) else 9 + 5 * (ended - len(kept))) * MIB
        memory.add_report(number / 4, current, max(current, 27 * MIB), 128 * MIB)
        reported.append(detector.evaluate(memory, number / 4) is not None)
    assert sum(map(ne, reported[1:], reported)) == 1


def test_a_limit_unknown_for_seconds_does_not_end_a_leak() -> None:
    """While the limit is unknown for some seconds the leak stays reported, without time left."""
    memory, detector = MemorySeries(), LeakDetector()
    found = {}
    for at in range(60):
        memory.add_report(at, (100 + 5 * at) * MIB, (150 + 5 * at) * MIB, None if 40 <= at < 45 else 600 * MIB)
        found[at] = detector.evaluate(memory, at)
    assert [at for at in range(40, 60) if found[at] is None] == []
    without = {at for at, leak in found.items() if leak is not None and leak.left is None}
    assert without
    assert without <= set(range(40, 48))


def test_without_a_limit_there_is_no_forecast() -> None:
    """Without a limit a leak must last longer to be reported, and has no time left."""
    memory = leaking(1200, lambda _at: None)
    points = list(memory)
    assert find_leak([each for each in points if each.ended < MIN_LASTING_SECONDS], MIN_LASTING_SECONDS) is None
    found = find_leak(points, 1200.0)
    assert found is not None
    assert found.left is None
    assert found.bytes_per_second == pytest.approx(5 * MIB, rel=0.01)


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["each step", "each epoch", "in validations", "with a saw"]),
    st.sampled_from([1.0, 2.0, 16.0, 160.0]),
    st.sampled_from([0.0, 64.0, 65536.0]),
)
def test_shift_and_scale(name: str, scale: float, shift: float) -> None:
    """Start time and device size do not change the result."""
    training = replace(LEAKS[name], seconds=60.0)
    plain, other = detect_leaks(training), detect_leaks(training, scale=scale, shift=shift)
    assert [at for at, _ in plain.leaks] == [at for at, _ in other.leaks]
    for (_, one), (_, two) in zip(plain.leaks, other.leaks, strict=True):
        assert two.bytes_per_second == pytest.approx(one.bytes_per_second * scale, rel=1e-3)
        assert seconds_left(two) == pytest.approx(seconds_left(one), rel=1e-2, abs=0.1)


def test_few_points_are_no_leak() -> None:
    """No points, or few of them, give no leak."""
    assert find_leak([], 0.0) is None
    assert find_leak(list(leaking(1, lambda _at: GIB)), 1.0) is None


def test_time_left_falls_between_two_points() -> None:
    """A poll without new points returns the same leak, with the passed time subtracted."""
    memory, detector = leaking(40, lambda _at: 600 * MIB), LeakDetector()
    first = seconds_left(detector.evaluate(memory, 40.0))
    assert seconds_left(detector.evaluate(memory, 42.0)) == pytest.approx(first - 2)
    assert seconds_left(detector.evaluate(memory, 43.0)) == pytest.approx(first - 3)
