"""Guard that keeps internal failures from the training program, and switches off a part that fails repeatedly.

The parts that `gpuwarden run` adds are switched off, too, once the program counts its steps itself.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

MAX_ERRORS = 5  # internal failures until the part that fails is switched off

log = logging.getLogger("gpuwarden")

_added: weakref.WeakSet[AddedCounter] = weakref.WeakSet()
_claimed = False
_reported: set[str] = set()  # functions whose first failure is logged


def log_safely(level: int, text: str, *values: object, error: BaseException | None = None) -> None:
    """Write a line to the log, with the traceback of `error`; drop what the user's logging handler raises."""
    with contextlib.suppress(Exception):
        log.log(level, text, *values, exc_info=error)


class Guard:
    """Counter of the failures of one part, named by `what`; `off` once there were too many."""

    def __init__(self, what: str, *, off: bool) -> None:
        self.off = off
        self._what = what
        self._errors = 0

    def record_failure(self, error: Exception, give_up: Callable[[], None]) -> None:
        """Count a failure. At the last one, log it and call `give_up` to end what is in progress."""
        self._errors += 1
        if self._errors == MAX_ERRORS:
            self.off = True
            with contextlib.suppress(Exception):  # it may be the part that fails
                give_up()
            text = "reporting switched off after internal errors, training continues part=%s errors=%d"
            log_safely(logging.WARNING, text, self._what, self._errors, error=error)


class Guarded(Protocol):
    """Object with methods that must not raise."""

    _guard: Guard

    def _give_up(self) -> None:
        """End what is in progress: no guarded method is called from now on."""


S = TypeVar("S", bound=Guarded)
P = ParamSpec("P")


def guarded(method: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """Decorate a method so that its failures do not reach the caller, and too many of them switch it off."""

    @functools.wraps(method)
    def kept(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        guard = self._guard
        if guard.off:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - no internal failure may end a training run
            guard.record_failure(error, self._give_up)

    return kept


T = TypeVar("T")


def call_guarded(function: Callable[..., T], *args: object, default: T) -> T:
    """Return the function's result, or `default` if it fails; its first failure is logged."""
    try:
        return function(*args)
    except Exception as error:  # noqa: BLE001 - no internal failure may end a training run
        if function.__qualname__ not in _reported:
            _reported.add(function.__qualname__)
            log_safely(logging.WARNING, "instrumentation failed, training continues", error=error)
        return default


class AddedCounter(Protocol):
    """Counter of steps that `gpuwarden run` added to a program."""

    def retire(self) -> None:
        """Stop counting, until the process ends."""


def claim_steps() -> None:
    """Record that the program made a callback or a watch of its own."""
    global _claimed  # noqa: PLW0603 - a fact about the process
    _claimed = True
    for each in tuple(_added):
        with contextlib.suppress(Exception):  # the program is making its own
            each.retire()
    _added.clear()


def are_steps_claimed() -> bool:
    """Return whether the program counts its steps itself."""
    return _claimed


def retire_when_claimed(counter: AddedCounter) -> None:
    """Retire an added counter as soon as the program counts its steps itself."""
    if _claimed:
        counter.retire()
    else:
        _added.add(counter)
