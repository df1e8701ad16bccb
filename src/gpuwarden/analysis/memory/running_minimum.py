"""Running minimum of a series, from its end: the memory that was never given back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

NumberT = TypeVar("NumberT", bound=float)


def running_minimum(values: Sequence[NumberT]) -> list[NumberT]:
    """Return at each place the least value from there to the end: a floor that never falls."""
    return list(accumulate(reversed(values), min))[::-1]
