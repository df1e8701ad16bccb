"""Log of recent events: what the detector found to have changed, in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from gpuwarden.fairness.fair_eviction import select_evicted
from gpuwarden.fairness.subordinate_uids import find_user
from gpuwarden.gpu.snapshot import UNBOUND
from gpuwarden.health.conditions import severity_of
from gpuwarden.health.run_conditions import END_CONDITIONS
from gpuwarden.nvml.events.model import DriverBinding
from gpuwarden.runs.outcome import Ending
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.severity import Severity
from gpuwarden.state import Alert, AlertKey, State

MAX_EVENTS = 50
MAX_TEXT = 300  # characters
QUIET_SECONDS = 60.0  # after the end of a condition, in which it is no new event if its end is none
_HOST = -1  # in place of a user, of events of GPUs and the driver

RUN_STARTED, RUN_ENDED, DRIVER_BOUND = "run_started", "run_ended", "driver_bound"  # events that are no condition

# Conditions that are events, with the words for their end; empty: their end is no event.
EVENT_CONDITIONS: Mapping[str, str] = {
    "GpuwardenDriverFault": "responding again",
    "GpuDown": "responding again",
    "GpuXidCritical": "",
    "GpuXidWarning": "",
    "GpuXidInfo": "",
    "GpuThrottled": "",
    "GpuMemoryPressure": "no longer low on memory",
    "GpuMemoryPressureCritical": "no longer low on memory",
    "GpuThermalPressure": "no longer hot",
    "GpuThermalPressureCritical": "no longer hot",
    "RunStalled": "",
    "RunOutOfMemory": "",
    "RunLossNotFinite": "",
    "RunWithoutGpu": "",
}


@dataclass(frozen=True, slots=True)
class Event:
    """Event of the host, a GPU or a run."""

    timestamp_seconds: Annotated[float, "Time of the event."]
    kind: Annotated[
        str,
        f"Name of the condition that began or ended: {', '.join(EVENT_CONDITIONS)}; or {RUN_STARTED}, {RUN_ENDED},"
        f" {DRIVER_BOUND}.",
    ]
    level: Annotated[Severity, "Severity: info, warning or critical; info for the end of a condition."]
    text: Annotated[str, "Description for people."]
    uuid: Annotated[str | None, "GPU or MIG instance concerned."] = None
    run_id: Annotated[str | None, "Run concerned."] = None
    run_name: Annotated[str | None, "Its name at that time."] = None
    xid: Annotated[int | None, "Code of an XID."] = None


class EventLog:
    """The last MAX_EVENTS events, fair by the users whose runs they are about. Used by one event loop."""

    def __init__(self) -> None:
        self._events: list[tuple[Event, int]] = []  # with the user of its run, or _HOST
        self._ended: dict[AlertKey, float] = {}  # Unix time, of conditions whose end is no event

    def newest_first(self) -> list[Event]:
        """Return the events, the newest first."""
        return sorted((event for event, _ in self._events), key=lambda event: -event.timestamp_seconds)

    def add_poll(self, state: State) -> Sequence[Event]:
        """Add the events of a poll, and return them: those of the host and its GPUs first."""
        new = sorted(self._find_events(state), key=lambda event: event.run_id is not None)
        if new:
            users = {run.peer.run_id: run.peer.uid for run in state.runs}
            self._events += [(event, users.get(event.run_id or "", _HOST)) for event in new]
        if len(self._events) > MAX_EVENTS:
            places = ((place, find_user(uid)) for place, (_, uid) in enumerate(self._events))
            evicted = set(select_evicted(places, MAX_EVENTS))
            self._events = [each for place, each in enumerate(self._events) if place not in evicted]
        return new

    def _find_events(self, state: State) -> Iterator[Event]:
        found, now = state.detection, state.snapshot.time
        for binding in state.snapshot.bindings:
            yield _binding_event(binding, state)
        for run in found.started:
            yield _run_event(run, run.began, RUN_STARTED, "info", "started")
        for alert in found.changed:
            if alert.name in EVENT_CONDITIONS:
                yield _alert_event(alert, state)
        for alert in found.opened:
            is_event = alert.name in EVENT_CONDITIONS and not _is_unbound(alert, state)
            if is_event and not 0 <= now - self._ended.get(alert.key, -QUIET_SECONDS) < QUIET_SECONDS:
                yield _alert_event(alert, state)
        yield from self._end_events(found.closed, state)
        for run in found.ended:
            if run.ending is not None and run.ending.settled:
                yield end_event(run, run.ending)

    def _end_events(self, closed: Iterable[Alert], state: State) -> Iterator[Event]:
        now = state.snapshot.time
        self._ended = {key: at for key, at in self._ended.items() if 0 <= now - at < QUIET_SECONDS}
        holding = {(EVENT_CONDITIONS.get(alert.name), _uuid(alert)) for alert in state.detection.holding}
        for alert in closed:
            if words := EVENT_CONDITIONS.get(alert.name):
                if (words, _uuid(alert)) not in holding:  # not of another level
                    yield _event_of(alert, now, "info", alert.ending or words)
            elif words is not None:
                self._ended[alert.key] = now


def _alert_event(alert: Alert, state: State) -> Event:
    text = f"{alert.text}: {alert.detail}" if alert.detail else alert.text
    event = _event_of(alert, alert.last or state.snapshot.time, alert.severity, text)
    if alert.labels.get("kind") != "device_oom":
        return event
    ooms = next((run.ooms for run in state.runs if run.peer.run_id == event.run_id), {})
    return replace(event, uuid=next(iter(ooms), None))


def _event_of(alert: Alert, at: float, level: Severity, text: str) -> Event:
    labels = alert.labels
    run_id, run_name, code = labels.get("run_id"), labels.get("run_name"), labels.get("xid")
    name = f"run {run_name}" if run_id else f"GPU {labels['gpu']}" if "gpu" in labels else "driver"
    xid = int(code) if code else None
    return Event(at, alert.name, level, f"{name} {text}"[:MAX_TEXT], _uuid(alert), run_id, run_name, xid)


def _uuid(alert: Alert) -> str | None:
    return alert.labels.get("instance_uuid") or alert.labels.get("uuid")


def _is_unbound(alert: Alert, state: State) -> bool:
    """Return whether an alert is of a GPU from which the driver was unbound, which is an event of its own."""
    gpu = state.snapshot.gpu(_uuid(alert) or "") if alert.name == "GpuDown" else None
    return gpu is not None and gpu.fault == UNBOUND


def _binding_event(binding: DriverBinding, state: State) -> Event:
    gpu = next((gpu for gpu in state.snapshot.gpus if gpu.identity.has_address(binding.pci)), None)
    name = f"GPU {gpu.identity.index} ({binding.pci})" if gpu else f"GPU {binding.pci}"
    text = f"driver {'bound to' if binding.bound else 'unbound from'} {name}"
    level: Severity = "info" if binding.bound else "warning"
    return Event(binding.time, DRIVER_BOUND, level, text, gpu.identity.uuid if gpu else None)


def end_event(run: RunSnapshot, ending: Ending) -> Event:
    """Return the event of a run's end."""
    text = f"ended: {ending.outcome.replace('_', ' ')} ({ending.evidence})"
    return _run_event(run, ending.at, RUN_ENDED, severity_of(END_CONDITIONS.get(ending.outcome)), text)


def _run_event(run: RunSnapshot, at: float, kind: str, level: Severity, text: str) -> Event:
    name = run.hello.name
    return Event(at, kind, level, f"run {name} {text}"[:MAX_TEXT], run_id=run.peer.run_id, run_name=name)
