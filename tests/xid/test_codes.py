"""The table of XIDs: NVIDIA's recommended actions are kept, and every code can be explained."""

from __future__ import annotations

import re

import pytest

from gpuwarden.cli.commands.reference_command import render_xids
from gpuwarden.nvml.constants import RECOVERY_ACTIONS
from gpuwarden.xid.codes import _ROWS, CASES, XIDS, Action, codes, explain, find_xid

# Column "immediate action" of NVIDIA's catalog as of 2025-10 (docs.nvidia.com/deploy/xid-errors), where it is one
# of these three. IGNORE differs where the catalog adds "contact support" or the log asks for a reset.
CATALOG = {
    Action.REBOOT_MACHINE: {79},
    Action.RESET_GPU: {46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158},
    Action.RESTART_APPLICATION: {
        *(8, 11, 13, 25, 31, 32, 39, 40, 41, 60, 68, 69, 70, 71, 72, 75, 76, 77, 80, 82, 83, 84, 85, 86, 88, 89, 94),
        *range(96, 106),
        *range(126, 136),
        139,
    },
}


@pytest.mark.parametrize("action", CATALOG)
def test_actions_are_nvidias(action: Action) -> None:
    """Actions are the immediate actions of NVIDIA's catalog; XID 48 has a workflow there that resets."""
    ours = {code for code, xid in XIDS.items() if xid.action is action}
    assert ours - {48} == CATALOG[action]


def test_codes_are_unique_and_sorted() -> None:
    """Codes are sorted and unique."""
    assert len(_ROWS) == len(XIDS)
    assert list(XIDS) == sorted(XIDS)


def test_gpus_that_need_a_reset_are_critical() -> None:
    """Codes that take the GPU or machine out of service are critical; of the other codes only NVLink's are."""
    out_of_service = {Action.RESET_GPU, Action.REBOOT_MACHINE, Action.RESTART_VM}
    rows = [*XIDS.values(), *CASES.values()]
    assert {xid.code for xid in rows if xid.action in out_of_service} - {154} == {*codes("critical")} - {74, 154}


def test_codes_without_action_are_info() -> None:
    """Codes without an action have the severity info."""
    assert {xid.severity for xid in XIDS.values() if xid.action is Action.IGNORE} == {"info"}


def test_texts_are_sentences() -> None:
    """Meanings and actions are sentences that fit into a table."""
    texts = [xid.meaning for xid in XIDS.values()] + [action.value for action in Action] + [explain(0).meaning]
    assert [text for text in texts if not (text[0].isupper() and text.endswith(".") and "|" not in text)] == []


def test_unknown_code_is_explained() -> None:
    """A code that is not in the table has a meaning and an action too."""
    assert (explain(100_000).code, explain(100_000).severity) == (100_000, "warning")


def test_other_severities_are_explained() -> None:
    """Events whose severity is not that of their code have a meaning and an action of their own."""
    assert all(row.meaning != explain(code).meaning for (code, _), row in CASES.items())
    assert all(explain(row.code, row.severity) is row for row in CASES.values() if row.code != 154)
    assert explain(145, "critical").action is Action.RESET_GPU
    assert explain(145, "warning") is explain(145)
    assert (codes("critical").count(144), codes("info").count(144)) == (1, 1)


def test_recovery_actions_are_cases() -> None:
    """Each recovery action of the driver is a case of XID 154; where only the severity is known, the driver's holds."""
    assert {case for code, case in CASES if code == 154} == set(RECOVERY_ACTIONS)
    assert find_xid(154, "node_reboot").action is Action.REBOOT_MACHINE
    assert [explain(154, severity).action for severity in ("critical", "warning", "info")] == [
        Action.RECOVER,
        Action.RECOVER,
        Action.IGNORE,
    ]


def test_reference_has_each_code_once() -> None:
    """The reference has each code in one line, which says how its events differ, below its action."""
    page = "\n".join(render_xids())
    lists = re.findall(r"^- (\d+(?:, \d+)*): .*$", page, re.MULTILINE)
    assert sorted(int(code) for codes in lists for code in codes.split(", ")) == list(XIDS)
    (line,) = re.findall(r"^- 144, 145, 146, 147, 148, 149, 150: .*$", page, re.MULTILINE)
    assert line.endswith("*fatal*: reset_gpu, critical. *nonfatal*: ignore, info.")
    assert re.search(rf"^## check_nvlink\n\n(?:(?!##).*\n)*{re.escape(line)}$", page, re.MULTILINE)
