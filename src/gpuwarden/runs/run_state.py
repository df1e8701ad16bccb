"""State of one run: its messages, its end, its devices; and the frozen snapshot that each poll makes of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from gpuwarden.analysis.batch_size.cost_model import BatchSizeAdvice
from gpuwarden.analysis.batch_size.prior_runs import PriorRuns
from gpuwarden.analysis.batch_size.tracker import BatchSizeTracker
from gpuwarden.analysis.memory.device_memory import is_listed, sum_by_gpu, sum_held_by_others
from gpuwarden.analysis.memory.headroom import Headrooms, HeadroomTracker, HeadroomUnknown, find_unreported_devices
from gpuwarden.analysis.memory.leak_watch import HOST, LeakWatch
from gpuwarden.analysis.memory.memory_history import MemoryHistory
from gpuwarden.analysis.oom.co_tenants import CoTenants
from gpuwarden.analysis.oom.diagnoser import PollFacts, RunFacts
from gpuwarden.formatting import format_fields
from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.host.host_reader import try_read_host_memory
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.host.process_tree import HostUsage, PresentProcesses, read_state
from gpuwarden.protocol.messages import OOM_KINDS, Census, DeviceMemory, End, Error, Hello, Message, NoGpuReason, Report
from gpuwarden.runs.devices import ListedProcesses, resolve, resolve_mps_limits
from gpuwarden.runs.outcome import Outcome, OutcomeTracker
from gpuwarden.runs.run_errors import RunErrors
from gpuwarden.runs.run_events import ReportEvents
from gpuwarden.runs.run_snapshot import RunSnapshot, SeenCensus
from gpuwarden.runs.stall import Patience, Stall, StallWatch, busiest, log_change

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rules:
    """Settings of runs: `expiry` in seconds, `overhead` in bytes (docs/understand/headroom.md).

    `wall` is the Unix clock. `alerting`: the daemon itself sends alerts.
    """

    expiry: float
    overhead: float
    patience: Patience
    wall: Callable[[], float]
    prior_runs: PriorRuns = field(default_factory=PriorRuns)
    alerting: bool = False


@dataclass(slots=True)
class RunState:
    """State of one run. Used by one event loop; times are monotonic unless their comment says otherwise."""

    peer: ProcessKey
    hello: Hello
    rules: Rules
    seen_at: float
    began: float  # Unix time
    began_monotonic: float
    renamed_at: float = -math.inf  # when its name or framework last changed
    pending_hello: Hello | None = None  # with a new name that cannot be shown yet
    report: Report | None = None
    reported_monotonic: float | None = None
    reported_at: float | None = None  # Unix time
    connected: bool = True
    uuids: Mapping[str, str] = field(default_factory=dict)  # by device; kept after the end
    devices: Mapping[str, bool] = field(default_factory=dict)  # by UUID, whether the driver confirms its use
    present: PresentProcesses | None = None  # its processes at the last sample
    histories: dict[str, MemoryHistory] = field(default_factory=dict)  # by UUID
    unidentified: dict[str, MemoryHistory] = field(default_factory=dict)  # by device of the last report, without a UUID
    unknown_gpus: Mapping[str, str] = field(default_factory=dict)  # UUIDs by device that no GPU has had here
    advice_connection: int = 0  # a new number for each connection that reads advice
    advice_limits: Mapping[str, float] = field(
        default_factory=dict
    )  # bytes in use by UUID above which a report triggers a poll
    stalls: StallWatch = field(default_factory=StallWatch)
    leaks: LeakWatch = field(default_factory=LeakWatch)
    events: ReportEvents = field(default_factory=ReportEvents)
    no_gpu: NoGpuReason | None = None  # kept after the end
    census: SeenCensus | None = None  # likewise
    outcome: OutcomeTracker = field(init=False)
    errors: RunErrors = field(init=False)
    headroom: HeadroomTracker = field(init=False)
    batch_sizes: BatchSizeTracker = field(init=False)

    def __post_init__(self) -> None:
        self.outcome = OutcomeTracker(self.peer.pid, self.began_monotonic)
        self.errors = RunErrors(self.peer.run_id)
        self.headroom = HeadroomTracker(self.rules.overhead)
        self.batch_sizes = BatchSizeTracker(self.rules.prior_runs, self.peer.uid)

    @property
    def up(self) -> bool:
        """True until the run has ended."""
        return self.outcome.ended is None

    def handle(self, message: Message, now: float) -> bool:
        """Handle a message, the first is a hello; return whether it should trigger an early poll."""
        if isinstance(message, Hello):
            self._rename(message, now)
        elif self.pending_hello is not None:
            self._rename(self.pending_hello, now)
        self.seen_at, self.connected = now, True
        self.outcome.resume()
        if isinstance(message, Error):
            self._handle_error(message, now)
            return message.kind in OOM_KINDS
        if isinstance(message, Report):
            return self._handle_report(message, now)
        if isinstance(message, Census):
            self.census = SeenCensus(message, self.rules.wall())
        if isinstance(message, End):
            if self.report is not None:
                self.report = replace(self.report, dropped=max(self.report.dropped, message.dropped))
            self._end(now)
            self.outcome.handle_farewell(message)
        return False

    def _rename(self, hello: Hello, now: float) -> None:
        """Apply a changed hello. A new name makes new series, so it changes once per expiry at most.

        The first change is free: `gpuwarden run` introduces a program before that names itself.
        """
        same = _labels(hello) == _labels(self.hello)
        self.pending_hello = None
        if not same and now - self.renamed_at <= self.rules.expiry:
            self.pending_hello = hello
            hello = replace(hello, **_labels(self.hello))
        elif not same:
            self.renamed_at = now
        self.hello = hello

    def _handle_report(self, report: Report, now: float) -> bool:
        wall = self.rules.wall()
        self.errors.handle_report(report, self.report, wall)
        is_first = self.report is None and (self.hello.hears or self.rules.alerting)
        has_news = self._add_memory(report, now)
        wants_summary = report.summaries_wanted > (self.report.summaries_wanted if self.report else 0)
        self.report, self.reported_monotonic, self.reported_at = report, now, wall
        self.stalls.handle_report(report, now)
        return is_first or has_news or wants_summary

    def _add_memory(self, report: Report, now: float) -> bool:
        """Add a report to the memory history; return whether memory in use is above an advice limit."""
        at, has_news = now - self.began_monotonic, False
        self.events.add_report(self.report, report, at)
        self.batch_sizes.add_report(report, self.uuids, at)
        for uuid, memory in sum_by_gpu(report.memory, self.uuids).items():
            self.histories.setdefault(uuid, MemoryHistory()).add_report(memory, report, at)
            if memory.current > self.advice_limits.get(uuid, math.inf):
                self.advice_limits = {}  # one poll is enough
                has_news = True
        without_uuid = report.memory.keys() - self.uuids.keys()
        self.unidentified = {device: self.unidentified.get(device, MemoryHistory()) for device in without_uuid}
        for device, history in self.unidentified.items():
            history.add_report(report.memory[device], report, at)
        return has_news

    def _handle_error(self, error: Error, now: float) -> None:
        if error.kind == "device_oom":
            self.batch_sizes.handle_oom(error)
        facts = self._facts(now) if error.kind in OOM_KINDS else None
        left = self.headroom.at_error(sum_by_gpu(error.memory, self.uuids))
        self.errors.handle_error(error, self.hello, facts, left, at=self.rules.wall(), now=now)
        if facts:
            self.leaks.handle_oom()

    def _facts(self, now: float) -> RunFacts:
        return RunFacts(
            self.hello,
            self.uuids,
            self.report,
            {**self.unidentified, **self.histories},
            self.began_monotonic,
            now,
            self.leaks.reported,
            host_memory=self.present.memory if self.present else None,
            host_size=host.size if (host := try_read_host_memory()) else None,
            advice=self.batch_sizes.evaluate(self.hello, self.histories, now),
        )

    @property
    def _own(self) -> set[int]:
        """Pids of the run's processes at the last sample; empty if its pid is unknown."""
        return {self.peer.pid, *(self.present.pids if self.present else ())} - {0}

    def handle_exit(self, now: float, status: int | None) -> None:
        """Handle the end of the process, or its exit status (wait(2)), which may come later."""
        self._end(now)
        self.outcome.handle_exit(now, status, self.present.oom_kills if self.present else None)

    def _end(self, now: float) -> None:
        if self.up:
            self.batch_sizes.handle_end()
            self.outcome.begin(now, self.rules.wall(), self.errors.newest, self.leaks.reported.get(HOST))

    def conclude(self, now: float) -> Outcome | None:
        """Settle the outcome, because all evidence is in; return it unless it is already counted."""
        goes_on = self.up
        self._end(now)
        return self.outcome.conclude(goes_on=goes_on)

    def add_poll(
        self,
        snapshot: Snapshot,
        usage: HostUsage | None,
        co_tenants: CoTenants,
        listed: ListedProcesses,
        now: float,
        *,
        available: float | None,
        cgroups: Sequence[str] = (),
    ) -> RunSnapshot:
        """Add a poll; return the run joined with its GPUs.

        `available` is the host's free memory in bytes, `cgroups` are the folders of the run's cgroups.
        """
        up = self.up
        current = up and self.reported_monotonic is not None and now - self.reported_monotonic <= self.rules.expiry
        claimed = uuids = resolve(self.hello, self.peer.pid, snapshot)
        if up:
            self.present = (usage.present if usage else None) or self.present
            uuids = self._verify(claimed, listed)
            self._update_unknown_gpus(snapshot)
        memory = sum_by_gpu(self.report.memory, uuids) if self.report and current else {}
        headroom = self._update_headroom(memory, uuids, cgroups, snapshot, now)
        facts = PollFacts(memory, headroom.now, self._own, snapshot, uuids, self._is_gone, co_tenants)
        self.errors.handle_poll(facts, self.hello, self.uuids, up=up)
        if self.reported_at is not None:  # the clock may have been set back: never in the future
            self.reported_at = min(self.reported_at, self.rules.wall())
        return RunSnapshot(
            peer=self.peer,
            hello=self.hello,
            report=self.report,
            last_report=self.reported_at,
            up=up,
            current=current,
            memory=memory,
            **self._headroom_fields(headroom, claimed, current=current),
            host_usage=usage,
            began=self.began,
            # A run that connects while the GPUs are polled is newer than the poll.
            lasted=max((now if self.outcome.ended is None else self.outcome.ended) - self.began_monotonic, 0.0),
            **self._error_fields(),
            ending=self.outcome.ending,
            stall=self._update_stall(usage, snapshot, now),
            stalls=self.stalls.stalls,
            devices=self.devices if up else {},
            unknown_gpus=self.unknown_gpus if up else {},
            events=self.events.events,
            advice_connection=self.advice_connection,
            **self._memory_history_fields(now),
            **self._leak_fields(memory, usage if up else None, available, now),
            no_gpu=self._update_no_gpu(snapshot),
            census=self.census,
        )

    def _verify(self, claimed: Mapping[str, str], listed: ListedProcesses) -> Mapping[str, str]:
        """Return those of the claimed devices that count as the run's."""
        self.devices = listed.verify(claimed.values(), self._own, self.devices)
        uuids = {device: uuid for device, uuid in claimed.items() if uuid in self.devices}
        self.uuids = uuids or self.uuids
        return uuids

    def _update_unknown_gpus(self, snapshot: Snapshot) -> None:
        """Find devices with a UUID that is none of this machine's, such as a mistyped one; log each once."""
        before, reported = self.unknown_gpus, self.hello.devices
        if snapshot.gpus and all(gpu.up for gpu in snapshot.gpus):  # one that does not answer may lack its UUID
            unknown = {device for device, uuid in reported.items() if uuid and snapshot.gpu_with(uuid) is None}
            self.unknown_gpus = {device: reported[device] or "" for device in unknown - self.uuids.keys()}
        for device, uuid in self.unknown_gpus.items() - before.items():
            fields = format_fields(run=self.peer.run_id, name=self.hello.name, device=device, uuid=uuid)
            log.warning("run reports a GPU that is not known here %s", fields)

    def _add_to_histories(
        self, memory: Collection[str], headroom: Mapping[str, float], snapshot: Snapshot, now: float
    ) -> None:
        if self.report and memory and not self.histories:  # it came before the first poll identified its devices
            self._add_memory(self.report, now)
        own = self._own
        for uuid in self.histories.keys() & memory:
            others = sum_held_by_others(own, uuid, snapshot) if is_listed(own, uuid, snapshot) else None
            self.histories[uuid].add_poll(headroom.get(uuid), others)

    def _update_headroom(
        self,
        memory: Mapping[str, DeviceMemory],
        uuids: Mapping[str, str],
        cgroups: Sequence[str],
        snapshot: Snapshot,
        now: float,
    ) -> Headrooms:
        pid, at, mps = self.peer.pid, self.reported_monotonic, resolve_mps_limits(self.hello, uuids)
        headroom = self.headroom.compute(pid, memory, at, snapshot, mps=mps, cgroups=cgroups)
        self._add_to_histories(memory, headroom.now, snapshot, now)
        return headroom

    def _headroom_fields(self, headroom: Headrooms, claimed: Mapping[str, str], *, current: bool) -> dict[str, Any]:
        return {
            "headroom": headroom.now,
            "headroom_at_peak": headroom.at_peak,
            "headroom_in_step": self._headroom_in_step(headroom),
            "headroom_limits": headroom.limits,
            "headroom_unknown": {**self._unreported(claimed, current=current), **headroom.unknown} if self.up else {},
            "unresolved": len(self.hello.devices) - len(claimed),
        }

    def _error_fields(self) -> dict[str, Any]:
        return {
            "errors": tuple(self.errors.recent),
            "last_errors": dict(self.errors.last),
            "ooms": self.errors.ooms,
            "diagnosis": self.errors.diagnosis,
        }

    def _memory_history_fields(self, now: float) -> dict[str, Any]:
        return {
            "memory_windows": {uuid: tuple(history.series) for uuid, history in self.histories.items()},
            "batch_peaks": self.batch_sizes.peaks(self.histories),
            "batch_size_advice": self._advise_batch_size(now),
        }

    def _leak_fields(
        self, memory: Collection[str], usage: HostUsage | None, available: float | None, now: float
    ) -> dict[str, Any]:
        """Update the leaks, and return the snapshot's."""
        who, age = (self.peer.run_id, self.hello.name), now - self.began_monotonic
        leaks = self.leaks.evaluate_gpus(self.histories, memory, who, age)
        return {"leaks": leaks, "host_leak": self.leaks.evaluate_host(usage, available, who, age)}

    def _headroom_in_step(self, headroom: Headrooms) -> dict[str, float]:
        """Return the headroom at the peak where that is the peak of the last steps."""
        growing = {uuid for uuid, history in self.histories.items() if history.grows_in_steps}
        return {uuid: left for uuid, left in headroom.at_peak.items() if uuid in growing and left < headroom.now[uuid]}

    def _unreported(self, claimed: Mapping[str, str], *, current: bool) -> dict[str, HeadroomUnknown]:
        """Return why devices have no headroom, other than for a missing figure of the driver."""
        unknown = find_unreported_devices(self.hello, self.report, claimed, self.uuids, current=current)
        for device in self.report.memory if self.report and current else ():
            if device in claimed and claimed[device] not in self.devices:
                unknown[claimed[device]] = "process_unlisted"
        return unknown

    def _advise_batch_size(self, now: float) -> BatchSizeAdvice | None:
        advice = self.batch_sizes.evaluate(self.hello, self.histories, now)
        return None if self.errors.has_other_cause(self.report.steps if self.report else 0) else advice

    @property
    def _is_gone(self) -> bool:
        """True if its process is known and has ended."""
        return bool(self._own) and self.outcome.is_gone

    def _update_no_gpu(self, snapshot: Snapshot) -> NoGpuReason | None:
        """Return why the run computes on the CPU; None if the host has no GPU, or the driver lists the run on one."""
        if self.up and (self.hello.no_gpu or self.no_gpu):
            own, has_stepped = self._own, self.report is not None and self.report.steps > 0
            is_on_gpu = any(process.pid in own for gpu in snapshot.gpus for process in gpu.processes)
            is_believed = has_stepped and not self.hello.devices and bool(snapshot.gpus) and not is_on_gpu
            self.no_gpu = self.hello.no_gpu if is_believed else None
        return self.no_gpu

    def _update_stall(self, usage: HostUsage | None, snapshot: Snapshot, now: float) -> Stall | None:
        before, report = self.stalls.stall, self.report if self.up else None
        self.stalls.handle_usage(usage, now)
        busy = partial(busiest, self.uuids.values(), snapshot)
        stall = self.stalls.judge(report, busy, partial(read_state, self.peer), self.rules.patience, now)
        log_change((self.peer.run_id, self.hello.name), before, stall, up=self.up)
        return stall


def _labels(hello: Hello) -> dict[str, Any]:
    """Return the fields of a hello that become labels."""
    return {"name": hello.name, "framework": hello.framework, "job": hello.job, "rank": hello.rank}
