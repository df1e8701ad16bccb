"""Conclusion of how a run ended, from its own goodbye and from the kernel's facts about its process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.analysis.oom.diagnosis_wording import host_memory_growth
from gpuwarden.host.oom_killer import OomKill
from gpuwarden.protocol.messages import End, Error
from gpuwarden.xid.codes import explain

Outcome = Literal["finished", "failed", "killed", "oom_killed", "aborted", "crashed", "unknown"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

ILLEGAL_ADDRESS = frozenset({13, 31})  # XIDs after which CUDA gives a program nothing but errors
_AFTERMATH = frozenset({43, 45})  # XIDs that the end of a program causes itself
_CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP}
)  # for what the program did itself


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence of a run's end.

    `exit_status` is that of wait(2), None where it is unknown. `oom_kill` is the kernel's word that it killed this
    process for memory; `cgroup_oom_kills` counts such kills in its cgroup, of whichever process, shortly before.
    `xids` are codes that its GPUs had shortly before. `error` is the last one that the run reported. `host_growth` is
    how the memory of its processes grew then. `goes_on`: the run ended its connection, and its process lives.
    """

    farewell: End | None = None
    exit_status: int | None = None
    oom_kill: OomKill | None = None
    cgroup_oom_kills: int = 0
    xids: tuple[int, ...] = ()
    error: Error | None = None
    host_growth: Leak | None = None
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Ending:
    """Outcome of a run: `evidence` names in words what it was concluded from; `at` is Unix time.

    One that is not `settled` may become another as evidence comes in.
    """

    outcome: Outcome
    evidence: str
    at: float
    settled: bool = False


def conclude(evidence: Evidence) -> tuple[Outcome, str]:
    """Return the outcome, and in words what it was concluded from. The kernel's word goes before the run's own."""
    outcome, words = _conclude(evidence)
    if outcome == "oom_killed" and evidence.host_growth is not None:
        words = [*words, host_memory_growth(evidence.host_growth)]
    if evidence.farewell is not None:
        words = [*words, f"it said: {evidence.farewell.reason}"]
    if evidence.error is not None and outcome != "finished":
        words = [*words, f"the last error it told: {evidence.error.kind} ({evidence.error.exception})"]
    return outcome, "; ".join(words)


def _conclude(evidence: Evidence) -> tuple[Outcome, list[str]]:
    status = evidence.exit_status
    if evidence.goes_on:
        return "unknown", ["it closed its connection, and its process went on"]
    if status is not None and os.WIFSIGNALED(status):
        return _of_signal(status, evidence)
    if status is not None:
        code = os.WEXITSTATUS(status)
        return ("failed", [f"exit status {code}", *_oom_beside(evidence)]) if code else ("finished", ["exit status 0"])
    if evidence.oom_kill is not None:
        return "oom_killed", [_told(evidence.oom_kill)]
    if evidence.farewell is not None:
        return evidence.farewell.outcome, []
    return _of_silence(evidence)


def _of_signal(status: int, evidence: Evidence) -> tuple[Outcome, list[str]]:
    number = os.WTERMSIG(status)
    ended_by = f"ended by {_name(number)}{', with a core dump' if os.WCOREDUMP(status) else ''}"
    if number == signal.SIGKILL and evidence.oom_kill is not None:
        return "oom_killed", [_told(evidence.oom_kill)]
    if number == signal.SIGKILL and evidence.cgroup_oom_kills:
        return "oom_killed", [ended_by, *_oom_beside(evidence)]
    if number == signal.SIGABRT:
        return "aborted", [ended_by, *_faults(evidence.xids)]
    if number in _CRASHES:
        return "crashed", [ended_by, *_faults(evidence.xids)]
    return "killed", [ended_by]


def _of_silence(evidence: Evidence) -> tuple[Outcome, list[str]]:
    """Conclude from what happened around a process that is gone without a goodbye or a status that we may know."""
    gone = "it is gone without a goodbye, and how its process ended is not known"
    if evidence.cgroup_oom_kills:
        return "oom_killed", [gone, *_oom_beside(evidence)]
    if ILLEGAL_ADDRESS.intersection(evidence.xids):
        return "aborted", [gone, *_faults(evidence.xids)]
    return "unknown", [gone]


def _told(kill: OomKill) -> str:
    where = {True: "its cgroup was", False: "the host was", None: "its cgroup or the host was"}[kill.in_cgroup]
    return f"the kernel log says that the OOM killer killed it: {where} out of memory"


def _oom_beside(evidence: Evidence) -> Iterable[str]:
    if evidence.cgroup_oom_kills:
        yield f"the kernel's OOM killer killed in its cgroup then (kills: {evidence.cgroup_oom_kills})"


def _faults(xids: Iterable[int]) -> Iterable[str]:
    for code in sorted(set(xids) - _AFTERMATH)[:3]:
        kind = " (illegal address)" if code in ILLEGAL_ADDRESS else ""
        yield f"shortly before its GPU had XID {code}{kind}: {explain(code).meaning.rstrip('.')}"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
