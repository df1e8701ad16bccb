"""Patch of the functions that fit, evaluate and predict call each step, which reports their exceptions.

Keras reports no exception to a callback. The functions are restored at the end and after an error. Exceptions are
raised unchanged and not kept: their frames hold tensors on the device, which the user needs back.
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
    """Meter of one fit's input wait, called with the arguments of Keras's train function before each execution.

    Used in the thread that trains. It must not block or keep the input alive.
    """

    def __call__(self, arguments: tuple[Any, ...], /) -> tuple[Any, ...]:
        """Return the arguments to pass to the train function in place of Keras's."""

    def record_wait(self) -> None:
        """Record the input wait; called between two executions, about once a second."""

    def pause(self) -> None:
        """Record the wait once more and stop until the next execution: the epoch ends or validation starts."""


class ReturnCounter:
    """Counter of the calls of a function that have returned."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Observer(Protocol):
    """Callback that is notified of a function's exceptions."""

    def record_exception(self, exception: BaseException, /) -> None:
        """Record an exception that is being raised to the user; keep only its text."""

    def record_end_of_data(self) -> None:
        """Record that a call found the end of the data."""


class _Wrapped:
    """Callable that replaces `function` and passes attribute access through to it.

    A copy or pickle contains only the function. `meter` gets the arguments of each call and may replace them.
    """

    # Names that no function uses for its own attributes.
    __slots__ = (
        "__weakref__",
        "_gpuwarden_function",
        "_gpuwarden_meter",
        "_gpuwarden_observer",
        "_gpuwarden_returned",
    )

    _gpuwarden_function: Callable[..., Any]
    _gpuwarden_observer: weakref.ref[Observer]
    _gpuwarden_meter: InputMeter | None
    _gpuwarden_returned: ReturnCounter

    def __init__(
        self, function: Callable[..., Any], observer: Observer, meter: InputMeter | None, returned: ReturnCounter
    ) -> None:
        object.__setattr__(self, "_gpuwarden_function", function)
        object.__setattr__(self, "_gpuwarden_observer", weakref.ref(observer))
        object.__setattr__(self, "_gpuwarden_meter", meter)
        object.__setattr__(self, "_gpuwarden_returned", returned)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        meter = self._gpuwarden_meter
        try:
            if meter is not None:
                try:  # noqa: SIM105 - in each step: a context manager takes longer
                    args = meter(args)
                except Exception:  # noqa: BLE001, S110 - no internal failure may end a training run
                    pass
            result = self._gpuwarden_function(*args, **kwargs)
        except BaseException as error:  # KeyboardInterrupt too: the call has ended
            _report(self._gpuwarden_observer, error)
            raise
        self._gpuwarden_returned.count += 1
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gpuwarden_function, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._gpuwarden_function, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._gpuwarden_function, name)

    def __dir__(self) -> Iterable[str]:
        return dir(self._gpuwarden_function)

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        # With the standard library only: the pickle may be loaded where this package is not installed.
        return operator.getitem, ((self._gpuwarden_function,), 0)


def wrap(
    function: Callable[..., Any],
    observer: Observer,
    meter: InputMeter | None = None,
    returned: ReturnCounter | None = None,
) -> Callable[..., Any]:
    """Return a callable that reports exceptions of `function` to `observer`, which is referenced weakly.

    A wrapped function is unwrapped first. The end of the data is reported as such, not as an error. Exceptions of
    `observer` are dropped. `meter` gets the arguments of each call and may replace them; if it raises, they are kept.
    """
    return _Wrapped(unwrap(function), observer, meter, returned or ReturnCounter())


def unwrap(function: Any) -> Any:
    """Return the function that `wrap` was given; anything else unchanged."""
    # Not isinstance: a function may override __class__.
    return function._gpuwarden_function if type(function) is _Wrapped else function  # noqa: SLF001 - our own


def reports_to(function: Any, observer: Observer) -> bool:
    """Return whether this was made by `wrap` for `observer`."""
    return type(function) is _Wrapped and function._gpuwarden_observer() is observer  # noqa: SLF001 - our own


def _report(reference: weakref.ref[Observer], error: BaseException) -> None:
    # In a frame of its own: the caller's frame lives as long as the exception, and must not reference the observer.
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

    def patch(
        self,
        kind: FunctionKind,
        observer: Observer,
        meter: InputMeter | None = None,
        returned: ReturnCounter | None = None,
    ) -> None:
        """Patch a function, see `wrap`. Repeat it each epoch: `compile` and `make_train_function` make a new one."""
        function = getattr(self._model, f"{kind}_function", None)
        if function is not None:
            setattr(self._model, f"{kind}_function", wrap(function, observer, meter, returned))

    def patch_test_early(self, observer: Observer) -> None:
        """Patch Keras 2's test function before `evaluate` reads it: no hook is called before that.

        `evaluate` would make the function a moment later, by the same call.
        """
        if hasattr(self._model, "_get_test_function_runner"):
            if getattr(self._model, "_is_compiled", False):
                self._model.make_test_function()
            self.patch("test", observer)

    def restore(self, observer: Observer, *kinds: FunctionKind) -> None:
        """Restore the functions that are patched for `observer`: all of them unless kinds are named."""
        for kind in kinds or FUNCTION_KINDS:
            if reports_to(getattr(self._model, f"{kind}_function", None), observer):
                self._restore_one(kind)

    def restore_all(self) -> None:
        """Restore all functions of the model, whatever observer they have."""
        for kind in FUNCTION_KINDS:
            self._restore_one(kind)

    def _restore_one(self, kind: FunctionKind) -> None:
        function = getattr(self._model, f"{kind}_function", None)
        if unwrap(function) is not function:
            setattr(self._model, f"{kind}_function", unwrap(function))
