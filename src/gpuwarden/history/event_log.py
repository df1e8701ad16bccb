"""Log of recent events, found by comparing each poll with the one before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from gpuwarden.analysis.findings import NO_GPU_GUIDES, nonfinite_loss_text
from gpuwarden.config import thresholds
from gpuwarden.fairness.fair_eviction import select_evicted
from gpuwarden.fairness.subordinate_uids import find_user
from gpuwarden.gpu.snapshot import UNBOUND, Gpu
from gpuwarden.health.conditions import severity_of
from gpuwarden.health.model import PRESSURE_SEVERITY
from gpuwarden.health.run_conditions import END_CONDITIONS, stall_cause_text
from gpuwarden.health.thermal_conditions import throttle_reasons
from gpuwarden.metrics.model import Labels
from gpuwarden.nvml.troubleshooting import error_text
from gpuwarden.protocol.messages import OOM_KINDS, Level
from gpuwarden.runs.outcome import Ending
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.severity import Severity
from gpuwarden.state import State
from gpuwarden.xid.codes import explain, worst_severity

MAX_EVENTS = 50
MAX_TEXT = 300  # characters
THROTTLE_QUIET_SECONDS = 60.0  # without throttling, after which it is a new event
_HOST = -1  # in place of a user, of events of GPUs and the driver

EventKind = Literal[
    "xid",
    "gpu",
    "driver",
    "binding",
    "pressure",
    "throttled",
    "run_began",
    "run_ended",
    "stall",
    "out_of_memory",
    "loss",
    "no_gpu",
]

_RESOURCES = {"memory": "memory", "thermal": "temperature"}
_LEVELS: Mapping[Level, str] = {"none": "OK", "warning": "warning", "critical": "critical"}


@dataclass(frozen=True, slots=True)
class Event:
    """Event of the host, a GPU or a run."""

    timestamp_seconds: Annotated[float, "Time of the event."]
    kind: Annotated[EventKind, f"One of {', '.join(get_args(EventKind))}."]
    level: Annotated[Severity, "Severity: info, warning or critical."]
    text: Annotated[str, "Description for people."]
    uuid: Annotated[str | None, "GPU or MIG instance concerned."] = None
    run_id: Annotated[str | None, "Run concerned."] = None
    run_name: Annotated[str | None, "Its name at that time."] = None
    xid: Annotated[int | None, "Code of an XID."] = None


class _Known:
    """State of a run at the previous poll."""

    __slots__ = ("ending", "errors", "findings", "stalls")

    def __init__(self, stalls: int) -> None:
        self.ending: Ending | None = None
        self.stalls = stalls
        self.errors: frozenset[float] = frozenset()  # times
        self.findings: set[EventKind] = set()  # reported once


def _has_news(run: RunSnapshot, known: _Known | None) -> bool:
    """Return whether a run may have an event: mostly none of many runs has."""
    if known is None or run.errors or run.no_gpu or run.ending is not None or known.ending is not None:
        return True
    return run.stalls != known.stalls or run.nonfinite_loss is not None


class EventLog:
    """The last MAX_EVENTS events, fair by the users whose runs they are about. Used by one event loop."""

    def __init__(self) -> None:
        self._events: list[tuple[Event, int]] = []  # with the user of its run, or _HOST
        self._runs: dict[str, _Known] = {}
        self._levels: Mapping[Labels, Level] = {}
        self._faults: dict[str, str | None] = {}
        self._xids: dict[tuple[str, int], int] = {}
        self._driver_fault: str | None = None
        self.throttled: dict[str, float] = {}  # last time, by UUID

    def newest_first(self) -> list[Event]:
        """Return the events, the newest first."""
        return sorted((event for event, _ in self._events), key=lambda event: -event.timestamp_seconds)

    def update(self, state: State) -> Sequence[Event]:
        """Add the changes since the previous poll, and return them; about 50 µs for 64 runs if there are none."""
        new = [(event, _HOST) for event in self._host_events(state)]
        for run in state.runs:
            if _has_news(run, self._runs.get(run.peer.run_id)):
                new.extend((event, run.peer.uid) for event in self._run_events(run, state.snapshot.time))
        self._events += new
        if len(self._runs) > len(state.runs):
            present = {run.peer.run_id for run in state.runs}
            self._runs = {run_id: known for run_id, known in self._runs.items() if run_id in present}
        if len(self._events) > MAX_EVENTS:
            users = ((place, find_user(uid)) for place, (_, uid) in enumerate(self._events))
            evicted = set(select_evicted(users, MAX_EVENTS))
            self._events = [each for place, each in enumerate(self._events) if place not in evicted]
        return [event for event, _uid in new]

    def _host_events(self, state: State) -> Iterator[Event]:
        yield from self._driver_events(state)
        for gpu in state.snapshot.gpus:
            yield from self._gpu_events(gpu, state.snapshot.time)
        if state.pressure.levels != self._levels:
            yield from self._pressure_events(state)

    def _driver_events(self, state: State) -> Iterator[Event]:
        for each in state.snapshot.bindings:
            gpu = next((gpu for gpu in state.snapshot.gpus if gpu.identity.has_address(each.pci)), None)
            name = f"GPU {gpu.identity.index} ({each.pci})" if gpu else f"GPU {each.pci}"
            text = f"driver {'bound to' if each.bound else 'unbound from'} {name}"
            uuid = gpu.identity.uuid if gpu else None
            yield Event(each.time, "binding", "info" if each.bound else "warning", text, uuid)
        if not state.snapshot.asked:
            return  # paused, or all GPUs asleep: a driver fault has not ended
        fault = state.snapshot.fault
        if fault != self._driver_fault:
            at = state.snapshot.time
            if fault is not None:
                yield Event(
                    at, "driver", severity_of("GpuwardenDriverFault"), f"driver not responding: {error_text(fault)}"
                )
            else:
                yield Event(at, "driver", "info", "driver responding again")
        self._driver_fault = fault

    def _gpu_events(self, gpu: Gpu, now: float) -> Iterator[Event]:
        uuid = gpu.identity.uuid
        if gpu.fault not in (self._faults.get(uuid), UNBOUND):  # the unbinding is an event of its own
            name = f"GPU {gpu.identity.index}"
            if gpu.fault is not None:
                yield Event(now, "gpu", severity_of("GpuDown"), f"{name} not responding: {error_text(gpu.fault)}", uuid)
            else:
                yield Event(
                    now, "gpu", "info", f"{name} responding again" if gpu.up else f"{name} no longer polled", uuid
                )
        self._faults[uuid] = gpu.fault
        for code, count in gpu.xids.items():
            if count.count != self._xids.get((uuid, code)):
                self._xids[uuid, code] = count.count
                if (
                    now - count.last < thresholds.XID_SECONDS
                ):  # at its start the daemon reads older ones from the kernel log
                    xid = explain(code, worst_severity(code, count, count.last - 1.0))
                    text = f"GPU {gpu.identity.index} XID {code}: {xid.meaning} {xid.action.value}"
                    yield Event(count.last, "xid", xid.severity, text[:MAX_TEXT], uuid, xid=code)
        if reasons := throttle_reasons(gpu):
            last, self.throttled[uuid] = self.throttled.get(uuid), now
            if last is None or not last <= now < last + THROTTLE_QUIET_SECONDS:
                name = f"GPU {gpu.identity.index}"
                yield Event(now, "throttled", severity_of("GpuThrottled"), f"{name} throttled: {reasons[0]}", uuid)

    def _pressure_events(self, state: State) -> Iterator[Event]:
        before, self._levels = self._levels, dict(state.pressure.levels)
        for (uuid, resource), level in self._levels.items():
            was = before.get((uuid, resource), "none")
            if level != was:
                gpu = state.snapshot.gpu_with(uuid)
                name = f"GPU {gpu.identity.index}" if gpu else uuid
                text = f"{name} {_RESOURCES[resource]}: {_LEVELS[was]} → {_LEVELS[level]}"
                yield Event(state.snapshot.time, "pressure", PRESSURE_SEVERITY[level], text, uuid)

    def _run_events(self, run: RunSnapshot, now: float) -> Iterator[Event]:
        run_id, name = run.peer.run_id, run.hello.name
        known = self._runs.get(run_id)
        if known is None:
            known = self._runs[run_id] = _Known(run.stalls)
            yield Event(run.began, "run_began", "info", f"run {name} started", run_id=run_id, run_name=name)
        if run.stalls != known.stalls:
            known.stalls = run.stalls
            if run.stall is not None:
                text = (
                    f"run {name} stalled: no step for {run.stall.seconds:.0f} s ({stall_cause_text(run.stall.cause)})"
                )
                yield Event(now, "stall", severity_of("RunStalled"), text, run_id=run_id, run_name=name)
        if run.errors:
            yield from self._error_events(run, known)
        for event in _finding_events(run, now):
            if event.kind not in known.findings:
                known.findings.add(event.kind)
                yield event
        ending = run.ending if run.ending is not None and run.ending.settled else None
        if ending is not None and ending != known.ending:
            yield end_event(run, ending)
        known.ending = ending

    def _error_events(self, run: RunSnapshot, known: _Known) -> Iterator[Event]:
        run_id, name = run.peer.run_id, run.hello.name
        for seen in run.errors:
            if seen.at not in known.errors and seen.error.kind in OOM_KINDS:
                why = f": {seen.diagnosis.cause.replace('_', ' ')}. {seen.diagnosis.evidence}" if seen.diagnosis else ""
                where = "device" if seen.error.kind == "device_oom" else "host"
                text = f"run {name} out of {where} memory{why}"
                uuid = next(iter(run.ooms), None) if where == "device" else None
                severity = severity_of("RunOutOfMemory")
                yield Event(seen.at, "out_of_memory", severity, text[:MAX_TEXT], uuid, run_id, name)
        known.errors = frozenset(seen.at for seen in run.errors)


def end_event(run: RunSnapshot, ending: Ending) -> Event:
    """Return the event of a run's end."""
    severity, name = severity_of(END_CONDITIONS.get(ending.outcome)), run.hello.name
    text = f"run {name} ended: {ending.outcome.replace('_', ' ')} ({ending.evidence})"
    return Event(ending.at, "run_ended", severity, text[:MAX_TEXT], run_id=run.peer.run_id, run_name=name)


def _finding_events(run: RunSnapshot, now: float) -> Iterator[Event]:
    run_id, name = run.peer.run_id, run.hello.name
    if loss := run.nonfinite_loss:
        text = f"run {name}: loss {nonfinite_loss_text(loss)}"
        at = (run.last_report or now) - loss.seconds_ago
        yield Event(at, "loss", severity_of("RunLossNotFinite"), text[:MAX_TEXT], run_id=run_id, run_name=name)
    if run.no_gpu:
        text = f"run {name} uses no GPU: {NO_GPU_GUIDES[run.no_gpu].meaning}"
        yield Event(now, "no_gpu", severity_of("RunWithoutGpu"), text[:MAX_TEXT], run_id=run_id, run_name=name)
