"""Detector of memory leaks: growth without end, its rate, and the time until it reaches the limit.

It uses the floor: memory in use that was never freed since. The floor must have risen evenly up to now, and far enough
towards the limit; less far if it has lasted for long. docs/understand/leaks.md has the reasons.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

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
from gpuwarden.analysis.memory.running_minimum import running_minimum
from gpuwarden.analysis.memory.theil_sen import Trend, fit_trend

MIN_RATIO = 0.01  # of the memory available to the run: less is noise
MAX_BINS = 12  # equal parts of the time, whose minima make the trend; half of them are needed
MIN_STEADY_RISES = 7.0  # equal rises of steady growth; half of them are needed, or regular rises
MAX_DEVIATION_RATIO = 0.08  # from a straight line, of the growth, in addition to the size of one rise
MIN_WAY_RATIO = 0.38  # of the way to the limit that growth must have covered,
MIN_LASTING_WAY_RATIO = 0.05  # or, if it is steady and has lasted for MIN_LASTING_SECONDS, this part
MIN_LASTING_SECONDS = 900.0
HYSTERESIS = 0.6  # a reported leak stays reported above this fraction of the reporting threshold
PATIENCE = 1.6  # times the longest pause, or cycle, so far: growth that has not come by then is over


@dataclass(frozen=True, slots=True)
class Leak:
    """Leak: its rate, the bytes grown, and the time left to the limit if that is known."""

    bytes_per_second: float
    grown: int
    left: TimeLeft | None = None


@dataclass(frozen=True, slots=True)
class _Span:
    """Part of a series, with the floor of each of its windows."""

    windows: Sequence[MemoryWindow]
    times: Sequence[float]
    floor: Sequence[int]

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.times[0]

    @property
    def grown(self) -> int:
        return self.windows[-1].lowest - self.floor[0]

    @property
    def noise(self) -> float:
        """Median bytes in use above the floor."""
        return median(each.lowest - under for each, under in zip(self.windows, self.floor, strict=True))


@dataclass(frozen=True, slots=True)
class _Cycle:
    """Memory that is repeatedly allocated and freed: the last certain window, and the seconds of one cycle."""

    end: int
    seconds: float = 0.0  # 0 for none


def find_leak(windows: Sequence[MemoryWindow], now: float, *, reported: bool = False) -> Leak | None:
    """Return the current leak, of the longest span up to now in which memory grew evenly; about 200 µs.

    `reported`: the leak is already reported, so the lower threshold applies (HYSTERESIS).
    """
    if len(windows) < MAX_BINS // 2:
        return None
    times = [each.lowest_at for each in windows]
    floor = running_minimum([each.lowest for each in windows])
    smallest = MIN_RATIO * (windows[-1].limit or windows[-1].highest)
    cycle = _find_cycle(windows, floor, smallest, now)
    hold = HYSTERESIS if reported else 1.0
    end, seconds = cycle.end, times[cycle.end] - times[0]
    while True:
        first = bisect_left(times, times[end] - seconds)
        span = _Span(windows[first : end + 1], times[first : end + 1], floor[first : end + 1])
        if len(span.windows) < MAX_BINS // 2 or span.grown < smallest * hold:
            return None  # shorter spans have even less
        is_even, leak = _evaluate(span, now, cycle.seconds, hold)
        if is_even:
            return leak  # a shorter span has not grown more
        seconds /= 2**0.5


def _find_cycle(windows: Sequence[MemoryWindow], floor: Sequence[int], smallest: float, now: float) -> _Cycle:
    """Return the cycle, if any: memory allocated since the last free may be freed as well.

    Not if it is more than in any earlier cycle, or stays for longer.
    """
    above = [each.lowest - under for each, under in zip(windows, floor, strict=True)]
    most, last = max(above), len(windows) - 1
    if most < smallest / 4:
        return _Cycle(last)
    troughs, is_high = [0], False
    for number, bytes_above in enumerate(above):
        if bytes_above >= most / 2:
            is_high = True
        elif is_high and not bytes_above:  # later values are not lower, but may be as low
            troughs.append(number)
            is_high = False
    times = [windows[each].lowest_at for each in troughs]
    cycles = sorted(after - before for before, after in pairwise(times))
    trough = troughs[-1]
    is_higher = windows[last].lowest - windows[trough].lowest > (1 + ALIKE_RATIO) * most
    is_longer = now - times[-1] > PATIENCE * cycles[-1]
    return _Cycle(last if is_higher or is_longer else trough, cycles[len(cycles) // 2])


def _evaluate(span: _Span, now: float, cycle: float, hold: float) -> tuple[bool, Leak | None]:
    """Return whether a span grows evenly up to now, and the leak if it has grown far enough.

    With a `hold` below 1 growth may be less even, so that a training with a varying pace has its leak reported once.
    """
    bins = _bins(span, cycle)
    evenness = _evenness(bins)
    trend = fit_trend(bins)
    if evenness is None or trend is None or trend.lower <= 0:
        return False, None
    equal_rises, deviation = evenness
    rises = find_rises(span.times, span.floor, MIN_RATIO * span.grown)
    if deviation > MAX_DEVIATION_RATIO + 1 / equal_rises or not rises or _is_over(rises, span, now, cycle):
        return False, None
    regular = find_regular_rises(rises, span.floor[-1], span.noise, now)
    if equal_rises < MIN_STEADY_RISES / 2 * hold and regular is None:
        return False, None
    if equal_rises > MIN_STEADY_RISES:
        trend = _recent_trend(bins, trend)
    is_steady = equal_rises >= MIN_STEADY_RISES or regular is not None
    is_lasting = is_steady and span.seconds >= MIN_LASTING_SECONDS
    limit = span.windows[-1].limit
    if limit is None:
        return True, Leak(trend.slope, span.grown) if is_lasting or hold < 1 else None
    limit_slope = _limit_slope(span)
    likely, most = _step_bytes(span)
    room = max(limit - span.windows[-1].lowest - likely, 0)
    way = (MIN_LASTING_WAY_RATIO if is_lasting else MIN_WAY_RATIO) * hold
    # If the limit rises too, the growth is no loss: pages of a mapped file, or others free memory.
    if limit_slope > trend.slope / 2 or span.grown < way * (span.grown + room):
        return True, None
    level = median(low - trend.slope * at for at, low in bins) + trend.slope * now
    left = forecast_oom(
        trend, regular, level=level, step_bytes=(likely, most), limit=limit, limit_slope=limit_slope, now=now
    )
    return True, Leak(trend.slope, span.grown, left)


def _bins(span: _Span, cycle: float) -> list[tuple[float, float]]:
    """Return the minimum of each of some equal parts of the time, with its time; parts are no shorter than a cycle."""
    count = max(min(MAX_BINS, int(span.seconds / cycle)), MAX_BINS // 2 - 1) if cycle else MAX_BINS
    width = span.seconds * (1 + 1e-9) / count
    least: dict[int, tuple[float, float]] = {}
    for at, window in zip(span.times, span.windows, strict=True):
        part = int((at - span.times[0]) / width)
        if part not in least or window.lowest <= least[part][1]:
            least[part] = at, window.lowest
    return list(least.values())


def _evenness(bins: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Return the equivalent number of equal rises, and the deviation from a straight line as a ratio of the growth."""
    floor = running_minimum([low for _, low in bins])
    grown, (begin, _), seconds = floor[-1] - floor[0], bins[0], bins[-1][0] - bins[0][0]
    if len(bins) < MAX_BINS // 2 - 1 or grown <= 0:
        return None
    equal_rises = grown**2 / sum((after - before) ** 2 for before, after in pairwise(floor))
    off = [(low - floor[0]) / grown - (at - begin) / seconds for low, (at, _) in zip(floor, bins, strict=True)]
    return equal_rises, max(map(abs, off))


def _is_over(rises: Sequence[Rise], span: _Span, now: float, cycle: float) -> bool:
    """Return True where the last rise is longer ago than any pause before it."""
    recent = span.times[-1] - span.times[-MAX_BINS // 2]
    longest = max(rise.pause for rise in rises) + cycle
    return now - rises[-1].at > PATIENCE * longest + max(recent, span.seconds / 20)


def _recent_trend(bins: Sequence[tuple[float, float]], whole: Trend) -> Trend:
    """Return the trend of the second half where it is another one: what counts is what it does now."""
    half = fit_trend(bins[len(bins) // 2 :])
    return whole if half is None or half.lower <= 0 or whole.lower <= half.slope <= whole.upper else half


def _limit_slope(span: _Span) -> float:
    """Return the bytes a second by which the limit rises, or, as others allocate, falls; 0 where it varies.

    A process that allocates something once, or frees it, makes no trend: what counts is since then.
    """
    every = max(len(span.windows) // MAX_BINS, 1)
    limits = [(each.lowest_at, each.limit) for each in span.windows[::every] if each.limit is not None]
    changes = [abs(after - before) for (_, before), (_, after) in pairwise(limits)]
    while changes and (most := max(changes)) > sum(changes) / 2:
        last = changes.index(most) + 1
        limits, changes = limits[last:], changes[last:]
    trend = fit_trend(limits)
    return trend.slope if trend is not None and (trend.lower > 0 or trend.upper < 0) else 0.0


def _step_bytes(span: _Span) -> tuple[float, float]:
    """Return what training steps take on top of the floor, by the allocator's peak: probably, and at most.

    Where the peak has not risen with the floor it is an old one, and steps take anything up to it.
    """
    half = len(span.windows) // 2
    pairs = zip(span.windows[half:], span.floor[half:], strict=True)
    above = sorted(max(each.peak_at_lowest - under, 0) for each, under in pairs)
    if span.windows[-1].peak_at_lowest - span.windows[0].peak_at_lowest < span.grown / 2:
        most = max(span.windows[-1].peak_at_lowest - span.floor[-1], 0)
        return most / 2, most
    return above[len(above) * 3 // 4], above[-1]


@dataclass(slots=True)
class LeakDetector:
    """Detector on one series, which evaluates it whenever it has a new window. `leak` is the present one."""

    leak: Leak | None = None
    _closed: int = -1
    _at: float = 0.0  # when `leak` was evaluated

    def evaluate(self, series: Downsampled[MemoryWindow], now: float, since: float = 0.0) -> Leak | None:
        """Return the leak there is `now`, by the series' own clock, in what came `since` a time."""
        if series.closed != self._closed:
            self._closed = series.closed
            windows = [each for each in series if each.lowest_at >= since]
            self.leak = find_leak(windows, now, reported=self.leak is not None)
        elif self.leak is not None and self.leak.left is not None:
            self.leak = replace(self.leak, left=self.leak.left.after(now - self._at))
        self._at = now
        return self.leak
