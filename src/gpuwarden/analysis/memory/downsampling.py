"""Downsampled series of windows: fine for what is recent, ever coarser for what is long ago.

A leak that ends a run in half a minute shows in it after a day as well as after a minute, and a leak that takes a day
does too, in some tens of kilobytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self  # which a service need not have

FINEST_SECONDS = 0.5  # least length of the newest windows; twice that is the most, unless values are rarer
MAX_PER_LEVEL = 32  # each half of the whole time keeps at least as many windows


class Joinable(Protocol):
    """Stretch of time with its values, which can be joined with the one after it; seconds."""

    @property
    def began(self) -> float: ...  # noqa: D102
    @property
    def ended(self) -> float: ...  # noqa: D102

    def joined(self, other: Self, /) -> Self:
        """Return both as one."""


WindowT = TypeVar("WindowT", bound=Joinable)


@dataclass(slots=True)
class Downsampled(Generic[WindowT]):
    """One series. `newest` is its last window, which still grows; `closed` counts all that ever were before it.

    Windows lie in levels; where a level is full, its two oldest are joined and go to the next.
    """

    newest: WindowT | None = None
    closed: int = 0
    _levels: list[list[WindowT]] = field(default_factory=list)  # the finest first; in each the oldest first

    def append(self, window: WindowT) -> None:
        """Add what came last: to the newest window as long as that stays short, else as a new one."""
        newest = self.newest
        if newest is None:
            self.newest = window
        elif newest.ended - newest.began < FINEST_SECONDS and window.ended - newest.began < 2 * FINEST_SECONDS:
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
            if len(level) <= MAX_PER_LEVEL:
                return
            window = level[0].joined(level[1])
            del level[:2]
        self._levels.append([window])
