"""Builder of an incident from what the flight recorder froze. Pure: it runs on a thread of its own."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu, GpuProcess, MemorySample
from gpuwarden.health.conditions import severity_of
from gpuwarden.history.event_log import RUN_ENDED, Event
from gpuwarden.history.series import Columns, HistoryFrame, clock_event_names, read_columns
from gpuwarden.incidents.causes import FALLEN_OFF_THE_BUS, Fact
from gpuwarden.incidents.finding import find, root_of
from gpuwarden.incidents.incident import (
    VERSION,
    ClockEvent,
    Incident,
    IncidentBox,
    IncidentGpu,
    IncidentProcess,
    IncidentSeries,
    IncidentSubject,
    IncidentXid,
    KernelLine,
    MemorySamples,
)
from gpuwarden.owners.resolver import Owners
from gpuwarden.records.record import RunRecord
from gpuwarden.records.record_json import json_from_record
from gpuwarden.severity import SEVERITY_RANK, Severity
from gpuwarden.state import State
from gpuwarden.xid.codes import explain

MAX_PROCESSES = 256
MAX_CLOCK_EVENTS = 200
_DIGITS = {"utilization_ratio": 3, "temperature_celsius": 1, "memory_temperature_celsius": 1, "power_watts": 1}
_DIGITS |= {"loss": 6, "host_cpu_seconds": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Frozen values of the daemon for one incident, all of them immutable. `state` is of its first poll.

    `processes` are those of the last poll before it, by UUID of the GPU; `samples` are in Unix time, by UUID.
    """

    id: str
    at: float  # Unix time of what opened it
    host: str
    boot_id: str
    opened: Sequence[Event]
    facts: Sequence[Fact]
    note: str
    uid: int | None
    state: State
    ended: float | None
    frames: Sequence[HistoryFrame]
    processes: Mapping[str, tuple[GpuProcess, ...]]
    owners: Owners
    samples: Mapping[str, Sequence[MemorySample]]
    runs: Sequence[RunRecord]
    jobs: Sequence[str]
    events: Sequence[Event]
    kernel_lines: Sequence[KernelLine]


def build_incident(recording: Recording) -> Incident:
    """Return the incident; some tens of milliseconds."""
    facts, opened = recording.facts, recording.opened
    finding, root = find(facts), root_of(facts)
    return Incident(
        version=VERSION,
        id=recording.id,
        kind=incident_kind_of(root),
        severity=min((_severity(event, root) for event in opened), key=SEVERITY_RANK.__getitem__, default="info"),
        host=recording.host,
        began_timestamp_seconds=root.at,
        at_timestamp_seconds=recording.at,
        ended_timestamp_seconds=recording.ended,
        uid=recording.uid,
        subject=_subject(root, recording),
        finding=finding,
        note=recording.note or None,
        jobs=tuple(recording.jobs),
        box=_box(recording),
        gpus=tuple(map(_gpu, recording.state.snapshot.gpus)),
        processes=tuple(_processes(recording)),
        runs=[json_from_record(record) for record in recording.runs],
        events=tuple(recording.events),
        xids=tuple(_xids(recording.events)),
        clock_events=tuple(_clock_events(recording))[-MAX_CLOCK_EVENTS:],
        kernel_lines=tuple(recording.kernel_lines),
        series=_series(recording),
    )


def incident_kind_of(root: Fact) -> str:
    """Return the kind of incident that a root is."""
    if root.code == FALLEN_OFF_THE_BUS:
        return "GpuDown"
    if root.kind == RUN_ENDED:
        return {"out_of_memory": "RunOutOfMemory", "killed": "RunKilled"}.get(root.what, "RunDied")
    return "RunDied" if root.kind == "error" else root.kind


def _severity(event: Event, root: Fact) -> Severity:
    """Return the severity of an event; pressure that announced an out-of-memory counts as the out-of-memory."""
    is_sign = event.kind == "GpuMemoryPressureCritical" and incident_kind_of(root) == "RunOutOfMemory"
    return severity_of("RunOutOfMemory") if is_sign else event.level


def _subject(root: Fact, recording: Recording) -> IncidentSubject:
    job = root.job.partition(":")[2] or None
    uuid = min(root.gpus) if len(root.gpus) == 1 else None
    gpu = recording.state.snapshot.gpu(uuid) if uuid else None
    index = gpu.identity.index if gpu else None
    if root.run_id:
        return IncidentSubject(kind="run", text=f"run {root.run}", gpu=index, uuid=uuid, run_id=root.run_id, job=job)
    if uuid:
        return IncidentSubject(kind="gpu", text=root.gpu, gpu=index, uuid=uuid)
    return IncidentSubject(kind="host", text=f"host {recording.host}")


def _box(recording: Recording) -> IncidentBox:
    state, driver, host = recording.state, recording.state.snapshot.driver, recording.state.host
    return IncidentBox(
        version=state.version,
        source=state.source,
        kernel=os.uname().release,
        python=state.python,
        poll_interval_seconds=state.poll_interval,
        driver_version=driver.version if driver else None,
        cuda_version=driver.cuda_version if driver else None,
        boot_id=recording.boot_id or None,
        cpus=host.cpus,
        memory_size_bytes=host.memory_size,
        memory_available_bytes=host.memory_available,
        fault=state.snapshot.fault,
    )


def _gpu(gpu: Gpu) -> IncidentGpu:
    identity, value = gpu.identity, gpu.value
    return IncidentGpu(
        uuid=identity.uuid,
        index=identity.index,
        name=identity.name,
        pci_bus_id=identity.pci_bus_id or None,
        fault=gpu.fault,
        memory_size_bytes=value(GpuReadings.memory_size_bytes),
        memory_used_bytes=value(GpuReadings.memory_used_bytes),
        utilization_ratio=value(GpuReadings.utilization_ratio),
        temperature_celsius=value(GpuReadings.temperature_celsius, "core"),
        power_watts=value(GpuReadings.power_usage_watts),
        performance_state=value(GpuReadings.performance_state),
        mig=tuple(instance.identity.uuid for instance in gpu.mig),
    )


def _processes(recording: Recording) -> Iterator[IncidentProcess]:
    owners = recording.owners
    found = [(uuid, process) for uuid, processes in recording.processes.items() for process in processes]
    found.sort(key=lambda each: -(each[1].memory or 0))  # over all GPUs: many small ones on one are left out first
    for uuid, process in found[:MAX_PROCESSES]:
        identity = owners.identities.get(process.pid)
        yield IncidentProcess(
            uuid=uuid,
            pid=process.pid,
            type=process.type,
            instance_uuid=process.instance,
            memory_bytes=process.memory,
            command=(identity.comm or None) if identity else None,
            owners=dict(owners.by_pid.get(process.pid, {})) or None,
        )


def _xids(events: Iterable[Event]) -> Iterator[IncidentXid]:
    for event in events:
        if event.xid is not None:
            xid = explain(event.xid, event.level)
            yield IncidentXid(
                timestamp_seconds=event.timestamp_seconds,
                code=event.xid,
                uuid=event.uuid or "",
                severity=event.level,
                meaning=xid.meaning,
                action=xid.action.value,
            )


def _clock_events(recording: Recording) -> list[ClockEvent]:
    """Return the times in which clocks were limited by more than idleness or a power cap."""
    found = []
    for (uuid,), columns in read_columns(recording.frames, "gpus").items():
        masks = columns.get("clock_events", [])
        since: dict[str, tuple[float, float]] = {}
        for frame, mask in zip(recording.frames, masks, strict=False):
            active = set(clock_event_names(mask or 0))
            for reason in since.keys() - active:
                began, ended = since.pop(reason)
                found.append(_clock_event(uuid, reason, began, ended))
            for reason in active:
                since[reason] = since.get(reason, (frame.time, 0.0))[0], frame.time
        found += [_clock_event(uuid, reason, *times) for reason, times in since.items()]
    return sorted(found, key=lambda event: event.began_timestamp_seconds)


def _clock_event(uuid: str, reason: str, began: float, ended: float) -> ClockEvent:
    return ClockEvent(began_timestamp_seconds=began, ended_timestamp_seconds=ended, uuid=uuid, reason=reason)


def _series(recording: Recording) -> IncidentSeries | None:
    frames = recording.frames
    if not frames:
        return None
    wanted = {record.run_id for record in recording.runs}
    devices: dict[str, dict[str, Columns]] = {}
    for (run_id, uuid), columns in read_columns(frames, "devices").items():
        if run_id in wanted and columns:
            devices.setdefault(run_id, {})[uuid] = _rounded(columns)
    runs = {run_id: _rounded(columns) for (run_id,), columns in read_columns(frames, "runs").items()}
    host = read_columns(frames, "host").get((), {})
    return IncidentSeries(
        timestamp_seconds=[round(frame.time, 3) for frame in recording.frames],
        gpus={uuid: _rounded(columns) for (uuid,), columns in read_columns(frames, "gpus").items()},
        runs={run_id: columns for run_id, columns in runs.items() if run_id in wanted},
        devices=devices,
        host=_rounded(host),
        memory_samples={
            uuid: MemorySamples(
                timestamp_seconds=[round(at, 3) for at, _ in samples], used_bytes=[used for _, used in samples]
            )
            for uuid, samples in recording.samples.items()
            if samples
        },
    )


def _rounded(columns: Columns) -> Columns:
    return {
        name: [None if value is None else round(value, _DIGITS.get(name)) for value in values]
        for name, values in columns.items()
        if name != "clock_events"
    }
