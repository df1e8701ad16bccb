"""The watch of a custom loop, with a real socket: what it counts, and that it does not disturb the loop."""

from __future__ import annotations

import copy
import gc
import logging
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from receiver import PATIENCE, Peer, Receiver

import gpuwarden
from gpuwarden import watch
from gpuwarden.client import loop_tracker
from gpuwarden.client.frameworks import FRAMEWORK_NAMES
from gpuwarden.client.guard import MAX_ERRORS
from gpuwarden.client.loop_tracker import MAX_CHANGES_PER_SECOND, LoopTracker
from gpuwarden.client.watch import Watch
from gpuwarden.protocol.messages import End, Error, Hello, Message, Report


@dataclass
class Clock:
    """A monotonic clock that is moved by the test."""

    now: float = 1000.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Move it."""
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Put a clock that the test moves in the watch's place."""
    made = Clock()
    monkeypatch.setattr("gpuwarden.client.loop_tracker.monotonic", made)
    monkeypatch.setattr("gpuwarden.client.watch.monotonic", made)
    return made


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Listen on the socket that watches report to."""
    monkeypatch.delenv("GPUWARDEN_DISABLED", raising=False)
    for module in (*FRAMEWORK_NAMES, "torch.cuda", "jax._src.xla_bridge", "tensorflow.python.eager.context"):
        monkeypatch.delitem(sys.modules, module, raising=False)  # which another test may have imported
    receiver = Receiver(tmp_path / "run.sock")
    monkeypatch.setenv("GPUWARDEN_SOCKET", receiver.path)
    yield receiver
    receiver.close()


def list_reports(messages: list[Message]) -> list[Report]:
    """Keep the reports."""
    return [each for each in messages if isinstance(each, Report)]


def last(peer: Peer) -> Report:
    """Return the last report that waits."""
    return list_reports(peer.waiting())[-1]


def phases(messages: list[Message]) -> list[str]:
    """Return the phases in the order they were entered."""
    return [phase for phase, _ in groupby(each.phase for each in list_reports(messages))]


def python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `script` in its own interpreter."""
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=PATIENCE, check=False
    )


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
    assert phases(messages) == ["train", "idle"]


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
    assert phases(messages) == ["train", "test", "train", "test", "train", "idle"]


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
    assert phases(messages) == ["train", "test", "predict", "test", "train", "idle"]


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
    assert phases(messages) == ["train", "test", "train", "test", "train", "idle"]


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
    report = last(daemon.accept())
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
    report = last(daemon.accept())
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
        assert not last(peer).stepping
        for _ in run.batches([1]):
            run.step()
            assert last(peer).stepping
        assert not last(peer).stepping
        run.step()
        assert last(peer).stepping
        with run.phase("idle"):
            assert not last(peer).stepping
        assert last(peer).stepping
    assert not last(peer).stepping


def test_by_hand(daemon: Receiver) -> None:
    """A watch without a block is closed by hand; after that it does nothing."""
    run = watch("by hand")
    run.step()
    run.close()
    run.step()
    run.epoch(3)
    run.close()
    messages = daemon.accept().waiting()
    assert (list_reports(messages)[-1].steps, list_reports(messages)[-1].phase, list_reports(messages)[-1].epoch) == (
        1,
        "idle",
        None,
    )


@pytest.mark.parametrize("then", ["pass", "del run"])
def test_forgotten(daemon: Receiver, then: str) -> None:
    """Steps of a watch that is never closed are counted before the run reports its end."""
    done = python(f"from gpuwarden import watch\nrun = watch()\nfor _ in range(1000): run.step()\n{then}")
    assert (done.returncode, done.stderr) == (0, "")
    messages = daemon.accept().waiting()
    assert list_reports(messages)[-1].steps == 1000
    assert messages[-1] == End("exit")


def test_one_run(daemon: Receiver) -> None:
    """Watches of one process, after each other or within each other, are one run on one connection."""
    with watch("outer") as outer:
        outer.step()
        with watch("inner") as inner:
            inner.step(batch_size=2)
        peer = daemon.accept()
        assert last(peer).phase == "train"
        outer.step(batch_size=1)
    with watch("again") as again:
        again.step()
    report = last(peer)
    assert (report.steps, report.batch_size, report.phase) == (4, 1, "idle")
    assert not daemon.connected()


def test_threads(daemon: Receiver) -> None:
    """Threads with a watch each lose no step, and all of them end well."""

    def train() -> None:
        with watch(interval=0.001) as run:
            for _ in range(3000):
                run.step(batch_size=1)

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    peer = daemon.accept()
    while any(thread.is_alive() for thread in threads):
        peer.waiting()
    for thread in threads:
        thread.join()
    run = watch()
    report = last(peer)
    assert (report.steps, report.examples) == (12_000, 12_000)
    assert not loop_tracker._open - {run._loop}
    assert not daemon.connected()


def test_closed_while_another_reports(daemon: Receiver) -> None:
    """A watch that closes while another thread reports for long is counted by the next report."""
    first, second = watch(interval=0), watch(interval=0)
    peer = daemon.accept()
    second.step()
    with loop_tracker._reporting:
        second.step()
        second.close()
    first.epoch(1)
    assert (last(peer).steps, second._loop in loop_tracker._open) == (2, False)
    first.close()


def test_dropped(daemon: Receiver) -> None:
    """A watch without references has ended; its steps are counted with the next report."""
    watch().step()
    for _ in watch().batches([1]):
        pass
    with watch() as run:
        run.step()
        peer = daemon.accept()
    assert last(peer).steps == 2
    assert not [each for each in loop_tracker._open if each.run is run._loop.run]


@pytest.mark.parametrize("asked", ["run.step()", "run.pressure"])
def test_made_again(daemon: Receiver, asked: str) -> None:
    """A loop continues after a watch was dropped with uncounted steps, as when a notebook's cell runs again."""
    script = f"""
        from time import monotonic
        from gpuwarden import watch
        run = watch(interval=3600)
        run.step()
        run = watch(interval=3600)
        until = monotonic() + 0.2  # in which it listens and does not look
        while monotonic() < until:
            {asked}
    """
    done = python(textwrap.dedent(script))
    assert (done.returncode, done.stderr) == (0, "")
    reports = list_reports(daemon.accept().waiting())
    assert reports[-1].steps > 1 if asked == "run.step()" else reports[-1].steps == 1


def test_slow_thread(daemon: Receiver) -> None:
    """The steps of a thread that never reports are counted by the one that does."""
    slow, fast = watch(interval=0), watch(interval=0)
    peer = daemon.accept()
    for each in (slow, fast):
        each._loop.run.observe_due = float("inf")
        each.step()
    fast._loop.run.report_soon()
    fast.step()
    assert last(peer).steps == 3
    slow.close()
    fast.close()


def test_busy(daemon: Receiver) -> None:
    """While another thread reports, nothing waits for it, and steps recorded meanwhile are counted later."""
    with watch(interval=0) as run:
        peer = daemon.accept()
        peer.waiting()
        with loop_tracker._reporting:
            run.step()
            run.epoch(1)
            with run.phase("test"):
                pass
            assert peer.waiting() == []
        run.step()
        assert (last(peer).steps, run._loop.phase) == (2, "train")


def test_forked_child(daemon: Receiver) -> None:
    """A forked child's copy reports nothing, even if the lock was held at the fork; its own watch is its own run."""
    with watch("parent") as run:
        run.step()
        peer = daemon.accept()
        with loop_tracker._reporting:
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    run.step()
                    run.epoch(7)
                    run.__exit__(ValueError, ValueError("the child's"), None)
                    with watch("child") as own:
                        own.step()
                    status = 0
                finally:
                    os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        run.step()
    messages = peer.waiting()
    assert (list_reports(messages)[-1].steps, list_reports(messages)[-1].epoch, list_reports(messages)[-1].errors) == (
        2,
        None,
        {},
    )
    childs = daemon.accept()
    assert childs.pid() == child
    received = childs.waiting()
    assert isinstance(received[0], Hello)
    assert (received[0].name, list_reports(received)[-1].steps) == ("child", 1)


def test_copies(daemon: Receiver) -> None:
    """Copies and pickles of a watch, as programs hand to their workers, do nothing."""
    with watch() as run:
        run.step()
        for twin in (copy.copy(run), copy.deepcopy(run), pickle.loads(pickle.dumps(run))):  # noqa: S301 - our own
            with twin:
                twin.step()
            del twin
        run.step()
    assert last(daemon.accept()).steps == 2
    assert not daemon.connected()


class Held:
    """Stand-in for tensors in a frame."""


def test_error(daemon: Receiver) -> None:
    """An exception is reported as text and raised unchanged; none of its frames is kept."""
    tensors: list[weakref.ref[Held]] = []

    def train() -> None:
        held = Held()
        tensors.append(weakref.ref(held))
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def loop_of_the_user() -> None:
        with watch() as run:
            run.step()
            with run.phase("test"):
                train()

    with pytest.raises(RuntimeError, match="CUDA out of memory") as raised:
        loop_of_the_user()
    assert raised.value.__context__ is None
    assert raised.value.__cause__ is None
    assert vars(raised.value) == {}
    del raised
    gc.collect()
    assert tensors[0]() is None
    messages = daemon.accept().waiting()
    (error,) = [each for each in messages if isinstance(each, Error)]
    assert (error.kind, error.exception, error.phase, error.steps) == ("device_oom", "RuntimeError", "test", 1)
    assert list_reports(messages)[-1].errors == {"device_oom": 1}


def test_error_later(daemon: Receiver) -> None:
    """An error is of the phase in which it was raised, not of one whose error was caught before."""
    run = watch()
    with pytest.raises(KeyError), run.phase("test"):
        raise KeyError("caught")
    run.step()
    with pytest.raises(ValueError, match="later"), run:
        raise ValueError("later")
    messages = daemon.accept().waiting()
    assert [(each.exception, each.phase) for each in messages if isinstance(each, Error)] == [("ValueError", "train")]


def test_error_of_a_watch_within(daemon: Receiver) -> None:
    """An error that leaves two watches is one; the same one again is another."""
    for _ in range(2):
        with pytest.raises(ValueError, match="once"), watch(), watch():
            raise ValueError("once")
    assert sum(last(daemon.accept()).errors.values()) == 2


class OutOfRangeError(Exception):
    """Exception with the name of TensorFlow's end of data."""


@pytest.mark.parametrize(
    "raised", [KeyboardInterrupt, GeneratorExit, SystemExit, StopIteration, StopAsyncIteration, OutOfRangeError]
)
def test_no_error(daemon: Receiver, raised: type[BaseException]) -> None:
    """An exception that only stops the loop is no error, and is raised unchanged."""
    with pytest.raises(raised), watch():
        raise raised
    messages = daemon.accept().waiting()
    assert not any(isinstance(each, Error) for each in messages)
    assert list_reports(messages)[-1].phase == "idle"


def test_phase_left_by_an_error(daemon: Receiver) -> None:
    """Memory in use after an error is not reported as that between steps: the error is sent first."""

    def fail() -> None:
        with watch() as run:
            run.step()
            with run.phase("test"):
                raise KeyError("no such file")

    with pytest.raises(KeyError):
        fail()
    messages = daemon.accept().waiting()
    failed = next(index for index, each in enumerate(messages) if isinstance(each, Error))
    assert phases(messages[:failed]) == ["train", "test"]


def test_uncaught(daemon: Receiver) -> None:
    """A script that an error ends prints its traceback as ever, and its run failed."""
    done = python("from gpuwarden import watch\nwith watch() as run:\n    run.step()\n    1 / 0")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
    messages = daemon.accept().waiting()
    assert messages[-1] == End("uncaught ZeroDivisionError", "failed")
    assert list_reports(messages)[-1].errors == {"other": 1}


@pytest.mark.parametrize("phase", ["train", "test"])
def test_phase_of_an_uncaught_error(daemon: Receiver, phase: str) -> None:
    """An error keeps the phase in which it was raised if a `finally` closes the watch before it is reported."""
    script = """
        import sys
        from gpuwarden import watch
        run = watch()
        try:
            run.step()
            with run.phase(sys.argv[1]):
                1 / 0
        finally:
            run.close()
    """
    python(textwrap.dedent(script), phase)
    (error,) = [each for each in daemon.accept().waiting() if isinstance(each, Error)]
    assert (error.exception, error.phase, error.steps) == ("ZeroDivisionError", phase, 1)


@pytest.mark.parametrize(
    ("settings", "error", "name"),
    [
        ({"interval": float("nan")}, ValueError, "interval"),
        ({"interval": -1}, ValueError, "interval"),
        ({"interval": "1"}, TypeError, "interval"),
        ({"interval": True}, TypeError, "interval"),
        ({"interval": 10**400}, ValueError, "interval"),
        ({"disabled": "false"}, TypeError, "disabled"),
        ({"name": 3}, TypeError, "name"),
        ({"socket": 3}, TypeError, "socket"),
        ({"devices": ["GPU:0"]}, TypeError, "devices"),
        ({"devices": {"GPU:0": 1}}, TypeError, "devices"),
        ({"devices": {"cuda:0": "GPU-a"}}, ValueError, "devices"),
        ({"framework": "keras"}, ValueError, "framework"),
    ],
)
def test_bad_arguments(settings: dict[str, Any], error: type[Exception], name: str) -> None:
    """A wrong argument is refused at once, by its name."""
    with pytest.raises(error, match=f"^{name}: "):
        watch(**settings)


class Tensor:
    """An object whose value must not be read: that would wait for the device."""

    def __float__(self) -> float:
        raise AssertionError("asked for its value")

    __index__ = __int__ = __repr__ = __bool__ = __gt__ = __float__  # type: ignore[assignment] # none may be called


def test_batch_sizes(daemon: Receiver) -> None:
    """The last step's size is reported, and the largest of all, even if it came between two reports."""
    with watch() as run:
        for size in (4, 64, 8):
            run.step(batch_size=size)
        run.step()
    report = last(daemon.accept())
    assert (report.batch_size, report.largest_batch_size) == (8, 64)


def test_step_without_its_batch_size(daemon: Receiver) -> None:
    """The sum of the examples ends with the first step whose examples are unknown: it would be a lower bound."""
    with watch(interval=0) as run:
        sums = []
        for size in (8, 8, None, 8):
            run.step(batch_size=size)
            sums.append(run._loop.run.examples)
    assert sums == [8, 16, None, None]
    assert last(daemon.accept()).examples is None


def test_absurd_batch_size(daemon: Receiver) -> None:
    """A batch size that no message can hold leaves the examples unknown, and the reports go on."""
    with watch() as run:
        run.step(batch_size=8)
        run.epoch(1)
        run.step(batch_size=10**30)
        run.epoch(2)
        run.step(batch_size=8)
    last = list_reports(daemon.accept().waiting())[-1]
    assert (last.steps, last.examples, last.batch_size, last.largest_batch_size) == (3, None, 8, 8)


def test_odd_values(daemon: Receiver, caplog: pytest.LogCaptureFixture) -> None:
    """Values that are not numbers on the host are ignored with one line in the log, and the steps count."""
    odd: Any = Tensor()
    with watch() as run:
        for _ in range(3):
            run.step(batch_size=odd, loss=odd)
            run.step(batch_size=-1)
            run.step(batch_size=True)
        run.epoch(odd)
        with run.phase(odd):
            pass
    report = last(daemon.accept())
    assert (report.steps, report.examples, report.loss, report.epoch) == (9, None, None, None)
    assert [each.partition(":")[0] for each in caplog.messages] == [
        "batch_size",
        "loss",
        "batch_size",
        "epoch",
        "phase",
    ]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [(2, 2.0), (float("nan"), None), (float("inf"), None), (1e30, None), pytest.param(10**400, None, id="huge")],
)
def test_loss(daemon: Receiver, loss: float, expected: float | None) -> None:
    """The last loss is reported; one that a message cannot hold is reported as unknown, and no report is lost."""
    with watch() as run:
        run.step(loss=1.0)
        run.step()
        run.step(loss=loss)
    report = last(daemon.accept())
    assert (report.loss, report.steps) == (expected, 3)


def test_nonfinite_loss(daemon: Receiver) -> None:
    """Steps with a loss of NaN or infinity are counted exactly where each loss is passed, and the first is marked."""
    with watch() as run:
        run.step()
        peer = daemon.accept()
        assert last(peer).nonfinite_loss is None
        for loss in (1.0, float("nan"), float("inf"), 2.0, float("-inf")):
            run.step(loss=loss)
    found = last(peer).nonfinite_loss
    assert found is not None
    assert (found.steps, found.max_steps, found.after, found.first, found.current) == (3, 3, 2, 3, True)
    assert 0 <= found.seconds_ago < PATIENCE


def test_nonfinite_loss_ends(daemon: Receiver) -> None:
    """A finite loss ends the condition; the count stays."""
    with watch() as run:
        for loss in (float("nan"), 1.0):
            run.step(loss=loss)
    found = last(daemon.accept()).nonfinite_loss
    assert found is not None
    assert (found.steps, found.after, found.first, found.current) == (1, 0, 1, False)


def test_own_errors(daemon: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A watch that fails switches itself off with one warning and is idle from then on; the loop continues."""

    def fail(_self: LoopTracker) -> None:
        raise RuntimeError("a fault of the watch's own")

    run = watch(interval=0)
    with monkeypatch.context() as patch:
        patch.setattr(LoopTracker, "count", fail)
        for _ in range(MAX_ERRORS + 3):
            run.step()
    with run.phase("test"):
        run.step()
    assert ["training continues part=watch" in each for each in caplog.messages] == [True]
    first, last = list_reports(daemon.accept().waiting())
    assert (first.phase, last.phase, last.stepping) == ("train", "idle", False)


def test_own_errors_beside_another(daemon: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch that fails does not affect another's steps."""
    other, run = watch(interval=0), watch(interval=0)
    other.step()
    monkeypatch.setattr(run._loop, "_search", None)
    for _ in range(MAX_ERRORS):
        run.step()
    other.step()
    reports = list_reports(daemon.accept().waiting())
    assert {each.phase for each in reports} == {"train"}
    assert (reports[-1].stepping, reports[-1].steps) == (True, 2 + MAX_ERRORS)


def test_failing_from_the_start(daemon: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch whose very beginning fails lets the loop run."""
    monkeypatch.setattr("gpuwarden.client.loop_tracker.join_run", lambda *_: 1 / 0)
    with watch() as run:
        for _ in run.epochs(2):
            for _ in run.batches([1, 2, 3]):
                run.step()
    assert not daemon.connected()


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_disabled(daemon: Receiver, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A disabled watch, by argument or environment, does not connect, and the loop runs."""
    if how == "environment":
        monkeypatch.setenv("GPUWARDEN_DISABLED", "1")
    with watch(disabled=True if how == "argument" else None) as run:
        for _ in run.epochs(2):
            assert list(run.batches([1, 2])) == [1, 2]
            with run.phase("test"):
                run.step()
    assert not daemon.connected()


def test_absent(tmp_path: Path) -> None:
    """Without a daemon the loop runs."""
    with watch(socket=tmp_path / "none.sock") as run:
        for _ in run.batches([1, 2]):
            run.step()


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
        assert last(peer).epoch == 999


def test_place(daemon: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that torchrun started reports its job, its rank and the world size."""
    for name, value in {"TORCHELASTIC_RUN_ID": "job 7", "RANK": "3", "WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with watch():
        hello = daemon.accept().receive()
    assert isinstance(hello, Hello)
    assert (hello.job, hello.rank, hello.world_size, hello.visible_devices) == ("job 7", 3, 8, "3")


def test_package() -> None:
    """The package has the watch, and nothing else that it has not."""
    assert gpuwarden.watch is watch
    assert isinstance(watch(disabled=True), Watch)
    with pytest.raises(AttributeError, match="module 'gpuwarden' has no attribute 'wotch'"):
        gpuwarden.wotch  # noqa: B018 - the error is the point


def test_imports() -> None:
    """The package loads nothing of the watch; the watch loads only the client's side and the standard library."""
    script = """
import sys
import gpuwarden
print(*sorted(name for name in sys.modules if name.startswith("gpuwarden")))
before = set(sys.modules)
with gpuwarden.watch() as run: run.step()
new = set(sys.modules) - before
print(*{name.partition(".")[0] for name in new} - sys.stdlib_module_names)
half = ("gpuwarden.client", "gpuwarden.errors", "gpuwarden.protocol")
print(*sorted(name for name in new if name.startswith("gpuwarden") and not name.startswith(half)))
"""
    assert python(script).stdout.splitlines() == ["gpuwarden", "gpuwarden", ""]


def test_quiet(caplog: pytest.LogCaptureFixture, daemon: Receiver) -> None:
    """A loop that goes well leaves nothing in the log."""
    caplog.set_level(logging.DEBUG, "gpuwarden")
    with watch() as run:
        run.step(batch_size=1, loss=1.0)
    assert daemon.connected()
    assert caplog.messages == []
