"""How long steps waited for their input, where that can be known; unknown is absent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(slots=True)
class InputWait:
    """`waited` seconds of the `observed` seconds of stepping in which the wait could be known.

    `buffered` of `buffer_size` batches stood ready at the last look.
    """

    waited: float | None = None
    observed: float | None = None
    buffered: int | None = None
    buffer_size: int | None = None

    def add(self, waited: float, observed: float) -> None:
        """Count `observed` more seconds, `waited` of them for input."""
        self.waited = (self.waited or 0.0) + waited
        self.observed = (self.observed or 0.0) + observed

    def forget_buffer(self) -> None:
        """Say nothing of a buffer any more."""
        self.buffered = self.buffer_size = None


class InputMeter(Protocol):
    """Meter of one fit's input wait; it is given the arguments of Keras's train function before each execution.

    Used in the thread that trains. Nothing of it may block or keep the input alive.
    """

    def __call__(self, arguments: tuple[Any, ...], /) -> tuple[Any, ...]:
        """Give the arguments to call with in place of those Keras gave."""

    def look(self) -> None:
        """Bring the InputWait up to date; called between two executions, about once a second."""

    def pause(self) -> None:
        """Look once more and stop, until the next execution: the epoch ends or validation begins."""
