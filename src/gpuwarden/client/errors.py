"""What an exception of a training step says, in the words of the protocol."""

from __future__ import annotations

from gpuwarden.protocol import MAX_ERROR_TEXT, Allocation, ErrorKind, clip


def describe(exception: BaseException) -> tuple[ErrorKind, tuple[Allocation, ...], str, str]:
    """Return the kind, the allocations that failed, the exception's type and the end of its message."""
    return "other", (), clip(type(exception).__name__), clip(str(exception)[-MAX_ERROR_TEXT:], MAX_ERROR_TEXT)
