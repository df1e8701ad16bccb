"""How steps are counted and timed, and when a run looks and reports."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from math import inf

import pytest
from client_ends import Clock
from receiver import Receiver

from gpuwarden.client.connection import Connection
from gpuwarden.client.hook import Hook
from gpuwarden.client.run import Run
from gpuwarden.client.steps import MANY, Steps
from gpuwarden.protocol import STEP_BUCKETS, Report


class SlowRun(Run):
    """A run whose every look takes a second of the clock."""

    def __init__(self, connection: Connection, clock: Clock) -> None:
        super().__init__(connection)
        self.clock = clock

    def observe(self, now: float) -> None:
        """Look, and take a second for it."""
        super().observe(now)
        self.clock.now += 1


@pytest.fixture
def run(connection: Connection, clock: Clock) -> Run:
    """Give a run that nobody listens to."""
    return SlowRun(connection, clock)


def play(steps: Steps, clock: Clock, begins: int, *, in_vain: bool = False) -> None:
    """Play an epoch of `begins` begins, each of an execution that takes 2 s."""
    steps.begin_epoch()
    for number in range(begins):
        steps.begin(number)
        clock.now += 2
    steps.end_epoch(in_vain=in_vain)
    clock.now += 100  # validation
    steps.end_epoch(in_vain=in_vain)


def test_time(run: Run, clock: Clock) -> None:
    """A step lasts from begin to begin without our own time; the first, which compiles, has no time."""
    play(Steps(run, 1, 4, clock=clock), clock, 4)
    assert (run.steps, run.durations.total, sum(run.durations.buckets)) == (4, 6.0, 3)


def test_second_epoch(run: Run, clock: Clock) -> None:
    """Only a fit's first step compiles: the second epoch's steps all have times."""
    steps = Steps(run, 1, 4, clock=clock)
    play(steps, clock, 4)
    play(steps, clock, 4)
    assert (run.steps, run.durations.total, sum(run.durations.buckets)) == (8, 14.0, 7)


def test_several_an_execution(run: Run, clock: Clock) -> None:
    """An execution of several steps counts each, at its share of the time; the last may be short."""
    steps = Steps(run, 3, 4, clock=clock)
    play(steps, clock, 2)
    play(steps, clock, 2)
    assert (run.steps, run.durations.total) == (8, 6.0)
    assert run.durations.buckets[STEP_BUCKETS.index(1.0)] == 3
    assert run.durations.buckets[STEP_BUCKETS.index(2.5)] == 2


def test_unknown_length(run: Run, clock: Clock) -> None:
    """Where Keras does not know an epoch's length, a last begin that found no data is no step."""
    play(Steps(run, 1, None, updates=lambda: 17, clock=clock), clock, 5, in_vain=True)
    assert (run.steps, run.durations.total) == (4, 6.0)


def test_shorter_than_told(run: Run, clock: Clock) -> None:
    """Nor is it where there is less data than Keras was told."""
    play(Steps(run, 1, 9, clock=clock), clock, 5, in_vain=True)
    assert (run.steps, run.durations.total) == (4, 6.0)


def test_stopped(run: Run, clock: Clock) -> None:
    """A fit that was asked to stop made a step of every begin."""
    play(Steps(run, 1, None, clock=clock), clock, 5)
    assert run.steps == 5


@pytest.mark.parametrize(
    ("updates", "steps"),
    [((0, 10), 10), ((100, 112), 12), ((0, 0), 10), ((0, 99), 12), ((None, None), 12)],
    ids=["short", "full", "skipped updates", "two updates a step", "no optimizer"],
)
def test_unknown_length_several(run: Run, clock: Clock, updates: tuple[int | None, ...], steps: int) -> None:
    """The optimizer tells how many steps a short last execution made, within what the executions allow."""
    answers = iter(updates)
    play(Steps(run, 3, None, updates=lambda: next(answers), clock=clock), clock, 5, in_vain=True)
    assert run.steps == steps


def test_never_more_than_made(run: Run, clock: Clock) -> None:
    """While an epoch of unknown length runs, an execution that may be short is not counted yet."""
    steps = Steps(run, 3, None, updates=lambda: 0, clock=clock)
    steps.begin_epoch()
    counted = []
    for number in range(4):
        steps.begin(number)
        steps.settle()
        counted.append(run.steps)
    assert counted == [0, 0, 3, 6]


def test_failed_fit(run: Run, clock: Clock) -> None:
    """The steps of a fit that ended by an exception count, all but the one that failed."""
    failed = Steps(run, 1, 10, clock=clock)
    failed.begin_epoch()
    run.look_due = clock.now + 1000
    for number in range(4):
        failed.begin(number)
    assert run.steps == 0
    Steps(run, 1, 10, clock=clock)
    assert run.steps == 3
    assert failed.superseded()


def test_step_that_failed(run: Run, clock: Clock) -> None:
    """Of an execution that raised no step counts, and none is under way."""
    steps = Steps(run, 1, 10, clock=clock)
    steps.begin_epoch()
    for number in range(4):
        steps.begin(number)
        clock.now += 2
    assert run.stepping
    steps.fail()
    assert (run.steps, run.durations.total, run.stepping) == (3, 4.0, False)


def test_stepping_is_told_at_once(daemon: Receiver, connection: Connection, clock: Clock) -> None:
    """The first step of an epoch is told when it begins: it may hang."""
    run = Run(connection)
    run.report(clock.now)
    steps = Steps(run, 1, 10, clock=clock)
    steps.begin_epoch()
    clock.now += 0.001
    steps.begin(0)
    last = daemon.accept().waiting()[-1]
    assert isinstance(last, Report)
    assert (last.stepping, last.batch) == (True, 0)
    steps.end_epoch(in_vain=False)
    assert not run.stepping


def play_traced(run: Run, clock: Clock, traces: list[object], durations: list[float]) -> None:
    """Play an epoch whose executions take so long, with what the traces are told to be as each of them ends."""
    told = iter(traces)
    steps = Steps(run, 1, len(durations), traces=lambda: next(told), clock=clock)
    steps.begin_epoch()
    for number, seconds in enumerate(durations):
        steps.begin(number)
        clock.now += seconds
    steps.end_epoch(in_vain=False)


@pytest.mark.parametrize(
    ("traces", "compiled", "timed"),
    [
        ([0, 1, 1, 1, 1], 100.0, 3),
        ([1, 1, 1, 1, 1], 0.0, 4),
        ([0, 1, 1, 2, 2], 150.0, 2),
        ([0, 1, 2, 2, 2], 100.0, 3),
        ([None] * 5, None, 3),
        ([0, None, None, None, None], 100.0, 3),
    ],
    ids=["first", "compiled by an earlier fit", "retraced", "retraced at no cost", "unknown", "who told is gone"],
)
def test_compiling(
    connection: Connection, clock: Clock, traces: list[object], compiled: float | None, timed: int
) -> None:
    """An execution that traced is timed apart if it took that long; where nobody can tell the first has no time."""
    run = Run(connection)
    play_traced(run, clock, traces, [100.0, 1.0, 50.0, 1.0])
    assert (run.steps, run.compile_seconds, sum(run.durations.buckets)) == (4, compiled, timed)


def test_looks_are_seldom(connection: Connection, clock: Clock) -> None:
    """What is read from the device between steps is read once a second."""
    run = Run(connection)
    looked: list[float] = []
    steps = Steps(run, 1, None, looks=[lambda: looked.append(clock.now)], clock=clock)
    steps.begin_epoch()
    for number in range(50):
        steps.begin(number)
        clock.now += 0.125
    assert [round(after - before) for before, after in pairwise(looked)] == [1, 1, 1, 1, 1]


def done_at_each(connection: Connection, clock: Clock, seconds: float, interval: float) -> list[set[str]]:
    """Play two seconds, or five steps, of steps that take so long; give what was done at each begin but the first."""
    run, done = Run(connection), set[str]()
    run.interval = interval
    sample, execute = run.memory.sample, run.execute

    def sampled() -> None:
        done.add("report")
        sample()

    def settled(executions: Sequence[float], steps: int) -> None:
        done.update(["settle"] if len(executions) > MANY else [])
        execute(executions, steps)

    run.memory.sample = sampled  # type: ignore[method-assign] # and they do what they did
    run.execute = settled  # type: ignore[method-assign]
    steps = Steps(run, 1, None, looks=[lambda: done.add("loss"), lambda: done.add("input")], clock=clock)
    steps.begin_epoch()
    each: list[set[str]] = []
    for number in range(round(max(2, 5 * seconds) / seconds)):
        steps.begin(number)
        each.append(set(done))
        done.clear()
        clock.now += seconds
    return each[1:]


def test_shared_out(connection: Connection, clock: Clock) -> None:
    """No short step waits for more than one thing, and each is done as often as ever."""
    each = done_at_each(connection, clock, 1 / 1024, 0.25)
    assert max(map(len, each)) == 1
    counts = Counter(name for done in each for name in done)
    assert (counts["loss"], counts["input"]) == (2, 2)
    assert counts["settle"] == counts["report"] == 7
    after_settling = [after for before, after in pairwise(each) if before == {"settle"}]
    assert {"loss"} in after_settling or {"input"} in after_settling
    assert set() not in after_settling


@pytest.mark.parametrize(("seconds", "interval"), [(1 / 1024, 0), (1 / 64, 0), (0.25, 0.25), (2, 0.25)])
def test_each_step_reports(connection: Connection, clock: Clock, seconds: float, interval: float) -> None:
    """Where a report is asked for at each step, each has one, with at most one look at something else."""
    each = done_at_each(connection, clock, seconds, interval)
    assert all("report" in done and len(done) <= 2 for done in each)
    counts = Counter(name for done in each for name in done)
    assert (counts["loss"], counts["input"]) == (2, 2)


@pytest.mark.parametrize(("cost", "pause"), [(0.0001, 0.25), (0.0003, 0.6), (0.01, 1.0)])
def test_slow_reports_are_rarer(connection: Connection, clock: Clock, cost: float, pause: float) -> None:
    """Reports that take long come later, for half a thousandth of the time, but come."""
    run = Run(connection)
    run.memory.sample = lambda: setattr(clock, "now", clock.now + cost)  # type: ignore[method-assign] # takes that long
    steps = Steps(run, 1, None, clock=clock)
    steps.begin_epoch()
    steps.begin(0)
    begun = clock.now
    steps.begin(1)
    assert run.look_due - begun == pytest.approx(pause, rel=0.02)


@pytest.mark.parametrize("looked", [True, False])
def test_nested_fit(run: Run, clock: Clock, *, looked: bool) -> None:
    """A fit inside a fit's step, which has ended, takes nothing from the outer one but the time of that step."""
    outer = Steps(run, 1, 10, clock=clock)
    outer.begin_epoch()
    for number in range(7):
        outer.begin(number)
        clock.now += 2
        if number == 3:
            play(Steps(run, 1, 4, clock=clock), clock, 4)
            run.phase = "idle"
            run.look_due = clock.now if looked else inf
    assert (run.phase, run.stepping) == (("train", True) if looked else ("idle", False))
    outer.end_epoch(in_vain=False)
    assert run.steps == 11
    assert (run.durations.total, sum(run.durations.buckets)) == (16.0, 8)  # the first of both and the one in between


def test_nested_fit_ends_by_an_exception(run: Run, clock: Clock) -> None:
    """What a fit inside a fit has begun counts as ever, and then the outer one goes on."""
    outer = Steps(run, 1, 10, clock=clock)
    outer.begin_epoch()
    outer.begin(0)
    inner = Steps(run, 1, 2, clock=clock)
    inner.begin_epoch()
    for steps, number in ((inner, 0), (inner, 1), (outer, 1), (outer, 2)):
        clock.now += 2
        steps.begin(number)
    clock.now += 2
    outer.end_epoch(in_vain=False)
    assert run.steps == 4


def test_fit_in_another_thread(run: Run, clock: Clock) -> None:
    """A fit that goes on beside a fit takes over the counting; the other one keeps nothing of its epoch's rest."""
    one = Steps(run, 1, 10, clock=clock)
    one.begin_epoch()
    one.begin(0)
    beside = threading.Thread(target=lambda: play(Steps(run, 1, 2, clock=clock), clock, 2))
    beside.start()
    beside.join()
    run.hasten()
    for number in range(1, 6):
        one.begin(number)
    assert len(one._begins) <= 1
    assert run.steps == 2


def test_empty_epoch(run: Run, clock: Clock) -> None:
    """An epoch without data counts no step."""
    play(Steps(run, 3, None, updates=lambda: 0, clock=clock), clock, 1, in_vain=True)
    play(Steps(run, 1, None, clock=clock), clock, 0)
    assert run.steps == 0


def test_number_told_twice(run: Run, clock: Clock) -> None:
    """A callback that is in the list twice notes each step once, an epoch of one step after another too."""
    steps = Steps(run, 1, 1, clock=clock)
    for _ in range(3):
        steps.begin_epoch()
        steps.begin(0)
        steps.begin(0, None)
        clock.now += 2
        steps.end_epoch(in_vain=False)
    assert run.steps == 3


def test_failing(run: Run, clock: Clock) -> None:
    """What fails as a step begins is told and not raised, and tried again when it is due again."""
    failures: list[Exception] = []
    steps = Steps(run, 1, None, hook=Hook(failures.append, clock), clock=clock)
    steps.begin_epoch()
    run.memory.sample = lambda: 1 / 0  # type: ignore[assignment] # fails
    for number in range(3):
        steps.begin(number)
        clock.now += 0.15
    assert [type(each) for each in failures] == [ZeroDivisionError, ZeroDivisionError]


def test_hook_for_good(run: Run, clock: Clock) -> None:
    """Who has kept the function of a hook calls it for whoever counts now, and for nobody once the hook rests."""
    hook = Hook(clock=clock)
    kept = hook.begin
    kept(0)
    outer = Steps(run, 1, 9, hook=hook, clock=clock)
    outer.begin_epoch()
    kept(0)
    inner = Steps(run, 1, 9, hook=hook, clock=clock)
    inner.begin_epoch()
    for number in range(3):
        kept(number)
    inner.end_epoch(in_vain=False)
    outer.take_notes()
    kept(1)
    outer.end_epoch(in_vain=False)
    counted = run.steps
    hook.rest()
    kept(2)
    assert (counted, outer.under_way, outer.begin) == (5, None, kept)


def test_under_way(run: Run, clock: Clock) -> None:
    """The execution under way is known by when it began, until it has ended."""
    steps = Steps(run, 1, None, clock=clock)
    steps.begin_epoch()
    told = [steps.under_way]
    for number in range(2):
        steps.begin(number)
        told.append(steps.under_way)
        clock.now += 2
    made = steps.end_epoch(in_vain=True), steps.end_epoch(in_vain=True)
    assert told[0] is steps.under_way is None
    assert told[2] == clock.now - 2 > (told[1] or 0)
    assert made == (1, None)
