"""Errors of a watched loop, and of the watch itself."""

from __future__ import annotations

import gc
import textwrap
import weakref

import pytest
from receiver import Receiver
from watch_stage import list_phases, list_reports, read_last_report, run_script

from gpuwarden import watch
from gpuwarden.client.guard import MAX_ERRORS
from gpuwarden.client.loop_tracker import LoopTracker
from gpuwarden.protocol.messages import End, Error


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
    assert sum(read_last_report(daemon.accept()).errors.values()) == 2


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
    assert list_phases(messages[:failed]) == ["train", "test"]


def test_uncaught(daemon: Receiver) -> None:
    """A script that an error ends prints its traceback as ever, and its run failed."""
    done = run_script("from gpuwarden import watch\nwith watch() as run:\n    run.step()\n    1 / 0")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
    messages = daemon.accept().waiting()
    assert messages[-1] == End("uncaught ZeroDivisionError", "failed", sent=len(messages))
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
    run_script(textwrap.dedent(script), phase)
    (error,) = [each for each in daemon.accept().waiting() if isinstance(each, Error)]
    assert (error.exception, error.phase, error.steps) == ("ZeroDivisionError", phase, 1)


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
