"""What batches of each size took on one device, as a run's reports show it: the sizes under which the peak rose.

An allocator's peak is the highest ever, so only a size larger than all before shows its own; smaller ones are hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuwarden.analysis.batch_size.cost_model import (
    INPUT_RATIO,
    MAX_FLOOR_DIFFERENCE_BYTES,
    MAX_FLOOR_DIFFERENCE_RATIO,
    SizePeak,
)
from gpuwarden.protocol.messages import DeviceMemory, Report

MAX_SIZES = 16
LATE_SECONDS = 2.5  # that a size may be told after its first step: where it is not declared it is counted


@dataclass(slots=True)
class _Entry:
    """One size; `before` is the peak that had held for a while when it rose last."""

    floor: int
    peak: int
    at: float
    before: int | None = None


@dataclass(slots=True)
class SizePeaks:
    """One run on one device. Used by one event loop; times are seconds since the run was first heard of."""

    peak: int  # at the last report; what made that of the first is not known
    _sizes: dict[int, _Entry] = field(default_factory=dict)
    _size: int | None = None

    def hear(self, memory: DeviceMemory, report: Report, at: float) -> None:
        """Take one report that tells a batch size; some 0.3 µs."""
        size = report.largest_batch_size
        if not size:  # a batch of none tells nothing
            return
        rose = memory.peak > self.peak
        if size != self._size:
            rose = self._take_back(at) or rose
            self._size = size
        if rose:
            self._rise(size, memory, at)
            self.peak = max(self.peak, memory.peak)
        entry = self._sizes.get(size)
        if entry is not None and memory.current < entry.floor:
            entry.floor = memory.current

    def _take_back(self, at: float) -> bool:
        """Tell whether a rise that was laid to the size before was the new one's, which was told a little late."""
        last = self._sizes.get(self._size) if self._size is not None else None
        if last is None or at - last.at > LATE_SECONDS:
            return False
        if last.before is None:
            self._sizes = {size: entry for size, entry in self._sizes.items() if entry is not last}
        else:
            last.peak = last.before
        return True

    def _rise(self, size: int, memory: DeviceMemory, at: float) -> None:
        entry = self._sizes.get(size)
        if entry is not None:
            if at - entry.at > LATE_SECONDS:
                entry.before = entry.peak
            entry.peak, entry.at = memory.peak, at
        elif len(self._sizes) < MAX_SIZES:
            self._sizes[size] = _Entry(memory.current, memory.peak, at)

    def seen(self, low: int | None) -> tuple[SizePeak, ...]:
        """Return what is known by size, smallest first; nothing where what is in use has grown to `low` since.

        Then the peak is that of something else than the batch.
        """
        found = tuple(SizePeak(size, entry.floor, entry.peak) for size, entry in sorted(self._sizes.items()))
        if not found or low is None:
            return found
        newest = found[-1]
        fed = INPUT_RATIO * (newest.peak - newest.floor)
        return () if low > newest.floor * (1 + MAX_FLOOR_DIFFERENCE_RATIO) + MAX_FLOOR_DIFFERENCE_BYTES + fed else found
