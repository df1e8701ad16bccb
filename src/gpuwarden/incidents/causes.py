"""Causes: whether one fact of an incident follows from another, by their kinds, their subjects and their times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

SLACK_SECONDS = 5.0  # by which a cause may be noticed after its effect: a poll, or a driver call that times out
LOST_SLACK_SECONDS = 30.0  # likewise for a GPU that is lost: calls to it may hang for as long
ABORT_SECONDS = 1.0  # after a rank's trouble at least, in which another one is aborted because of it
REACH_SECONDS = 120.0  # from a cause to its effect
STALL_REACH_SECONDS = 900.0  # likewise to a stall, which is noticed late, and from one to the end of its run

AFTERMATH_XIDS = frozenset({43, 45})  # that the end of a program causes itself
FALLEN_OFF_THE_BUS = 79
NVLINK_XIDS = frozenset({74, *range(144, 151)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something that happened. `at` is Unix time; `gpus` has the UUIDs of the GPUs concerned.

    `kind` is that of its event (history/event_log.py), or `error` or `requested`. `what` is the detail in words: a
    driver fault, the meaning of an XID, an outcome, a kind of error. `code` is of an XID. `is_collective`: an error of
    communication between the ranks of a job, or an end after one. `opened`: it opened the incident, or joined it. `job`
    identifies a job of several processes.
    """

    at: float
    kind: str
    what: str = ""
    detail: str = ""  # a further sentence, of a root only
    gpu: str = ""  # name of the GPU, such as GPU 3
    gpus: frozenset[str] = frozenset()
    code: int | None = None
    is_collective: bool = False
    run: str = ""  # name of the run
    run_id: str = ""
    job: str = ""
    rank: int | None = None
    opened: bool = False

    @property
    def is_xid(self) -> bool:
        """True for an XID."""
        return self.code is not None


def explains(cause: Fact, effect: Fact) -> bool:
    """Return whether an effect follows from a cause."""
    rule = _RULES.get("hardware" if is_of_hardware(cause) else cause.kind)
    return rule is not None and rule(cause, effect)


def is_of_hardware(fact: Fact) -> bool:
    """Return whether a fact is of the GPU or the driver, and no program caused it."""
    return fact.kind in ("GpuDown", "GpuwardenDriverFault", "GpuXidCritical", "GpuXidWarning")


def _hardware_explains(cause: Fact, effect: Fact) -> bool:
    """Return whether a lost GPU, a driver that does not answer, or an XID of the hardware explains something."""
    is_there = cause.kind == "GpuwardenDriverFault" or bool(cause.gpus & effect.gpus)
    if effect.is_xid and is_of_hardware(effect):
        return _explains_hardware_xid(cause, effect, is_there=is_there)
    if effect.kind == "GpuDown":
        return is_there and _is_after(cause, effect, slack=0.0 if cause.kind == "GpuDown" else LOST_SLACK_SECONDS)
    if effect.kind == "GpuwardenDriverFault":
        return cause.is_xid and _is_after(cause, effect, slack=LOST_SLACK_SECONDS)
    reach = STALL_REACH_SECONDS if effect.kind == "RunStalled" else REACH_SECONDS
    slack = SLACK_SECONDS if cause.is_xid else LOST_SLACK_SECONDS
    is_kind = effect.is_xid or effect.kind in ("error", "run_ended", "RunStalled")
    return is_there and is_kind and _is_after(cause, effect, slack=slack, reach=reach)


def _explains_hardware_xid(cause: Fact, effect: Fact, *, is_there: bool) -> bool:
    if not cause.is_xid:
        return not is_there and effect.code in NVLINK_XIDS and _is_after(cause, effect, slack=SLACK_SECONDS)
    if effect.code in NVLINK_XIDS and cause.code not in NVLINK_XIDS:
        return _is_after(cause, effect, slack=SLACK_SECONDS)  # a link of this or another GPU to the faulty one
    is_link = effect.code in NVLINK_XIDS and cause.code in NVLINK_XIDS
    return (is_there or is_link) and _is_after(cause, effect)


def _heat_explains(cause: Fact, effect: Fact) -> bool:
    if not cause.gpus & effect.gpus:
        return False
    is_later = effect.kind in ("GpuDown", "GpuThrottled") or effect.code == FALLEN_OFF_THE_BUS
    return _is_sign(cause, effect) or (is_later and _is_after(cause, effect))


def _program_xid_explains(cause: Fact, effect: Fact) -> bool:
    """Return whether an XID that a program caused explains something."""
    if cause.code in AFTERMATH_XIDS or not cause.gpus & effect.gpus:
        return False
    if effect.is_xid:
        return not is_of_hardware(effect) and (effect.code in AFTERMATH_XIDS or _is_after(cause, effect))
    return effect.kind in ("error", "run_ended") and _is_after(cause, effect, slack=SLACK_SECONDS)


def _run_explains(cause: Fact, effect: Fact) -> bool:
    """Return whether a fact of a run explains another: of the same run, of its job, or of its GPU."""
    if effect.is_xid:
        is_there = effect.code in AFTERMATH_XIDS and bool(cause.gpus & effect.gpus)
        return is_there and _is_after(cause, effect, slack=SLACK_SECONDS)
    if _is_sign(cause, effect):
        return cause.run_id == effect.run_id or bool(cause.gpus & effect.gpus)
    if cause.run_id == effect.run_id:
        return _explains_same_run(cause, effect)
    return bool(cause.job) and cause.job == effect.job and _explains_rank(cause, effect)


def _explains_same_run(cause: Fact, effect: Fact) -> bool:
    if cause.kind == "run_ended":
        return False
    if effect.kind == "run_ended":
        reach = STALL_REACH_SECONDS if cause.kind == "RunStalled" else REACH_SECONDS
        return _is_after(cause, effect, reach=reach, slack=1.0)
    return effect.kind in ("error", "RunStalled", "RunOutOfMemory") and _is_after(cause, effect)


def _explains_rank(cause: Fact, effect: Fact) -> bool:
    """Return whether a fact of one rank explains one of another rank of its job."""
    if effect.kind not in ("error", "run_ended", "RunStalled"):
        return False
    reach = STALL_REACH_SECONDS if "RunStalled" in (cause.kind, effect.kind) else REACH_SECONDS
    if _is_weak(effect) and not _is_weak(cause):
        return _is_after(cause, effect, reach=reach, slack=SLACK_SECONDS)
    if _is_weak(cause) and not _is_weak(effect):
        is_aborted = effect.kind == "run_ended" and effect.what in ("killed", "crashed")
        return is_aborted and effect.at - cause.at > ABORT_SECONDS and _is_after(cause, effect, reach=reach)
    return _is_after(cause, effect, reach=reach)


def _is_weak(fact: Fact) -> bool:
    """Return whether a rank's trouble is usually the effect of another rank's: it waits, or cannot communicate."""
    return fact.is_collective or fact.kind == "RunStalled"


def _is_sign(cause: Fact, effect: Fact) -> bool:
    """Return whether an effect is pressure that announced the cause, or came with it."""
    return _SIGNS.get(effect.kind) == cause.kind and abs(effect.at - cause.at) <= STALL_REACH_SECONDS


def _is_after(cause: Fact, effect: Fact, *, slack: float = 0.0, reach: float = REACH_SECONDS) -> bool:
    """Return whether the times allow it; of two facts of the same time, the order is that of their kinds and names."""
    passed = effect.at - cause.at
    if slack:
        return -slack <= passed <= reach
    return 0 < passed <= reach or (passed == 0 and _order(cause) < _order(effect))


def _order(fact: Fact) -> tuple[str, int, str, str]:
    return fact.kind, fact.code or 0, fact.run_id, fact.gpu


_SIGNS = {"GpuMemoryPressureCritical": "RunOutOfMemory", "GpuThermalPressureCritical": "GpuThrottled"}
_RULES: Mapping[str, Callable[[Fact, Fact], bool]] = {
    "hardware": _hardware_explains,
    "GpuThrottled": _heat_explains,
    "GpuXidInfo": _program_xid_explains,
    "RunOutOfMemory": _run_explains,
    "error": _run_explains,
    "run_ended": _run_explains,
    "RunStalled": _run_explains,
}
