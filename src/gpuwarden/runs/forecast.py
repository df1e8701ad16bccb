"""When something that grows will meet its limit: by a line where it grows steadily, by its steps where it has some."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise, takewhile
from math import ceil
from operator import sub
from typing import Literal, NamedTuple

from gpuwarden.runs.stretch import Stretch
from gpuwarden.runs.trend import Trend, median

Pattern = Literal["steady", "staircase", "by epoch"]

SMALLEST_RISE = 1 / 64  # of what was grown: less is noise
ALIKE = 0.25  # by which steps may differ from their median, and pauses likewise
MOST_NOISE = 0.1  # of a step, that is usually in use on top of the floor
LEAST_STEPS = 3
MOST_STEPS = 8
PUNCTUAL = 1.5  # times its pause after the last step, the next one is there
# Share of what a step takes that finds no place though as much is free: TensorFlow's allocator hands out a piece whole
# that is up to twice as large as asked for (bfc_allocator.cc). Steps of one large tensor lost a third in real leaks; of
# many small ones they lose nothing. Not where growth comes by regular steps: a whole one would hang on it.
LOST = 1 / 16
DOUBT = 0.15  # of the seconds that are left, at least: rates change, and the last allocation is not the average one


class Step(NamedTuple):
    """A rise: when it began, by how many bytes, after how many seconds without one, and in which epoch.

    Of `pause` is left out what lies between two points.
    """

    at: float
    size: float
    pause: float
    epochs: int
    sharp: bool  # when it was is known much better than how long the pause before it was


class Rhythm(NamedTuple):
    """Steps that can be told apart: bytes of one, seconds from one to the next, when the last was and to what `level`.

    `regular`: they are alike; `by_epoch`: and there is one in each epoch.
    """

    size: float
    pause: float
    last: float
    level: float
    regular: bool
    by_epoch: bool


class Transient(NamedTuple):
    """Bytes that training steps take on top of what is in use between them: surely, probably, and at most.

    Those are above the line through the floor; `above_floor` is above the floor itself.
    """

    sure: float
    likely: float
    most: float
    above_floor: float


class TimeLeft(NamedTuple):
    """Seconds to the limit, and their bounds; there is no `upper` where it may never come."""

    seconds: float
    lower: float
    upper: float | None

    def after(self, seconds: float) -> TimeLeft:
        """Return what is left when so much time has passed."""
        upper = None if self.upper is None else max(self.upper - seconds, 0.0)
        return TimeLeft(max(self.seconds - seconds, 0.0), max(self.lower - seconds, 0.0), upper)


def steps_of(stretch: Stretch) -> list[Step]:
    """Return the rises of the floor that matter; those of neighbouring points are one where others have pauses."""
    times, floor, epochs = stretch.times, stretch.floor, stretch.epochs
    steps: list[Step] = []
    last, level, before = times[0], floor[0], -1  # when and how far it rose last, and to which point
    least = max(ceil(SMALLEST_RISE * stretch.grown), 1)
    for number, held in enumerate(floor):
        size = held - level
        if size < least:
            continue
        at = times[number - 1]
        spacing = times[number] - at
        pause = at - last - spacing
        if pause < 0:
            pause = 0.0
        if before == number - 1 and steps[-1].sharp and pause < steps[-1].pause / 4:
            steps[-1] = steps[-1]._replace(at=at, size=steps[-1].size + size, epochs=epochs[number])
        else:
            sharp = pause > spacing and held - floor[number - 1] > size / 2
            steps.append(Step(at, size, pause, epochs[number], sharp))
        last, level, before = at, held, number
    return steps


def rhythm_of(steps: Sequence[Step], stretch: Stretch) -> Rhythm | None:
    """Return how the last steps went, where they can be told apart and nothing is given back between them.

    The last one may be under way, and is left out then.
    """
    found = _rhythm(steps, stretch, stretch.floor[-1])
    if (found is None or not found.regular) and len(steps) > LEAST_STEPS:
        before = _rhythm(steps[:-1], stretch, stretch.floor[-1] - steps[-1].size)
        if before is not None and before.regular and stretch.times[-1] < before.last + PUNCTUAL * before.pause:
            return before
    return found


def _rhythm(steps: Sequence[Step], stretch: Stretch, level: float) -> Rhythm | None:
    sharp = list(takewhile(lambda step: step.sharp, reversed(steps)))[:MOST_STEPS][::-1]
    if len(sharp) < LEAST_STEPS:
        return None
    sizes = [step.size for step in sharp]
    size = median(sizes)
    first = bisect_left(stretch.times, sharp[0].at)
    if median(map(sub, stretch.lows[first:], stretch.floor[first:])) > size * MOST_NOISE:
        return None
    pauses = [after.at - before.at for before, after in pairwise(sharp)]
    pause = median(pauses)
    alike = all(abs(each - size) <= ALIKE * size for each in sizes)
    regular = alike and all(abs(each - pause) <= ALIKE * pause for each in pauses)
    epochs = sharp[-1].epochs - sharp[0].epochs
    by_epoch = regular and epochs == len(sharp) - 1
    return Rhythm(size, pause, sharp[-1].at, level, regular=regular, by_epoch=by_epoch)


def time_left(
    lows: Sequence[tuple[float, float]],
    trend: Trend,
    rhythm: Rhythm | None,
    *,
    transient: Transient,
    cap: float,
    cap_slope: float,
    now: float,
) -> TimeLeft:
    """Return how long it is to the limit `cap`, which itself moves by `cap_slope` bytes a second."""
    level = level_of(lows, trend.slope, now)

    def to(limit: float, slope: float) -> float:
        return max(limit - level, 0.0) / (slope - cap_slope)

    seconds = to(cap - transient.likely * (1 + LOST), trend.slope)
    lower, upper = (
        to(cap - transient.most, trend.upper),
        to(cap, trend.lower) if trend.lower > max(cap_slope, 0) else None,
    )
    if rhythm is not None and rhythm.regular:
        room = max(cap - transient.above_floor - rhythm.level, 0.0)
        due = rhythm.last + max(ceil(room / (rhythm.size - cap_slope * rhythm.pause)), 1) * rhythm.pause
        seconds = max(due - now, rhythm.pause / 10)
        lower, upper = min(lower, seconds - rhythm.pause), None if upper is None else max(upper, seconds + rhythm.pause)
    doubt = DOUBT * seconds
    return TimeLeft(
        seconds, max(min(seconds - doubt, lower), 0.0), None if upper is None else max(seconds + doubt, upper)
    )


def level_of(lows: Sequence[tuple[float, float]], slope: float, at: float) -> float:
    """Return where a line of that slope through the middle of the points is at a time."""
    return median(low - slope * then for then, low in lows) + slope * at
