"""Whether what a run holds grows for good, how fast, and when it meets its limit: docs/foresight.md has the reasons.

What counts is the floor: what was in use and never given back since. It must have risen evenly, in four steps or more,
up to now, and by enough: the shorter that has lasted, the more of the way to the limit it must have gone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import mul, sub
from typing import NamedTuple

from gpuwarden.protocol import Phase
from gpuwarden.runs.forecast import Pattern, Rhythm, Step, TimeLeft, Transient, level_of, rhythm_of, steps_of, time_left
from gpuwarden.runs.ladder import Ladder, Point
from gpuwarden.runs.stretch import Stretch, floor_of
from gpuwarden.runs.trend import MOST_POINTS, Trend, trend

LEAST_BYTES = 4 << 20
LEAST_SHARE = 0.01  # of what the run can have
LEAST_UNBOUNDED = 32 << 20  # bytes, where nobody knows what it can have
LEAST_SECONDS = 4.0
LEAST_POINTS = 6
LEAST_RISES = 3.5  # as many equal ones would be
LEAST_REGULAR = 2.8  # likewise, of those that come regularly
MANY_RISES = 7.0
LEAST_RISING = 0.85  # of pairs of points
MOST_DEVIATION = 0.08  # from a straight line, of what was grown, beside the size of one step
MOST_BINS = 12
BRIEF_WAY = 1 / 3  # of the way to the limit, which growth has to have gone where it has not lasted
SHAKY_WAY = 0.42  # where it has not even outlasted an epoch, or goes by few or irregular steps
OUTLASTED_EPOCHS = 2  # ends of them
LASTING_WAY = 0.05  # where it has: for
LASTING_SECONDS = 900.0
LASTING_EPOCHS = 12  # in at least
LASTING_EPOCHS_SECONDS = 300.0
LASTING_RISES = 10
HELD_ON = 0.6  # of what it takes to be told, holds on what has been told
AGAIN = 1.25  # times as high, or
AGAIN_LONGER = 2.0  # times as long as what was given back before, is no more of the same
PATIENCE = 1.6  # times the longest pause there was before it is over, and
LEAST_PATIENCE = 2.5  # seconds, or
PATIENCE_SHARE = 0.05  # of how long it lasted
NEARLY_ALL = 0.8
LEAST_HALF = 0.2  # of what was grown, that either half of a stretch has to have brought
SHORTER = 2**0.5  # by which stretches are tried
LOOKS_SHARE = 0.02  # of how long it has lasted, or the series where there is none, from look to look, but
MOST_LOOKS_SECONDS = 5.0  # at most: what begins then, or grows faster than before, is not to wait


class Growth(NamedTuple):
    """Growth of what a run holds: bytes a second between `lower` and `upper`, since `since`, and `grown` bytes so far.

    `since` and `at`, when this was found, are seconds since the run was first heard of. `phase` is the one that nearly
    all of it happens in, where there is one. `left` is how long it is to the limit, where that is known.
    """

    bytes_per_second: float
    lower: float
    upper: float
    since: float
    at: float
    grown: int
    pattern: Pattern
    phase: Phase | None = None
    left: TimeLeft | None = None

    def seen(self, now: float) -> Growth:
        """Return it as it is at another time, as long as nothing new is known."""
        return self if self.left is None else self._replace(at=now, left=self.left.after(now - self.at))


def find(points: Sequence[Point], now: float, *, known: bool = False, beside: Phase = "test") -> Growth | None:
    """Return the growth that there is now, of the longest stretch up to now in which it was even.

    `known`: it has been told of, and less is enough for it to hold on. `beside` is what other phases than training are
    to be called. Takes some 100 µs.
    """
    if len(points) < LEAST_POINTS:
        return None
    whole = Stretch.of(points)
    times, floor = whole.times, whole.floor
    end, cycle = _last_sure(whole, now)
    hold = HELD_ON if known else 1.0
    cap = whole.caps[-1]
    least = least_growth(cap)
    span = times[end] - times[0]
    while span >= LEAST_SECONDS * hold:
        first = bisect_left(times, times[end] - span)
        grown = whole.lows[end] - floor[first]
        if grown < least * hold or end - first + 1 < LEAST_POINTS:
            return None  # nor in any shorter stretch
        middle = floor[bisect_left(times, times[end] - span / 2, first, end)] - floor[first]
        if LEAST_HALF <= middle / grown <= 1 - LEAST_HALF:
            shape = _shape(whole.part(first, end + 1), now, cycle, known=known)
            if shape is not None:  # a shorter stretch has not gone further
                return _weigh(shape, now, cap, beside, known=known)
        span /= SHORTER
    return None


def least_growth(cap: float | None) -> float:
    """Return the bytes by which a run has to have grown that can have `cap`, or nobody knows how many."""
    return LEAST_UNBOUNDED if cap is None else max(LEAST_BYTES, LEAST_SHARE * cap)


def _last_sure(whole: Stretch, now: float) -> tuple[int, float]:
    """Return the last point to look at, and seconds in which memory usually is taken and given back, 0 for none.

    What rises since it was last given back may be given back as well, unless it is more, or stays for longer.
    """
    falls = list(map(sub, whole.lows, whole.floor))
    most = max(falls)
    last = len(falls) - 1
    if most < LEAST_BYTES / 4:
        return last, 0.0
    troughs, high = [], False
    for number, fall in enumerate(falls):
        if fall >= most / 2:
            high = True
        elif high and not fall:  # what follows is no lower, but may be as low again
            troughs.append(number)
            high = False
    times = [whole.times[0], *(whole.times[each] for each in troughs)]
    cycles = sorted(map(sub, times[1:], times))
    trough = troughs[-1]
    repeats = whole.lows[last] - whole.lows[trough] <= AGAIN * most and now - times[-1] <= AGAIN_LONGER * cycles[-1]
    return (trough if repeats else last), cycles[len(cycles) // 2]


class _Shape(NamedTuple):
    """Even growth over a stretch, with the least of equal parts of its time."""

    stretch: Stretch
    lows: Sequence[tuple[float, float]]
    rises: float
    trend: Trend
    rhythm: Rhythm | None

    @property
    def regular(self) -> bool:
        return self.rhythm is not None and self.rhythm.regular

    @property
    def pattern(self) -> Pattern:
        if self.rhythm is None or not (self.regular or self.rises < MANY_RISES):
            return "steady"
        return "by epoch" if self.rhythm.by_epoch else "staircase"

    def phase(self, beside: Phase) -> Phase | None:
        stretch = self.stretch
        share = (stretch.beside[-1] - stretch.beside[0]) / stretch.grown
        return beside if share >= NEARLY_ALL else "train" if share <= 1 - NEARLY_ALL else None


def _shape(stretch: Stretch, now: float, cycle: float, *, known: bool) -> _Shape | None:
    """Return the growth over a stretch if it is even and goes on; what is known need not have as many rises for it."""
    bins = min(MOST_BINS, int(stretch.seconds / cycle)) if cycle else MOST_BINS
    lows = _lows(stretch, max(bins, LEAST_POINTS - 1))
    even = _Evenness.of(lows)
    if even is None or even.rises < LEAST_REGULAR or even.deviation > MOST_DEVIATION + 1 / even.rises:
        return None
    steps = steps_of(stretch)
    if not steps or _over(steps, stretch, now, cycle):
        return None
    found = trend(lows)
    if found is None or found.rising < LEAST_RISING or found.slope <= 0:
        return None
    if even.rises > MANY_RISES:
        found = _recent(lows, found)
    shape = _Shape(stretch, lows, even.rises, found, rhythm_of(steps, stretch))
    return shape if known or even.rises >= LEAST_RISES or shape.regular else None


def _weigh(shape: _Shape, now: float, cap: float | None, beside: Phase, *, known: bool) -> Growth | None:
    """Return the growth if it is enough for how long it has lasted; of what is known that it goes on is enough."""
    stretch, lows, found = shape.stretch, shape.lows, shape.trend
    left = None
    if cap is None:
        if not known and stretch.seconds < LASTING_SECONDS:
            return None
    else:
        cap_slope = _cap_slope(stretch)
        if cap_slope > found.slope / 2:
            return None  # what it grows by is not lost: pages of a mapped file, or others give way
        transient = _transient(shape)
        room = max(cap - stretch.lows[-1] - transient.sure, 0)
        if stretch.grown < (HELD_ON if known else 1.0) * _way(shape) * (stretch.grown + room):
            return None
        left = time_left(lows, found, shape.rhythm, transient=transient, cap=cap, cap_slope=cap_slope, now=now)
    return Growth(
        bytes_per_second=found.slope,
        lower=max(found.lower, 0.0),
        upper=found.upper,
        since=stretch.times[0],
        at=now,
        grown=stretch.grown,
        pattern=shape.pattern,
        phase=shape.phase(beside),
        left=left,
    )


def _cap_slope(stretch: Stretch) -> float:
    """Return the bytes a second by which what there can be rises, or, as others take it, falls; 0 where it varies.

    Who takes something once, or gives it back, makes no trend: what counts is since then.
    """
    every = max(len(stretch.caps) // 8, 1)
    pairs = zip(stretch.times[::every], stretch.caps[::every], strict=True)
    some = [(at, cap) for at, cap in pairs if cap is not None][-MOST_POINTS:]
    changes = [abs(after - before) for (_, before), (_, after) in pairwise(some)]
    while changes and (most := max(changes)) > sum(changes) / 2:
        last = changes.index(most) + 1
        some, changes = some[last:], changes[last:]
    found = trend(some)
    return found.slope if found is not None and not 1 - LEAST_RISING < found.rising < LEAST_RISING else 0.0


class _Evenness(NamedTuple):
    """How evenly something rose: in how many equal `rises` it might have, and how far from a straight line it went.

    The `deviation` is a share of all that was grown.
    """

    rises: float
    deviation: float

    @classmethod
    def of(cls, lows: Sequence[tuple[float, float]]) -> _Evenness | None:
        if len(lows) < LEAST_POINTS - 1:
            return None
        floor = floor_of([low for _, low in lows])
        grown = floor[-1] - floor[0]
        if grown <= 0:
            return None
        rises = list(map(sub, floor[1:], floor))
        begin, seconds, first = lows[0][0], lows[-1][0] - lows[0][0], floor[0]
        off = [(low - first) / grown - (at - begin) / seconds for low, (at, _) in zip(floor, lows, strict=True)]
        return cls(grown * grown / sum(map(mul, rises, rises)), max(map(abs, off)))


def _lows(stretch: Stretch, bins: int) -> list[tuple[float, float]]:
    """Return the least of each of so many equal parts of the time, with when it was."""
    begin = stretch.times[0]
    width = stretch.seconds * (1 + 1e-9) / bins
    least: list[tuple[float, float]] = []
    last = -1
    for at, low in zip(stretch.times, stretch.lows, strict=True):
        part = int((at - begin) / width)
        if part != last:
            least.append((at, low))
            last = part
        elif low <= least[-1][1]:
            least[-1] = at, low
    return least


def _over(steps: Sequence[Step], stretch: Stretch, now: float, cycle: float) -> bool:
    """Tell whether it has not risen for longer than it had not before."""
    pause = max(step.pause for step in steps)
    recent = stretch.times[-1] - stretch.times[-min(len(stretch.times), 4)]
    patience = max(LEAST_PATIENCE, PATIENCE_SHARE * stretch.seconds, recent)
    return now - steps[-1].at > PATIENCE * pause + patience + AGAIN_LONGER * cycle


def _recent(lows: Sequence[tuple[float, float]], whole: Trend) -> Trend:
    """Return the trend of the second half where it is another one: what counts is what it does now."""
    half = trend(lows[len(lows) // 2 :])
    if half is None or half.rising < LEAST_RISING or whole.lower <= half.slope <= whole.upper:
        return whole
    return half


def _transient(shape: _Shape) -> Transient:
    """Return what steps take on top of the floor, by the allocator's peak: sure where that has risen with the floor.

    Where it has not, the mark is an old one, and steps take anything from nothing to what was left to it.
    """
    stretch, slope = shape.stretch, shape.trend.slope
    base = level_of(shape.lows, slope, 0.0)
    half = len(stretch.peaks) // 2
    peaks = stretch.peaks[half:]
    over = [peak - slope * at - base for peak, at in zip(peaks, stretch.times[half:], strict=True)]
    above = sorted(map(sub, peaks, stretch.floor[half:]))
    above_floor = max(above[len(above) * 3 // 4], 0)
    if peaks[-1] - stretch.peaks[0] < stretch.grown / 2:
        most = max(over[-1], 0.0)
        return Transient(0, most / 2, most, above_floor / 2)
    over.sort()
    likely = max(over[len(over) * 4 // 5], 0.0)
    return Transient(likely, likely, max(over[-1], likely), above_floor)


def _way(shape: _Shape) -> float:
    """Return the share of the way to its limit that growth has to have gone: less where it has lasted.

    Where a run has epochs and it has hardly outlasted one, it may all be given back when the next ends.
    """
    if shape.rises < MANY_RISES and not shape.regular:
        return SHAKY_WAY
    had, seconds = shape.stretch.epochs, shape.stretch.seconds
    epochs = had[-1] - had[0]
    in_epochs = min(epochs / LASTING_EPOCHS, seconds / LASTING_EPOCHS_SECONDS)
    lasted = min(max(in_epochs, seconds / LASTING_SECONDS), shape.rises / LASTING_RISES, 1.0)
    if lasted > 1 / 2:
        return BRIEF_WAY + (LASTING_WAY - BRIEF_WAY) * (2 * lasted - 1)
    return SHAKY_WAY if shape.rises < LEAST_RISES or (had[-1] and epochs < OUTLASTED_EPOCHS) else BRIEF_WAY


@dataclass(slots=True)
class GrowthWatch:
    """Looks for growth in one series, where that has a new point. `growth` is what there is now.

    What has been as it is for long is looked at less often: a look takes up to half a millisecond.
    """

    growth: Growth | None = None
    _closed: int = -1
    _due: float = 0.0

    def look(self, ladder: Ladder, now: float, phase_beside: Callable[[], Phase] = lambda: "test") -> Growth | None:
        """Return the growth there is `now`, by the series' own clock.

        `phase_beside` says what other phases than training are to be called.
        """
        if ladder.closed != self._closed and now >= self._due:
            self._closed = ladder.closed
            known = self.growth is not None
            if ladder.spread < least_growth(ladder.cap) * (HELD_ON if known else 1.0):
                self.growth = None  # as most runs: what never went up by so much has not grown by it
            else:
                self.growth = find(ladder.points(), now, known=known, beside=phase_beside())
            since = self.growth.since if self.growth else ladder.began if ladder.began is not None else now
            pause = LOOKS_SHARE * (now - since)
            self._due = now + min(pause, MOST_LOOKS_SECONDS)
        elif self.growth is not None:
            self.growth = self.growth.seen(now)
        return self.growth
