"""How long steps waited for their input, where that can be known; unknown is absent."""

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
