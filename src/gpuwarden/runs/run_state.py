"""State of one run: its messages, its end, its devices; and the frozen snapshot that each poll makes of it."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from gpuwarden.analysis.batch_size.prior_runs import PriorRuns
from gpuwarden.analysis.batch_size.tracker import BatchSizeTracker
from gpuwarden.analysis.memory.device_memory import held_by_others, is_listed, memory_by_gpu
from gpuwarden.analysis.memory.headroom import HeadroomTracker, HeadroomUnknown, unreported_devices
from gpuwarden.analysis.memory.leak_watch import HOST, LeakWatch
from gpuwarden.analysis.memory.memory_history import MemoryHistory
from gpuwarden.analysis.oom.co_tenants import CoTenants
from gpuwarden.analysis.oom.diagnoser import Diagnoser, PollFacts, RunFacts
from gpuwarden.analysis.oom.diagnosis import Diagnosis
from gpuwarden.analysis.oom.failed_allocation import Oom, ooms_by_gpu
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.host.oom_killer import OomKill
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.host.process_tree import HostUsage, PresentProcesses, read_state
from gpuwarden.protocol.messages import End, Error, ErrorKind, Hello, Message, Report
from gpuwarden.runs.devices import resolve
from gpuwarden.runs.error_log import ErrorLog
from gpuwarden.runs.outcome import Evidence, Outcome
from gpuwarden.runs.outcome_evidence import OutcomeEvidence, xids
from gpuwarden.runs.run_events import ReportEvents
from gpuwarden.runs.run_snapshot import KEPT_ERRORS, RunSnapshot, SeenError
from gpuwarden.runs.stall import Patience, Stall, StallWatch

log = logging.getLogger(__name__)

OOM_KINDS = ("device_oom", "host_oom")
TOLD_STALLS = 20  # of a run, in the log


@dataclass(frozen=True, slots=True)
class Rules:
    """Settings of runs: `expiry` in seconds, `overhead` in bytes (docs/headroom.md); `wall` tells Unix time.

    `alerting`: the daemon itself sends alerts.
    """

    expiry: float
    overhead: float
    patience: Patience
    wall: Callable[[], float]
    predecessors: PriorRuns = field(default_factory=PriorRuns)
    alerting: bool = False


@dataclass(slots=True)
class RunState:
    """One run. Used by one event loop; times are monotonic unless they say otherwise."""

    peer: ProcessKey
    hello: Hello
    rules: Rules
    seen: float
    named: float  # when its name or framework last changed
    began: float  # Unix time, to show
    began_at: float
    wish: Hello | None = None  # a hello whose new name has to wait
    report: Report | None = None
    last_report: float | None = None
    last_report_time: float | None = None  # Unix time, to show
    inquest: OutcomeEvidence | None = None  # once it is not up
    told: set[Outcome] = field(default_factory=set)  # one may say its end again and again
    connected: bool = True
    uuids: Mapping[str, str] = field(default_factory=dict)  # by device, while it lived
    present: PresentProcesses | None = None  # when its processes were last seen
    stalling: StallWatch = field(default_factory=StallWatch)
    errors: deque[SeenError] = field(default_factory=lambda: deque(maxlen=KEPT_ERRORS))
    last_errors: dict[ErrorKind, float] = field(default_factory=dict)  # Unix time, to show
    last_oom: SeenError | None = None
    ooms: Mapping[str, Oom] = field(default_factory=dict)
    inquiry: Diagnoser = field(default_factory=Diagnoser)
    error_log: ErrorLog = field(default_factory=ErrorLog)
    histories: dict[str, MemoryHistory] = field(default_factory=dict)  # of its memory, by UUID
    advice_connection: int = 0  # another number each time that it connects anew to read advice
    advice_limits: Mapping[str, float] = field(default_factory=dict)  # bytes in use by UUID, beyond which there is news
    events: ReportEvents = field(default_factory=ReportEvents)
    outlook: LeakWatch = field(default_factory=LeakWatch)
    headroom: HeadroomTracker = field(init=False)
    batch_sizes: BatchSizeTracker = field(init=False)

    def __post_init__(self) -> None:
        self.headroom = HeadroomTracker(self.rules.overhead)
        self.batch_sizes = BatchSizeTracker(self.rules.predecessors, self.peer.uid)

    def handle(self, message: Message, now: float) -> bool:
        """Handle a message, of which a hello is the first; return whether it is worth a poll before the next is due."""
        if isinstance(message, Hello):
            self._rename(message, now)
        elif self.wish is not None:
            self._rename(self.wish, now)
        self.seen, self.connected = now, True
        if self.inquest and self.inquest.evidence.exit_status is None:  # it goes on
            self.inquest = None
        if isinstance(message, Error):
            self._note(message, now)
            return self.rules.alerting and message.kind in OOM_KINDS
        if isinstance(message, Report):
            self._date_errors(message)
            urgent = self.report is None and (self.hello.hears or self.rules.alerting)
            urgent = self._remember(message, now) or urgent
            self.inquiry.handle_report(message, self.report)
            self.report, self.last_report, self.last_report_time = message, now, self.rules.wall()
            self.stalling.hear(message, now)
            return urgent
        if isinstance(message, End):
            inquest = self._end(now)
            inquest.evidence = replace(inquest.evidence, farewell=message)
        return False

    def _rename(self, hello: Hello, now: float) -> None:
        """Take a changed hello; but a new name makes new series, so there is one an expiry at most: the last one."""
        same = _labels(hello) == _labels(self.hello)
        self.wish = None
        if not same and now - self.named <= self.rules.expiry:
            self.wish = hello
            hello = replace(hello, **_labels(self.hello))
        elif not same:
            self.named = now
        self.hello = hello

    def _note(self, error: Error, now: float) -> None:
        if error.kind == "device_oom":
            self.batch_sizes.handle_oom(error)
        verdict = None
        if error.kind in OOM_KINDS:
            verdict = self._judge(error, now)
            self.outlook.handle_oom()
        left = self.headroom.at_error(memory_by_gpu(error.memory, self.uuids))
        seen = SeenError(error, self.rules.wall(), left.now, left.at_peak, verdict)
        self.errors.append(seen)
        self.last_errors[error.kind] = seen.at
        failed = self._failed(seen) if error.kind == "device_oom" else {}
        if error.kind == "device_oom":
            self.last_oom, self.ooms = seen, failed
        self.error_log.tell(self.peer.run_id, self.hello, seen, failed, now)

    def _judge(self, error: Error, now: float) -> Diagnosis:
        known = RunFacts(
            self.hello,
            self.uuids,
            self.report,
            self.histories,
            self.began_at,
            now,
            self.outlook.leaks,
            self.outlook.leaks.get(HOST),
            host_memory=self.present.memory if self.present else None,
            advice=self.batch_sizes.evaluate(self.hello, self.histories, now),
        )
        return self.inquiry.handle_error(error, known)

    @property
    def _own(self) -> set[int]:
        """The run's processes as last seen; none where its pid is not known."""
        return {self.peer.pid, *(self.present.pids if self.present else ())} - {0}

    def _review_verdict(self, poll: PollFacts, *, up: bool) -> None:
        """Judge the last out-of-memory again by a poll's facts, where none has come since."""
        verdict = self.inquiry.handle_poll(poll, up=up)
        if verdict is None:
            return
        for place, seen in reversed(list(enumerate(self.errors))):
            if seen.error.kind in OOM_KINDS:
                self.errors[place] = replace(seen, verdict=verdict)
                break
        self.error_log.revise(self.peer.run_id, self.hello, verdict)

    def _failed(self, seen: SeenError) -> dict[str, Oom]:
        return ooms_by_gpu(seen.error, self.hello, self.uuids, seen.headroom, seen.least_headroom)

    def _remember(self, report: Report, now: float) -> bool:
        """Add a report to what is known of its memory; return whether it uses so much that there is news."""
        at, passed = now - self.began_at, False
        self.events.update(self.report, report, at)
        self.batch_sizes.add_report(report, self.uuids, at)
        for uuid, memory in memory_by_gpu(report.memory, self.uuids).items():
            history = self.histories.get(uuid)
            if history is None:
                history = self.histories[uuid] = MemoryHistory()
            history.add_report(memory, report, at)
            if memory.current > self.advice_limits.get(uuid, math.inf):
                self.advice_limits = {}  # one poll is enough
                passed = True
        return passed

    def _date_errors(self, report: Report) -> None:
        """Take note of errors that were not told one by one; of a first report nobody knows how old they are."""
        if self.report is None:
            return
        for kind, count in report.errors.items():
            if count > self.report.errors.get(kind, 0):
                self.last_errors[cast("ErrorKind", kind)] = self.rules.wall()

    def see_exit(self, now: float, status: int | None) -> None:
        """Take the end of the process, or its exit status as of wait(2), which may be told later."""
        inquest = self._end(now)
        if inquest.settled:
            return
        if inquest.gone is None:
            kills = self.present.oom_kills if self.present else None
            inquest.gone = now
            inquest.evidence = replace(inquest.evidence, cgroup_oom_kills=kills.since() if kills else 0)
        if status is not None:
            inquest.evidence = replace(inquest.evidence, exit_status=status)

    def _end(self, now: float) -> OutcomeEvidence:
        if self.inquest is None:
            self.batch_sizes.handle_end()
            error = self.errors[-1].error if self.errors else None
            evidence = Evidence(error=error, host_growth=self.outlook.leaks.get(HOST))
            self.inquest = OutcomeEvidence(self.peer.pid, self.began_at, now, self.rules.wall(), evidence)
        return self.inquest

    def review(self, kills: Iterable[OomKill], snapshot: Snapshot, now: float) -> Outcome | None:
        """Take what has become known of its end since; return how it ended once that is settled and new."""
        inquest = self.inquest
        if inquest is None or inquest.settled:
            return None
        if inquest.gone is not None and self.peer.pid:
            codes = tuple(xids(self.uuids.values(), snapshot, inquest.at))
            inquest.evidence = replace(inquest.evidence, oom_kill=inquest.oom_kill(kills), xids=codes)
        return self._settle(inquest) if inquest.ready(now) else None

    def conclude(self, now: float) -> Outcome | None:
        """Stand by what is known of its end, as nothing more will be; return how it ended if that is new."""
        inquest = self.inquest
        if inquest is None:
            inquest = self._end(now)
            inquest.evidence = replace(inquest.evidence, goes_on=True)
        return None if inquest.settled else self._settle(inquest)

    def _settle(self, inquest: OutcomeEvidence) -> Outcome | None:
        """Stand by how it ended; return that unless it had ended that way before and gone on. Its receipt tells it."""
        outcome = inquest.settle().outcome
        if outcome in self.told:
            return None
        self.told.add(outcome)
        return outcome

    def run(
        self, snapshot: Snapshot, usage: HostUsage | None, co_tenants: CoTenants, now: float, available: float | None
    ) -> RunSnapshot:
        """Return the run as of this poll, joined with its GPUs; `available` is the host's free memory in bytes."""
        up = self.inquest is None
        current = up and self.last_report is not None and now - self.last_report <= self.rules.expiry
        uuids = resolve(self.hello, self.peer.pid, snapshot)
        if up:
            self.uuids = uuids or self.uuids
            self.present = (usage.present if usage else None) or self.present
        if self.last_oom and not self.ooms:  # it came before the first poll
            self.ooms = self._failed(self.last_oom)
        memory = memory_by_gpu(self.report.memory, uuids) if self.report and current else {}
        if self.report and memory and not self.histories:  # it came before the first poll told its devices
            self._remember(self.report, now)
        headroom = self.headroom.update(self.peer.pid, memory, self.last_report, snapshot)
        own = self._own
        for uuid in memory.keys() & self.histories.keys():
            others = held_by_others(own, uuid, snapshot) if is_listed(own, uuid, snapshot) else None
            self.histories[uuid].add_poll(headroom.now.get(uuid), others)
        gone = bool(own) and self.inquest is not None and self.inquest.gone is not None
        self._review_verdict(PollFacts(memory, headroom.now, own, snapshot, uuids, gone, co_tenants), up=up)
        who, age = (self.peer.run_id, self.hello.name), now - self.began_at
        return RunSnapshot(
            peer=self.peer,
            hello=self.hello,
            report=self.report,
            last_report=self.last_report_time,
            up=up,
            current=current,
            memory=memory,
            headroom=headroom.now,
            headroom_at_peak=headroom.at_peak,
            headroom_unknown=self._unknown(uuids, headroom.unknown, current=current) if up else {},
            unresolved=len(self.hello.devices) - len(uuids),
            usage=usage,
            began=self.began,
            lasted=(self.inquest.ended if self.inquest else now) - self.began_at,
            errors=tuple(self.errors),
            last_errors=dict(self.last_errors),
            ooms=self.ooms,
            ending=self.inquest.ending if self.inquest else None,
            stall=self._stall(usage, snapshot, now),
            stalls=self.stalling.stalls,
            histories=self.histories,
            verdict=self.inquiry.diagnosis,
            devices=tuple(dict.fromkeys(self.uuids.values())) if up else (),
            events=self.events.events,
            advice_connection=self.advice_connection,
            batch_peaks=self.batch_sizes.peaks(self.histories),
            batch_size_advice=self.batch_sizes.evaluate(self.hello, self.histories, now),
            growth=self.outlook.update_gpus(self.histories, memory, who, age),
            host_growth=self.outlook.update_host(usage if up else None, available, who, age),
        )

    def _unknown(
        self, uuids: Mapping[str, str], found: Mapping[str, HeadroomUnknown], *, current: bool
    ) -> Mapping[str, HeadroomUnknown]:
        """Say why devices of it have no headroom, by UUID."""
        return {**unreported_devices(self.hello, self.report, uuids, self.uuids, current=current), **found}

    def _stall(self, usage: HostUsage | None, snapshot: Snapshot, now: float) -> Stall | None:
        watch, before = self.stalling, self.stalling.stall
        watch.look(usage, now)
        report = self.report if self.inquest is None else None
        busiest = partial(_busiest, self.uuids.values(), snapshot)
        stall = watch.judge(report, busiest, partial(read_state, self.peer), self.rules.patience, now)
        who = self.peer.run_id, self.hello.name
        if stall and not before and watch.stalls <= TOLD_STALLS:
            log.warning("run=%s name=%r stalls: no step for %.0f s (%s)", *who, stall.seconds, stall.cause)
        elif before and not stall and watch.stalls <= TOLD_STALLS:
            end = "ended in its stall" if self.inquest else "goes on"
            log.warning("run=%s name=%r %s after %.0f s without a step", *who, end, before.seconds)
        return stall


def _labels(hello: Hello) -> dict[str, Any]:
    """Give what of a hello becomes labels."""
    return {"name": hello.name, "framework": hello.framework, "job": hello.job, "rank": hello.rank}


def _busiest(uuids: Iterable[str], snapshot: Snapshot) -> float | None:
    gpus = [gpu for uuid in uuids if (gpu := snapshot.gpu_with(uuid))]
    return max((busy for gpu in gpus if (busy := gpu.value(GpuReadings.utilization_ratio)) is not None), default=None)
