"""Wrapper of a Keras function that reports what it raises: Keras itself tells a callback of no error.

What is raised goes on as it was. Nothing here keeps it: an exception holds its traceback, the traceback its frames, and
those the tensors on the device that the user needs back.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from gpuwarden.client.input_wait import InputMeter

_END_OF_DATA = "OutOfRangeError"  # TensorFlow's; by name, since TensorFlow is not imported here


class Observer(Protocol):
    """Callback that is notified of what a function raises."""

    def failed(self, exception: BaseException, /) -> None:
        """Take note of an exception that is on its way to the user, and keep nothing of it but text."""

    def ended(self) -> None:
        """Take note that a call found the data at its end."""


class _Wrapped:
    """Calls as `function` does, and answers for it to whoever reads or sets an attribute.

    A copy or pickle is one of the function alone. `feed` is shown the arguments of each call and may replace them.
    """

    # Under names that no function has for itself.
    __slots__ = ("__weakref__", "_gpuwarden_feed", "_gpuwarden_function", "_gpuwarden_observer")

    _gpuwarden_function: Callable[..., Any]
    _gpuwarden_observer: weakref.ref[Observer]
    _gpuwarden_feed: InputMeter | None

    def __init__(self, function: Callable[..., Any], observer: Observer, feed: InputMeter | None) -> None:
        object.__setattr__(self, "_gpuwarden_function", function)
        object.__setattr__(self, "_gpuwarden_observer", weakref.ref(observer))
        object.__setattr__(self, "_gpuwarden_feed", feed)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._gpuwarden_function(*_fed(self._gpuwarden_feed, args), **kwargs)
        except BaseException as error:  # KeyboardInterrupt too: what was called is over
            _tell(self._gpuwarden_observer, error)
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gpuwarden_function, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._gpuwarden_function, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._gpuwarden_function, name)

    def __dir__(self) -> Iterable[str]:
        return dir(self._gpuwarden_function)

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        # By the standard library alone: who loads the pickle may not have this package.
        return operator.getitem, ((self._gpuwarden_function,), 0)


def wrap(function: Callable[..., Any], observer: Observer, feed: InputMeter | None = None) -> Callable[..., Any]:
    """Return a callable that tells `observer`, which it holds weakly, of what `function` raises; never one in another.

    The end of the data is no error, and told as what it is. What `observer` itself raises is dropped. `feed` is shown
    the arguments of each call and may replace them; where it raises, they stay.
    """
    return _Wrapped(unwrap(function), observer, feed)


def unwrap(function: Any) -> Any:
    """Return what `wrap` was given; anything else as it is."""
    # Not isinstance: that would believe what the function says of its __class__.
    return function._gpuwarden_function if type(function) is _Wrapped else function  # noqa: SLF001 - our own


def reports_to(function: Any, observer: Observer) -> bool:
    """Say whether this came of `wrap` for `observer`."""
    return type(function) is _Wrapped and function._gpuwarden_observer() is observer  # noqa: SLF001 - our own


def _fed(feed: InputMeter | None, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if feed is None:
        return args
    try:
        return feed(args)
    except Exception:  # noqa: BLE001 - whatever fails here must not end a training run
        return args


def _tell(reference: weakref.ref[Observer], error: BaseException) -> None:
    # In a frame of its own: the one that calls lives as long as the exception does, and must not hold the observer.
    observer = reference()
    if observer is None:
        return
    with contextlib.suppress(Exception):
        if isinstance(error, StopIteration) or any(each.__name__ == _END_OF_DATA for each in type(error).__mro__):
            observer.ended()
        else:
            observer.failed(error)
