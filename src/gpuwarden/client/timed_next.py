"""How long steps wait for their input where Keras computes with JAX: its train function calls `next` in Python."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

from gpuwarden.client.input_wait import InputWait


class TimedNext:
    """Gives Keras's train function an iterator whose `next` is timed, in place of its own; about 1 µs a step.

    JAX computes while Python goes on. So a `next` counts as waited only where the step before it is done when the batch
    comes: otherwise the device had work all the while. Part of what counts may still have been that step's: the wait is
    at most this. With several steps an execution nothing is known. The first execution compiles and is left out.
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
            timed.counted += timed.waited
        timed.waited = 0.0
        timed.before = _of_step_before(state)
        self._since = now if self._compiled else None
        self._compiled = True
        return state, timed

    def look(self) -> None:
        """Count the steps that have ended."""
        timed = self._timed
        if timed is not None and self._observed:
            self._wait.add(min(timed.counted, self._observed), self._observed)
            self._observed = timed.counted = 0.0

    def pause(self) -> None:
        """Count them, and observe nothing until the next execution."""
        self.look()
        self._timed = self._since = None


class _Timed:
    """An iterator that notes how long its last `next` took, if nothing else was done meanwhile.

    Whoever calls holds the other iterator; were it held here too, the input would outlive a fit that has failed.
    """

    def __init__(self, iterator: weakref.ref[Iterator[Any]], clock: Callable[[], float]) -> None:
        self.iterator = iterator
        self.waited = 0.0
        self.counted = 0.0
        self.before: Any = None  # an array that the step before computed
        self._clock = clock

    def __iter__(self) -> _Timed:
        return self

    def __next__(self) -> Any:
        iterator = self.iterator()
        assert iterator is not None
        begin = self._clock()
        batch = next(iterator)
        before, self.before = self.before, None
        if _ready(before):
            self.waited += self._clock() - begin
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.iterator(), name)


def _of_step_before(state: Any) -> Any:
    """Pick one array of the state that a step computed; all come of one computation, so they are ready together."""
    return next((array for part in state for array in part), None)


def _ready(array: Any) -> bool:
    """Ask JAX whether an array is computed; one that cannot be asked is taken to be."""
    ask = getattr(array, "is_ready", None)
    return ask is None or bool(ask())
