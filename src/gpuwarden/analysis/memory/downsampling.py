"""Downsampled series of windows: fine for recent time, coarser for the past.

It shows a leak of half a minute as well as one of a day, in some tens of kilobytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self  # which a service need not have

MIN_WINDOW_SECONDS = 0.5  # length of the newest windows, which is at most twice that unless values are rarer
MAX_WINDOWS_PER_LEVEL = 32  # each half of the whole time keeps at least so many windows


class Joinable(Protocol):
    """Time window with its values, that can be joined with the next one; times in seconds."""

    @property
    def began(self) -> float: ...  # noqa: D102
    @property
    def ended(self) -> float: ...  # noqa: D102

    def joined(self, other: Self, /) -> Self:
        """Return both as one."""


WindowT = TypeVar("WindowT", bound=Joinable)


@dataclass(slots=True)
class Downsampled(Generic[WindowT]):
    """Series of windows. `newest` is the last one, still open; `closed` counts all windows before it.

    Windows are kept in levels; when a level is full, its two oldest are joined and move to the next.
    """

    newest: WindowT | None = None
    closed: int = 0
    _levels: list[list[WindowT]] = field(default_factory=list)  # the finest first; in each the oldest first

    def append(self, window: WindowT) -> None:
        """Add a window; it is joined with the newest one while that is short."""
        newest = self.newest
        if newest is None:
            self.newest = window
        elif newest.ended - newest.began < MIN_WINDOW_SECONDS and window.ended - newest.began < 2 * MIN_WINDOW_SECONDS:
            self.newest = newest.joined(window)
        else:
            self.newest = window
            self._close(newest)

    def __iter__(self) -> Iterator[WindowT]:
        """Yield all windows, the oldest first."""
        for level in reversed(self._levels):
            yield from level
        if self.newest is not None:
            yield self.newest

    def _close(self, window: WindowT) -> None:
        self.closed += 1
        for level in self._levels:
            level.append(window)
            if len(level) <= MAX_WINDOWS_PER_LEVEL:
                return
            window = level[0].joined(level[1])
            del level[:2]
        self._levels.append([window])


def downsample(windows: Sequence[WindowT], max_count: int) -> list[WindowT]:
    """Return at most `max_count` windows: those that end in the same part of the time are joined."""
    if len(windows) <= max_count:
        return list(windows)
    began = windows[0].began
    part_seconds = (windows[-1].ended - began) / max_count or 1.0
    found: list[WindowT] = []
    last = -1
    for window in windows:
        part = min(int((window.ended - began) / part_seconds), max_count - 1)  # the very end belongs to the last part
        if part == last:
            found[-1] = found[-1].joined(window)
        else:
            found.append(window)
        last = part
    return found
