"""Tracker of XIDs that programs and hardware both cause: repeats in one part of a GPU point to the hardware."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpuwarden.nvml.events.model import XidReport

# In a row in one part. NVIDIA's catalog calls repeats on the same GPC and TPC a possible hardware fault (XID 13), and
# asks for several runs to establish a pattern (XID 31).
MIN_REPEATS = 3
BURST_SECONDS = 60.0  # between reports of one incident: a program's fault is reported by many parts at once
REMEMBER_SECONDS = 86400.0  # for which an incident counts


@dataclass(slots=True)
class _Incident:
    """Reports of one code that came together; `part` is "" if they named several parts."""

    time: float  # monotonic, of the last report
    part: str


class RepeatTracker:
    """Tracker of incidents by GPU and code. A report that names no part is not considered."""

    def __init__(self) -> None:
        self._incidents: dict[tuple[str, int], list[_Incident]] = {}

    def rate(self, report: XidReport) -> XidReport:
        """Add a report; return it, with the case "repeated" if it continues a row of incidents in one part."""
        if not report.part:
            return report
        known = self._incidents.setdefault((report.gpu, report.code), [])
        known[:] = [each for each in known if report.latest - each.time < REMEMBER_SECONDS][-MIN_REPEATS:]
        if known and report.latest - known[-1].time < BURST_SECONDS:
            last = known[-1]
            last.time, last.part = report.latest, last.part if last.part == report.part else ""
        else:
            known.append(_Incident(report.latest, report.part))
        in_a_row = len(known) >= MIN_REPEATS and {each.part for each in known[-MIN_REPEATS:]} == {report.part}
        return replace(report, case="repeated") if in_a_row else report
