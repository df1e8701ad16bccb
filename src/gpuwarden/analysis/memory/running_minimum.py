"""Suffix minimum of a series: the memory that was never freed afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

NumberT = TypeVar("NumberT", bound=float)


def running_minimum(values: Sequence[NumberT]) -> list[NumberT]:
    """Return at each index the minimum from there to the end: a floor that never falls."""
    return list(accumulate(reversed(values), min))[::-1]
