"""A part of a series up to now, and its floor: what was in use and never given back since."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from gpuwarden.runs.ladder import Point

Bytes = TypeVar("Bytes", bound=float)


class Stretch(NamedTuple):
    """What a ladder's points tell, each of it as a column of its own: those are gone through in half the time.

    The `floor` never falls: at each point it is the least from there to the end, in bytes.
    """

    times: Sequence[float]
    lows: Sequence[int]
    peaks: Sequence[int]
    epochs: Sequence[int]
    beside: Sequence[int]
    caps: Sequence[float | None]
    floor: Sequence[int]

    @classmethod
    def of(cls, points: Sequence[Point]) -> Stretch:
        """Return all of a series, of at least one point."""
        times, lows, peaks, epochs, beside, caps = zip(*points, strict=True)
        return cls(times, lows, peaks, epochs, beside, caps, floor_of(lows))

    def part(self, first: int, end: int) -> Stretch:
        """Return the points from `first` on and before `end`, above the same floor."""
        return Stretch._make(column[first:end] for column in self)

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.times[-1] - self.times[0]

    @property
    def grown(self) -> int:
        """Bytes by which it went from its first floor to what was in use at last."""
        return self.lows[-1] - self.floor[0]


def floor_of(lows: Sequence[Bytes]) -> list[Bytes]:
    """Return at each the least from there to the end."""
    floor, least = [], lows[-1]
    for low in reversed(lows):
        if low < least:  # noqa: PLR1730 - min takes as long as all the rest
            least = low
        floor.append(least)
    floor.reverse()
    return floor
