"""Batch size advice: follows a line of peaks, is careful with little evidence, and absent without any."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.analysis.batch_size.cost_model import (
    BatchCost,
    BatchSizeAdvice,
    SizePeak,
    advise,
    fit_cost,
    list_usual_sizes,
)
from gpuwarden.analysis.batch_size.prior_runs import MAX_NAMES, PriorRuns
from gpuwarden.analysis.batch_size.size_peaks import MAX_LATE_SECONDS, MAX_SIZES, SizePeaks
from gpuwarden.analysis.batch_size.tracker import (
    EVALUATION_SECONDS,
    MIN_RETRAINED_SECONDS,
    MIN_RETRAINED_STEPS,
    BatchSizeTracker,
)
from gpuwarden.analysis.memory.memory_history import MemoryHistory
from gpuwarden.protocol.messages import STEP_BUCKETS, DeviceMemory, Error, Hello, Report

MIB = 1 << 20
FLOOR, BASE, EXAMPLE = 1000 * MIB, 1200 * MIB, 10 * MIB
REPORT = Report("train", 1, 0.0, (0,) * (len(STEP_BUCKETS) + 1), {})
USER, OTHER = 1000, 1001
HELLO = Hello("resnet", "tensorflow", {"GPU:0": "GPU-0"})


def seen(size: int, *, off: int = 0, floor: int = FLOOR) -> SizePeak:
    """Make what a size took: the base and 10 MiB an example."""
    return SizePeak(size, floor, BASE + EXAMPLE * size + off)


def cost(*sizes: int) -> BatchCost:
    """Return what is known from those sizes."""
    found = fit_cost([seen(size) for size in sizes])
    assert found is not None
    return found


def test_three_sizes_make_a_line() -> None:
    """Base and cost of an example are found, with high confidence."""
    found = cost(32, 64, 128)
    assert (found.base, found.per_example, found.residual) == (BASE, EXAMPLE, 0)
    assert (found.sizes, found.largest, found.confidence) == (3, 128, "high")


def test_one_size_bounds_what_an_example_takes() -> None:
    """All above the floor is laid to the examples: too much an example, so that more of them are not thought cheap."""
    found = cost(64)
    assert (found.base, found.confidence, found.sizes) == (FLOOR, "low", 1)
    assert found.per_example == EXAMPLE + 200 * MIB / 64
    assert found.peak(128) > BASE + EXAMPLE * 128


@pytest.mark.parametrize(
    ("own", "others", "confidence"),
    [
        ([seen(64)], [seen(32)], "medium"),
        ([seen(64)], [seen(32), seen(16)], "high"),
        ([seen(64)], [seen(32, floor=FLOOR * 2)], "low"),  # another model of the same name
        ([seen(64)], [seen(64, off=500 * MIB)], "low"),  # its own word counts
        ([seen(64)], [seen(60)], "low"),  # too near to lay a line through
        ([seen(64)], [seen(32, off=2000 * MIB)], "low"),  # more memory for less: no such line
        ([seen(64)], [seen(32, off=-900 * MIB)], "low"),  # a base below the floor
        ([seen(64)], [seen(32), seen(16, off=900 * MIB)], "low"),  # on no line
        ([seen(64)], [seen(32), seen(16, off=200 * MIB)], "low"),  # hardly on one
        ([seen(64)], [seen(32, floor=FLOOR - 70 * MIB), seen(16, floor=FLOOR - 99 * MIB)], "high"),  # what is fed stays
        ([seen(64)], [seen(32, floor=FLOOR + 70 * MIB), seen(16, floor=FLOOR - 299 * MIB)], "low"),  # more than that
        ([seen(64)], [seen(32), seen(16, off=60 * MIB)], "medium"),  # nearly
    ],
)
def test_what_predecessors_are_worth(own: list[SizePeak], others: list[SizePeak], confidence: str) -> None:
    """They count where they are of the same model and lie on a line with the run's own."""
    found = fit_cost(own, others)
    assert found is not None
    assert found.confidence == confidence


def test_a_batch_of_none_shows_nothing() -> None:
    """A report may say that its largest batch had no examples; that is no size to divide by."""
    memory = SizePeaks(100)
    hear(memory, 0.0, 0, 200)
    assert known(memory) == {}


def test_no_batch_needs_less_than_nothing() -> None:
    """A line may begin a little below zero, where an allocator rounds up."""
    line = fit_cost([SizePeak(each, 10, 100 * each - 90) for each in (10, 20, 40)])
    assert line is not None
    assert line.base < 0
    assert line.peak(0) == 0


def test_nothing_seen_is_no_cost() -> None:
    """Without a peak of its own a run gets no advice: whether predecessors are of the same model is not known."""
    assert fit_cost([], [seen(32), seen(64)]) is None
    assert fit_cost([SizePeak(64, FLOOR, FLOOR)]) is None


def test_the_largest_usual_size_that_fits() -> None:
    """It leaves the margin, and the next one would not."""
    advice = told(advise(cost(32, 64, 128), 64, 4096.0 * MIB))
    assert (advice.advised, advice.too_large) == (256, False)
    assert advice.needed == BASE + 256 * EXAMPLE
    assert (
        "batch size 256 should fit instead of 64, using 3.67 GiB of the 4.00 GiB available to the run;" in advice.text
    )
    assert "estimated from 3 sizes (error at most 0 B): 10.0 MiB per example" in advice.text


def told(advice: BatchSizeAdvice | None) -> BatchSizeAdvice:
    """Expect advice."""
    assert advice is not None
    return advice


def test_advice_does_not_reach_too_far() -> None:
    """What is far from all that was seen is not promised."""
    assert told(advise(cost(16, 32, 64), 64, 1e12)).advised == 256
    assert told(advise(cost(32, 64), 64, 1e12)).advised == 128
    far = told(advise(cost(64), 64, 1e12))
    assert far.advised == 128
    assert "perhaps more" in far.text
    assert "estimated from one size" in far.text


def test_a_size_that_failed_is_not_advised() -> None:
    """Whatever the line says: it was out of memory."""
    advice = told(advise(cost(32, 64, 128), 256, 8192.0 * MIB, failed=256))
    assert (advice.advised, advice.too_large) == (224, True)
    assert advice.text.startswith("batch size 256 is too large; 224 should fit")


def test_a_size_that_works_within_the_margin() -> None:
    """It is not too large, but a smaller one would leave room; where none does it may stay."""
    advice = told(advise(cost(32, 64, 128), 128, BASE + 129.0 * EXAMPLE))
    assert (advice.advised, advice.too_large) == (112, False)
    assert advice.text.startswith("batch size 128 fits with little headroom; 112 would leave some")
    advice = told(advise(cost(1, 2, 3), 1, BASE + 1.0 * EXAMPLE))
    assert (advice.advised, advice.too_large) == (1, False)


def test_a_size_of_ones_own_choice_may_be_the_best() -> None:
    """An unusual size that fits stays, where the usual ones around it are smaller or do not."""
    advice = told(advise(cost(32, 50, 100), 100, (BASE + 105.0 * EXAMPLE) / 0.95))
    assert advice.advised == 100
    assert "batch size 100 is about the largest that fits" in advice.text


def test_memory_that_others_took_makes_a_size_too_large() -> None:
    """What fitted yesterday does not where less is left."""
    advice = told(advise(cost(32, 64, 128), 128, BASE + 60.0 * EXAMPLE))
    assert (advice.advised, advice.too_large) == (48, True)
    assert advise(cost(32, 64, 128), 128, float(BASE)) is None


def test_sizes_are_shared_by_devices() -> None:
    """A batch is divided among the run's devices."""
    assert told(advise(cost(32, 64), 64, BASE + 140.0 * EXAMPLE, multiple_of=8)).advised % 8 == 0


def test_usual_sizes() -> None:
    """Powers of two, and three steps between them."""
    assert list_usual_sizes(64) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64]
    assert list_usual_sizes(0) == []


@given(
    st.lists(st.tuples(st.integers(1, 10**5), st.integers(0, 2**40)), min_size=1, max_size=16),
    st.integers(1, 10**5),
    st.floats(0, 2**41),
    st.none() | st.integers(1, 10**5),
)
def test_advice_never_exceeds_what_there_is(
    peaks: list[tuple[int, int]], present: int, capacity: float, failed: int | None
) -> None:
    """Whatever was seen: another size than the present one fits with its margin, below what failed, and not too far."""
    shown = [SizePeak(size, 0, peak) for size, peak in peaks]
    found = fit_cost(shown)
    advice = advise(found, present, capacity, failed=failed) if found else None
    if found and advice and advice.advised != present:
        assert advice.needed <= capacity - found.margin(capacity)
        assert failed is None or advice.advised < failed
        assert advice.advised <= 4 * found.largest


def hear(memory: SizePeaks, at: float, size: int | None, peak: int, current: int = 100) -> None:
    """Have it hear one report."""
    report = replace(REPORT, batch_size=size, largest_batch_size=size)
    memory.add_report(DeviceMemory(current * MIB, peak * MIB), report, at)


def known(memory: SizePeaks, low: int | None = None) -> dict[int, tuple[int, int]]:
    """Return floors and peaks in MiB by size."""
    found = memory.peaks(None if low is None else low * MIB)
    return {each.batch_size: (each.floor // MIB, each.peak // MIB) for each in found}


def test_a_rise_belongs_to_the_size_it_came_under() -> None:
    """Growing batches show each their peak; smaller ones afterwards show none."""
    memory = SizePeaks(100 * MIB)
    for at, (size, peak) in enumerate([(32, 200), (64, 300), (128, 500)]):
        hear(memory, 10.0 * at, size, peak, current=110)
        hear(memory, 10.0 * at + 5, size, peak)
    hear(memory, 60.0, 128, 500)
    assert known(memory) == {32: (100, 200), 64: (100, 300), 128: (100, 500)}


def test_a_peak_from_before_shows_nothing() -> None:
    """What a process had done before its first report is not laid to the batches."""
    memory = SizePeaks(500 * MIB)
    hear(memory, 0.0, 32, 500)
    hear(memory, 9.0, 32, 500)
    assert known(memory) == {}
    hear(memory, 10.0, 32, 600)
    assert known(memory) == {32: (100, 600)}


def test_a_size_that_is_told_late_takes_its_rise_along() -> None:
    """Where sizes are counted they are known a second or two after the steps that needed more."""
    memory = SizePeaks(100 * MIB)
    hear(memory, 0.0, 32, 200)
    hear(memory, 10.0, 32, 300)  # of the next size already
    hear(memory, 10.0 + MAX_LATE_SECONDS / 2, 64, 300)
    assert known(memory) == {32: (100, 200), 64: (100, 300)}


def test_a_size_known_only_by_its_successor_is_dropped() -> None:
    """Where nothing tells which of two sizes made the peak it is the larger one."""
    memory = SizePeaks(100 * MIB)
    hear(memory, 0.0, 32, 200)
    hear(memory, 1.0, 64, 200)
    assert known(memory) == {64: (100, 200)}


def test_growth_is_no_matter_of_batches() -> None:
    """Where what is in use between steps has grown since, the peak says nothing of batches."""
    memory = SizePeaks(100 * MIB)
    hear(memory, 0.0, 32, 200)
    assert known(memory, low=120) == {32: (100, 200)}
    assert known(memory, low=150) == {}


def test_sizes_are_bounded() -> None:
    """A run of many sizes is known by the first."""
    memory = SizePeaks(0)
    for each in range(1, 100):
        hear(memory, each * 10.0, each, each)
    hear(memory, 2000.0, None, 10**6)
    assert len(known(memory)) == MAX_SIZES


def test_predecessors_are_known_by_name_and_framework() -> None:
    """The newest word on a size counts, of each model; names are bounded."""
    predecessors = PriorRuns()
    predecessors.add(USER, "resnet", "tensorflow", (seen(32), seen(64)))
    predecessors.add(USER, "resnet", "tensorflow", (seen(64, off=MIB), seen(64, floor=2 * FLOOR)))
    predecessors.add(USER, "resnet", "torch", (seen(8),))
    predecessors.add(USER, "vgg", "tensorflow", ())
    assert predecessors.peaks(USER, HELLO) == (seen(32), seen(64, off=MIB), seen(64, floor=2 * FLOOR))
    for each in range(MAX_NAMES):
        predecessors.add(USER, f"{each}", "tensorflow", (seen(1),))
    assert predecessors.peaks(USER, HELLO) == ()


def test_nobody_teaches_the_runs_of_others() -> None:
    """A run of another user counts for nothing, whatever it calls itself; nor do very many push out what is known."""
    own = BASE + 64 * EXAMPLE
    assert told(look(watch_of(64, own, uid=OTHER), 0.0)) == told(look(watch_of(64, own, taught=False), 0.0))
    predecessors = PriorRuns()
    predecessors.add(USER, "resnet", "tensorflow", (seen(32),))
    for each in range(2 * MAX_NAMES):
        predecessors.add(OTHER, f"{each}", "tensorflow", (seen(1),))
    assert predecessors.peaks(USER, HELLO) == (seen(32),)
    assert len(predecessors._peaks) == MAX_NAMES


def watch_of(size: int, peak: int, *, first_steps: int = 0, uid: int = USER, taught: bool = True) -> BatchSizeTracker:
    """Make a watch that has heard a run's first report and one of its steps."""
    predecessors = PriorRuns()
    if taught:
        predecessors.add(USER, "resnet", "tensorflow", (seen(32), seen(16)))
    watch = BatchSizeTracker(predecessors, uid)
    first = replace(REPORT, steps=first_steps, memory={"GPU:0": DeviceMemory(MIB, MIB)})
    watch.add_report(first, {}, 0.0)
    memory = {"GPU:0": DeviceMemory(FLOOR, peak)}
    told_sizes = replace(REPORT, memory=memory, batch_size=size, largest_batch_size=size)
    watch.add_report(told_sizes, {"GPU:0": "GPU-0"}, 1.0)
    return watch


def look(watch: BatchSizeTracker, now: float, capacity: float = 5096.0 * MIB) -> BatchSizeAdvice | None:
    """Have it look at a run that can have so many bytes."""
    return watch.evaluate(HELLO, {"GPU-0": MemoryHistory(limit=capacity)}, now)


def test_advice_for_a_run() -> None:
    """Its own size and its predecessors' make the line, up to what it can have."""
    watch = watch_of(64, BASE + 64 * EXAMPLE)
    advice = told(look(watch, 0.0, 4096.0 * MIB))
    assert (advice.present, advice.advised, advice.cost.confidence) == (64, 256, "high")
    assert advice.capacity == 4096 * MIB
    assert look(watch, EVALUATION_SECONDS / 2, 0.0) is advice
    watch.handle_end()
    assert look(watch, EVALUATION_SECONDS / 2, 1300.0 * MIB) is not advice


def test_out_of_memory_is_looked_at_at_once() -> None:
    """The size that failed is too large, whatever was thought before."""
    watch = watch_of(64, BASE + 64 * EXAMPLE)
    assert not told(look(watch, 0.0)).too_large
    watch.handle_oom(Error("device_oom", "E", "", "train", 2, batch_size=64))
    advice = told(look(watch, 0.1))
    assert advice.too_large
    assert advice.advised < 64


@pytest.mark.parametrize(
    ("size", "steps", "seconds", "too_large"),
    [
        (64, 100, MIN_RETRAINED_SECONDS, False),
        (64, 100, MIN_RETRAINED_SECONDS / 2, True),
        (64, MIN_RETRAINED_STEPS, MIN_RETRAINED_SECONDS, True),  # the first one may be of before
        (63, 100, MIN_RETRAINED_SECONDS, True),
    ],
)
def test_a_size_that_trains_again(size: int, steps: int, seconds: float, *, too_large: bool) -> None:
    """What was out of memory once and trains since is not called too large; none larger is advised."""
    watch = watch_of(64, BASE + 64 * EXAMPLE)
    watch.handle_oom(Error("device_oom", "E", "", "train", 2, batch_size=64))
    for step, at in ((2, 2.0), (3, 3.0), (2 + steps, 3.0 + seconds)):
        memory = {"GPU:0": DeviceMemory(FLOOR, BASE + 64 * EXAMPLE)}
        watch.add_report(replace(REPORT, steps=step, memory=memory, batch_size=size), {"GPU:0": "GPU-0"}, at)
    watch.add_report(replace(REPORT, steps=2 + steps, memory=memory, batch_size=64), {"GPU:0": "GPU-0"}, 4.0 + seconds)
    advice = told(look(watch, 100.0))
    assert advice.present == 64
    assert advice.too_large == too_large
    assert advice.advised == (56 if too_large else 64)


def test_a_daemon_that_comes_later_knows_no_peak() -> None:
    """A run whose first report tells of steps had its peak before."""
    assert look(watch_of(64, MIB, first_steps=10), 0.0) is None


def test_a_run_without_batch_sizes_has_no_advice() -> None:
    """Nothing is known, so nothing is said."""
    watch = BatchSizeTracker(PriorRuns(), USER)
    watch.add_report(replace(REPORT, memory={"GPU:0": DeviceMemory(1, 2)}), {"GPU:0": "GPU-0"}, 0.0)
    assert look(watch, 0.0) is None
    assert watch.peaks({}) == {}
