"""`/api/v1/state`: the host at the last poll."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from os import uname
from pathlib import Path
from typing import Annotated

from gpuwarden.config import thresholds
from gpuwarden.fitness.model import Assessment
from gpuwarden.gpu.snapshot import Gpu, GpuProcess
from gpuwarden.health.status import Trouble, box_status
from gpuwarden.history.event_log import MAX_EVENTS, Event, EventLog
from gpuwarden.history.series import HistorySeries
from gpuwarden.host.host_reader import Host
from gpuwarden.nvml.troubleshooting import suggest_fix
from gpuwarden.owners.kinds import OWNER_KINDS
from gpuwarden.records.record_parts import RecordedHeadline
from gpuwarden.state import State
from gpuwarden.web.api.document import API_VERSION, VERSION_MEANING, render_json
from gpuwarden.web.api.gpu_document import GpuDocument, Number, gpu_documents
from gpuwarden.web.api.run_document import MAX_RUNS, RunDocument, run_documents

MAX_PROCESSES = 50
MAX_TROUBLES = 50


@dataclass(frozen=True, slots=True)
class StateInputs:
    """Inputs of the document: a poll, its recent past, and data of the daemon."""

    state: State
    series: HistorySeries
    events: EventLog
    user_name: Callable[[int], str]
    socket: Path  # of the runs
    started: float  # start of the daemon, in Unix time
    slow_interval: float  # seconds
    fitness: Assessment | None = None
    find_headline: Callable[[str], RecordedHeadline | None] = lambda _run_id: None  # of a run, by its ID


# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonDocument:
    """The daemon, and the driver as a whole."""

    version: Annotated[str, "Version of gpuwarden."]
    started_timestamp_seconds: Annotated[float, "Start of the daemon."]
    source: Annotated[str, "Source of the GPUs: nvml, simulated or capture (the latter two are not this machine's)."]
    poll_interval_seconds: Annotated[float, "Time between polls."]
    slow_interval_seconds: Annotated[float, "Time between reads of slow values; energy and throttled time of a running run are counted that often."]
    poll_duration_seconds: Annotated[float, "Duration of the last poll."]
    runs_socket: Annotated[str, "Socket to which runs report (`GPUWARDEN_SOCKET`)."]
    driver_version: Annotated[str | None, "Version of the NVIDIA driver."] = None
    cuda_version: Annotated[str | None, "CUDA version of the driver."] = None
    fault: Annotated[str | None, "Error of the driver as a whole, if it does not respond."] = None
    fault_advice: Annotated[str | None, "Recommended action."] = None
    paused_until_timestamp_seconds: Annotated[Number, "End of the pause; present while no GPU is polled."] = None
    gpus_enumerated: Annotated[int | None, "Number of GPUs that the driver lists."] = None
    gpus_asleep: Annotated[int | None, "Number of sleeping GPUs, which are not woken up."] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDocument:
    """The machine, read every `poll.slow_interval`."""

    name: Annotated[str, "Host name; in a container, that of the container."]
    memory_size_bytes: Annotated[Number, "Host memory."] = None
    memory_available_bytes: Annotated[Number, "Available host memory."] = None
    swap_size_bytes: Annotated[Number, "Swap space."] = None
    swap_used_bytes: Annotated[Number, "Used swap space."] = None
    shm_size_bytes: Annotated[Number, "Size of shared memory (`/dev/shm`)."] = None
    shm_used_bytes: Annotated[Number, "Used shared memory."] = None
    cpus: Annotated[int | None, "CPUs online."] = None
    cpu_seconds: Annotated[Mapping[str, float] | None, "CPU time of all CPUs since boot by mode (busy, iowait, idle, steal)."] = None
    oom_kills: Annotated[int | None, "Processes killed by the kernel for memory since boot."] = None


@dataclass(frozen=True, slots=True)
class FitnessDocument:
    """Fitness of the node for jobs, as `gpuwarden check` answers."""

    status: Annotated[str, "fit, warning, unfit, or unknown while no GPU is polled."]
    text: Annotated[str, "The first problems, with what they need."]


@dataclass(frozen=True, slots=True)
class EnergyDocument:
    """Energy of all GPUs since local midnight; what was used before the daemon started is not known."""

    joules: Annotated[float, "Energy in that time."]
    since_timestamp_seconds: Annotated[float, "First poll of the day."]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdsDocument:
    """Thresholds of pressure and of the alerts, to color readings."""

    headroom_warning_ratio: Annotated[float, "Headroom ratio of a run at which pressure is warning."]
    headroom_critical_ratio: Annotated[float, "Headroom ratio at which it is critical."]
    oom_warning_seconds: Annotated[float, "Forecast time to out-of-memory at which pressure is warning."]
    oom_critical_seconds: Annotated[float, "Forecast time at which it is critical."]
    temperature_margin_warning_celsius: Annotated[float, "Margin to the throttle point at which pressure is warning."]
    temperature_margin_critical_celsius: Annotated[float, "Margin at which it is critical."]
    input_wait_warning_ratio: Annotated[float, "Input wait ratio above which a run is input-bound."]
    poll_stale_seconds: Annotated[float, "Age at which the last poll is stale."]
    xid_seconds: Annotated[float, "Time for which an XID is reported."]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Process:
    """Process with memory on a GPU; one entry for each of its GPUs."""

    pid: Annotated[int, "Process id."]
    uuid: Annotated[str, "UUID of the GPU."]
    instance_uuid: Annotated[str | None, "UUID of the MIG instance."] = None
    type: Annotated[str, "compute or graphics."]
    memory_bytes: Annotated[int | None, "Memory of the process, if the driver reports it."] = None
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
    """The host at the last poll."""

    version: Annotated[int, VERSION_MEANING]
    polled_timestamp_seconds: Annotated[float, "Time of the poll."]
    condition: Annotated[str, "Worst severity of all problems: ok, warning or critical; unknown if no GPU has a reading."]
    troubles: Annotated[Sequence[Trouble], f"Problems of the driver, of GPUs, and of runs until they expire (runs.expiry); the worst first, {MAX_TROUBLES} at most."] = ()
    troubles_dropped: Annotated[int | None, "Number of further problems."] = None
    fitness: Annotated[FitnessDocument | None, "Fitness for jobs ([check](../use/check.md))."] = None
    daemon: Annotated[DaemonDocument, "The daemon."]
    host: Annotated[HostDocument, "The machine."]
    energy: Annotated[EnergyDocument | None, "Energy of all GPUs today; absent while none is known."] = None
    thresholds: Annotated[ThresholdsDocument, "Thresholds of readings."]
    gpus: Annotated[Sequence[GpuDocument], "All known GPUs."]
    runs: Annotated[Sequence[RunDocument], f"Training runs: running ones first, then the worst, then the newest; {MAX_RUNS} at most."]
    runs_dropped: Annotated[int | None, "Number of further runs."] = None
    processes: Annotated[Sequence[ProcessDocument], f"Processes by memory, the largest first; {MAX_PROCESSES} at most."]  # type: ignore[valid-type] # made of the table of owner kinds
    processes_dropped: Annotated[int | None, "Number of further processes."] = None
    events: Annotated[Sequence[Event], f"The last {MAX_EVENTS} events since the start of the daemon, the newest first."]
# fmt: on


def render_state(seen: StateInputs) -> bytes:
    """Return `/api/v1/state`; about 2 ms for 8 GPUs and 8 runs."""
    state = seen.state
    status = box_status(state)
    runs, runs_dropped = run_documents(status, seen.user_name, seen.series.pace, seen.find_headline)
    held = [(gpu, process) for gpu in state.snapshot.gpus for process in gpu.processes]
    held.sort(key=lambda pair: pair[1].memory or 0, reverse=True)
    document = BoxDocument(
        version=API_VERSION,
        polled_timestamp_seconds=state.snapshot.time,
        condition=status.health,
        troubles=status.troubles[:MAX_TROUBLES],
        troubles_dropped=max(len(status.troubles) - MAX_TROUBLES, 0) or None,
        fitness=FitnessDocument(seen.fitness.status, seen.fitness.text) if seen.fitness else None,
        daemon=_daemon(seen),
        host=_host(state.host),
        energy=EnergyDocument(round(state.energy.joules, 1), state.energy.since) if state.energy else None,
        thresholds=_thresholds(state),
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
        slow_interval_seconds=seen.slow_interval,
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


def _thresholds(state: State) -> ThresholdsDocument:
    limits = state.pressure.limits
    return ThresholdsDocument(
        headroom_warning_ratio=limits.memory_warning,
        headroom_critical_ratio=limits.memory_critical,
        oom_warning_seconds=limits.oom_warning,
        oom_critical_seconds=limits.oom_critical,
        temperature_margin_warning_celsius=limits.thermal_warning,
        temperature_margin_critical_celsius=limits.thermal_critical,
        input_wait_warning_ratio=thresholds.INPUT_BOUND,
        poll_stale_seconds=max(thresholds.STALE_POLLS * state.poll_interval, thresholds.STALE_POLL_SECONDS),
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
