"""Input wait of steps where Keras computes with JAX: its train function calls `next` in Python."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

from gpuwarden.client.input_wait import InputWait

MAX_UNSURE_RATIO = 0.1  # ratio: of the observed time, what may remain unknown


class IteratorWait:
    """Meter that gives Keras's train function an iterator whose `next` is timed; about 1 µs a step.

    JAX computes while Python goes on. Where the step before was done when `next` was called, all of its time is wait;
    where it was not done even when the batch came, none is. In between it is unknown which part is; where such steps
    are more than a tenth of the time since the last update, that time is not observed. With several steps an execution
    nothing is known. The first execution compiles and is left out.
    """

    def __init__(self, wait: InputWait, clock: Callable[[], float] = monotonic) -> None:
        self._wait = wait
        self._clock = clock
        self._compiled = False
        self._timed: _Timed | None = None
        self._since: float | None = None  # when the execution under way began
        self._observed = 0.0

    def __call__(self, arguments: tuple[Any, ...], /) -> tuple[Any, ...]:
        """Put the timed iterator in the place of the one that is given."""
        state, iterator = arguments
        timed = self._timed
        if timed is None or timed.iterator() is not iterator:
            timed = self._timed = _Timed(weakref.ref(iterator), self._clock)
        now = self._clock()
        if self._since is not None:
            self._observed += now - self._since
            timed.settle()
        timed.begin_step()
        timed.before = _pick_array(state)
        self._since = now if self._compiled else None
        self._compiled = True
        return state, timed

    def update(self) -> None:
        """Count the steps that have ended, if their wait is known."""
        timed = self._timed
        if timed is None:
            return
        if self._observed and timed.unsure <= MAX_UNSURE_RATIO * self._observed:
            self._wait.add(min(timed.waited, self._observed), self._observed)
        self._observed = timed.waited = timed.unsure = 0.0

    def pause(self) -> None:
        """Count them, and observe nothing until the next execution."""
        self.update()
        self._timed = self._since = None


class _Timed:
    """An iterator that notes how long its `next` takes and what the device does meanwhile.

    The caller holds the other iterator; were it held here too, the input would outlive a fit that has failed.
    """

    def __init__(self, iterator: weakref.ref[Iterator[Any]], clock: Callable[[], float]) -> None:
        self.iterator = iterator
        self.waited = 0.0  # seconds, of the steps that have ended
        self.unsure = 0.0  # of which it is unknown whether they were
        self.before: Any = None  # an array that the step before computed
        self._clock = clock
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a step."""
        self._waiting = self._perhaps = 0.0

    def settle(self) -> None:
        """Count the step that has ended."""
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
    """Pick one array of the state that a step computed; all come of one computation, so they are ready together."""
    return next((array for part in state for array in part), None)


def _is_ready(array: Any) -> bool:
    """Return whether an array is computed; one that cannot be asked is taken to be."""
    ask = getattr(array, "is_ready", None)
    return ask is None or bool(ask())
