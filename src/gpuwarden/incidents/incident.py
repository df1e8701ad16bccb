"""Incident: the frozen recording around a fault, as stored and served.

A field's name is its key in JSON, with its unit; unknown values have no key. Private texts are withheld from other
users (incidents/incident_store.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from gpuwarden.history.event_log import Event
from gpuwarden.incidents.finding import IncidentFinding
from gpuwarden.records.figure import Private
from gpuwarden.records.record_json import json_from_record
from gpuwarden.severity import Severity

VERSION = 1

# Names of conditions, or requested.
INCIDENT_KINDS = (
    "RunOutOfMemory",
    "RunDied",
    "RunKilled",
    "RunStalled",
    "GpuXidCritical",
    "GpuXidWarning",
    "GpuXidInfo",
    "GpuDown",
    "GpuwardenDriverFault",
    "GpuMemoryPressureCritical",
    "GpuThermalPressureCritical",
    "GpuThrottled",
    "requested",
)
SubjectKind = Literal["gpu", "run", "host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentSubject:
    """GPU, run or host that the incident is about."""

    kind: Annotated[SubjectKind, f"One of {', '.join(get_args(SubjectKind))}."]
    text: Annotated[str, "Its name, such as GPU 3."]
    gpu: Annotated[int | None, "Index of the GPU."] = None
    uuid: Annotated[str | None, "UUID of the GPU or MIG instance."] = None
    run_id: Annotated[str | None, "Run id."] = None
    job: Annotated[str | None, "Job of several processes that the run belongs to."] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentBox:
    """Host, its versions and its memory."""

    version: Annotated[str, "Version of gpuwarden."]
    source: Annotated[str, "Source of the GPU readings; nvml is the driver."]
    kernel: Annotated[str, "Release of the kernel."]
    python: Annotated[str, "Version of Python of the daemon."]
    poll_interval_seconds: Annotated[float, "Configured poll interval."]
    driver_version: Annotated[str | None, "Version of the driver."] = None
    cuda_version: Annotated[str | None, "Newest version of CUDA that the driver supports."] = None
    boot_id: Annotated[str | None, "Boot ID of the host, as in run records."] = None
    cpus: Annotated[int | None, "Number of CPUs."] = None
    memory_size_bytes: Annotated[int | None, "Host memory."] = None
    memory_available_bytes: Annotated[int | None, "Host memory that can be allocated without swapping."] = None
    fault: Annotated[str | None, "Fault of the driver as a whole."] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentGpu:
    """GPU at the moment of the incident. One that did not answer has no readings."""

    uuid: Annotated[str, "UUID."]
    index: Annotated[int, "Index of the driver."]
    name: Annotated[str, "Model name."]
    pci_bus_id: Annotated[str | None, "PCI address."] = None
    fault: Annotated[str | None, "Why it did not answer."] = None
    memory_size_bytes: Annotated[float | None, "Device memory."] = None
    memory_used_bytes: Annotated[float | None, "Used device memory."] = None
    utilization_ratio: Annotated[float | None, "Share of time with a kernel running."] = None
    temperature_celsius: Annotated[float | None, "Temperature of the core."] = None
    power_watts: Annotated[float | None, "Power draw."] = None
    performance_state: Annotated[float | None, "Performance state; 0 is the fastest."] = None
    mig: Annotated[tuple[str, ...], "UUIDs of its MIG instances."] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentProcess:
    """Process on a GPU at the last poll before the incident in which it was listed."""

    uuid: Annotated[str, "UUID of the GPU."]
    pid: Annotated[int, "Process id."]
    type: Annotated[str, "compute or graphics."]
    instance_uuid: Annotated[str | None, "UUID of the MIG instance."] = None
    memory_bytes: Annotated[int | None, "Memory of the process, if the driver reports it."] = None
    command: Annotated[str | None, "Name of its program."] = None
    owners: Annotated[
        Mapping[str, str] | None, "Its owners by kind: user, container, pod, slurm_job, run and so on."
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentXid:
    """XID that a GPU reported."""

    timestamp_seconds: Annotated[float, "Time of the XID."]
    code: Annotated[int, "Code ([XIDs](xids.md))."]
    uuid: Annotated[str, "UUID of the GPU."]
    severity: Annotated[str, "info, warning or critical."]
    meaning: Annotated[str, "Meaning of the code."]
    action: Annotated[str, "What to do."]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockEvent:
    """Time in which a reason other than idleness or a power cap limited the clocks of a GPU."""

    began_timestamp_seconds: Annotated[float, "First poll with the reason."]
    ended_timestamp_seconds: Annotated[float, "Last poll with the reason."]
    uuid: Annotated[str, "UUID of the GPU."]
    reason: Annotated[str, "Clock event reason, as in `gpuwarden_gpu_clock_event_active`."]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLine:
    """Line of the kernel log about a GPU or an out-of-memory kill."""

    timestamp_seconds: Annotated[float, "Time of the line."]
    text: Annotated[str, Private("The line; like the kernel log itself it can have names of processes.")]


Columns = Mapping[str, Sequence[float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySamples:
    """Used memory of a GPU at the fast rate (`poll.memory_interval`)."""

    timestamp_seconds: Annotated[Sequence[float], "Time of each sample."]
    used_bytes: Annotated[Sequence[int], "Used device memory."]


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentSeries:
    """Series from ten minutes before the incident to ten seconds after it.

    Each list has an entry for each of `timestamp_seconds`, null if unknown. There is one a second, and each poll in the
    last 30 s before the incident.
    """

    timestamp_seconds: Annotated[
        Sequence[float], "Time of each point, the oldest first, in Unix time by the clock at the end of the recording."
    ]
    gpus: Annotated[
        Mapping[str, Columns],
        "By UUID of GPU or MIG instance: `memory_used_bytes`, `memory_in_use_bytes` (by the allocators of reporting"
        " runs), `utilization_ratio`, `temperature_celsius`, `memory_temperature_celsius`, `power_watts`,"
        " `sm_clock_hertz`.",
    ]
    runs: Annotated[Mapping[str, Columns] | None, "By run id: `steps`, `loss`, `host_cpu_seconds`."] = None
    devices: Annotated[
        Mapping[str, Mapping[str, Columns]] | None,
        "By run id and UUID: `memory_in_use_bytes`, `memory_reserved_bytes` and `headroom_bytes` of its allocator.",
    ] = None
    host: Annotated[Columns | None, "`memory_available_bytes` of the host."] = None
    memory_samples: Annotated[
        Mapping[str, MemorySamples] | None, "Used memory in the last 30 s at the fast rate, by UUID of the GPU."
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Recording around a fault: what was wrong, in which order, with what the daemon knew at that time."""

    version: Annotated[int, f"Version of the format: {VERSION}. Later ones only add keys."]
    id: Annotated[str, "Id of the incident, unique on this host."]
    kind: Annotated[str, f"Kind of its root: one of {', '.join(INCIDENT_KINDS)}."]
    severity: Annotated[
        Severity,
        "Worst severity of what happened: info, warning or critical; pressure before an out-of-memory counts as that.",
    ]
    host: Annotated[str, "Name of the host."]
    began_timestamp_seconds: Annotated[float, "Time of the root."]
    at_timestamp_seconds: Annotated[float, "Time of the event that opened the incident."]
    ended_timestamp_seconds: Annotated[
        float | None, "End of the recording; absent while it lasts, and if it was interrupted."
    ] = None
    interrupted: Annotated[
        bool | None, "True if the daemon was killed before the recording was complete; it has what was known by then."
    ] = None
    uid: Annotated[int | None, "User id of the run that opened it; absent if a GPU or the host failed."] = None
    subject: Annotated[IncidentSubject, "What the incident is about."]
    finding: Annotated[IncidentFinding, "What happened, in words."]
    note: Annotated[str | None, "Text given with `gpuwarden incidents record`."] = None
    jobs: Annotated[
        tuple[str, ...], "Jobs whose runs are concerned, to find incidents of the same job on other hosts."
    ] = ()
    box: Annotated[IncidentBox, "The host and its versions; only in the response for one incident, as all that follow."]
    gpus: Annotated[tuple[IncidentGpu, ...], "GPUs at the moment of the incident."] = ()
    processes: Annotated[tuple[IncidentProcess, ...], "Processes on the GPUs."] = ()
    runs: Annotated[
        Sequence[Mapping[str, Any]],
        "[Run records](#run-records), without `events` and `timeline`, of the runs concerned, and of others on the"
        " host, up to 32.",
    ] = ()
    events: Annotated[
        tuple[Event, ...],
        "Events of the host from fifteen minutes before the incident to its end, the oldest first: a stall may be its"
        " first cause that long before it.",
    ] = ()
    xids: Annotated[tuple[IncidentXid, ...], "XIDs in the time of `events`, the oldest first."] = ()
    clock_events: Annotated[tuple[ClockEvent, ...], "Clock events in the time of `series`, the oldest first."] = ()
    kernel_lines: Annotated[
        tuple[KernelLine, ...], "Lines of the kernel log about GPUs and out-of-memory kills, in the time of `events`."
    ] = ()
    series: Annotated[IncidentSeries | None, "Series of GPUs, runs and host."] = None


DETAILS = ("box", "gpus", "processes", "runs", "events", "xids", "clock_events", "kernel_lines", "series")


def json_from_incident(incident: Incident) -> dict[str, Any]:
    """Return an incident as JSON values, without unknown ones."""
    found: dict[str, Any] = json_from_record(incident)
    return found


def outline(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return an incident's JSON as listed: without its details."""
    return {key: value for key, value in document.items() if key not in DETAILS}
