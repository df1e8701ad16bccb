"""Memory that grows for good is told from memory that does not, in time, and its end foreseen: shape by shape."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate, pairwise
from operator import ne
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_shapes import MIB, POLL_SECONDS, Training, watched

from gpuwarden.runs.growth import MOST_LOOKS_SECONDS, GrowthWatch, find
from gpuwarden.runs.ladder import MOST_IN_A_RUNG, MOST_RUNGS, Ladder

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
def test_only_the_first_tooth_of_a_high_saw_is_told(drift: int) -> None:
    """What has been given back once is not told as growth when it comes again, whether or not to the same byte."""
    saw = Training(kept=lambda at: 250 * MIB * (at % 50) / 50 + drift * (at // 50), base=154 * MIB, seconds=400)
    seen = watched(saw)
    assert seen.ended is None
    assert [at for at, _ in seen.grows if at > 60] == []


@pytest.mark.parametrize("training", HEALTHY.values(), ids=HEALTHY)
def test_healthy(training: Training) -> None:
    """None of these is ever told to grow."""
    seen = watched(training)
    assert seen.ended is None
    assert seen.grows == []


LEAKS = {
    "each step, 20 s": (Training(kept=lambda at: 15 * MIB * at), "steady", "train"),
    "each step": (Training(kept=lambda at: 5 * MIB * at), "steady", "train"),
    "each step, one epoch": (Training(kept=lambda at: 5 * MIB * at, epoch=1e9), "steady", "train"),
    "variable batches": (Training(kept=lambda at: 3 * MIB * at, noise=40 * MIB, varied=0.4), "steady", "train"),
    "each epoch": (Training(kept=lambda at: 15 * MIB * (at // 4), epoch=4.0), "by epoch", "train"),
    "each fold": (Training(kept=lambda at: 40 * MIB * (at // 8), epoch=4.0), "staircase", "train"),
    "in validations": (Training(epoch=3.0, validation=1.0, leaked=12 * MIB, seconds=300), "by epoch", "test"),
    "beside a saw": (
        Training(kept=lambda at: 40 * MIB * (at % 4) / 4 + 2 * MIB * at, epoch=4.0, seconds=200), None, "train"),
    "beside a saw over epochs": (
        Training(kept=lambda at: 60 * MIB * (at % 10) / 10 + 1.5 * MIB * at, seconds=800), None, "train"),
    "from a time on": (Training(kept=lambda at: 4 * MIB * max(at - 60, 0), seconds=400), "steady", "train"),
    "after a step": (Training(kept=lambda at: 90 * MIB * (at > 20) + 3 * MIB * max(at - 40, 0)), "steady", "train"),
    "hours": (
        Training(cap=80 * GIB, base=10 * GIB, transient=10 * GIB, noise=GIB, step=0.5, epoch=300.0, seconds=20000,
                 kept=lambda at: 5 * MIB * at), "steady", "train"),
    "steps of 8 s": (
        Training(cap=80 * GIB, base=10 * GIB, transient=10 * GIB, step=8, epoch=400.0, seconds=8000,
                 kept=lambda at: 20 * MIB * at), "steady", "train"),
}  # fmt: skip
BEGINS = {"from a time on": 60.0, "after a step": 40.0}
TEETH = {"beside a saw": 4.0, "beside a saw over epochs": 10.0}  # seconds of one, which ends at its top


@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_is_told_from_half_of_its_way_on(name: str) -> None:
    """It is there at each poll of the second half, with its end within a quarter of what is left, and its bounds."""
    training, pattern, phase = LEAKS[name]
    seen = watched(training)
    assert seen.ended is not None
    half = (BEGINS.get(name, 0.0) + seen.ended) / 2
    late = [(at, growth) for at, growth in seen.polls if at >= half]
    assert all(growth and growth.left for _, growth in late)
    near = max(0.1 * (seen.ended - half), 2 * POLL_SECONDS)
    errors, held = [], 0
    for at, growth in late:
        assert growth is not None
        assert growth.left is not None
        left = seen.ended - at
        held += growth.left.lower <= left + 1 and left - 1 <= (growth.left.upper or math.inf)
        if left > near:
            errors.append(max(abs(growth.left.seconds - left) - TEETH.get(name, 0.0), 0.0) / left)
    assert median(errors) < 0.15
    assert sum(error <= 0.25 for error in errors) >= 0.9 * len(errors)
    assert held >= 0.9 * len(late)
    assert pattern is None or sum(growth.pattern == pattern for _, growth in late if growth) > len(late) / 2
    assert sum(growth.phase == phase for _, growth in late if growth) > len(late) / 2


def test_growth_that_ends_is_gone_soon() -> None:
    """What grew for 40 s and stays is told no more a tenth of that later."""
    seen = watched(Training(kept=lambda at: 5 * MIB * min(at, 40)))
    told = [at for at, _ in seen.grows]
    assert min(told) < 30
    assert max(told) <= 46


def test_the_rate_is_that_of_the_last_part() -> None:
    """A leak that becomes six times as fast is told with what it does now."""
    seen = watched(Training(kept=lambda at: MIB * at + 6 * MIB * max(at - 60, 0), seconds=200))
    assert seen.ended is not None
    (_, growth) = seen.grows[-1]
    assert growth.bytes_per_second == pytest.approx(7 * MIB, rel=0.1)


def test_a_fast_leak_after_hours_is_seen_as_fast() -> None:
    """What was long ago does not blur what is now: a minute's leak is told before half of it."""
    training = Training(
        cap=80 * GIB, base=10 * GIB, transient=10 * GIB, step=0.25, epoch=300.0, seconds=9000,
        kept=lambda at: GIB * max(at - 7200, 0),
    )  # fmt: skip
    seen = watched(training)
    assert seen.ended is not None
    assert 7200 < seen.grows[0][0] < (7200 + seen.ended) / 2


def test_others_that_take_the_device_shorten_the_time() -> None:
    """Where what the run can have falls as fast as it grows, half the time is left."""
    times = []
    for others in (0, 5 * MIB):
        ladder = Ladder()
        for number in range(160):
            at = number / 4
            floor = int(100 * MIB + 5 * MIB * at)
            ladder.hear(at, floor, floor + 50 * MIB, cap=600 * MIB - others * at)
        growth = find(ladder.points(), 40.0)
        assert growth is not None
        assert growth.left is not None
        times.append(growth.left.seconds)
    room = 600 - 100 - 200 - 50
    assert times[0] == pytest.approx(room / 5, rel=0.1)
    assert times[1] == pytest.approx((room - 200) / 10, rel=0.1)


def test_a_part_of_what_a_step_takes_finds_no_place() -> None:
    """A sixteenth of it is left out where growth is steady: no allocator hands out its last pieces."""
    ladder = Ladder()
    for number in range(160):
        floor = int((100 + 5 * number / 4) * MIB)
        ladder.hear(number / 4, floor, floor + 64 * MIB, cap=600 * MIB)
    growth = find(ladder.points(), 40.0)
    assert growth is not None
    assert growth.left is not None
    assert growth.left.seconds == pytest.approx((600 - 100 - 200 - 64 - 4) / 5, rel=0.005)


def test_pages_that_the_kernel_can_drop_are_no_growth() -> None:
    """A mapped file that is read makes a process large and leaves the host as much as it had."""
    ladder = Ladder()
    for number in range(100):
        memory = (100 + 20 * number) * MIB
        ladder.hear(number * 5.0, memory, memory, cap=memory + 1000 * MIB)
    assert find(ladder.points(), 500.0) is None


@pytest.mark.parametrize(("before", "since"), [(600, 800), (800, 600), (600, 1000)])
def test_others_that_come_or_leave_once_make_no_trend(before: int, since: int) -> None:
    """What others took or gave back at one moment counts as what there is since, and takes no growth away."""
    ladder = Ladder()
    for number in range(220):
        at = number / 4
        ladder.hear(at, int((100 + 5 * at) * MIB), int((150 + 5 * at) * MIB), cap=(before if at < 45 else since) * MIB)
    growth = find(ladder.points(), 55.0, known=True)
    assert growth is not None
    assert growth.left is not None
    assert growth.left.seconds == pytest.approx((since - 150) / 5 - 55, rel=0.05)


@pytest.mark.parametrize("begin", [4.9, 5.8, 5.9])
def test_growth_at_an_uneven_pace_holds_on(begin: float) -> None:
    """Epochs of a busy machine, as they once lasted: what each leaves is told once, and not given up between."""
    kept = (2.5, 2.5, 1.6, 2.3, 2.9, 3.6, 3.6)  # seconds of epochs, which give back what they keep
    leaking = (1.3, 2.1, 5.6, 2.5, 1.8, 4.7, 3.4, 2.9, 1.3, 2.5, 1.5, 1.5, 2.5, 1.3, 1.3, 1.3, 1.2, 1.2, 1.3, 1.4)
    ends = list(accumulate(kept + leaking, initial=begin))
    ladder, watch, told = Ladder(), GrowthWatch(), []
    for number in range(int(ends[-1] * 4)):
        at = number / 4
        ended = bisect_right(ends, at)
        current = (26 if ended < len(kept) else 9 + 5 * (ended - len(kept))) * MIB
        ladder.hear(at, current, max(current, 27 * MIB), epochs=ended, cap=128 * MIB)
        told.append(watch.look(ladder, at) is not None)
    assert sum(map(ne, told[1:], told)) == 1


def test_a_moment_without_a_limit_ends_no_growth() -> None:
    """Where nobody knows for some seconds what it can have, it has no time to its end then, and goes on."""
    ladder, watch = Ladder(), GrowthWatch()
    found = {}
    for at in range(60):
        ladder.hear(at, (100 + 5 * at) * MIB, (150 + 5 * at) * MIB, cap=None if 40 <= at < 45 else 600 * MIB)
        found[at] = watch.look(ladder, at)
    assert [at for at in range(40, 60) if found[at] is None] == []
    without = [at for at, growth in found.items() if growth is not None and growth.left is None]
    assert without
    assert set(without) <= set(range(40, 48))


def test_without_a_limit_growth_has_no_end() -> None:
    """Where nobody knows what it can have, growth has to last for long, and has no time to its end."""
    ladder = Ladder()
    found = []
    for number in range(1200):
        ladder.hear(number, (100 + number) * MIB, (150 + number) * MIB)
        if number % 100 == 0:
            found.append(find(ladder.points(), number))
    assert found[:9] == [None] * 9
    assert found[-1] is not None
    assert found[-1].left is None
    assert found[-1].bytes_per_second == pytest.approx(MIB, rel=0.01)


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["each step", "each epoch", "in validations", "beside a saw"]),
    st.sampled_from([1.0, 2.0, 16.0, 160.0]),
    st.sampled_from([0.0, 64.0, 65536.0]),
)
def test_shift_and_scale(name: str, scale: float, shift: float) -> None:
    """When a run began does not matter, nor how large its device is: only shares of it do."""
    training = replace(LEAKS[name][0], seconds=60.0)
    plain, other = watched(training), watched(training, scale=scale, shift=shift)
    assert [at for at, _ in plain.grows] == [at for at, _ in other.grows]
    for (_, one), (_, two) in zip(plain.grows, other.grows, strict=True):
        assert (two.pattern, two.phase) == (one.pattern, one.phase)
        assert two.bytes_per_second == pytest.approx(one.bytes_per_second * scale, rel=1e-3)
        assert two.since == pytest.approx(one.since + shift)
        assert one.left is not None
        assert two.left is not None
        assert two.left.seconds == pytest.approx(one.left.seconds, rel=1e-2, abs=0.1)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=400), st.sampled_from([0.1, 0.5, 3.0]))
def test_a_ladder_keeps_the_least(values: list[int], spacing: float) -> None:
    """However many values came, the least of them is there, times rise, and the last point is the last value's."""
    ladder = Ladder()
    for number, value in enumerate(values):
        ladder.hear(number * spacing, value, value)
    points = ladder.points()
    assert min(point.low for point in points) == min(values)
    assert all(one.at < other.at for one, other in pairwise(points))
    assert points[-1].low <= values[-1]


def test_a_ladder_stays_small() -> None:
    """A month of points is kept in a few hundred, and its least and its begin are not lost."""
    ladder = Ladder()
    for number in range(200_000):
        ladder.hear(number * 13.0, 5 if number == 77_777 else 1000 + number % 7, 2000)
    points = ladder.points()
    assert len(points) <= MOST_IN_A_RUNG * MOST_RUNGS + 1
    assert min(points, key=lambda point: point.low).at == 77_777 * 13.0


def test_find_looks_at_nothing_where_there_is_little() -> None:
    """No points, and few of them, are no growth."""
    assert find([], 0.0) is None
    ladder = Ladder()
    for number in range(4):
        ladder.hear(number, number * 100 * MIB, number * 100 * MIB, cap=GIB)
    assert find(ladder.points(), 4.0) is None


def test_what_has_been_for_long_is_looked_at_less_often() -> None:
    """In the first minute at each poll; a leak that begins after two hours of nothing is told seconds later at most."""
    watch, ladder = GrowthWatch(), Ladder()
    assert watch.look(ladder, 0.0) is None  # nothing was heard yet
    found: list[float] = []
    known: list[float] = []
    for quarter in range(4 * 7500):
        at = quarter / 4
        level = 100 * MIB + int(max(at - 7200, 0) * 2 * MIB)
        ladder.hear(at, level, level + MIB, cap=600 * MIB)
        if quarter % 4 == 0:
            if watch.look(ladder, at) is not None:
                found.append(at)
            if at > 7200 and find(ladder.points(), at) is not None:
                known.append(at)
        if quarter == 4 * 45:
            assert watch._due <= at + 1.0
    assert known[0] < 7400
    assert known[0] <= found[0] <= known[0] + 6.0
    assert found[-1] == known[-1] == 7499.0


def test_what_has_grown_for_long_is_looked_at_as_often() -> None:
    """It may grow faster from now on, and the time that was told would be far too long."""
    watch, ladder = GrowthWatch(), Ladder()
    for at in range(3600):
        ladder.hear(at, GIB + at * MIB // 2, GIB + at * MIB // 2, cap=4 * GIB)
        growth = watch.look(ladder, at)
        assert watch._due <= at + MOST_LOOKS_SECONDS
    assert growth is not None
    assert growth.since < 60
