"""Guard of the training against failures of our own: none reaches it, and what fails again and again is off."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

MAX_ERRORS = 5  # failures of our own until what fails stays off

log = logging.getLogger("gpuwarden")


def log_safely(level: int, text: str, *values: object, error: BaseException | None = None) -> None:
    """Write a line to the log, with the traceback of `error`; drop what a logging handler of the user's raises."""
    with contextlib.suppress(Exception):
        log.log(level, text, *values, exc_info=error)


class Guard:
    """Counter of the failures of `what`; `off` once there were too many."""

    def __init__(self, what: str, *, off: bool) -> None:
        self.off = off
        self._what = what
        self._errors = 0

    def record_failure(self, error: Exception, give_up: Callable[[], None]) -> None:
        """Count a failure; at the last one log it, once, and have what goes on by itself given up."""
        self._errors += 1
        if self._errors == MAX_ERRORS:
            self.off = True
            with contextlib.suppress(Exception):  # it may be what fails
                give_up()
            text = "%s switched off after errors=%d; training goes on"
            log_safely(logging.WARNING, text, self._what, self._errors, error=error)


class Guarded(Protocol):
    """Object with methods that must not raise."""

    _guard: Guard

    def _give_up(self) -> None:
        """End what would go on, now that no guarded method is called."""


S = TypeVar("S", bound=Guarded)
P = ParamSpec("P")


def guarded(method: Callable[Concatenate[S, P], None]) -> Callable[Concatenate[S, P], None]:
    """Keep a failing method from its caller, and from being called once there were too many failures."""

    @functools.wraps(method)
    def kept(self: S, /, *args: P.args, **kwargs: P.kwargs) -> None:
        guard = self._guard
        if guard.off:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - whatever fails here must not end a training run
            guard.record_failure(error, self._give_up)

    return kept
