"""Wrapper of a Keras function: it reports exceptions, raises them unchanged, and keeps no reference."""

from __future__ import annotations

import copy
import gc
import pickle
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from gpuwarden.client.keras.fit.function_patch import unwrap, wrap


class Observer:
    """Records what is reported, as text."""

    def __init__(self) -> None:
        self.reported: list[str] = []

    def record_exception(self, exception: BaseException) -> None:
        """Note the exception."""
        self.reported.append(repr(exception))

    def record_end_of_data(self) -> None:
        """Note the end of the data."""
        self.reported.append("the end")


class OutOfRangeError(Exception):
    """Exception with the name of TensorFlow's, which ends data of an unknown length."""


class EndOfSequence(OutOfRangeError):  # noqa: N818 - as TensorFlow's own subclass might be
    """One of its kind."""


class NoMemoryError(Exception):
    """An exception that weak references can watch."""


class Tensor:
    """Stand-in for memory on a device."""


def raising(error: BaseException) -> Callable[..., Any]:
    """Make a function that raises `error`."""

    def function(*_args: Any, **_kwargs: Any) -> Any:
        raise error

    return function


def module_level(first: int, *, second: int) -> tuple[int, int]:
    """Return the argument; found by its name when unpickled."""
    return first, second


@pytest.fixture
def observer() -> Observer:
    """Make an observer."""
    return Observer()


def test_call(observer: Observer) -> None:
    """Arguments and result pass through unchanged."""
    assert wrap(module_level, observer)(1, second=2) == (1, 2)
    assert observer.reported == []


def test_error(observer: Observer) -> None:
    """An exception is reported once and reaches the caller as the same object, with its cause."""
    error = ValueError("no memory")
    error.__cause__ = cause = KeyError("first")
    with pytest.raises(ValueError, match="no memory") as raised:
        wrap(raising(error), observer)()
    assert raised.value is error
    assert error.__cause__ is cause
    assert error.__context__ is None
    assert observer.reported == ["ValueError('no memory')"]
    assert [each.name for each in traceback.extract_tb(error.__traceback__)][1:] == ["__call__", "function"]


@pytest.mark.parametrize("error", [StopIteration(), OutOfRangeError("End of sequence"), EndOfSequence()])
def test_end_of_data(observer: Observer, error: Exception) -> None:
    """The end of the data passes, and is not reported as an error."""
    with pytest.raises(type(error)):
        wrap(raising(error), observer)()
    assert observer.reported == ["the end"]


def test_interrupt(observer: Observer) -> None:
    """An interrupt is reported too: it ends the call."""
    with pytest.raises(KeyboardInterrupt):
        wrap(raising(KeyboardInterrupt()), observer)()
    assert observer.reported == ["KeyboardInterrupt()"]


def test_observer_raises() -> None:
    """An observer that fails changes nothing for the user."""

    class Failing(Observer):
        def record_exception(self, _exception: BaseException) -> None:
            raise TypeError("of the observer")

    failing = Failing()
    with pytest.raises(ValueError, match="the user's") as raised:
        wrap(raising(ValueError("the user's")), failing)()
    assert raised.value.__context__ is None


def test_observer_is_gone() -> None:
    """The observer is not kept alive, and nothing is reported once it is gone."""
    observer = Observer()
    function = wrap(raising(ValueError("unheard")), observer)
    gone = weakref.ref(observer)
    del observer
    gc.collect()
    assert gone() is None
    with pytest.raises(ValueError, match="unheard"):
        function()


def test_nothing_is_held(observer: Observer) -> None:
    """Once the caller has dropped the exception, its frames' tensors are free without the garbage collector's help."""
    tensors = []

    def function(_batch: Tensor) -> None:
        activation = Tensor()
        tensors.append(weakref.ref(activation))
        raise NoMemoryError("no memory")

    batch = Tensor()
    tensors.append(weakref.ref(batch))
    wrapped = wrap(function, observer)
    gc.disable()
    try:
        with pytest.raises(NoMemoryError) as raised:
            wrapped(batch)
        held = weakref.ref(raised.value)
        del raised, batch
        assert (held(), *(each() for each in tensors)) == (None, None, None)
    finally:
        gc.enable()
    assert len(observer.reported) == 1


def test_frame_does_not_hold_observer() -> None:
    """A user who keeps the exception keeps the function's frames by it, but not the observer."""
    observer = Observer()
    try:
        wrap(raising(ValueError("kept")), observer)()
    except ValueError as error:
        kept = error
    gone = weakref.ref(observer)
    del observer
    assert gone() is None
    assert str(kept) == "kept"


def test_attributes(observer: Observer) -> None:
    """Attributes are the function's, whichever way they are looked at."""

    def function() -> None:
        pass

    wrapped: Any = wrap(function, observer)
    function.function_spec = "spec"  # type: ignore[attr-defined] # as tf.function's, which TensorBoard looks for
    assert wrapped.function_spec == "spec"
    assert wrapped.__name__ == "function"
    assert "function_spec" in dir(wrapped)
    wrapped.mine = 1
    assert function.mine == 1  # type: ignore[attr-defined]
    del wrapped.mine
    assert not hasattr(function, "mine")
    assert not hasattr(wrapped, "mine")


def test_never_nested(observer: Observer) -> None:
    """Wrapped again, for whomever, it is wrapped once, and unwrapped it is the function."""
    other = Observer()
    function = raising(ValueError("once"))
    twice = wrap(wrap(function, observer), other)
    with pytest.raises(ValueError, match="once"):
        twice()
    assert (observer.reported, other.reported) == ([], ["ValueError('once')"])
    assert unwrap(twice) is function
    assert unwrap(function) is function
    assert unwrap(None) is None


def test_copies(observer: Observer) -> None:
    """Copies and pickles contain only the function, and fail where its own would."""
    wrapped = wrap(module_level, observer)
    assert copy.copy(wrapped) is module_level
    assert copy.deepcopy(wrapped) is module_level
    data = pickle.dumps(wrapped)
    assert pickle.loads(data) is module_level  # noqa: S301 - its own
    assert b"gpuwarden" not in data
    for local in (raising(ValueError()), wrap(raising(ValueError()), observer)):
        with pytest.raises((AttributeError, pickle.PicklingError)):
            pickle.dumps(local)


def test_deep_copy_of_an_object(observer: Observer) -> None:
    """A callable object with its own way of copying is copied that way."""

    class Function:
        def __call__(self) -> None:
            pass

        def __deepcopy__(self, _memo: Any) -> Function:
            return self

    function = Function()
    assert copy.deepcopy(wrap(function, observer)) is function


class Doubled:
    """Passes each argument twice."""

    def __call__(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace the arguments."""
        return tuple(2 * each for each in arguments)

    def record_wait(self) -> None:
        """Do nothing."""

    def pause(self) -> None:
        """Do nothing."""


class Broken(Doubled):
    """Fails at each call."""

    def __call__(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Fail."""
        raise RuntimeError(str(arguments))


def test_feed(observer: Observer) -> None:
    """A meter gets the arguments first and returns those to call with; errors are reported as without it."""
    assert wrap(module_level, observer, Doubled())(1, second=2) == (2, 2)
    with pytest.raises(ValueError, match="no memory"):
        wrap(raising(ValueError("no memory")), observer, Doubled())()
    assert observer.reported == ["ValueError('no memory')"]


def test_broken_feed(observer: Observer) -> None:
    """A feed that fails changes nothing and is no error of the function's."""
    assert wrap(module_level, observer, Broken())(1, second=2) == (1, 2)
    assert observer.reported == []


def test_fed_is_unwrapped(observer: Observer) -> None:
    """A wrapper with a meter is removed, replaced and copied like one without."""
    fed = wrap(module_level, observer, Doubled())
    assert unwrap(fed) is module_level
    assert unwrap(wrap(fed, observer)) is module_level
    assert copy.deepcopy(fed) is module_level
