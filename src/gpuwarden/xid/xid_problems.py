"""Problems of XIDs: each has the meaning, severity and action of its row in xid/codes.py."""

from __future__ import annotations

from dataclasses import replace

from gpuwarden.errors import device_problems as device
from gpuwarden.errors.problems import Problem
from gpuwarden.xid.codes import Action, Xid
from gpuwarden.xid.kernel_messages import FALLEN_OFF_THE_BUS, find_text_xid

# Those that other problems follow from; all others by their action.
_PROBLEMS = {
    FALLEN_OFF_THE_BUS: device.GPU_LOST,
    **dict.fromkeys((13, 31), device.ILLEGAL_ADDRESS),
    **dict.fromkeys((48, 94, 95, 140, 171, 172), device.ECC_ERROR),
    154: device.GPU_RECOVERY,
}
_BY_ACTION = {
    **dict.fromkeys((Action.IGNORE, Action.FOLLOW_OTHER), device.XID_NOTICE),
    Action.RESTART_APPLICATION: device.GPU_PROGRAM_FAULT,
}


def find_xid_problem(text: str) -> Problem | None:
    """Return the problem of the XID that a line has; None if it has none."""
    xid = find_text_xid(text)
    return problem_from_xid(xid) if xid else None


def problem_from_xid(xid: Xid) -> Problem:
    """Return the problem of a row. The driver logs XIDs in their order: none follows from a later one."""
    by_action = _BY_ACTION.get(xid.action, device.GPU_FAULT)
    base = device.XID_NOTICE if xid.action is Action.IGNORE else _PROBLEMS.get(xid.code, by_action)
    return replace(
        base,
        title=f"XID {xid.code}, {xid.severity}: {xid.meaning.rstrip('.')}",
        first_step=xid.action.value,
        follows=tuple(name for name in base.follows if base is device.GPU_RECOVERY or name not in device.HARDWARE),
    )
