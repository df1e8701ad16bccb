"""XIDs in a text: the meaning, severity and action of the one table, in each form in which they are written."""

from __future__ import annotations

import io

import pytest

from gpuwarden.errors.explanation import Explanation, explain_events
from gpuwarden.explain.events import read_events
from gpuwarden.xid.codes import CASES, XIDS, Xid, find_xid

FORMS = (
    "NVRM: Xid (PCI:0000:41:00): {}, pid=4242, name=python3, Ch 00000008",
    "[  100.000001] NVRM: Xid (0000:41:00): {}, Ch 1",  # drivers before R300
    "Nov 28 10:00:00 box kernel: NVRM: Xid (PCI:0000:41:00 GPU-I:02 GPU-CI:01): {}, pid='<unknown>', name=<unknown>",
    "XidCriticalError: Xid={} on Device=GPU-5130, the device will go unhealthy.",
)


def explain(log: str) -> Explanation:
    """Return the explanation of a log that has one."""
    explanation = explain_events(read_events(io.BytesIO(log.encode())))
    assert explanation is not None
    return explanation


def shown(log: str) -> tuple[str, str]:
    """Return the title and the first step of the root of a log."""
    problem = explain(log).root.problem
    return problem.title, problem.first_step


def texts(xid: Xid) -> tuple[str, str]:
    """Return the title and the first step that the row of an XID has."""
    return f"XID {xid.code}, {xid.severity}: {xid.meaning.rstrip('.')}", xid.action.value


@pytest.mark.parametrize("form", FORMS)
def test_each_code_is_explained_by_its_row(form: str) -> None:
    """Each code has its own meaning, severity and action, whatever the line's form."""
    assert {code: shown(form.format(code)) for code in XIDS} == {code: texts(xid) for code, xid in XIDS.items()}


@pytest.mark.parametrize(
    ("line", "code", "case"),
    [
        ("145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008)", 145, "nonfatal"),
        ("149, pid=7, name=a, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x025001c6)", 149, "fatal"),
        ("154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", 154, "none"),
        ("154, GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)", 154, "node_reboot"),
        ("154, GPU recovery action changed from 0x0 (None) to 0x3 (Drain P2P)", 154, "drain_p2p"),
        ("154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)", 154, "drain_and_reset"),
        ("45, pid=1818990, name=python3, Ch 00000001 caused by previous Xid 149", 149, ""),
        ("4000, a newer driver's", 4000, ""),
    ],
)
def test_text_of_an_event_decides_its_case(line: str, code: int, case: str) -> None:
    """The driver's text beyond the code is read as the daemon reads it."""
    assert shown(f"NVRM: Xid (PCI:0000:41:00): {line}") == texts(find_xid(code, case))


def test_lost_gpu_in_three_lines() -> None:
    """The message of a GPU that is lost before it has an XID has its last words on a line of its own."""
    log = (
        "NVRM: The NVIDIA GPU 0000:b3:00.0\nNVRM: (PCI ID: 10de:26b5) installed in this system has\n"
        "NVRM: fallen off the bus and is not responding to commands.\n"
    )
    assert shown(log) == texts(XIDS[79])


def test_targets_of_a_recovery_are_different_errors() -> None:
    """Two XIDs 154 of one log that differ in their target are both explained."""
    log = "".join(
        f"NVRM: Xid (PCI:0000:41:00): 154, GPU recovery action changed from 0x{old} (x) to 0x{new} (x)\n"
        for old, new in ((0, 1), (1, 0))
    )
    (other,) = explain(log).others
    assert shown(log) == texts(CASES[154, "gpu_reset"])
    assert other.problem.title == texts(CASES[154, "none"])[0]


def test_fault_goes_before_the_recovery_and_notices_that_it_has() -> None:
    """The first fault is the cause, wherever the driver's notices stand, and before a recovery that it needs."""
    log = (
        "NVRM: Xid (PCI:0000:41:00): 45, pid=1, name=python3, Ch 00000008\n"
        "NVRM: Xid (PCI:0000:41:00): 119, pid=1, name=python3, Timeout after 45s of waiting for RPC response\n"
        "NVRM: Xid (PCI:0000:41:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)\n"
        "RuntimeError: CUDA error: unspecified launch failure\n"
    )
    explanation = explain(log)
    assert explanation.root.problem.title.startswith("XID 119, critical: ")
    assert [each.problem.name for each in explanation.followers] == ["gpu_recovery", "kernel_launch_failed"]
    assert [each.problem.name for each in explanation.others] == ["xid_notice"]


def test_error_of_the_program_goes_before_a_notice() -> None:
    """A report that needs no action explains nothing."""
    log = "NVRM: Xid (PCI:0000:41:00): 43, pid=1, name=a\nTraceback (most recent call last):\nKeyError: 'image'\n"
    assert explain(log).root.problem.name == "program_error"


def test_number_of_another_system_is_no_xid() -> None:
    """A transaction of a database has an xid too."""
    assert read_events(io.BytesIO(b"commit of xid 9001 done\n")) == []
