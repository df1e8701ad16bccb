"""A run's memory over its whole life in a few points a device: what a receipt keeps of its history.

Points are windows of the history, joined until they are few; those of an earlier daemon and this one's make one story.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpuwarden.analysis.memory.memory_history import MemoryWindow

MOST_POINTS = 60  # of a device
MOST_TOGETHER = 480  # of all devices of a run


def points_each(devices: int) -> int:
    """Return how many points each device may have where a run has so many."""
    return max(min(MOST_POINTS, MOST_TOGETHER // max(devices, 1)), 2)


def thinned(windows: Sequence[MemoryWindow], most: int = MOST_POINTS) -> list[MemoryWindow]:
    """Join neighbours until there are at most `most` windows: those that end in the same part of the whole time."""
    if len(windows) <= most:
        return list(windows)
    began = windows[0].began
    part = (windows[-1].ended - began) / most or 1.0
    found: list[MemoryWindow] = []
    last = -1
    for window in windows:
        # The end of all would be a part of its own.
        place = min(int((window.ended - began) / part), most - 1)
        if place == last:
            found[-1] = found[-1].joined(window)
        else:
            found.append(window)
        last = place
    return found


def shifted(windows: Sequence[MemoryWindow], seconds: float) -> list[MemoryWindow]:
    """Return windows as seen from a begin that lies so many seconds earlier."""
    return [replace(window, began=window.began + seconds, ended=window.ended + seconds) for window in windows]
