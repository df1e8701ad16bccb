"""Leak detector: separates leaks from memory that comes and goes, in time, and forecasts the end; by shape."""

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
from memory_shapes import MIB, POLL_SECONDS, Memory, Training, watched

from gpuwarden.analysis.memory.leak_detector import MIN_LASTING_SECONDS, Leak, LeakDetector, find_leak

GIB = 1 << 30


def _buckets(seed: int) -> Training:
    chance = random.Random(seed)  # noqa: S311 - shapes are to be the same each time
    first = sorted(chance.expovariate(1 / 12) for _ in range(8))
    return Training(kept=lambda at: sum(8 * MIB for each in first if each < at))


HEALTHY = {
    "flat": Training(),
    "batches that wait": Training(noise=40 * MIB),
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
    """What has been given back once is not reported as growth when it comes again, whether or not to the same byte."""
    saw = Training(kept=lambda at: 250 * MIB * (at % 50) / 50 + drift * (at // 50), base=154 * MIB, seconds=400)
    seen = watched(saw)
    assert seen.ended is None
    assert [at for at, _ in seen.grows if at > 60] == []


def test_healthy() -> None:
    """None of these is ever reported to grow."""
    seen = {name: watched(training) for name, training in HEALTHY.items()}
    assert [name for name, each in seen.items() if each.ended is not None or each.grows] == []


LEAKS = {
    "each step, 20 s": Training(kept=lambda at: 15 * MIB * at),
    "each step": Training(kept=lambda at: 5 * MIB * at),
    "each step, one epoch": Training(kept=lambda at: 5 * MIB * at, epoch=1e9),
    "variable batches": Training(kept=lambda at: 3 * MIB * at, noise=40 * MIB, varied=0.4),
    "each epoch": Training(kept=lambda at: 15 * MIB * (at // 4), epoch=4.0),
    "each fold": Training(kept=lambda at: 40 * MIB * (at // 8), epoch=4.0),
    "in validations": Training(epoch=3.0, validation=1.0, leaked=12 * MIB, seconds=300),
    "beside a saw": Training(kept=lambda at: 40 * MIB * (at % 4) / 4 + 2 * MIB * at, epoch=4.0, seconds=200),
    "beside a saw over epochs": Training(kept=lambda at: 60 * MIB * (at % 10) / 10 + 1.5 * MIB * at, seconds=800),
    "from a time on": Training(kept=lambda at: 4 * MIB * max(at - 60, 0), seconds=400),
    "after a step": Training(kept=lambda at: 90 * MIB * (at > 20) + 3 * MIB * max(at - 40, 0)),
    "hours": Training(cap=80 * GIB, base=10 * GIB, transient=10 * GIB, noise=GIB, step=0.5, epoch=300.0, seconds=20000,
                      kept=lambda at: 5 * MIB * at),
    "steps of 8 s": Training(cap=80 * GIB, base=10 * GIB, transient=10 * GIB, step=8, epoch=400.0, seconds=8000,
                             kept=lambda at: 20 * MIB * at),
}  # fmt: skip
BEGINS = {"from a time on": 60.0, "after a step": 40.0}
TEETH = {"beside a saw": 4.0, "beside a saw over epochs": 10.0}  # seconds of one, which ends at its top


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_reported_from_half_of_its_way_on(name: str) -> None:
    """It is there at each poll of the second half, with its end within a quarter of what is left, and its bounds."""
    seen = watched(LEAKS[name])
    assert seen.ended is not None
    half = (BEGINS.get(name, 0.0) + seen.ended) / 2
    late = [(at, growth.left) for at, growth in seen.polls if at >= half and growth and growth.left]
    assert len(late) == sum(at >= half for at, _ in seen.polls)
    near = max(0.1 * (seen.ended - half), 2 * POLL_SECONDS)
    true = [seen.ended - at for at, _ in late]
    held = [
        left.lower <= was + 1 and was - 1 <= (left.upper or math.inf) for (_, left), was in zip(late, true, strict=True)
    ]
    errors = [
        max(abs(left.seconds - was) - TEETH.get(name, 0.0), 0.0) / was
        for (_, left), was in zip(late, true, strict=True)
        if was > near
    ]
    assert median(errors) < 0.15
    assert sum(error <= 0.25 for error in errors) >= 0.9 * len(errors)
    assert sum(held) >= 0.9 * len(late)


def test_growth_that_ends_is_gone_soon() -> None:
    """What grew for 40 s and stays is reported no more a tenth of that later."""
    told = [at for at, _ in watched(Training(kept=lambda at: 5 * MIB * min(at, 40))).grows]
    assert min(told) < 30
    assert max(told) <= 46


def test_the_rate_is_that_of_the_last_part() -> None:
    """A leak that becomes six times as fast is reported with what it does now."""
    seen = watched(Training(kept=lambda at: MIB * at + 6 * MIB * max(at - 60, 0), seconds=200))
    assert seen.ended is not None
    assert seen.grows[-1][1].bytes_per_second == pytest.approx(7 * MIB, rel=0.1)


def test_a_fast_leak_after_hours_is_seen_as_fast() -> None:
    """What was long ago does not blur what is now: a minute's leak is reported before half of it."""
    training = Training(
        cap=80 * GIB, base=10 * GIB, transient=10 * GIB, step=0.25, epoch=300.0, seconds=9000,
        kept=lambda at: GIB * max(at - 7200, 0),
    )  # fmt: skip
    seen = watched(training)
    assert seen.ended is not None
    assert 7200 < seen.grows[0][0] < (7200 + seen.ended) / 2


def leaking(seconds: float, limit: Callable[[float], float | None], *, step: int = 50 * MIB) -> Memory:
    """Make the memory of a run that leaks 5 MiB a second from 100 MiB on, reported four times a second."""
    memory = Memory()
    for number in range(int(seconds * 4)):
        held = int((100 + 5 * number / 4) * MIB)
        memory.report(number / 4, held, held + step, limit(number / 4))
    return memory


def left(growth: Leak | None) -> float:
    """Return the seconds to its limit."""
    assert growth is not None
    assert growth.left is not None
    return growth.left.seconds


def test_others_that_take_the_device_shorten_the_time() -> None:
    """Where what the run can have falls as fast as it grows, half the time is left."""
    room = 600 - 100 - 200 - 50
    for others, seconds in ((0, room / 5), (5, (room - 200) / 10)):
        memory = leaking(40, lambda at, others=others: (600 - others * at) * MIB)  # type: ignore[misc] # a default
        assert left(find_leak(list(memory), 40.0)) == pytest.approx(seconds, rel=0.1)


def test_a_part_of_what_a_step_takes_finds_no_place() -> None:
    """A sixteenth of it is left out where growth is steady: no allocator hands out its last pieces."""
    memory = leaking(40, lambda _at: 600 * MIB, step=64 * MIB)
    assert left(find_leak(list(memory), 40.0)) == pytest.approx((600 - 100 - 200 - 64 - 4) / 5, rel=0.005)


def test_pages_that_the_kernel_can_drop_are_no_growth() -> None:
    """A mapped file that is read makes a process large and leaves the host as much as it had."""
    memory = Memory()
    for number in range(100):
        memory.report(number * 5.0, (100 + 20 * number) * MIB, limit=(1100 + 20 * number) * MIB)
    assert find_leak(list(memory), 500.0) is None


@pytest.mark.parametrize(("before", "since"), [(600, 800), (800, 600), (600, 1000)])
def test_others_that_come_or_leave_once_make_no_trend(before: int, since: int) -> None:
    """What others took or gave back at one moment counts as what there is since, and takes no growth away."""
    memory = leaking(55, lambda at: (before if at < 45 else since) * MIB)
    assert left(find_leak(list(memory), 55.0, reported=True)) == pytest.approx((since - 150) / 5 - 55, rel=0.05)


# Seconds of epochs on a busy machine, first those that free what they keep, then those that leak: measured, and two
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
    """A leak of epochs that last differently is reported once, and stays reported until the end."""
    kept, leaks = epochs
    ends = list(accumulate(kept + leaks, initial=begin))
    memory, watch, reported = Memory(), LeakDetector(), []
    for number in range(int(ends[-1] * 4)):
        ended = bisect_right(ends, number / 4)
        current = (26 if ended < len(kept) else 9 + 5 * (ended - len(kept))) * MIB
        memory.report(number / 4, current, max(current, 27 * MIB), 128 * MIB)
        reported.append(watch.update(memory, number / 4) is not None)
    assert sum(map(ne, reported[1:], reported)) == 1


def test_a_moment_without_a_limit_ends_no_growth() -> None:
    """Where nobody knows for some seconds what it can have, it has no time to its end then, and goes on."""
    memory, watch = Memory(), LeakDetector()
    found = {}
    for at in range(60):
        memory.report(at, (100 + 5 * at) * MIB, (150 + 5 * at) * MIB, None if 40 <= at < 45 else 600 * MIB)
        found[at] = watch.update(memory, at)
    assert [at for at in range(40, 60) if found[at] is None] == []
    without = {at for at, growth in found.items() if growth is not None and growth.left is None}
    assert without
    assert without <= set(range(40, 48))


def test_without_a_limit_growth_has_no_end() -> None:
    """Where nobody knows what it can have, growth has to last for long, and has no time to its end."""
    memory = leaking(1200, lambda _at: None)
    points = list(memory)
    assert find_leak([each for each in points if each.ended < MIN_LASTING_SECONDS], MIN_LASTING_SECONDS) is None
    found = find_leak(points, 1200.0)
    assert found is not None
    assert found.left is None
    assert found.bytes_per_second == pytest.approx(5 * MIB, rel=0.01)


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["each step", "each epoch", "in validations", "beside a saw"]),
    st.sampled_from([1.0, 2.0, 16.0, 160.0]),
    st.sampled_from([0.0, 64.0, 65536.0]),
)
def test_shift_and_scale(name: str, scale: float, shift: float) -> None:
    """When a run began does not matter, nor how large its device is: only shares of it do."""
    training = replace(LEAKS[name], seconds=60.0)
    plain, other = watched(training), watched(training, scale=scale, shift=shift)
    assert [at for at, _ in plain.grows] == [at for at, _ in other.grows]
    for (_, one), (_, two) in zip(plain.grows, other.grows, strict=True):
        assert two.bytes_per_second == pytest.approx(one.bytes_per_second * scale, rel=1e-3)
        assert left(two) == pytest.approx(left(one), rel=1e-2, abs=0.1)


def test_few_points_are_no_growth() -> None:
    """No points, and few of them, whatever they say."""
    assert find_leak([], 0.0) is None
    assert find_leak(list(leaking(1, lambda _at: GIB)), 1.0) is None


def test_between_two_points_time_passes() -> None:
    """A poll that finds nothing new reports the same growth, and as much less time as has passed."""
    memory, watch = leaking(40, lambda _at: 600 * MIB), LeakDetector()
    first = left(watch.update(memory, 40.0))
    assert left(watch.update(memory, 42.0)) == pytest.approx(first - 2)
    assert left(watch.update(memory, 43.0)) == pytest.approx(first - 3)
