"""What the program's own signal handlers raise reaches the program, wherever in our code the signal comes."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from receiver import Receiver

from gpuwarden import watch
from gpuwarden.client import connection, disk_room, loop
from gpuwarden.client.answer import Wish, fulfil
from gpuwarden.client.frameworks import Framework
from gpuwarden.client.guard import by_signal
from gpuwarden.client.memory import Memory


class OverTimeError(TimeoutError):
    """A time limit, as programs have them: an OSError."""


def function(_number: int, _frame: FrameType | None) -> None:
    """Raise as a plain handler."""
    raise OverTimeError


def any_arguments(*_given: object) -> None:
    """Raise as a handler that takes whatever it is given."""
    raise OverTimeError


def nested(_number: int, _frame: FrameType | None) -> None:
    """Raise in a function that the handler calls, once the handler has been taken back."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    any_arguments()


class Equal:
    """Says that it is equal to anything, or asks what equal means, as tensors do."""

    def __eq__(self, other: object) -> bool:
        """Say so."""
        return True

    __hash__ = None  # type: ignore[assignment] # as theirs


class Limit:
    """Has handlers that are no functions."""

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        """Raise as an object."""
        raise OverTimeError

    def method(self, number: int, frame: FrameType | None) -> None:
        """Raise as a method."""
        self(number, frame)


HANDLERS = [function, any_arguments, nested, Limit(), Limit().method, functools.partial(function)]


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Put the signal back."""
    before = signal.signal(signal.SIGUSR1, function)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Listen where watches report to."""
    monkeypatch.delenv("GPUWARDEN_DISABLED", raising=False)
    receiver = Receiver(tmp_path / "run.sock")
    monkeypatch.setenv("GPUWARDEN_SOCKET", receiver.path)
    yield receiver
    receiver.close()


def interrupted(*_given: object) -> Any:
    """Be where the signal comes."""
    signal.raise_signal(signal.SIGUSR1)


@pytest.mark.parametrize("kind", HANDLERS, ids=lambda kind: getattr(kind, "__name__", type(kind).__name__))
def test_handlers(kind: Callable[[int, FrameType | None], None]) -> None:
    """Each kind of handler is known by the frame that it is given."""
    signal.signal(signal.SIGUSR1, kind)
    with pytest.raises(OverTimeError) as raised:
        interrupted()
    assert by_signal(raised.value)


def changed_arguments(*given: object) -> None:
    """Raise as a function that has made something else of what it was given."""
    given = len(given)  # type: ignore[assignment] # the point
    raise OverTimeError(given)


@pytest.mark.parametrize("given", [(), (signal.SIGUSR1, None), (Equal(),)])
@pytest.mark.parametrize("raising", [any_arguments, changed_arguments])
def test_no_signal(raising: Callable[..., None], given: tuple[object, ...]) -> None:
    """What is raised without a signal is not taken for a handler's, whatever it was given."""
    with pytest.raises(OverTimeError) as raised:
        raising(*given)
    assert not by_signal(raised.value)


@pytest.mark.parametrize(
    "place", [(loop, "monotonic"), (connection, "encode"), (os, "fstat")], ids=["step", "message", "socket"]
)
def test_watch(daemon: Receiver, monkeypatch: pytest.MonkeyPatch, place: tuple[object, str]) -> None:
    """A loop gets what the handler raised, and its watch goes on."""
    with watch(interval=0) as run:
        peer = daemon.accept()
        with monkeypatch.context() as patched:
            patched.setattr(*place, interrupted)
            run._loop.run.hasten()
            with pytest.raises(OverTimeError):
                run.step()
        assert run._loop._guard._errors == 0
        peer.waiting()
        run._loop.run.hasten()
        run.step()
        assert peer.waiting()


class Held:
    """What stands for tensors in a frame."""


def test_nothing_is_kept(daemon: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the program has caught what the handler raised, nothing of ours holds the frames that it went through."""
    tensors: list[weakref.ref[Held]] = []

    def train() -> None:
        held = Held()
        tensors.append(weakref.ref(held))
        run.step()

    gc.disable()
    try:
        with watch(interval=0) as run:
            monkeypatch.setattr(loop, "monotonic", interrupted)
            with contextlib.suppress(OverTimeError):
                train()
            monkeypatch.undo()
            assert tensors[0]() is None
    finally:
        gc.enable()


def test_own_fault(daemon: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same error without a signal stays away from the loop."""
    with watch(interval=0) as run:
        with monkeypatch.context() as patched:
            patched.setattr(loop, "monotonic", any_arguments)
            run.step()
        assert run._loop._guard._errors == 1


def test_allocator() -> None:
    """A device is asked on where a signal came as it was asked."""

    class Interrupted:
        """A framework with one device."""

        memory = staticmethod(interrupted)

    made: Any = Interrupted()
    framework: Framework = made
    memory = Memory()
    with pytest.raises(OverTimeError):
        memory.watch(framework, ["GPU:0"])
    with pytest.raises(OverTimeError):
        memory.sample()


def test_disk_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit that comes as room for a checkpoint is made is not taken for a disk without any."""
    monkeypatch.setattr(disk_room, "sizes_of", lambda _model: [1])
    monkeypatch.setattr(os, "posix_fallocate", interrupted)
    with pytest.raises(OverTimeError):
        disk_room.check_room(None, tmp_path / "a.h5")


def test_wish() -> None:
    """A time limit that comes as a model is saved on pressure ends the training, as it would without."""
    with pytest.raises(OverTimeError):
        fulfil(Wish(interrupted, "critical", Path()), None, None, first=True)
