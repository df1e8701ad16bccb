"""Batch-size advice: cost model, its confidence, and the advised size."""

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


def peak_of(size: int, *, off: int = 0, floor: int = FLOOR) -> SizePeak:
    """Return a size's peak: the base plus 10 MiB an example."""
    return SizePeak(size, floor, BASE + EXAMPLE * size + off)


def cost(*sizes: int) -> BatchCost:
    """Return the cost fitted to these sizes."""
    found = fit_cost([peak_of(size) for size in sizes])
    assert found is not None
    return found


def test_three_sizes_make_a_line() -> None:
    """Base and cost per example are found, with high confidence."""
    found = cost(32, 64, 128)
    assert (found.base, found.per_example, found.residual) == (BASE, EXAMPLE, 0)
    assert (found.sizes, found.largest, found.confidence) == (3, 128, "high")


def test_one_size_bounds_the_cost_of_an_example() -> None:
    """All memory above the floor counts to the examples, which overestimates their cost."""
    found = cost(64)
    assert (found.base, found.confidence, found.sizes) == (FLOOR, "low", 1)
    assert found.per_example == EXAMPLE + 200 * MIB / 64
    assert found.peak(128) > BASE + EXAMPLE * 128


@pytest.mark.parametrize(
    ("own", "others", "confidence"),
    [
        ([peak_of(64)], [peak_of(32)], "medium"),
        ([peak_of(64)], [peak_of(32), peak_of(16)], "high"),
        ([peak_of(64)], [peak_of(32, floor=FLOOR * 2)], "low"),  # another model of the same name
        ([peak_of(64)], [peak_of(64, off=500 * MIB)], "low"),  # its own peak counts
        ([peak_of(64)], [peak_of(60)], "low"),  # too near for a line
        ([peak_of(64)], [peak_of(32, off=2000 * MIB)], "low"),  # more memory for a smaller batch
        ([peak_of(64)], [peak_of(32, off=-900 * MIB)], "low"),  # a base below the floor
        ([peak_of(64)], [peak_of(32), peak_of(16, off=900 * MIB)], "low"),  # not on a line
        ([peak_of(64)], [peak_of(32), peak_of(16, off=200 * MIB)], "low"),  # hardly on a line
        (
            [peak_of(64)],
            [peak_of(32, floor=FLOOR - 70 * MIB), peak_of(16, floor=FLOOR - 99 * MIB)],
            "high",
        ),  # a difference of the input
        (
            [peak_of(64)],
            [peak_of(32, floor=FLOOR + 70 * MIB), peak_of(16, floor=FLOOR - 299 * MIB)],
            "low",
        ),  # a larger difference
        ([peak_of(64)], [peak_of(32), peak_of(16, off=60 * MIB)], "medium"),  # nearly on a line
    ],
)
def test_confidence_from_prior_runs(own: list[SizePeak], others: list[SizePeak], confidence: str) -> None:
    """Prior runs count if they are of the same model and lie on a line with the run's own peaks."""
    found = fit_cost(own, others)
    assert found is not None
    assert found.confidence == confidence


def test_an_empty_batch_gives_no_peak() -> None:
    """A reported largest batch of 0 examples is not divided by."""
    memory = SizePeaks(100)
    add_report(memory, 0.0, 0, 200)
    assert peaks_in_mib(memory) == {}


def test_peaks_are_never_negative() -> None:
    """A fitted base may be slightly below zero, where an allocator rounds up."""
    line = fit_cost([SizePeak(each, 10, 100 * each - 90) for each in (10, 20, 40)])
    assert line is not None
    assert line.base < 0
    assert line.peak(0) == 0


def test_no_own_peak_no_cost() -> None:
    """Without a peak of its own a run gets no advice: prior runs may be of another model."""
    assert fit_cost([], [peak_of(32), peak_of(64)]) is None
    assert fit_cost([SizePeak(64, FLOOR, FLOOR)]) is None


def test_the_largest_usual_size_that_fits() -> None:
    """The advised size leaves the margin, and the next one does not."""
    advice = expect_advice(advise(cost(32, 64, 128), 64, 4096.0 * MIB))
    assert (advice.advised, advice.too_large) == (256, False)
    assert advice.needed == BASE + 256 * EXAMPLE
    assert (
        "batch size 256 should fit instead of 64, using 3.67 GiB of the 4.00 GiB available to the run;" in advice.text
    )
    assert "estimated from 3 sizes (error at most 0 B): 10.0 MiB per example" in advice.text


def expect_advice(advice: BatchSizeAdvice | None) -> BatchSizeAdvice:
    """Assert that there is advice, and return it."""
    assert advice is not None
    return advice


def test_advice_does_not_reach_too_far() -> None:
    """The advised size is at most a small multiple of the sizes that ran."""
    assert expect_advice(advise(cost(16, 32, 64), 64, 1e12)).advised == 256
    assert expect_advice(advise(cost(32, 64), 64, 1e12)).advised == 128
    far = expect_advice(advise(cost(64), 64, 1e12))
    assert far.advised == 128
    assert "perhaps more" in far.text
    assert "estimated from one size" in far.text


def test_a_size_that_failed_is_not_advised() -> None:
    """A size that ran out of memory is not advised, whatever the fit."""
    advice = expect_advice(advise(cost(32, 64, 128), 256, 8192.0 * MIB, failed=256))
    assert (advice.advised, advice.too_large) == (224, True)
    assert advice.text.startswith("batch size 256 is too large; 224 should fit")


def test_a_size_that_works_within_the_margin() -> None:
    """A size that runs within the margin is not too large; a smaller one is advised if there is one."""
    advice = expect_advice(advise(cost(32, 64, 128), 128, BASE + 129.0 * EXAMPLE))
    assert (advice.advised, advice.too_large) == (112, False)
    assert advice.text.startswith("batch size 128 fits with little headroom; 112 would leave some")
    advice = expect_advice(advise(cost(1, 2, 3), 1, BASE + 1.0 * EXAMPLE))
    assert (advice.advised, advice.too_large) == (1, False)


def test_an_unusual_size_may_be_the_best() -> None:
    """An unusual size that fits is kept if the usual ones are smaller or do not fit."""
    advice = expect_advice(advise(cost(32, 50, 100), 100, (BASE + 105.0 * EXAMPLE) / 0.95))
    assert advice.advised == 100
    assert "batch size 100 is about the largest that fits" in advice.text


def test_co_tenants_may_make_a_size_too_large() -> None:
    """A size that fitted is too large where less memory is available."""
    advice = expect_advice(advise(cost(32, 64, 128), 128, BASE + 60.0 * EXAMPLE))
    assert (advice.advised, advice.too_large) == (48, True)
    assert advise(cost(32, 64, 128), 128, float(BASE)) is None


def test_sizes_are_shared_by_devices() -> None:
    """The advised size is divisible by the number of devices."""
    assert expect_advice(advise(cost(32, 64), 64, BASE + 140.0 * EXAMPLE, multiple_of=8)).advised % 8 == 0


def test_usual_sizes() -> None:
    """Usual sizes are powers of two, with three steps between them."""
    assert list_usual_sizes(64) == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64]
    assert list_usual_sizes(0) == []


@given(
    st.lists(st.tuples(st.integers(1, 10**5), st.integers(0, 2**40)), min_size=1, max_size=16),
    st.integers(1, 10**5),
    st.floats(0, 2**41),
    st.none() | st.integers(1, 10**5),
)
def test_advice_never_exceeds_the_capacity(
    peaks: list[tuple[int, int]], present: int, capacity: float, failed: int | None
) -> None:
    """For any peaks, a new size fits with its margin, is below the failed one, and is not too far."""
    shown = [SizePeak(size, 0, peak) for size, peak in peaks]
    found = fit_cost(shown)
    advice = advise(found, present, capacity, failed=failed) if found else None
    if found and advice and advice.advised != present:
        assert advice.needed <= capacity - found.margin(capacity)
        assert failed is None or advice.advised < failed
        assert advice.advised <= 4 * found.largest


def add_report(memory: SizePeaks, at: float, size: int | None, peak: int, current: int = 100) -> None:
    """Add one report; bytes in MiB."""
    report = replace(REPORT, batch_size=size, largest_batch_size=size)
    memory.add_report(DeviceMemory(current * MIB, peak * MIB), report, at)


def peaks_in_mib(memory: SizePeaks, low: int | None = None) -> dict[int, tuple[int, int]]:
    """Return floors and peaks in MiB by size."""
    found = memory.peaks(None if low is None else low * MIB)
    return {each.batch_size: (each.floor // MIB, each.peak // MIB) for each in found}


def test_a_rise_belongs_to_the_size_at_that_time() -> None:
    """Each growing batch has its peak; smaller batches after them have none."""
    memory = SizePeaks(100 * MIB)
    for at, (size, peak) in enumerate([(32, 200), (64, 300), (128, 500)]):
        add_report(memory, 10.0 * at, size, peak, current=110)
        add_report(memory, 10.0 * at + 5, size, peak)
    add_report(memory, 60.0, 128, 500)
    assert peaks_in_mib(memory) == {32: (100, 200), 64: (100, 300), 128: (100, 500)}


def test_an_earlier_peak_is_ignored() -> None:
    """A peak from before the first report is not attributed to batches."""
    memory = SizePeaks(500 * MIB)
    add_report(memory, 0.0, 32, 500)
    add_report(memory, 9.0, 32, 500)
    assert peaks_in_mib(memory) == {}
    add_report(memory, 10.0, 32, 600)
    assert peaks_in_mib(memory) == {32: (100, 600)}


def test_a_size_reported_late_gets_its_rise() -> None:
    """Counted sizes are reported a second or two after the steps that needed more memory."""
    memory = SizePeaks(100 * MIB)
    add_report(memory, 0.0, 32, 200)
    add_report(memory, 10.0, 32, 300)  # already of the next size
    add_report(memory, 10.0 + MAX_LATE_SECONDS / 2, 64, 300)
    assert peaks_in_mib(memory) == {32: (100, 200), 64: (100, 300)}


def test_a_size_known_only_by_its_successor_is_dropped() -> None:
    """A peak that may be of either size is attributed to the larger one."""
    memory = SizePeaks(100 * MIB)
    add_report(memory, 0.0, 32, 200)
    add_report(memory, 1.0, 64, 200)
    assert peaks_in_mib(memory) == {64: (100, 200)}


def test_peaks_during_a_leak_are_ignored() -> None:
    """A peak is ignored if memory in use between steps has grown since."""
    memory = SizePeaks(100 * MIB)
    add_report(memory, 0.0, 32, 200)
    assert peaks_in_mib(memory, low=120) == {32: (100, 200)}
    assert peaks_in_mib(memory, low=150) == {}


def test_sizes_are_bounded() -> None:
    """Only the first sizes of a run are stored."""
    memory = SizePeaks(0)
    for each in range(1, 100):
        add_report(memory, each * 10.0, each, each)
    add_report(memory, 2000.0, None, 10**6)
    assert len(peaks_in_mib(memory)) == MAX_SIZES


def test_prior_runs_are_stored_by_name_and_framework() -> None:
    """The newest peak of a size counts, for each model; the number of names is limited."""
    stored = PriorRuns()
    stored.add(USER, "resnet", "tensorflow", (peak_of(32), peak_of(64)))
    stored.add(USER, "resnet", "tensorflow", (peak_of(64, off=MIB), peak_of(64, floor=2 * FLOOR)))
    stored.add(USER, "resnet", "torch", (peak_of(8),))
    stored.add(USER, "vgg", "tensorflow", ())
    assert stored.peaks(USER, HELLO) == (peak_of(32), peak_of(64, off=MIB), peak_of(64, floor=2 * FLOOR))
    for each in range(MAX_NAMES):
        stored.add(USER, f"{each}", "tensorflow", (peak_of(1),))
    assert stored.peaks(USER, HELLO) == ()


def test_runs_of_other_users_are_ignored() -> None:
    """Runs of another user neither count, whatever their name, nor evict those of the user."""
    own = BASE + 64 * EXAMPLE
    assert expect_advice(evaluate(tracker_after(64, own, uid=OTHER), 0.0)) == expect_advice(
        evaluate(tracker_after(64, own, with_prior_runs=False), 0.0)
    )
    stored = PriorRuns()
    stored.add(USER, "resnet", "tensorflow", (peak_of(32),))
    for each in range(2 * MAX_NAMES):
        stored.add(OTHER, f"{each}", "tensorflow", (peak_of(1),))
    assert stored.peaks(USER, HELLO) == (peak_of(32),)
    assert len(stored._peaks) == MAX_NAMES


def tracker_after(
    size: int, peak: int, *, first_steps: int = 0, uid: int = USER, with_prior_runs: bool = True
) -> BatchSizeTracker:
    """Return a tracker that received a run's first report and one of a step."""
    stored = PriorRuns()
    if with_prior_runs:
        stored.add(USER, "resnet", "tensorflow", (peak_of(32), peak_of(16)))
    tracker = BatchSizeTracker(stored, uid)
    first = replace(REPORT, steps=first_steps, memory={"GPU:0": DeviceMemory(MIB, MIB)})
    tracker.add_report(first, {}, 0.0)
    memory = {"GPU:0": DeviceMemory(FLOOR, peak)}
    with_sizes = replace(REPORT, memory=memory, batch_size=size, largest_batch_size=size)
    tracker.add_report(with_sizes, {"GPU:0": "GPU-0"}, 1.0)
    return tracker


def evaluate(tracker: BatchSizeTracker, now: float, capacity: float = 5096.0 * MIB) -> BatchSizeAdvice | None:
    """Evaluate a run with this capacity in bytes."""
    return tracker.evaluate(HELLO, {"GPU-0": MemoryHistory(limit=capacity)}, now)


def test_advice_for_a_run() -> None:
    """The run's own and prior sizes fit the line, up to the available memory."""
    tracker = tracker_after(64, BASE + 64 * EXAMPLE)
    advice = expect_advice(evaluate(tracker, 0.0, 4096.0 * MIB))
    assert (advice.present, advice.advised, advice.cost.confidence) == (64, 256, "high")
    assert advice.capacity == 4096 * MIB
    assert evaluate(tracker, EVALUATION_SECONDS / 2, 0.0) is advice
    tracker.handle_end()
    assert evaluate(tracker, EVALUATION_SECONDS / 2, 1300.0 * MIB) is not advice


def test_out_of_memory_is_evaluated_at_once() -> None:
    """The size that failed is too large, whatever the last advice."""
    tracker = tracker_after(64, BASE + 64 * EXAMPLE)
    assert not expect_advice(evaluate(tracker, 0.0)).too_large
    tracker.handle_oom(Error("device_oom", "E", "", "train", 2, batch_size=64))
    advice = expect_advice(evaluate(tracker, 0.1))
    assert advice.too_large
    assert advice.advised < 64


@pytest.mark.parametrize(
    ("size", "steps", "seconds", "too_large"),
    [
        (64, 100, MIN_RETRAINED_SECONDS, False),
        (64, 100, MIN_RETRAINED_SECONDS / 2, True),
        (64, MIN_RETRAINED_STEPS, MIN_RETRAINED_SECONDS, True),  # the first step may be from before
        (63, 100, MIN_RETRAINED_SECONDS, True),
    ],
)
def test_a_size_that_trains_again(size: int, steps: int, seconds: float, *, too_large: bool) -> None:
    """A size that failed and has trained since is not too large; no larger one is advised."""
    tracker = tracker_after(64, BASE + 64 * EXAMPLE)
    tracker.handle_oom(Error("device_oom", "E", "", "train", 2, batch_size=64))
    for step, at in ((2, 2.0), (3, 3.0), (2 + steps, 3.0 + seconds)):
        memory = {"GPU:0": DeviceMemory(FLOOR, BASE + 64 * EXAMPLE)}
        tracker.add_report(replace(REPORT, steps=step, memory=memory, batch_size=size), {"GPU:0": "GPU-0"}, at)
    tracker.add_report(
        replace(REPORT, steps=2 + steps, memory=memory, batch_size=64), {"GPU:0": "GPU-0"}, 4.0 + seconds
    )
    advice = expect_advice(evaluate(tracker, 100.0))
    assert advice.present == 64
    assert advice.too_large == too_large
    assert advice.advised == (56 if too_large else 64)


def test_a_daemon_that_starts_later_has_no_peak() -> None:
    """A run whose first report has steps had its peak before."""
    assert evaluate(tracker_after(64, MIB, first_steps=10), 0.0) is None


def test_a_run_without_batch_sizes_has_no_advice() -> None:
    """Without batch sizes there is no advice."""
    tracker = BatchSizeTracker(PriorRuns(), USER)
    tracker.add_report(replace(REPORT, memory={"GPU:0": DeviceMemory(1, 2)}), {"GPU:0": "GPU-0"}, 0.0)
    assert evaluate(tracker, 0.0) is None
    assert tracker.peaks({}) == {}
