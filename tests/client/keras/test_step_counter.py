"""Count and time of steps."""

from __future__ import annotations

from typing import Any

import pytest
from moved_clock import Clock

from gpuwarden.client.connection import DaemonConnection
from gpuwarden.client.keras.fit.step_counter import StepCounter
from gpuwarden.client.reporter import Reporter
from gpuwarden.protocol.messages import STEP_BUCKETS


@pytest.fixture
def run(connection: DaemonConnection) -> Reporter:
    """Return a run without a daemon."""
    return Reporter(connection)


class Fit(StepCounter):
    """Step counter of a fit; each callback takes a second of the clock."""

    def __init__(
        self, run: Reporter, clock: Clock, per_execution: int = 1, in_epoch: int | None = 4, **counts: Any
    ) -> None:
        super().__init__(run, per_execution, in_epoch, clock=clock, **counts)
        self.clock = clock

    def go(self, seconds: float, *batches: int) -> None:
        """Make executions that take so long each."""
        for batch in batches:
            self.begin(batch, self.clock.now)
            self.count_ended()
            self.clock.now += 1
            if self.counts:
                self.restart()
            self.clock.now += seconds

    def play(self, begins: int, *, no_data: bool = False) -> None:
        """Run an epoch of executions of 2 s."""
        self.begin_epoch()
        self.go(2, *range(begins))
        if no_data:
            self.find_end()
        self.end_epoch()
        self.clock.now += 100  # validation
        self.end_epoch()


def test_time(run: Reporter, clock: Clock) -> None:
    """A step lasts from start to start without the callback's own time; the first, which compiles, has no time."""
    Fit(run, clock).play(4)
    assert (run.state.steps, run.durations.total, sum(run.durations.buckets)) == (4, 6.0, 3)


def test_second_epoch(run: Reporter, clock: Clock) -> None:
    """Only a fit's first step compiles: the second epoch's steps all have times."""
    fit = Fit(run, clock)
    fit.play(4)
    fit.play(4)
    assert (run.state.steps, run.durations.total, sum(run.durations.buckets)) == (8, 14.0, 7)


def test_several_an_execution(run: Reporter, clock: Clock) -> None:
    """An execution of several steps counts each, with an equal part of the time; the last may be short."""
    fit = Fit(run, clock, 3)
    fit.play(2)
    fit.play(2)
    assert (run.state.steps, run.durations.total) == (8, 6.0)
    assert run.durations.buckets[STEP_BUCKETS.index(1.0)] == 3
    assert run.durations.buckets[STEP_BUCKETS.index(2.5)] == 2


def test_end_of_data(run: Reporter, clock: Clock) -> None:
    """A last begin that only found the end of the data is no step: of unknown length, or shorter than Keras assumed.

    A fit that was asked to stop made a step of every begin.
    """
    Fit(run, clock, in_epoch=None, updates=lambda: 17).play(5, no_data=True)
    assert (run.state.steps, run.durations.total) == (4, 6.0)
    Fit(run, clock, in_epoch=9).play(5, no_data=True)
    assert run.state.steps == 8
    Fit(run, clock, in_epoch=None).play(5)
    assert run.state.steps == 13


@pytest.mark.parametrize(
    ("updates", "steps"),
    [((0, 10), 10), ((100, 112), 12), ((0, 0), 10), ((0, 99), 12), ((None, None), 12)],
    ids=["short", "full", "skipped updates", "two updates a step", "no optimizer"],
)
def test_unknown_length_several(run: Reporter, clock: Clock, updates: tuple[int | None, ...], steps: int) -> None:
    """The optimizer's count shows how many steps a short last execution made, within what is possible."""
    answers = iter(updates)
    Fit(run, clock, 3, None, updates=lambda: next(answers)).play(5, no_data=True)
    assert run.state.steps == steps


def test_never_more_than_made(run: Reporter, clock: Clock) -> None:
    """While an epoch of unknown length runs, an execution that may be short is not counted yet."""
    fit = Fit(run, clock, 3, None, updates=lambda: 0)
    fit.begin_epoch()
    counted = []
    for batch in range(4):
        fit.go(2, batch)
        counted.append(run.state.steps)
    assert counted == [0, 0, 3, 6]


def test_failed_fit(run: Reporter, clock: Clock) -> None:
    """The steps of a fit that an exception ended count when the next starts, except for the failed one."""
    failed = Fit(run, clock, in_epoch=10)
    failed.begin_epoch()
    for batch in range(4):
        failed.begin(batch, clock.now)
    assert run.state.steps == 0
    Fit(run, clock)
    assert run.state.steps == 3


def test_step_that_failed(run: Reporter, clock: Clock) -> None:
    """An execution that raised counts no step, and none is in progress."""
    fit = Fit(run, clock, in_epoch=10)
    fit.begin_epoch()
    fit.go(2, *range(4))
    run.state.stepping = True
    assert fit.fail() == 3
    assert (run.state.steps, run.durations.total, run.state.stepping) == (3, 4.0, False)


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
    ids=["first", "compiled by an earlier fit", "retraced", "retraced at no cost", "unknown", "model gone"],
)
def test_compiling(run: Reporter, clock: Clock, traces: list[object], compiled: float | None, timed: int) -> None:
    """The time of an execution that traced counts apart if it was long; if traces are unknown, the first's does."""
    answers = iter(traces)
    fit = Fit(run, clock, traces=lambda: next(answers))
    fit.begin_epoch()
    for batch, seconds in enumerate([100.0, 1.0, 50.0, 1.0]):
        fit.go(seconds, batch)
    fit.end_epoch()
    assert (run.state.steps, run.state.compile_seconds, sum(run.durations.buckets)) == (4, compiled, timed)


def test_latest_counts(run: Reporter, clock: Clock) -> None:
    """If two fits run at once, the one that started last counts; the other keeps none of its steps."""
    first = Fit(run, clock, in_epoch=10)
    first.begin_epoch()
    first.go(2, 0, 1)
    Fit(run, clock).play(2)
    first.go(2, *range(2, 6))
    assert (run.state.steps, first.counts, first.end_epoch()) == (3, False, None)
    assert len(first._begins) == 0


def test_parts_of_an_epoch(run: Reporter, clock: Clock) -> None:
    """An epoch that an evaluation divides has as many steps as one that is whole."""
    answers = iter([0, 5, 7])
    fit = Fit(run, clock, 3, None, updates=lambda: next(answers))
    fit.begin_epoch()
    parts = []
    for batches in (range(2), range(2, 3)):
        fit.go(2, *batches)
        parts.append(fit.end_epoch())
    assert (parts, run.state.steps) == ([5, 2], 7)


def test_empty_epoch(run: Reporter, clock: Clock) -> None:
    """An epoch without data counts no step."""
    Fit(run, clock, 3, None, updates=lambda: 0).play(1, no_data=True)
    Fit(run, clock, in_epoch=None).play(0)
    assert run.state.steps == 0


def test_number_twice(run: Reporter, clock: Clock) -> None:
    """A callback that is in the list twice notes each step once, an epoch of one step after another too."""
    fit = Fit(run, clock, in_epoch=1)
    for _ in range(3):
        fit.begin_epoch()
        fit.begin(0, clock.now)
        fit.begin(0, clock.now)
        clock.now += 2
        fit.end_epoch()
    assert run.state.steps == 3


@pytest.mark.parametrize(("returned", "steps"), [(2, 2), (3, 3)])
def test_abandoned(run: Reporter, clock: Clock, returned: int, steps: int) -> None:
    """Another callback's exception ends a fit: its last step counts, without a time, if its execution has returned."""
    fit = Fit(run, clock)
    fit.begin_epoch()
    fit.go(2, 0, 1, 2)
    fit.returned.count = returned
    Fit(run, clock).play(4)
    assert (run.state.steps, sum(run.durations.buckets)) == (steps + 4, 1 + 3)


def test_abandoned_in_a_short_execution(run: Reporter, clock: Clock) -> None:
    """The last execution of an epoch may be shorter than the others."""
    fit = Fit(run, clock, per_execution=3, in_epoch=4)
    fit.begin_epoch()
    fit.go(2, 0, 3)
    fit.returned.count = 2
    run.finish()
    run.finish()
    assert run.state.steps == 4
