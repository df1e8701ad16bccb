"""Time that steps waited for their input, where it can be measured; None if unknown."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class InputWait:
    """Input wait of a run: `waited` seconds, of the `observed` seconds of training in which it could be measured.

    `buffered` of `buffer_size` batches were ready when last read.
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
