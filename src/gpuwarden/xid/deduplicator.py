"""Deduplication of XIDs that several sources report: each fault counts once."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

from gpuwarden.gpu.snapshot import EventCount
from gpuwarden.nvml.events.model import XidReport, XidSource
from gpuwarden.xid.codes import find_xid, times_by_severity

APART_SECONDS = 5.0  # between two sources' reports of one fault at most, in addition to the uncertainty of each
MAX_CODES = 64  # of a GPU; NVIDIA's catalog has 172
MAX_OPEN = 256  # faults of one GPU and code that a source has not reported and still may


class XidDeduplicator:
    """Pairs each report with the same fault reported by another source, in either order.

    A source reports a fault once, and its faults in order; so two reports of one source are two faults.
    """

    def __init__(self) -> None:
        self.dropped = 0  # faults not counted, as their GPU has too many codes
        self._counts: dict[str, dict[int, EventCount]] = {}
        # By GPU, code and source: the times of faults that this source has not reported yet.
        self._open: dict[tuple[str, int, XidSource], deque[tuple[float, float]]] = {}

    def add(self, report: XidReport) -> bool:
        """Add a report; return whether it is a new fault, and was counted. Another source may add its severity."""
        counts = self._counts.setdefault(report.gpu, {})
        old = counts.get(report.code)
        xid = find_xid(report.code, report.case)
        if self._known(report):
            if old and xid.case:
                known = times_by_severity(report.code, old)
                earlier = {each: at for each, at in known.items() if at != old.last}
                counts[report.code] = replace(old, by_severity={**earlier, xid.severity: old.last})
                self._end(xid.ends, counts)
            return False
        if old is None and len(counts) >= MAX_CODES:
            self.dropped += 1
            return False
        last = max(old.last, report.time) if old else report.time
        times = times_by_severity(report.code, old) if old else {}
        times = {**times, xid.severity: max(report.time, times.get(xid.severity, report.time))}
        counts[report.code] = EventCount(old.count + 1 if old else 1, last, times)
        self._end(xid.ends, counts)
        for other in get_args(XidSource):
            if other != report.source:
                key = report.gpu, report.code, other
                self._open.setdefault(key, deque(maxlen=MAX_OPEN)).append((report.earliest, report.latest))
        return True

    @staticmethod
    def _end(code: int, counts: dict[int, EventCount]) -> None:
        """End the condition of a code: its events so far need no action any longer."""
        if (ended := counts.get(code)) is not None:
            counts[code] = replace(ended, by_severity={"info": ended.last})

    def _known(self, report: XidReport) -> bool:
        faults = self._open.get((report.gpu, report.code, report.source))
        while faults:
            earliest, latest = faults[0]
            if report.latest < earliest - APART_SECONDS:
                return False
            faults.popleft()  # this report's, or too old for this and all later reports
            if report.earliest <= latest + APART_SECONDS:
                return True
        return False

    def expire(self, before: float) -> None:
        """Drop faults from before that monotonic time: a later report is a fault of its own."""
        for key, faults in list(self._open.items()):
            while faults and faults[0][1] < before:
                faults.popleft()
            if not faults:
                del self._open[key]

    def clamp_times(self, now: float) -> None:
        """Limit the times of faults to `now` (Unix time): after a clock was set back, later ones would stay new."""
        for counts in self._counts.values():
            for code, count in counts.items():
                if count.last > now:
                    times = {severity: min(at, now) for severity, at in count.by_severity.items()}
                    counts[code] = EventCount(count.count, now, times)

    @property
    def empty(self) -> bool:
        """True if no GPU has had a fault."""
        return not self._counts

    def counts(self, uuid: str) -> Mapping[int, EventCount]:
        """Return a GPU's faults by code."""
        return dict(self._counts.get(uuid, {}))
