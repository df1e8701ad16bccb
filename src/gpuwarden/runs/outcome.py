"""Outcome of a run, concluded from its own goodbye and from the kernel's facts about its process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.analysis.oom.diagnosis_wording import format_host_growth
from gpuwarden.errors.kind_guides import describe_error
from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.host.cgroup_limits import OomKillCounter
from gpuwarden.host.oom_killer import OomKill
from gpuwarden.protocol.messages import OOM_KINDS, End, Error, uncaught_reason
from gpuwarden.xid.codes import explain

Outcome = Literal["finished", "failed", "out_of_memory", "killed", "crashed", "unknown"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
RunStateName = Literal["running", "stalled"] | Outcome

SETTLE_SECONDS = 2.0  # after the process's end: the kernel logs a kill before it, and one or two polls read the log
PATIENCE_SECONDS = 10.0  # to wait for the end of a process after its last message, or for its exit status
XID_SECONDS = 30.0  # before a run's end, in which an XID may be the cause
_SLACK_SECONDS = 1.0  # by which the kernel log's clock may be off

ILLEGAL_ADDRESS = frozenset({13, 31})  # XIDs after which CUDA gives a program nothing but errors
_AFTERMATH = frozenset({43, 45})  # XIDs that the end of a program causes itself
_CRASHES = frozenset(
    {signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS, signal.SIGTRAP}
)  # for what the program did itself; frameworks abort after errors of CUDA that they cannot return


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence of a run's end.

    `exit_status` is that of wait(2), None if unknown. `oom_kill` is this process's OOM kill in the kernel log;
    `cgroup_oom_kills` counts recent OOM kills of any process in its cgroup. `xids` are recent codes of its GPUs.
    `error` is the last one that the run reported. `host_leak` is the leak of its processes at that time. `goes_on`: the
    run closed its connection, and its process lives.
    """

    farewell: End | None = None
    exit_status: int | None = None
    oom_kill: OomKill | None = None
    cgroup_oom_kills: int = 0
    xids: tuple[int, ...] = ()
    error: Error | None = None
    host_leak: Leak | None = None
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Ending:
    """Outcome of a run, with the `evidence` in words; `at` is Unix time, `exit_status` that of wait(2), if known.

    Until it is `settled`, the outcome may change as evidence comes in.
    """

    outcome: Outcome
    evidence: str
    at: float
    settled: bool = False
    exit_status: int | None = None

    @property
    def has_failed(self) -> bool:
        """True if the exit status is that of a failure: later evidence can only name another reason."""
        return bool(self.exit_status)

    @property
    def exit_signal(self) -> str | None:
        """Name of the signal that ended the process."""
        if self.exit_status is None or not os.WIFSIGNALED(self.exit_status):
            return None
        return signal_name(os.WTERMSIG(self.exit_status))


def conclude(evidence: Evidence) -> tuple[Outcome, str]:
    """Return the outcome, and the evidence in words. Evidence from the kernel has priority over the run's own.

    - finished: exit status 0; without a known status, a goodbye without an exception.
    - failed: another exit status, or a goodbye with an exception.
    - out_of_memory: failed or crashed, and the exception is the out-of-memory error that the run reported last, after
      which TensorFlow's allocator may abort at exit; or killed by the kernel's OOM killer. One that was caught, as by a
      retry with a smaller batch, does not count.
    - killed: another signal, such as SIGTERM, SIGINT or SIGKILL.
    - crashed: SIGABRT, or a signal for what the program did itself, such as SIGSEGV.
    - unknown: no evidence, or the run disconnected while its process lives.
    """
    outcome, words = _conclude(evidence)
    if outcome in ("failed", "crashed") and _is_uncaught_oom(evidence):
        outcome = "out_of_memory"
    elif outcome == "out_of_memory" and evidence.host_leak is not None:
        words = [*words, format_host_growth(evidence.host_leak)]
    if evidence.farewell is not None:
        words = [*words, f"last message: {evidence.farewell.reason}"]
    if evidence.error is not None and outcome != "finished":
        words = [*words, f"last error: {describe_error(evidence.error.kind, evidence.error.exception)}"]
    return outcome, "; ".join(words)


def _conclude(evidence: Evidence) -> tuple[Outcome, list[str]]:
    status = evidence.exit_status
    if evidence.goes_on:
        return "unknown", ["it closed its connection, but its process kept running"]
    if status is not None and os.WIFSIGNALED(status):
        return _conclude_signal(status, evidence)
    if status is not None:
        code = os.WEXITSTATUS(status)
        return ("failed", [f"exit status {code}", *_oom_beside(evidence)]) if code else ("finished", ["exit status 0"])
    if evidence.oom_kill is not None:
        return "out_of_memory", [_oom_kill_text(evidence.oom_kill)]
    if evidence.farewell is not None:
        return evidence.farewell.outcome, []
    return _conclude_silence(evidence)


def _conclude_signal(status: int, evidence: Evidence) -> tuple[Outcome, list[str]]:
    number = os.WTERMSIG(status)
    ended_by = f"ended by {signal_name(number)}{', with a core dump' if os.WCOREDUMP(status) else ''}"
    if number == signal.SIGKILL and evidence.oom_kill is not None:
        return "out_of_memory", [_oom_kill_text(evidence.oom_kill)]
    if number == signal.SIGKILL and evidence.cgroup_oom_kills:
        return "out_of_memory", [ended_by, *_oom_beside(evidence)]
    if number in _CRASHES:
        return "crashed", [ended_by, *_faults(evidence.xids)]
    return "killed", [ended_by]


def _conclude_silence(evidence: Evidence) -> tuple[Outcome, list[str]]:
    """Conclude for a process that is gone without a last message or a readable exit status."""
    gone = "the process is gone without a last message, exit status unknown"
    if evidence.cgroup_oom_kills:
        return "out_of_memory", [gone, *_oom_beside(evidence)]
    if ILLEGAL_ADDRESS.intersection(evidence.xids):
        return "crashed", [gone, *_faults(evidence.xids)]
    return "unknown", [gone]


def _is_uncaught_oom(evidence: Evidence) -> bool:
    """Return whether the exception that ended the run is the out-of-memory error that it reported last."""
    error, farewell = evidence.error, evidence.farewell
    if error is None or farewell is None or error.kind not in OOM_KINDS:
        return False
    return farewell.reason == uncaught_reason(error.exception)


def _oom_kill_text(kill: OomKill) -> str:
    where = {True: "its cgroup was", False: "the host was", None: "its cgroup or the host was"}[kill.in_cgroup]
    return f"killed by the kernel's OOM killer: {where} out of memory (kernel log)"


def _oom_beside(evidence: Evidence) -> Iterable[str]:
    if evidence.cgroup_oom_kills:
        yield f"the OOM killer killed processes of its cgroup (kills: {evidence.cgroup_oom_kills})"


def _faults(xids: Iterable[int]) -> Iterable[str]:
    for code in sorted(set(xids) - _AFTERMATH)[:3]:
        kind = " (illegal address)" if code in ILLEGAL_ADDRESS else ""
        yield f"just before, its GPU reported XID {code}{kind}: {explain(code).meaning.rstrip('.')}"


def signal_name(number: int) -> str:
    """Return a signal's name, such as SIGTERM; Python knows none of most real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class OutcomeTracker:
    """Outcome of one run: collects evidence of its end at once and in the next polls, until the ending is settled.

    A settled ending never changes: it has been shown and counted. `ended` is None while the run is up; times are
    monotonic.
    """

    def __init__(self, pid: int, began: float) -> None:
        self._pid = pid
        self._began = began
        self._counted: set[Outcome] = set()  # a run may report its end repeatedly
        self._evidence = Evidence()
        self._settled: Ending | None = None
        self._gone: float | None = None  # its process
        self._at = 0.0  # of the end, in Unix time
        self.ended: float | None = None

    @property
    def ending(self) -> Ending | None:
        """Current ending; None while the run is up."""
        if self.ended is None:
            return None
        return self._settled or self._conclude(settled=False)

    def _conclude(self, *, settled: bool) -> Ending:
        evidence = self._evidence
        status = None if evidence.goes_on else evidence.exit_status
        return Ending(*conclude(evidence), at=self._at, settled=settled, exit_status=status)

    @property
    def is_gone(self) -> bool:
        """True if the run's process has ended."""
        return self._gone is not None

    @property
    def is_open(self) -> bool:
        """True if the run has ended and its outcome is not settled."""
        return self.ended is not None and self._settled is None

    def begin(self, now: float, at: float, error: Error | None, host_leak: Leak | None) -> None:
        """Start to collect evidence, as the run has ended; `at` is Unix time."""
        self.ended, self._at = now, at
        self._evidence = Evidence(error=error, host_leak=host_leak)

    def resume(self) -> None:
        """Discard the end, as the run is active again, unless its exit status is known."""
        if self._evidence.exit_status is None:
            self.ended = self._gone = self._settled = None

    def handle_farewell(self, farewell: End, error: Error | None = None) -> None:
        """Add the run's own last message, and the error that it reports with it."""
        self._evidence = replace(self._evidence, farewell=farewell, error=error or self._evidence.error)

    def handle_exit(self, now: float, status: int | None, kills: OomKillCounter | None) -> None:
        """Add the end of the process, or its exit status (wait(2)), which may come later.

        `kills` counts OOM kills in its cgroup.
        """
        if self._settled is not None:
            return
        if self._gone is None:
            self._gone = now
            self._evidence = replace(self._evidence, cgroup_oom_kills=kills.since() if kills else 0)
        if status is not None:
            self._evidence = replace(self._evidence, exit_status=status)

    def add_evidence(
        self, kills: Iterable[OomKill], uuids: Iterable[str], snapshot: Snapshot, now: float
    ) -> Outcome | None:
        """Add the evidence of a poll; return the outcome when it is settled, unless it is already counted.

        `uuids` are those of the run's GPUs and MIG instances.
        """
        if not self.is_open:
            return None
        if self._gone is not None and self._pid:
            codes = tuple(_recent_xids(uuids, snapshot, self._at))
            kill = next((kill for kill in kills if self._is_own(kill, self._gone)), None)
            self._evidence = replace(self._evidence, oom_kill=kill, xids=codes)
        return self._settle() if self._is_complete(now) else None

    def conclude(self, *, goes_on: bool) -> Outcome | None:
        """Settle the ending, because all evidence is in; return the outcome as `add_evidence` does.

        `goes_on`: the process lives, and the run has no connection.
        """
        if goes_on:
            self._evidence = replace(self._evidence, goes_on=True)
        return self._settle() if self.is_open else None

    def _is_complete(self, now: float) -> bool:
        """Return whether there was enough time for all evidence to arrive."""
        is_known = self._gone is not None and (self._evidence.exit_status is not None or not self._pid)
        since = self._gone if self._gone is not None else self.ended
        return since is not None and now - since >= (SETTLE_SECONDS if is_known else PATIENCE_SECONDS)

    def _settle(self) -> Outcome | None:
        self._settled = self._conclude(settled=True)
        outcome = self._settled.outcome
        if outcome in self._counted:
            return None
        self._counted.add(outcome)
        return outcome

    def _is_own(self, kill: OomKill, gone: float) -> bool:
        """Return whether a kill is of this process, by pid and time."""
        after = kill.latest >= self._began - _SLACK_SECONDS
        return kill.pid == self._pid and after and kill.earliest <= gone + _SLACK_SECONDS


def _recent_xids(uuids: Iterable[str], snapshot: Snapshot, at: float) -> Iterator[int]:
    """Yield the XIDs of GPUs, or of the GPUs of MIG instances, shortly before `at` (Unix time)."""
    for gpu in {gpu.identity.uuid: gpu for uuid in uuids if (gpu := snapshot.gpu_with(uuid))}.values():
        for code, xid in gpu.xids.items():
            if at - XID_SECONDS <= xid.last <= at + SETTLE_SECONDS:
                yield code
