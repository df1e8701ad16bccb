"""The least that was in use, finely for what is recent and ever more coarsely for what is long ago.

Rungs of a few points each: where one is full its two oldest are joined and go to the next. So a leak that ends a run in
half a minute is seen as well after a day as after a minute, and one of a day beside it, in some kilobytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

FIRST_SECONDS = 0.5  # that a point of the first rung stands for, or a report where those are rarer
MOST_IN_A_RUNG = 16
MOST_RUNGS = 18  # of half a second and twice as long each: a week


class Point(NamedTuple):
    """The least of a stretch: `low` bytes, seen last at `at`, and `peak`, the allocator's own mark at that moment.

    The others are as at the stretch's end: `epochs` how many had begun, `beside` the bytes that were grown in other
    phases than training, and `cap` what there could have been in use at most, where that was known. A mark of the
    stretch's end would hold what was grown within it, and steps would seem to take that.
    """

    at: float
    low: int
    peak: int
    epochs: int
    beside: int
    cap: float | None


@dataclass(slots=True)
class Ladder:
    """One series. `closed` counts the points that ever were, for who wants to know whether there are new ones."""

    closed: int = 0
    cap: float | None = None  # as of the last report
    _least: int | None = None  # that was ever in use at a point
    _most: int = 0
    _rungs: list[list[Point]] = field(default_factory=list)  # the finest first
    _began: float | None = None  # the point under way
    _at: float = 0.0
    _low: int = 0
    _peak: int = 0
    _epochs: int = 0
    _beside: int = 0

    def hear(
        self, at: float, current: int, peak: int, *, epochs: int = 0, beside: int = 0, cap: float | None = None
    ) -> None:
        """Take what is in use now."""
        if self._began is None or at - self._began >= FIRST_SECONDS:
            if self._began is not None:
                self._close(self._under_way())
            self._began, self._at, self._low, self._peak = at, at, current, peak
        elif current <= self._low:
            self._at, self._low, self._peak = at, current, peak
        self._epochs, self._beside, self.cap = epochs, beside, cap

    @property
    def began(self) -> float | None:
        """The time of the oldest point."""
        if self._began is None:
            return None
        return self._rungs[-1][0].at if self._rungs else self._at

    @property
    def spread(self) -> int:
        """Bytes between the least and the most of all points that ever were: none that are left lie further apart."""
        if self._least is None:
            return 0
        return max(self._most, self._low) - min(self._least, self._low)

    def points(self) -> list[Point]:
        """Return all points, the oldest first; the last one is under way."""
        if self._began is None:
            return []
        points = [point for rung in reversed(self._rungs) for point in rung]
        points.append(self._under_way())
        return points

    def _under_way(self) -> Point:
        return Point(self._at, self._low, self._peak, self._epochs, self._beside, self.cap)

    def _close(self, point: Point) -> None:
        self.closed += 1
        if self._least is None or point.low < self._least:
            self._least = point.low
        self._most = max(self._most, point.low)
        for rung in self._rungs:
            rung.append(point)
            if len(rung) <= MOST_IN_A_RUNG:
                return
            point = _joined(rung[0], rung[1])
            del rung[:2]
        if len(self._rungs) < MOST_RUNGS:
            self._rungs.append([point])
        else:
            self._rungs[-1].insert(0, point)


def _joined(one: Point, other: Point) -> Point:
    """Join a point with the one after it."""
    return other if other.low <= one.low else other._replace(at=one.at, low=one.low, peak=one.peak)
