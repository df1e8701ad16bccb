"""Repeats of XIDs 13 and 31 in one part of a GPU, which point to its hardware."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from gpuwarden.host.kernel_log import KernelRecord
from gpuwarden.nvml.events.model import XidReport
from gpuwarden.xid.kernel_messages import parse_xids
from gpuwarden.xid.repeats import REMEMBER_SECONDS, RepeatTracker

WARP = "13, pid=1234, name=python3, Graphics SM Warp Exception on (GPC {}, TPC {}, SM 0): Out Of Range Address"
OLD_WARP = "13, Graphics SM Warp Exception on (GPC {}, TPC {}): Out Of Range Address"
UNKNOWN_WARP = (
    "13, pid='<unknown>', name=<unknown>, Graphics SM Global Exception on (GPC {}, TPC {}, SM 1): Multiple Warp"
)
FAULT = "31, pid=77, name=train, Ch 00000008, intr 0. MMU Fault: ENGINE GRAPHICS GPC{} GPCCLIENT_T1_{} faulted @ 0x7f"
REGISTERS = "13, pid=1234, name=python3, Graphics Exception: ESR 0x57c730=0xc04000b 0x57c734=0x24"


def parsed(text: str, at: float) -> XidReport:
    """Return the report of a line of the kernel log."""
    line = f"NVRM: Xid (PCI:0000:3b:00): {text}".encode()
    (found,) = parse_xids([KernelRecord(message=line, earliest=at, latest=at, time=at)])
    return found


def repeats(lines: Iterable[tuple[float, str]]) -> list[bool]:
    """Return for each line, with its time, whether it continues a row."""
    tracker = RepeatTracker()
    return [tracker.rate(parsed(text, at)).case == "repeated" for at, text in lines]


@pytest.mark.parametrize("text", [WARP, OLD_WARP, UNKNOWN_WARP, FAULT])
def test_part_of_the_gpu_is_read(text: str) -> None:
    """The part is read in the texts of older and newer drivers."""
    assert parsed(text.format(3, 11), 0.0).part == "GPC 3, TPC 11"


@pytest.mark.parametrize(
    "text",
    [
        REGISTERS,
        "31, pid=7, name=a, Ch 00000008, intr 0. MMU Fault: ENGINE HOST4 HUBCLIENT_ESC faulted @ 0x0",
        "13, pid=7, name=(GPC 1, TPC 1), Graphics Exception: ESR 0x0=0x0",
        "43, pid=7, name=a, Ch 00000008",
    ],
)
def test_other_texts_name_no_part(text: str) -> None:
    """A text without a part, and a part in the name of a process, are none."""
    assert parsed(text, 0.0).part == ""


@pytest.mark.parametrize("text", [WARP, FAULT])
def test_three_in_a_row(text: str) -> None:
    """The third incident in the same part is a repeat; one in another part ends the row."""
    here, there = text.format(7, 7), text.format(7, 6)
    assert repeats([(0, here), (100, here), (200, here), (300, here)]) == [False, False, True, True]
    assert repeats([(0, here), (100, there), (200, here), (300, here)]) == [False] * 4


def test_burst_is_one_incident() -> None:
    """A fault with many lines is one; one that many parts report at once is the program's."""
    one = [(0.0, WARP.format(7, 7)), (0.1, REGISTERS), (0.2, WARP.format(7, 7)), (0.3, WARP.format(7, 7))]
    assert repeats(one) == [False] * 4
    many = [(at + part / 10, WARP.format(0, part)) for at in (0, 100, 200, 300) for part in (0, 1, 2)]
    assert not any(repeats(many))


def test_incidents_are_forgotten() -> None:
    """Incidents of yesterday do not count."""
    here = WARP.format(7, 7)
    assert repeats([(0, here), (100, here), (200 + REMEMBER_SECONDS, here)]) == [False] * 3
