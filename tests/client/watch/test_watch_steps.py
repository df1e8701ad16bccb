"""Steps, epochs, phases and input wait that the watch of a custom loop counts, with a real socket."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import groupby

import pytest
from moved_clock import Clock
from receiver import Receiver
from watch_stage import list_phases, list_reports, read_last_report

from gpuwarden import watch
from gpuwarden.client.loop_tracker import MAX_CHANGES_PER_SECOND
from gpuwarden.protocol.messages import Hello


def test_two_lines(daemon: Receiver, clock: Clock) -> None:
    """Each step counts and is timed, except for the first, whose start is unknown."""
    with watch("name") as run:
        for seconds in (5.0, 0.02, 0.02, 0.03):
            clock.sleep(seconds)
            run.step(batch_size=64, loss=0.5)
    messages = daemon.accept().waiting()
    assert isinstance(messages[0], Hello)
    assert (messages[0].name, messages[0].devices) == ("name", {})
    assert messages[0].framework.startswith("python 3.")
    report = list_reports(messages)[-1]
    assert (report.steps, sum(report.step_buckets), report.examples, report.loss) == (4, 3, 256, 0.5)
    assert report.step_seconds == pytest.approx(0.07)
    assert (report.compile_seconds, report.input_wait_seconds) == (None, None)
    assert list_phases(messages) == ["train", "idle"]


def test_epochs(daemon: Receiver, clock: Clock) -> None:
    """Epochs are counted; the time from an epoch's last step to the next epoch is in no step; the first compiles."""
    with watch(interval=0) as run:
        for _ in run.epochs(range(3, 5)):
            for _ in range(3):
                clock.sleep(1)
                run.step()
            clock.sleep(100)
    reports = list_reports(daemon.accept().waiting())
    assert [epoch for epoch, _ in groupby(each.epoch for each in reports)] == [None, 3, 4]
    assert [each.batch for each in reports if each.epoch == 4][:4] == [0, 0, 1, 2]
    assert (reports[-1].steps, reports[-1].step_seconds, reports[-1].compile_seconds) == (6, 5, 1)


def test_count_of_epochs(daemon: Receiver) -> None:
    """A number of epochs is counted from 0."""
    with watch() as run:
        assert list(run.epochs(3)) == [0, 1, 2]


def test_phase(daemon: Receiver, clock: Clock) -> None:
    """The time of another phase is no part of a step, wherever the phase is, and its steps do not count."""
    with watch(interval=0) as run:
        run.step()
        for _ in range(2):
            clock.sleep(1)
            with run.phase("test"):
                for _ in run.batches([1, 2]):
                    clock.sleep(10)
                    run.step(batch_size=3)
            clock.sleep(1)
            run.step(batch_size=5)
    messages = daemon.accept().waiting()
    report = list_reports(messages)[-1]
    assert (report.steps, report.step_seconds, report.examples, report.batch_size) == (3, 4, None, 5)
    assert report.input_observed_seconds is None
    assert list_phases(messages) == ["train", "test", "train", "test", "train", "idle"]


def test_nested_phases(daemon: Receiver, clock: Clock) -> None:
    """A phase within a phase returns to the outer one, and the time counts once."""
    with watch() as run:
        run.step()
        with run.phase("test"):
            clock.sleep(1)
            with run.phase("predict"):
                clock.sleep(1)
        clock.sleep(3)
        run.step()
    messages = daemon.accept().waiting()
    assert list_reports(messages)[-1].step_seconds == 3
    assert list_phases(messages) == ["train", "test", "predict", "test", "train", "idle"]


def test_training_phase(daemon: Receiver, clock: Clock) -> None:
    """A loop may enter "train": inside the block, even within another phase, its steps count."""
    with watch() as run, run.phase("train"):
        run.step()
        clock.sleep(1)
        run.step()
        with run.phase("test"):
            clock.sleep(10)
            with run.phase("train"):
                clock.sleep(2)
                run.step()
            clock.sleep(20)
        clock.sleep(4)
        run.step()
    messages = daemon.accept().waiting()
    assert (list_reports(messages)[-1].steps, list_reports(messages)[-1].step_seconds) == (4, 7)
    assert list_phases(messages) == ["train", "test", "train", "test", "train", "idle"]


class Loader:
    """A loader that takes time, to start and for each batch."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __iter__(self) -> Iterator[int]:
        """Simulate the start of workers."""
        self.clock.sleep(0.5)
        return self.wait()

    def wait(self) -> Iterator[int]:
        """Make batches."""
        for batch in range(3):
            self.clock.sleep(0.25)
            yield batch
        self.clock.sleep(100)


def test_input_wait(daemon: Receiver, clock: Clock) -> None:
    """The wait for each timed step's batches counts, the loader's start included; the end of the data is no step."""
    loader = Loader(clock)
    with watch(interval=0) as run:
        for _ in range(2):
            for _ in run.batches(loader):
                clock.sleep(1)
                run.step()
    report = read_last_report(daemon.accept())
    # The very first step compiles: neither its time nor its wait counts.
    assert (report.steps, report.compile_seconds) == (6, 1.75)
    assert report.step_seconds == report.input_observed_seconds == 2 * 1.25 + 1.75 + 2 * 1.25
    assert report.input_wait_seconds == 2 * 0.25 + 0.75 + 2 * 0.25


def test_several_batches_a_step(daemon: Receiver, clock: Clock) -> None:
    """A step that accumulates several batches has waited for all of them."""
    with watch(interval=0) as run:
        run.step()
        for batch in run.batches(Loader(clock)):
            if batch == 2:
                run.step()
    report = read_last_report(daemon.accept())
    assert (report.input_wait_seconds, report.input_observed_seconds) == (1.25, 1.25)


def test_loader_unchanged(daemon: Receiver) -> None:
    """A loader can be iterated again, has its length or none, and raises its own errors."""
    with watch() as run:
        batches = run.batches([1, 2])
        assert (list(batches), list(batches), len(batches)) == ([1, 2], [1, 2], 2)
        iterator = run.batches(iter("ab"))
        assert (list(iterator), list(iterator)) == (["a", "b"], [])
        with pytest.raises(TypeError, match="has no len"):
            len(iterator)
        with pytest.raises(TypeError, match="not iterable"):
            iter(run.batches(3))  # type: ignore[arg-type] # a mistake of the user's

        def failing() -> Iterator[int]:
            yield 1
            raise ZeroDivisionError("the loader's")

        with pytest.raises(ZeroDivisionError, match="the loader's"):
            list(run.batches(failing()))


class Batch:
    """An object that can be weakly referenced."""


def test_batches_are_not_held(daemon: Receiver) -> None:
    """A batch is freed when the loop drops it, also while the next is made; so is the loader that was left."""
    alive: list[weakref.ref[Batch]] = []
    gone: list[bool] = []
    closed: list[bool] = []

    def loader() -> Iterator[Batch]:
        try:
            for _ in range(3):
                gone.extend(each() is None for each in alive)
                made = Batch()
                alive.append(weakref.ref(made))
                yield made
                del made
        finally:
            closed.append(True)

    with watch() as run:
        for batch in run.batches(loader()):
            run.step()
            del batch
            if len(alive) == 3:
                break
        assert gone == [True] * 3
        assert closed == [True]


@pytest.mark.usefixtures("clock")
def test_stepping(daemon: Receiver) -> None:
    """A step is in progress from the first batch's request on, until the end of the data, and in no other phase."""
    with watch(interval=0) as run:
        peer = daemon.accept()
        assert not read_last_report(peer).stepping
        for _ in run.batches([1]):
            run.step()
            assert read_last_report(peer).stepping
        assert not read_last_report(peer).stepping
        run.step()
        assert read_last_report(peer).stepping
        with run.phase("idle"):
            assert not read_last_report(peer).stepping
        assert read_last_report(peer).stepping
    assert not read_last_report(peer).stepping


def test_many_changes(daemon: Receiver, clock: Clock) -> None:
    """Epochs that follow each other too fast are reported now and then, and the last of them in the next report."""
    with watch() as run:
        peer = daemon.accept()
        peer.waiting()
        for _ in run.epochs(1000):
            clock.sleep(1e-6)
        assert len(list_reports(peer.waiting())) == MAX_CHANGES_PER_SECOND
        clock.sleep(1)
        run.step()
        assert read_last_report(peer).epoch == 999
