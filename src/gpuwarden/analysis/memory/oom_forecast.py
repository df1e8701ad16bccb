"""Forecast of when growing memory meets its limit: by a line, or by its steps where it has regular ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil

from gpuwarden.analysis.memory.theil_sen import Trend, median

ALIKE_RATIO = 0.25  # by which steps may differ from their median, and pauses likewise
# Part of what a training step takes that finds no place though as much is free: TensorFlow's allocator hands out a
# piece whole that is up to twice as large as asked for (bfc_allocator.cc). Chosen on bench/situations.py --set paced.
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
    """Steps that are alike and come regularly: bytes of one, seconds between two, when the last was and to what."""

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
        """Return what is left when so much time has passed."""
        upper = None if self.upper is None else max(self.upper - seconds, 0.0)
        return TimeLeft(max(self.seconds - seconds, 0.0), max(self.lower - seconds, 0.0), upper)


def find_rises(times: Sequence[float], floor: Sequence[float], smallest: float) -> list[Rise]:
    """Return the rises of the floor by `smallest` bytes or more; those of neighbouring points are one sharp step."""
    steps: list[Rise] = []
    last, level, before = times[0], floor[0], -1  # when and how far it rose last, and to which point
    for number, held in enumerate(floor):
        size = held - level
        if size <= 0 or size < smallest:
            continue
        at = times[number - 1]
        spacing = times[number] - at
        pause = max(at - last - spacing, 0.0)
        if before == number - 1 and steps[-1].sharp and pause < steps[-1].pause * ALIKE_RATIO:
            steps[-1] = replace(steps[-1], at=at, size=steps[-1].size + size)
        else:
            steps.append(Rise(at, size, pause, sharp=pause > spacing and held - floor[number - 1] > size / 2))
        last, level, before = at, held, number
    return steps


def find_regular_rises(steps: Sequence[Rise], level: float, noise: float, now: float) -> RegularRises | None:
    """Return the last steps, up to `level`, if they are alike and regular; the very last may be under way still.

    `noise` is how much is usually in use between them on top of the floor: it has to be small compared with a step.
    """
    found = _regular(steps, level, noise)
    if found is None and steps:
        before = _regular(steps[:-1], level - steps[-1].size, noise)
        if before is not None and now < before.last + (1 + 2 * ALIKE_RATIO) * before.pause:
            return before
    return found


def _regular(steps: Sequence[Rise], level: float, noise: float) -> RegularRises | None:
    blurred = [number for number, step in enumerate(steps) if not step.sharp]
    sharp = steps[blurred[-1] + 1 if blurred else 0 :][-8:]
    if len(sharp) < 3:  # noqa: PLR2004 - two pauses, of which each can confirm the other
        return None
    size = median(step.size for step in sharp)
    pauses = [after.at - before.at for before, after in pairwise(sharp)]
    pause = median(pauses)
    if noise > ALIKE_RATIO * size or any(abs(step.size - size) > ALIKE_RATIO * size for step in sharp):
        return None
    if any(abs(each - pause) > ALIKE_RATIO * pause for each in pauses):
        return None
    return RegularRises(size, pause, sharp[-1].at, level)


def forecast_oom(
    trend: Trend,
    stairs: RegularRises | None,
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
    if stairs is not None:
        room = max(limit - likely - stairs.level, 0.0)
        count = max(ceil(room / (stairs.size - limit_slope * stairs.pause)), 1)
        seconds = max(stairs.last + count * stairs.pause - now, stairs.pause / 10)
        lower = min(lower, seconds - stairs.pause)
        upper = None if upper is None else max(upper, seconds + stairs.pause)
    doubt = MIN_DOUBT_RATIO * seconds
    lower, upper = max(min(seconds - doubt, lower), 0.0), None if upper is None else max(seconds + doubt, upper)
    return TimeLeft(seconds, lower, upper)
