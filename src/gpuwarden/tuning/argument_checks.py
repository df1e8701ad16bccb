"""Checks of numbers, and of the process, that hold with every framework."""

from __future__ import annotations

import os
from typing import Any

from gpuwarden.client.distributed.job_place import read_job_place


def check_whole(value: Any, name: str) -> int:
    """Check a whole number of at least 1. Raises TypeError or ValueError with a message that begins with its name."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: {value!r} is not a whole number; pass an int")
    number = int(value)
    if number < 1:
        raise ValueError(f"{name}: {number} is too small; minimum 1")
    return number


def check_sizes(batch_size: Any, smallest: Any) -> tuple[int, int]:
    """Check a first and a smallest batch size. Raises likewise."""
    first, least = check_whole(batch_size, "batch_size"), check_whole(smallest, "smallest")
    if first < least:
        raise ValueError(f"batch_size: {first} is less than smallest; pass {least} or more")
    return first, least


def count_workers() -> int:
    """Return how many processes train together, by the variables that launchers set."""
    return read_job_place(os.environ).world_size or 1
