"""Time that steps waited for their input, where that can be known; unknown is absent."""

from __future__ import annotations

from dataclasses import dataclass


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

    def clear_buffer(self) -> None:
        """Clear the buffer figures."""
        self.buffered = self.buffer_size = None
