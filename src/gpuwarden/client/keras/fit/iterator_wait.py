"""Input wait of steps on Keras's JAX backend, whose train function calls `next` in Python."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

from gpuwarden.client.input_wait import add_input_wait
from gpuwarden.protocol.messages import Report

MAX_UNSURE_RATIO = 0.1  # largest part of the observed time for which the wait is unknown


class IteratorWait:
    """Meter that passes Keras's train function an iterator whose `next` is timed; about 1 µs a step.

    JAX computes while Python continues. If the previous step was done when `next` was called, all of the call is wait;
    if it was still not done when the batch arrived, none of it is. In between the wait is unknown; if such calls take
    more than a tenth of the time since the last `record_wait`, that time is not observed. With several steps an
    execution nothing can be measured. The first execution compiles and is left out.
    """

    def __init__(self, report: Report, clock: Callable[[], float] = monotonic) -> None:
        self._report = report
        self._clock = clock
        self._compiled = False
        self._timed: _Timed | None = None
        self._since: float | None = None  # start of the current execution
        self._observed = 0.0

    def __call__(self, arguments: tuple[Any, ...], /) -> tuple[Any, ...]:
        """Replace the iterator by the timed one."""
        state, iterator = arguments
        timed = self._timed
        if timed is None or timed.iterator() is not iterator:
            timed = self._timed = _Timed(weakref.ref(iterator), self._clock)
        now = self._clock()
        if self._since is not None:
            self._observed += now - self._since
            timed.count_step()
        timed.begin_step()
        timed.before = _pick_array(state)
        self._since = now if self._compiled else None
        self._compiled = True
        return state, timed

    def record_wait(self) -> None:
        """Count the finished steps, if their wait is known."""
        timed = self._timed
        if timed is None:
            return
        if self._observed and timed.unsure <= MAX_UNSURE_RATIO * self._observed:
            add_input_wait(self._report, min(timed.waited, self._observed), self._observed)
        self._observed = timed.waited = timed.unsure = 0.0

    def pause(self) -> None:
        """Record the wait, and observe nothing until the next execution."""
        self.record_wait()
        self._timed = self._since = None


class _Timed:
    """Iterator that measures its `next`, and checks whether the device computes meanwhile.

    It references the original iterator weakly, so that the input does not outlive a fit that has failed.
    """

    def __init__(self, iterator: weakref.ref[Iterator[Any]], clock: Callable[[], float]) -> None:
        self.iterator = iterator
        self.waited = 0.0  # seconds of wait in finished steps
        self.unsure = 0.0  # seconds in finished steps that may have been wait
        self.before: Any = None  # an array computed by the previous step
        self._clock = clock
        self.begin_step()

    def begin_step(self) -> None:
        """Start a step."""
        self._waiting = self._perhaps = 0.0

    def count_step(self) -> None:
        """Count the finished step."""
        self.waited += self._waiting
        self.unsure += self._perhaps

    def __iter__(self) -> _Timed:
        return self

    def __next__(self) -> Any:
        iterator = self.iterator()
        assert iterator is not None
        before, self.before = self.before, None
        idle = _is_ready(before)
        begin = self._clock()
        batch = next(iterator)
        if idle:
            self._waiting += self._clock() - begin
        elif _is_ready(before):
            self._perhaps += self._clock() - begin
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.iterator(), name)


def _pick_array(state: Any) -> Any:
    """Return one array of the state that a step computed; all of them are ready together."""
    return next((array for part in state for array in part), None)


def _is_ready(array: Any) -> bool:
    """Return whether an array has been computed; True if it has no such method."""
    is_ready = getattr(array, "is_ready", None)
    return is_ready is None or bool(is_ready())
