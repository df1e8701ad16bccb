"""Forecast of when growing memory meets its limit: by a line, or by its rises where they are regular."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from statistics import median

from gpuwarden.analysis.memory.theil_sen import Trend

ALIKE_RATIO = 0.25  # by which rises may differ from their median, and the pauses between them likewise
MAX_REGULAR_RISES = 8  # the last ones count
# Part of what a training step takes that finds no place though as much is free: TensorFlow's allocator hands out a
# piece whole that is up to twice as large as asked for (bfc_allocator.cc). Chosen on bench/accuracy.py paced.
LOST_RATIO = 1 / 16
MIN_DOUBT_RATIO = 0.15  # of the seconds left: rates change, and the last allocation is not the average one


@dataclass(frozen=True, slots=True)
class Rise:
    """Rise of the floor: when it began, by how many bytes, and how many seconds without one came before.

    `sharp`: when it was is known much better than how long that pause was.
    """

    at: float
    size: float
    pause: float
    sharp: bool


@dataclass(frozen=True, slots=True)
class RegularRises:
    """Rises of one size at one interval: bytes of one, seconds between two, when the last was and to what level."""

    size: float
    pause: float
    last: float
    level: float


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """Seconds to the limit, and their bounds; there is no `upper` where it may never come."""

    seconds: float
    lower: float
    upper: float | None

    def after(self, seconds: float) -> TimeLeft:
        """Return the time left when so many seconds have passed."""
        upper = None if self.upper is None else max(self.upper - seconds, 0.0)
        return TimeLeft(max(self.seconds - seconds, 0.0), max(self.lower - seconds, 0.0), upper)


def find_rises(times: Sequence[float], floor: Sequence[float], smallest: float) -> list[Rise]:
    """Return the rises of the floor by `smallest` bytes or more; those of adjacent points are one sharp rise."""
    rises: list[Rise] = []
    last, level, before = times[0], floor[0], -1  # when and how far it rose last, and to which point
    for number, held in enumerate(floor):
        size = held - level
        if size <= 0 or size < smallest:
            continue
        at = times[number - 1]
        spacing = times[number] - at
        pause = max(at - last - spacing, 0.0)
        if before == number - 1 and rises[-1].sharp and pause < rises[-1].pause * ALIKE_RATIO:
            rises[-1] = replace(rises[-1], at=at, size=rises[-1].size + size)
        else:
            rises.append(Rise(at, size, pause, sharp=pause > spacing and held - floor[number - 1] > size / 2))
        last, level, before = at, held, number
    return rises


def find_regular_rises(rises: Sequence[Rise], level: float, noise: float, now: float) -> RegularRises | None:
    """Return the last rises, up to `level`, if they are alike and regular; the very last may not be complete.

    `noise` is how much is usually in use between them on top of the floor: it has to be small compared with a rise.
    """
    found = _regular(rises, level, noise)
    if found is None and rises:
        before = _regular(rises[:-1], level - rises[-1].size, noise)
        if before is not None and now < before.last + (1 + 2 * ALIKE_RATIO) * before.pause:
            return before
    return found


def _regular(rises: Sequence[Rise], level: float, noise: float) -> RegularRises | None:
    blurred = [number for number, rise in enumerate(rises) if not rise.sharp]
    sharp = rises[blurred[-1] + 1 if blurred else 0 :][-MAX_REGULAR_RISES:]
    if len(sharp) < 3:  # noqa: PLR2004 - two pauses, of which each can confirm the other
        return None
    size = median(rise.size for rise in sharp)
    pauses = [after.at - before.at for before, after in pairwise(sharp)]
    pause = median(pauses)
    if noise > ALIKE_RATIO * size or any(abs(rise.size - size) > ALIKE_RATIO * size for rise in sharp):
        return None
    if any(abs(each - pause) > ALIKE_RATIO * pause for each in pauses):
        return None
    return RegularRises(size, pause, sharp[-1].at, level)


def forecast_oom(
    trend: Trend,
    regular: RegularRises | None,
    *,
    level: float,
    step_bytes: tuple[float, float],
    limit: float,
    limit_slope: float,
    now: float,
) -> TimeLeft:
    """Return how long it is from `level` to the limit, which itself moves by `limit_slope` bytes a second.

    `step_bytes` are what training steps take on top of that: probably, and at most.
    """
    likely, most = step_bytes

    def until(end: float, slope: float) -> float:
        return max(end - level, 0.0) / (slope - limit_slope)

    seconds = until(limit - likely * (1 + LOST_RATIO), trend.slope)
    lower = until(limit - most, trend.upper)
    upper = until(limit, trend.lower) if trend.lower > max(limit_slope, 0) else None
    if regular is not None:
        room = max(limit - likely - regular.level, 0.0)
        count = max(ceil(room / (regular.size - limit_slope * regular.pause)), 1)
        seconds = max(regular.last + count * regular.pause - now, regular.pause / 10)
        lower = min(lower, seconds - regular.pause)
        upper = None if upper is None else max(upper, seconds + regular.pause)
    doubt = MIN_DOUBT_RATIO * seconds
    lower, upper = max(min(seconds - doubt, lower), 0.0), None if upper is None else max(seconds + doubt, upper)
    return TimeLeft(seconds, lower, upper)
