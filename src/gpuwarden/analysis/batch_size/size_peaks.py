"""Memory peaks by batch size on one device, of the sizes at which the reported peak rose.

An allocator's peak is the highest ever, so only a size larger than all before shows its own peak.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gpuwarden.analysis.batch_size.cost_model import SizePeak, compute_max_floor
from gpuwarden.protocol.messages import DeviceMemory, Report

MAX_SIZES = 16
MAX_LATE_SECONDS = 2.5  # delay of a reported size after its first step: an undeclared size is counted


@dataclass(slots=True)
class _Entry:
    """One size; `before` is the stable peak before the last rise."""

    floor: int
    peak: int
    at: float
    before: int | None = None


@dataclass(slots=True)
class SizePeaks:
    """Peaks of one run on one device. Used by one event loop; times are seconds since the run's first message."""

    peak: int  # at the last report; the cause of the first report's peak is unknown
    _sizes: dict[int, _Entry] = field(default_factory=dict)
    _size: int | None = None

    def add_report(self, memory: DeviceMemory, report: Report, at: float) -> None:
        """Update with a report that has a batch size; about 0.3 µs."""
        size = report.largest_batch_size
        if not size:  # an empty batch shows nothing
            return
        rose = memory.peak > self.peak
        if size != self._size:
            rose = self._revoke_rise(at) or rose
            self._size = size
        if rose:
            self._raise_peak(size, memory, at)
            self.peak = max(self.peak, memory.peak)
        entry = self._sizes.get(size)
        if entry is not None and memory.current < entry.floor:
            entry.floor = memory.current

    def _revoke_rise(self, at: float) -> bool:
        """Undo a rise of the previous size if it belongs to the new one, reported slightly late; return whether."""
        last = self._sizes.get(self._size) if self._size is not None else None
        if last is None or at - last.at > MAX_LATE_SECONDS:
            return False
        if last.before is None:
            self._sizes = {size: entry for size, entry in self._sizes.items() if entry is not last}
        else:
            last.peak = last.before
        return True

    def _raise_peak(self, size: int, memory: DeviceMemory, at: float) -> None:
        entry = self._sizes.get(size)
        if entry is not None:
            if at - entry.at > MAX_LATE_SECONDS:
                entry.before = entry.peak
            entry.peak, entry.at = memory.peak, at
        elif len(self._sizes) < MAX_SIZES:
            self._sizes[size] = _Entry(memory.current, memory.peak, at)

    def peaks(self, lowest: int | None) -> tuple[SizePeak, ...]:
        """Return the peaks, smallest size first; none if the `lowest` memory in use has grown since.

        Then something other than the batch made the peak.
        """
        found = tuple(SizePeak(size, entry.floor, entry.peak) for size, entry in sorted(self._sizes.items()))
        return () if found and lowest is not None and lowest > compute_max_floor(found[-1]) else found
