"""Settings of the C library's memory allocator: training comes first, what a GPU box's daemon holds stays small."""

from __future__ import annotations

import ctypes

# mallopt(3), of glibc
_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
_LARGE_BYTES = 64 << 10


def keep_small() -> None:
    """Use one arena, and give large blocks back when they are freed; no effect where the C library is not glibc.

    A thread that allocates takes an arena of its own, and glibc keeps freed blocks as large as the largest it has seen:
    after some scrapes that is some MiB. To be called before there are threads.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def trim() -> None:
    """Give the system back what is free; takes about a millisecond."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
