"""`/api/v1/state`: the box at the last poll, for programs that show it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, make_dataclass
from os import uname
from pathlib import Path
from typing import Annotated

from gpuwarden.config import thresholds
from gpuwarden.gpu.snapshot import Gpu, GpuProcess
from gpuwarden.health.conditions import ConditionChecks
from gpuwarden.health.status import Trouble, box_status
from gpuwarden.history.event_log import MAX_EVENTS, Event, EventLog
from gpuwarden.history.series import HistorySeries
from gpuwarden.host.host_reader import Host
from gpuwarden.nvml.troubleshooting import suggest_fix
from gpuwarden.owners.kinds import OWNER_KINDS
from gpuwarden.state import State
from gpuwarden.web.api.document import API_VERSION, VERSION_MEANING, render_json
from gpuwarden.web.api.gpu_document import GpuDocument, Number, gpu_documents
from gpuwarden.web.api.run_document import MAX_RUNS, RunDocument, run_documents

MAX_PROCESSES = 50
MAX_TROUBLES = 50


@dataclass(frozen=True, slots=True)
class StateInputs:
    """Source of the answer: a poll, its recent past, and where the daemon listens."""

    state: State
    series: HistorySeries
    events: EventLog
    user_name: Callable[[int], str]
    socket: Path  # where runs report
    started: float  # the daemon, in Unix time
    checks: ConditionChecks = field(default_factory=ConditionChecks)


# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonDocument:
    """The daemon, and the driver as a whole."""

    version: Annotated[str, "Version of gpuwarden."]
    started_timestamp_seconds: Annotated[float, "When it was started, in Unix time."]
    source: Annotated[str, "nvml: this machine's GPUs; simulated or capture: not this machine's."]
    poll_interval_seconds: Annotated[float, "Time between polls."]
    poll_duration_seconds: Annotated[float, "How long the last one took."]
    runs_socket: Annotated[str, "Where runs report: `GPUWARDEN_SOCKET` of theirs."]
    driver_version: Annotated[str | None, "Version of the GPU driver."] = None
    cuda_version: Annotated[str | None, "The CUDA that it knows."] = None
    fault: Annotated[str | None, "Why the driver as a whole does not answer."] = None
    fault_advice: Annotated[str | None, "What to do about that."] = None
    paused_until_timestamp_seconds: Annotated[Number, "There during a pause: until when no GPU is read, in Unix time."] = None
    gpus_enumerated: Annotated[int | None, "How many GPUs the driver counts."] = None
    gpus_asleep: Annotated[int | None, "How many of them sleep, where they are let."] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDocument:
    """The machine around the GPUs, as of the last look (`poll.slow_interval`)."""

    name: Annotated[str, "What the host calls itself; in a container, that."]
    memory_size_bytes: Annotated[Number, "Memory of the host."] = None
    memory_available_bytes: Annotated[Number, "What processes can still get of it."] = None
    swap_size_bytes: Annotated[Number, "Swap space."] = None
    swap_used_bytes: Annotated[Number, "What of it is in use."] = None
    shm_size_bytes: Annotated[Number, "Shared memory that there can be (`/dev/shm`)."] = None
    shm_used_bytes: Annotated[Number, "What of it is in use."] = None
    cpus: Annotated[int | None, "CPUs that are online."] = None
    cpu_seconds: Annotated[Mapping[str, float] | None, "Time of all CPUs since boot by mode (busy, iowait, idle, steal), which sum up to all time."] = None
    oom_kills: Annotated[int | None, "Processes that the kernel killed for memory since boot."] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdsDocument:
    """Thresholds of the alert rules, for programs that color readings."""

    headroom_warning_ratio: Annotated[float, "Headroom of a run, by what it uses and can still allocate, where pressure begins."]
    headroom_critical_ratio: Annotated[float, "Likewise, where it is critical."]
    oom_warning_seconds: Annotated[float, "Time to out-of-memory where pressure begins."]
    oom_critical_seconds: Annotated[float, "Likewise, where it is critical."]
    temperature_margin_warning_celsius: Annotated[float, "Degrees left before a GPU slows itself down, where pressure begins."]
    temperature_margin_critical_celsius: Annotated[float, "Likewise, where it is critical."]
    input_wait_warning_ratio: Annotated[float, "Of the time of steps, the part in which they wait for input, from which on that is a trouble."]
    poll_stale_seconds: Annotated[float, "Age from which on the last poll is stale."]
    xid_seconds: Annotated[float, "How long an XID is reported."]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """Process that holds memory of a GPU; one that is on several stands there once each."""

    pid: Annotated[int, "Its pid."]
    uuid: Annotated[str, "The GPU's UUID."]
    instance_uuid: Annotated[str | None, "The MIG instance's."] = None
    type: Annotated[str, "compute or graphics."]
    memory_bytes: Annotated[int | None, "What it holds, where the driver reports it."] = None
    command: Annotated[str | None, "Name of its program."] = None


ProcessDocument = make_dataclass(
    "ProcessDocument",
    [(kind.key, Annotated[str | None, kind.meaning], None) for kind in OWNER_KINDS],
    bases=(_Process,),
    namespace={"__doc__": _Process.__doc__},
    frozen=True,
    slots=True,
    kw_only=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxDocument:
    """The box at the last poll."""

    version: Annotated[int, VERSION_MEANING]
    polled_timestamp_seconds: Annotated[float, "When the poll was, in Unix time."]
    condition: Annotated[str, "ok, warning or critical: the worst of its troubles; unknown where no GPU was asked."]
    troubles: Annotated[Sequence[Trouble], f"What is wrong with the driver, GPUs, and runs that go on or have ended within five minutes, the worst first, {MAX_TROUBLES} at most."] = ()
    troubles_dropped: Annotated[int | None, "How many more there are."] = None
    daemon: Annotated[DaemonDocument, "The daemon."]
    host: Annotated[HostDocument, "The machine."]
    thresholds: Annotated[ThresholdsDocument, "Where readings begin to mean trouble."]
    gpus: Annotated[Sequence[GpuDocument], "The GPUs that are known."]
    runs: Annotated[Sequence[RunDocument], f"Training runs, {MAX_RUNS} at most: those that go on first, then the worst, then the newest."]
    runs_dropped: Annotated[int | None, "How many more there are."] = None
    processes: Annotated[Sequence[ProcessDocument], f"Who holds memory, those with most first, {MAX_PROCESSES} at most."]  # type: ignore[valid-type] # made of the table of owner kinds
    processes_dropped: Annotated[int | None, "How many more there are."] = None
    events: Annotated[Sequence[Event], f"The last {MAX_EVENTS} events since the daemon was started, the newest first."]
# fmt: on


def render_state(seen: StateInputs) -> bytes:
    """Return `/api/v1/state`; some 2 ms for a box of 8 GPUs and 8 runs."""
    state = seen.state
    status = box_status(state, seen.checks.occurrences(state))
    runs, runs_dropped = run_documents(status, seen.user_name, seen.series.pace)
    held = [(gpu, process) for gpu in state.snapshot.gpus for process in gpu.processes]
    held.sort(key=lambda pair: pair[1].memory or 0, reverse=True)
    document = BoxDocument(
        version=API_VERSION,
        polled_timestamp_seconds=state.snapshot.time,
        condition=status.health,
        troubles=status.troubles[:MAX_TROUBLES],
        troubles_dropped=max(len(status.troubles) - MAX_TROUBLES, 0) or None,
        daemon=_daemon(seen),
        host=_host(state.host),
        thresholds=_thresholds(state.poll_interval),
        gpus=gpu_documents(status),
        runs=runs,
        runs_dropped=runs_dropped or None,
        processes=[_process(gpu, process, state) for gpu, process in held[:MAX_PROCESSES]],
        processes_dropped=max(len(held) - MAX_PROCESSES, 0) or None,
        events=seen.events.newest_first(),
    )
    return render_json(document)


def _daemon(seen: StateInputs) -> DaemonDocument:
    state, snapshot = seen.state, seen.state.snapshot
    return DaemonDocument(
        version=state.version,
        started_timestamp_seconds=seen.started,
        source=state.source,
        poll_interval_seconds=state.poll_interval,
        poll_duration_seconds=snapshot.duration,
        runs_socket=str(seen.socket),
        driver_version=snapshot.driver.version if snapshot.driver else None,
        cuda_version=snapshot.driver.cuda_version if snapshot.driver else None,
        fault=snapshot.fault,
        fault_advice=(suggest_fix(snapshot.fault) or None) if snapshot.fault else None,
        paused_until_timestamp_seconds=snapshot.paused_until,
        gpus_enumerated=snapshot.enumerated,
        gpus_asleep=snapshot.asleep_count,
    )


def _host(host: Host) -> HostDocument:
    return HostDocument(
        name=uname().nodename,
        memory_size_bytes=host.memory_size,
        memory_available_bytes=host.memory_available,
        swap_size_bytes=host.swap.size if host.swap else None,
        swap_used_bytes=host.swap.used if host.swap else None,
        shm_size_bytes=host.shm.size if host.shm else None,
        shm_used_bytes=host.shm.used if host.shm else None,
        cpus=host.cpus,
        cpu_seconds={labels[0]: round(seconds, 2) for labels, seconds in host.cpu_seconds.items()},
        oom_kills=host.oom_kills,
    )


def _thresholds(poll_interval: float) -> ThresholdsDocument:
    return ThresholdsDocument(
        headroom_warning_ratio=thresholds.LITTLE_MEMORY,
        headroom_critical_ratio=thresholds.NEAR_OUT_OF_MEMORY,
        oom_warning_seconds=thresholds.OUT_OF_MEMORY_AHEAD_SECONDS,
        oom_critical_seconds=thresholds.OUT_OF_MEMORY_SOON_SECONDS,
        temperature_margin_warning_celsius=thresholds.NEAR_SLOWDOWN,
        temperature_margin_critical_celsius=thresholds.SLOWDOWN,
        input_wait_warning_ratio=thresholds.INPUT_BOUND,
        poll_stale_seconds=max(thresholds.STALE_POLLS * poll_interval, thresholds.STALE_POLL_SECONDS),
        xid_seconds=thresholds.XID_SECONDS,
    )


def _process(gpu: Gpu, process: GpuProcess, state: State) -> _Process:
    identity = state.owners.identities.get(process.pid)
    owners = state.owners.by_pid.get(process.pid, {})
    found: _Process = ProcessDocument(
        pid=process.pid,
        uuid=gpu.identity.uuid,
        instance_uuid=process.instance,
        type=process.type,
        memory_bytes=process.memory,
        command=(identity.comm or None) if identity else None,
        **{kind.key: owners.get(kind.name) for kind in OWNER_KINDS},
    )
    return found
