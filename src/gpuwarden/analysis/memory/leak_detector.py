"""Detector of memory leaks: what a run holds grows without end, how fast, and when it meets its limit.

docs/foresight.md has the reasons. What counts is the floor: what was in use and never given back since. It must have
risen evenly up to now, and far enough on the way to the limit: less far where it has lasted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gpuwarden.analysis.memory.downsampling import Downsampled
from gpuwarden.analysis.memory.memory_history import MemoryWindow
from gpuwarden.analysis.memory.oom_forecast import (
    ALIKE_RATIO,
    Rise,
    TimeLeft,
    find_regular_rises,
    find_rises,
    forecast_oom,
)
from gpuwarden.analysis.memory.theil_sen import Trend, fit_trend, median, running_minimum

MIN_RATIO = 0.01  # of what the run can have: less is noise
BINS = 12  # equal parts of the time, whose least values make the trend; half of them are needed
STEADY_RISES = 7.0  # equal rises that steady growth has at least; half of them are needed, or regular steps
MAX_DEVIATION_RATIO = 0.08  # from a straight line, of what was grown, in addition to the size of one rise
MIN_WAY_RATIO = 0.38  # of the way to the limit, which growth has to have gone,
MIN_LASTING_WAY_RATIO = 0.05  # or where it is steady and has lasted for
LASTING_SECONDS = 900.0
HYSTERESIS = 0.6  # a reported leak stays reported above this part of what it takes to be reported
PATIENCE = 1.6  # times the longest pause, or cycle, there was: what has not come by then does not come


@dataclass(frozen=True, slots=True)
class Leak:
    """Growth of what a run holds: its rate, the bytes so far, and how long it is to the limit where that is known."""

    bytes_per_second: float
    grown: int
    left: TimeLeft | None = None


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Part of a series up to now, and the floor under each of its points."""

    points: Sequence[MemoryWindow]
    times: Sequence[float]
    floor: Sequence[int]

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.times[0]

    @property
    def grown(self) -> int:
        return self.points[-1].lowest - self.floor[0]


def find_leak(points: Sequence[MemoryWindow], now: float, *, known: bool = False) -> Leak | None:
    """Return the growth that there is now, of the longest stretch up to now in which it was even.

    `known`: it is reported already, and less is enough for it to hold on. Takes some 200 µs.
    """
    if len(points) < BINS // 2:
        return None
    times = [each.lowest_at for each in points]
    floor = running_minimum([each.lowest for each in points])
    least = MIN_RATIO * (points[-1].limit or points[-1].highest)
    end, cycle = _last_certain(points, floor, least, now)
    hold = HYSTERESIS if known else 1.0
    span = times[end] - times[0]
    while True:
        first = bisect_left(times, times[end] - span)
        stretch = _Stretch(points[first : end + 1], times[first : end + 1], floor[first : end + 1])
        if len(stretch.points) < BINS // 2 or stretch.grown < least * hold:
            return None  # nor has any shorter stretch
        even, growth = _growth(stretch, now, cycle, hold)
        if even:
            return growth  # a shorter stretch has not gone further
        span /= 2**0.5


def _last_certain(points: Sequence[MemoryWindow], floor: Sequence[int], least: float, now: float) -> tuple[int, float]:
    """Return the last point to consider, and the seconds in which memory usually is taken and given back, 0 for none.

    What rises since it was last given back may be given back as well, unless it is more, or stays for longer.
    """
    above = [each.lowest - under for each, under in zip(points, floor, strict=True)]
    most, last = max(above), len(points) - 1
    if most < least / 4:
        return last, 0.0
    troughs, high = [0], False
    for number, bytes_above in enumerate(above):
        if bytes_above >= most / 2:
            high = True
        elif high and not bytes_above:  # what follows is no lower, but may be as low again
            troughs.append(number)
            high = False
    times = [points[each].lowest_at for each in troughs]
    cycles = sorted(after - before for before, after in pairwise(times))
    trough = troughs[-1]
    higher = points[last].lowest - points[trough].lowest > (1 + ALIKE_RATIO) * most
    longer = now - times[-1] > PATIENCE * cycles[-1]
    return (last if higher or longer else trough), cycles[len(cycles) // 2]


def _growth(stretch: _Stretch, now: float, cycle: float, hold: float) -> tuple[bool, Leak | None]:
    """Return whether a stretch has grown evenly and still does, and that growth if it has gone far enough."""
    bins = _bins(stretch, cycle)
    even = _evenness(bins)
    found = fit_trend(bins)
    if even is None or found is None or found.lower <= 0:
        return False, None
    rises, deviation = even
    steps = find_rises(stretch.times, stretch.floor, MIN_RATIO * stretch.grown)
    if deviation > MAX_DEVIATION_RATIO + 1 / rises or not steps or _is_over(steps, stretch, now, cycle):
        return False, None
    noise = median(each.lowest - under for each, under in zip(stretch.points, stretch.floor, strict=True))
    stairs = find_regular_rises(steps, stretch.floor[-1], noise, now)
    if rises < STEADY_RISES / 2 and stairs is None:
        return False, None
    if rises > STEADY_RISES:
        found = _recent(bins, found)
    limit = stretch.points[-1].limit
    steady = rises >= STEADY_RISES or stairs is not None
    lasting = steady and stretch.seconds >= LASTING_SECONDS
    if limit is None:
        return True, Leak(found.slope, stretch.grown) if lasting or hold < 1 else None
    limit_slope = _limit_slope(stretch)
    likely, most = _step_bytes(stretch)
    room = max(limit - stretch.points[-1].lowest - likely, 0)
    way = (MIN_LASTING_WAY_RATIO if lasting else MIN_WAY_RATIO) * hold
    # Where the limit rises as well, what it grows by is not lost: pages of a mapped file, or others give way.
    if limit_slope > found.slope / 2 or stretch.grown < way * (stretch.grown + room):
        return True, None
    level = median(low - found.slope * at for at, low in bins) + found.slope * now
    left = forecast_oom(
        found, stairs, level=level, step_bytes=(likely, most), limit=limit, limit_slope=limit_slope, now=now
    )
    return True, Leak(found.slope, stretch.grown, left)


def _bins(stretch: _Stretch, cycle: float) -> list[tuple[float, float]]:
    """Return the least of each of some equal parts of the time, no shorter than a cycle, with when it was."""
    count = max(min(BINS, int(stretch.seconds / cycle)), BINS // 2 - 1) if cycle else BINS
    width = stretch.seconds * (1 + 1e-9) / count
    least: dict[int, tuple[float, float]] = {}
    for at, point in zip(stretch.times, stretch.points, strict=True):
        part = int((at - stretch.times[0]) / width)
        if part not in least or point.lowest <= least[part][1]:
            least[part] = at, point.lowest
    return list(least.values())


def _evenness(bins: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Return in how many equal rises it might have grown, and how far from a straight line it went, as a ratio."""
    floor = running_minimum([low for _, low in bins])
    grown, (begin, _), seconds = floor[-1] - floor[0], bins[0], bins[-1][0] - bins[0][0]
    if len(bins) < BINS // 2 - 1 or grown <= 0:
        return None
    rises = grown**2 / sum((after - before) ** 2 for before, after in pairwise(floor))
    off = [(low - floor[0]) / grown - (at - begin) / seconds for low, (at, _) in zip(floor, bins, strict=True)]
    return rises, max(map(abs, off))


def _is_over(steps: Sequence[Rise], stretch: _Stretch, now: float, cycle: float) -> bool:
    """Return whether the last rise is longer ago than any pause before it."""
    recent = stretch.times[-1] - stretch.times[-BINS // 2]
    longest = max(step.pause for step in steps) + cycle
    return now - steps[-1].at > PATIENCE * longest + max(recent, stretch.seconds / 20)


def _recent(bins: Sequence[tuple[float, float]], whole: Trend) -> Trend:
    """Return the trend of the second half where it is another one: what counts is what it does now."""
    half = fit_trend(bins[len(bins) // 2 :])
    return whole if half is None or half.lower <= 0 or whole.lower <= half.slope <= whole.upper else half


def _limit_slope(stretch: _Stretch) -> float:
    """Return the bytes a second by which what there can be rises, or, as others take it, falls; 0 where it varies.

    A process that takes something once, or gives it back, makes no trend: what counts is since then.
    """
    every = max(len(stretch.points) // BINS, 1)
    some = [(each.lowest_at, each.limit) for each in stretch.points[::every] if each.limit is not None]
    changes = [abs(after - before) for (_, before), (_, after) in pairwise(some)]
    while changes and (most := max(changes)) > sum(changes) / 2:
        last = changes.index(most) + 1
        some, changes = some[last:], changes[last:]
    found = fit_trend(some)
    return found.slope if found is not None and (found.lower > 0 or found.upper < 0) else 0.0


def _step_bytes(stretch: _Stretch) -> tuple[float, float]:
    """Return what training steps take on top of the floor, by the allocator's peak: probably, and at most.

    Where the peak has not risen with the floor it is an old one, and steps take anything up to it.
    """
    half = len(stretch.points) // 2
    pairs = zip(stretch.points[half:], stretch.floor[half:], strict=True)
    above = sorted(max(each.peak_at_lowest - under, 0) for each, under in pairs)
    if stretch.points[-1].peak_at_lowest - stretch.points[0].peak_at_lowest < stretch.grown / 2:
        most = max(stretch.points[-1].peak_at_lowest - stretch.floor[-1], 0)
        return most / 2, most
    return above[len(above) * 3 // 4], above[-1]


@dataclass(slots=True)
class LeakDetector:
    """Evaluates one series whenever it has a new window. `growth` is what there is now."""

    growth: Leak | None = None
    _closed: int = -1
    _at: float = 0.0  # when `growth` was

    def look(self, series: Downsampled[MemoryWindow], now: float, since: float = 0.0) -> Leak | None:
        """Return the growth there is `now`, by the series' own clock, in what came `since` a time."""
        if series.closed != self._closed:
            self._closed = series.closed
            points = [each for each in series if each.lowest_at >= since]
            self.growth = find_leak(points, now, known=self.growth is not None)
        elif self.growth is not None and self.growth.left is not None:
            self.growth = replace(self.growth, left=self.growth.left.after(now - self._at))
        self._at = now
        return self.growth
