"""The rise of what a run has in use between steps, where it was steady but too short to be told as growth."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from gpuwarden.runs.history import Window
from gpuwarden.runs.stretch import floor_of

LEAST_RISES = 2.5  # as many equal ones would be: a step up that comes once may be seen half-way, as two


class Rise(NamedTuple):
    """Bytes, over so many steps."""

    grown: float
    steps: int


def rise(windows: Sequence[Window], last: int) -> Rise | None:
    """Return by how much the floor rose up to `last`, if it kept rising; None if not.

    The floor is the least of each window that was not given back since. It counts from the first window with a step
    on: what comes before is the model's own making.
    """
    stepping = [each for each in windows if each.steps]
    lows = [*(each.lowest for each in stepping), last]
    floors = floor_of(lows)
    grown = floors[-1] - floors[0]
    squares = sum((after - before) ** 2 for before, after in pairwise(floors))
    if not grown or grown**2 < LEAST_RISES * squares:
        return None
    return Rise(grown, stepping[-1].steps - stepping[0].steps)
