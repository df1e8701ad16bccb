"""Patch of the functions that fit, evaluate and predict call each step, which reports what they raise.

Keras reports no exception to a callback. The functions are restored at the end, and at an error.
What is raised goes on as it was. Nothing here keeps it: an exception holds its traceback, the traceback its frames, and
those the tensors on the device that the user needs back.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

from gpuwarden.client.errors.uncaught import is_end_of_data

FunctionKind = Literal["train", "test", "predict"]
FUNCTION_KINDS: tuple[FunctionKind, ...] = ("train", "test", "predict")


class InputMeter(Protocol):
    """Meter of one fit's input wait; it is given the arguments of Keras's train function before each execution.

    Used in the thread that trains. Nothing of it may block or keep the input alive.
    """

    def __call__(self, arguments: tuple[Any, ...], /) -> tuple[Any, ...]:
        """Return the arguments to call with in place of those Keras gave."""

    def update(self) -> None:
        """Bring the InputWait up to date; called between two executions, about once a second."""

    def pause(self) -> None:
        """Update once more and stop, until the next execution: the epoch ends or validation begins."""


class Observer(Protocol):
    """Callback that is notified of what a function raises."""

    def record_exception(self, exception: BaseException, /) -> None:
        """Record an exception that is on its way to the user, and keep nothing of it but text."""

    def record_end_of_data(self) -> None:
        """Record that a call found the data at its end."""


class _Wrapped:
    """Callable in the place of `function`, whose attributes are read and set through it.

    A copy or pickle is one of the function alone. `meter` is shown the arguments of each call and may replace them.
    """

    # Under names that no function has for itself.
    __slots__ = ("__weakref__", "_gpuwarden_function", "_gpuwarden_meter", "_gpuwarden_observer")

    _gpuwarden_function: Callable[..., Any]
    _gpuwarden_observer: weakref.ref[Observer]
    _gpuwarden_meter: InputMeter | None

    def __init__(self, function: Callable[..., Any], observer: Observer, meter: InputMeter | None) -> None:
        object.__setattr__(self, "_gpuwarden_function", function)
        object.__setattr__(self, "_gpuwarden_observer", weakref.ref(observer))
        object.__setattr__(self, "_gpuwarden_meter", meter)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._gpuwarden_function(*_replace_arguments(self._gpuwarden_meter, args), **kwargs)
        except BaseException as error:  # KeyboardInterrupt too: what was called is over
            _report(self._gpuwarden_observer, error)
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


def wrap(function: Callable[..., Any], observer: Observer, meter: InputMeter | None = None) -> Callable[..., Any]:
    """Return a callable that reports what `function` raises to `observer`, held weakly; never one in another.

    The end of the data is no error, and reported as what it is. What `observer` itself raises is dropped. `meter` gets
    the arguments of each call and may replace them; where it raises, they stay.
    """
    return _Wrapped(unwrap(function), observer, meter)


def unwrap(function: Any) -> Any:
    """Return what `wrap` was given; anything else as it is."""
    # Not isinstance: that would believe what the function says of its __class__.
    return function._gpuwarden_function if type(function) is _Wrapped else function  # noqa: SLF001 - our own


def reports_to(function: Any, observer: Observer) -> bool:
    """Return whether this came of `wrap` for `observer`."""
    return type(function) is _Wrapped and function._gpuwarden_observer() is observer  # noqa: SLF001 - our own


def _replace_arguments(meter: InputMeter | None, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if meter is None:
        return args
    try:
        return meter(args)
    except Exception:  # noqa: BLE001 - whatever fails here must not end a training run
        return args


def _report(reference: weakref.ref[Observer], error: BaseException) -> None:
    # In a frame of its own: the one that calls lives as long as the exception does, and must not hold the observer.
    observer = reference()
    if observer is None:
        return
    with contextlib.suppress(Exception):
        if is_end_of_data(error):
            observer.record_end_of_data()
        else:
            observer.record_exception(error)


class FunctionPatch:
    """Patches of the functions of one model."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def patch(self, kind: FunctionKind, observer: Observer, meter: InputMeter | None = None) -> None:
        """Patch a function; again each epoch, since `compile` or `make_train_function` makes another.

        `meter` is shown what the function is called with.
        """
        function = getattr(self._model, f"{kind}_function", None)
        if function is not None:
            setattr(self._model, f"{kind}_function", wrap(function, observer, meter))

    def patch_test_early(self, observer: Observer) -> None:
        """Patch Keras 2's test function before `evaluate` reads it, which no hook comes before.

        `evaluate` itself would make it a moment later, by the same call.
        """
        if hasattr(self._model, "_get_test_function_runner"):
            if getattr(self._model, "_is_compiled", False):
                self._model.make_test_function()
            self.patch("test", observer)

    def restore(self, observer: Observer, *kinds: FunctionKind) -> None:
        """Restore the model's own functions from patches for `observer`: all of them unless some are named."""
        for kind in kinds or FUNCTION_KINDS:
            if reports_to(getattr(self._model, f"{kind}_function", None), observer):
                self._put_back(kind)

    def restore_all(self) -> None:
        """Restore all the model's own functions, whichever observer they have."""
        for kind in FUNCTION_KINDS:
            self._put_back(kind)

    def _put_back(self, kind: FunctionKind) -> None:
        function = getattr(self._model, f"{kind}_function", None)
        if unwrap(function) is not function:
            setattr(self._model, f"{kind}_function", unwrap(function))
