"""Counting of XIDs: one fault from several sources counts once, two faults count as two."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gpuwarden.gpu.snapshot import EventCount
from gpuwarden.nvml.events.model import XidReport, XidSource
from gpuwarden.xid.codes import worst_severity
from gpuwarden.xid.deduplicator import APART_SECONDS, MAX_CODES, MAX_OPEN, XidDeduplicator

SOURCES: tuple[XidSource, ...] = ("nvml", "kernel_log", "kernel_log_text")
WALL = 1e9  # Unix time at the monotonic time 0


def report(
    source: XidSource, moment: float, *, code: int = 79, uuid: str = "GPU-a", uncertain: float = 0.0
) -> XidReport:
    """Make a report of a fault that came in the `uncertain` seconds before `moment`."""
    return XidReport(source, uuid, code, moment - uncertain, moment, WALL + moment)


def counted(*reports: XidReport) -> int:
    """Return the number of faults in the reports of XID 79 on GPU-a."""
    ledger = XidDeduplicator()
    new = [ledger.add(each) for each in reports]
    count = ledger.counts("GPU-a")[79].count
    assert count == sum(new)
    return count


@pytest.mark.parametrize("order", list(itertools.permutations(SOURCES)))
def test_fault_reported_three_times_counts_once(order: Sequence[XidSource]) -> None:
    """The order of the sources does not matter."""
    assert counted(*(report(source, 10.0 + place) for place, source in enumerate(order))) == 1


@pytest.mark.parametrize("source", SOURCES)
def test_two_reports_of_one_source_are_two_faults(source: XidSource) -> None:
    """Two reports of one source at the same moment are two faults."""
    assert counted(report(source, 10.0), report(source, 10.0)) == 2


@pytest.mark.parametrize(
    "order",
    [
        ("nvml", "nvml", "kernel_log", "kernel_log"),
        ("nvml", "kernel_log", "nvml", "kernel_log"),
        ("nvml", "kernel_log", "kernel_log", "nvml"),
    ],
)
def test_two_faults_reported_twice_count_two(order: Sequence[XidSource]) -> None:
    """Two faults in a row are paired, in any order of the reports."""
    assert counted(*(report(source, 10.0 + place / 10) for place, source in enumerate(order))) == 2


def test_reports_far_apart_are_two_faults() -> None:
    """A report minutes later is another fault."""
    assert counted(report("nvml", 10.0), report("kernel_log", 10.0 + APART_SECONDS)) == 1
    assert counted(report("nvml", 10.0), report("kernel_log", 10.1 + APART_SECONDS)) == 2
    assert counted(report("nvml", 10.1 + APART_SECONDS), report("kernel_log", 10.0)) == 2


def test_report_that_comes_late_is_paired_by_its_time() -> None:
    """NVML reports a fault a minute late, and it pairs with the kernel log's report of that fault."""
    assert counted(report("kernel_log", 10.0), report("nvml", 70.0, uncertain=65.0)) == 1


def test_fault_missing_in_one_source_does_not_block_the_next() -> None:
    """A fault that NVML never reported is not paired with the report of the next one."""
    reports = report("kernel_log", 10.0), report("kernel_log", 60.0), report("nvml", 60.0), report("nvml", 90.0)
    assert counted(*reports) == 3


CRITICAL = EventCount(1, WALL + 10, {"critical": WALL + 10})


def test_gpus_and_codes_are_kept_apart() -> None:
    """The same code on another GPU, or another code on the same one, is another fault."""
    ledger = XidDeduplicator()
    assert ledger.add(report("nvml", 10.0))
    assert ledger.add(report("kernel_log", 10.0, uuid="GPU-b"))
    assert ledger.add(report("kernel_log", 10.0, code=48))
    assert ledger.counts("GPU-a") == {79: CRITICAL, 48: CRITICAL}
    assert ledger.counts("GPU-b") == {79: CRITICAL}
    assert ledger.counts("GPU-c") == {}


def test_time_is_that_of_the_last_fault() -> None:
    """A late report of an older fault does not set the time back."""
    ledger = XidDeduplicator()
    ledger.add(report("nvml", 100.0))
    ledger.add(report("kernel_log", 10.0))
    assert ledger.counts("GPU-a") == {79: EventCount(2, WALL + 100, {"critical": WALL + 100})}


def test_expired_fault_is_not_paired() -> None:
    """An old fault is closed and its memory freed."""
    ledger = XidDeduplicator()
    ledger.add(report("nvml", 10.0))
    ledger.expire(10.0)
    assert ledger._open
    ledger.expire(10.5)
    assert not ledger._open
    assert ledger.add(report("kernel_log", 10.0))


def test_memory_is_bounded() -> None:
    """Codes beyond the limit are counted as dropped, and a limited number of faults wait for another source."""
    ledger = XidDeduplicator()
    for code in range(MAX_CODES + 3):
        ledger.add(report("nvml", 10.0, code=code))
    assert (len(ledger.counts("GPU-a")), ledger.dropped) == (MAX_CODES, 3)
    for _ in range(3 * MAX_OPEN):
        ledger.add(report("kernel_log", 100.0, code=1))
    assert ledger.counts("GPU-a")[1].count == 1 + 3 * MAX_OPEN
    assert max(map(len, ledger._open.values())) == MAX_OPEN


@pytest.mark.parametrize("first", ["nvml", "kernel_log"])
def test_flag_of_an_nvlink_error_is_its_severity(first: XidSource) -> None:
    """The kernel log says whether an error is fatal, whichever comes first; without it the code's severity holds."""
    for case, severity in (("fatal", "critical"), ("nonfatal", "info"), ("", "warning")):
        ledger = XidDeduplicator()
        reports = {"nvml": report("nvml", 10.0, code=145), "kernel_log": report("kernel_log", 10.0, code=145)}
        reports["kernel_log"] = replace(reports["kernel_log"], case=case)
        assert ledger.add(reports.pop(first))
        assert not any(map(ledger.add, reports.values()))
        assert ledger.counts("GPU-a") == {145: EventCount(1, WALL + 10, {severity: WALL + 10})}


def test_later_nonfatal_error_does_not_hide_a_fatal_one() -> None:
    """Each severity keeps the time of its last event."""
    ledger = XidDeduplicator()
    ledger.add(replace(report("kernel_log", 10.0, code=149), case="fatal"))
    ledger.add(replace(report("kernel_log", 70.0, code=149), case="nonfatal"))
    seen = ledger.counts("GPU-a")[149]
    assert (seen.count, seen.by_severity) == (2, {"critical": WALL + 10, "info": WALL + 70})
    assert worst_severity(149, seen, since=WALL) == "critical"
    assert worst_severity(149, seen, since=WALL + 60) == "info"


def test_xid_162_ends_163() -> None:
    """Power smoothing that is on again needs no action; when it goes off again it does."""
    ledger = XidDeduplicator()
    ledger.add(report("kernel_log", 10.0, code=163))
    assert ledger.counts("GPU-a")[163].by_severity == {"warning": WALL + 10}
    ledger.add(report("kernel_log", 70.0, code=162))
    assert ledger.counts("GPU-a")[163].by_severity == {"info": WALL + 10}
    ledger.add(report("kernel_log", 130.0, code=163))
    assert ledger.counts("GPU-a")[163].by_severity["warning"] == WALL + 130


@pytest.mark.parametrize("first", ["nvml", "kernel_log"])
def test_recovered_gpu_ends_the_requests_of_a_recovery(first: XidSource) -> None:
    """XID 154 to no action ends those before it, whichever source reports it first; a later one counts again."""
    ledger = XidDeduplicator()
    ledger.add(replace(report("kernel_log", 10.0, code=154), case="gpu_reset"))
    assert ledger.counts("GPU-a")[154].by_severity == {"critical": WALL + 10}
    reports = {source: report(source, 70.0, code=154) for source in ("nvml", "kernel_log")}
    reports["kernel_log"] = replace(reports["kernel_log"], case="none")
    assert ledger.add(reports.pop(first))
    assert not any(map(ledger.add, reports.values()))
    assert ledger.counts("GPU-a")[154] == EventCount(2, WALL + 70, {"info": WALL + 70})
    ledger.add(replace(report("kernel_log", 130.0, code=154), case="drain_p2p"))
    assert ledger.counts("GPU-a")[154].by_severity["warning"] == WALL + 130
