"""The rest of the page: health of GPUs, processes, and the daemon's own, declared as rows like every other reading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from gpuwarden.gpu.snapshot import HUNG, Gpu, Snapshot
from gpuwarden.metrics.model import Labels, Metric, Reading, Table
from gpuwarden.owners.kinds import OWNER_KINDS
from gpuwarden.pressure.levels import RANK
from gpuwarden.protocol.codec import Rejection
from gpuwarden.state import State


@dataclass(frozen=True, slots=True)
class GpuInPoll:
    """One GPU and the poll it belongs to."""

    gpu: Gpu
    snapshot: Snapshot


def _gpu_info(subject: GpuInPoll) -> Reading:
    who, driver = subject.gpu.identity, subject.snapshot.driver
    versions = (driver.version, driver.cuda_version) if driver else ("", "")
    return {(str(who.index), who.name, who.pci_bus_id, *versions, who.vbios_version): 1}


def _hardware_info(subject: GpuInPoll) -> Reading:
    who = subject.gpu.identity
    kind = (who.brand, who.architecture, who.compute_capability)
    board = (who.serial, who.board_part_number, who.minor_number)
    return {(*kind, *board, who.gsp_firmware_version): 1}


def _process_counts(subject: GpuInPoll) -> Reading:
    types = [process.type for process in subject.gpu.processes]
    return {(name,): types.count(name) for name in subject.gpu.process_lists}


# Errors of the driver as a whole that are there from the start: increase() does not see a counter's first value.
_GRAVE = (HUNG, "driver_not_loaded", "uninitialized", "lib_rm_version_mismatch")


def _gpu_errors(subject: GpuInPoll) -> Reading:
    # The gravest are there from the start: increase() does not see a counter's first value.
    return {(name,): count for name, count in ({HUNG: 0, "gpu_is_lost": 0} | dict(subject.gpu.errors)).items()}


def _xid_counts(subject: GpuInPoll) -> Reading:
    return {(str(code),): xid.count for code, xid in subject.gpu.xids.items()}


def _xid_times(subject: GpuInPoll) -> Reading:
    return {(str(code),): xid.last for code, xid in subject.gpu.xids.items()}


class GpuHealth(Table[GpuInPoll], prefix="gpuwarden_gpu_", key=("uuid",)):
    """What is known of a GPU whether it answers or not."""

    # fmt: off
    info = Metric[GpuInPoll](
        "gpuwarden_gpu_info", "info", "", "Identity of a GPU; join on uuid.", _gpu_info,
        labels=("gpu", "name", "pci_bus_id", "driver_version", "cuda_version", "vbios_version"),
        source="nvmlDeviceGetName, …PciInfo, …VbiosVersion, nvmlSystemGetDriverVersion, …CudaDriverVersion_v2")
    hardware_info = Metric[GpuInPoll](
        "gpuwarden_gpu_hardware_info", "info", "", "What kind of GPU it is, which piece of it, and the firmware of its own processor; the minor number is that of /dev/nvidiaN.", _hardware_info,
        labels=("brand", "architecture", "compute_capability", "serial", "board_part_number", "minor_number", "gsp_firmware_version"),
        source="nvmlDeviceGetBrand, …Architecture, …CudaComputeCapability, …Serial, …BoardPartNumber, …MinorNumber, …GspFirmwareVersion")
    up = Metric[GpuInPoll](
        "gpuwarden_gpu_up", "gauge", "", "Whether the GPU answered in the last poll; nothing where it was not asked.",
        lambda subject: float(subject.gpu.up) if subject.gpu.asked else None, source="the poll")
    asleep = Metric[GpuInPoll](
        "gpuwarden_gpu_asleep", "gauge", "", "Whether the GPU sleeps (runtime D3) and is left alone for that.",
        lambda subject: subject.snapshot.asleep.get(subject.gpu.identity.uuid), source="/sys/bus/pci/devices/ADDRESS/power/runtime_status", opt_in="gpus.let_sleep")
    last_success_timestamp_seconds = Metric[GpuInPoll](
        "gpuwarden_gpu_last_success_timestamp_seconds", "gauge", "seconds", "When the GPU last answered, in Unix time.",
        lambda subject: subject.gpu.last_success, source="the poll")
    errors_total = Metric[GpuInPoll](
        "gpuwarden_gpu_errors_total", "counter", "", "Failed reads of the GPU by NVML's error; timeout is a call that hung, mig_reconfigured the end of a MIG instance.",
        _gpu_errors, labels=("error",), source="the poll")
    processes = Metric[GpuInPoll](
        "gpuwarden_gpu_processes", "gauge", "", "Processes with a context on the GPU; those with both types count as compute.",
        _process_counts, labels=("type",), source="nvmlDeviceGetComputeRunningProcesses, …GraphicsRunningProcesses")
    xid_events_total = Metric[GpuInPoll](
        "gpuwarden_gpu_xid_events_total", "counter", "", "XIDs of the GPU since the daemon started, and before as far as the kernel log goes back; docs/xid.md has the codes.",
        _xid_counts, labels=("xid",), source="nvmlEventSetWait_v2 and /dev/kmsg, each XID once")
    xid_last_event_timestamp_seconds = Metric[GpuInPoll](
        "gpuwarden_gpu_xid_last_event_timestamp_seconds", "gauge", "seconds", "When the GPU last had that XID, in Unix time.",
        _xid_times, labels=("xid",), source="nvmlEventSetWait_v2 and /dev/kmsg")
    # fmt: on


class PressureReadings(Table[State], prefix="gpuwarden_gpu_"):
    """How close GPUs, or the runs on them, are to their limits: [pressure.md](pressure.md)."""

    # fmt: off
    pressure_level = Metric[State](
        "gpuwarden_gpu_pressure_level", "gauge", "",
        "Pressure on a resource of a GPU or MIG instance: 0 none, 1 some, 2 critical; memory's is that of the run there that is worst off.",
        lambda state: {labels: RANK[level] for labels, level in state.pressure.levels.items()}, labels=("uuid", "resource"),
        source="docs/pressure.md; gpuwarden_run_memory_headroom_bytes, gpuwarden_gpu_temperature_margin_celsius, gpuwarden_gpu_clock_event_active")
    # fmt: on


def _collector_errors(state: State) -> Reading:
    counts = dict.fromkeys(_GRAVE, 0) | dict(state.snapshot.errors)
    return {("nvml", name): count for name, count in counts.items()}


def _process_memory(state: State) -> Reading:
    return {
        (gpu.identity.uuid, str(process.pid)): process.memory
        for gpu, process in state.processes
        if process.memory is not None
    }


_BESIDE_USER = tuple(kind for kind in OWNER_KINDS if kind.name != "user")


def _process_info(state: State) -> Reading:
    found: dict[Labels, float] = {}
    for pid in dict.fromkeys(process.pid for _gpu, process in state.processes):
        if (who := state.owners.identities.get(pid)) and (holder := state.owners.holders.get(pid)):
            labels = (str(pid), holder.user, who.comm, *(getattr(holder, kind.name) for kind in _BESIDE_USER))
            found[labels] = 1
    return found


class ProcessReadings(Table[State], prefix="gpuwarden_process_"):
    """The processes on the GPUs one by one, where processes.series is true: as many as processes.max_series allows."""

    # fmt: off
    gpu_memory_used_bytes = Metric[State](
        "gpuwarden_process_gpu_memory_used_bytes", "gauge", "bytes", "Device memory a process holds, its frameworks' pools included.",
        _process_memory, labels=("uuid", "pid"), source="nvmlDeviceGetComputeRunningProcesses, …GraphicsRunningProcesses")
    info = Metric[State](
        "gpuwarden_process_info", "info", "", "Identity of a process on a GPU; join on pid.",
        _process_info, labels=("pid", "user", "comm", *(kind.label for kind in _BESIDE_USER)),
        source="/proc/PID, as gpuwarden_owner_gpu_memory_used_bytes")
    # fmt: on


class OwnerReadings(Table[State], prefix="gpuwarden_"):
    """Who holds the GPUs; owners.md says where each owner comes from."""

    # fmt: off
    owner_gpu_memory_used_bytes = Metric[State](
        "gpuwarden_owner_gpu_memory_used_bytes", "gauge", "bytes",
        "Device memory by owner; a process counts once in each kind it has an owner of, so sum within one kind only.",
        lambda state: state.owners.memory, labels=("uuid", "owner_kind", "owner"),
        source="the process lists; /proc/PID, container runtimes, Slurm's maps, runs")
    gpu_slurm_job_info = Metric[State](
        "gpuwarden_gpu_slurm_job_info", "info", "", "Slurm job that the GPU is given to, whether it uses it or not.",
        lambda state: state.owners.jobs, labels=("uuid", "slurm_job_id"), source="Slurm's maps, /proc/PID/cgroup")
    # fmt: on


class DaemonReadings(Table[State], prefix="gpuwarden_"):
    """The daemon and its driver as a whole."""

    # fmt: off
    build_info = Metric[State](
        "gpuwarden_build_info", "info", "", "Version of the daemon.",
        lambda state: {(state.version, state.python): 1}, labels=("version", "python"))
    source_info = Metric[State](
        "gpuwarden_source_info", "info", "", "Where the readings come from: nvml is the driver, the others are not this machine's GPUs.",
        lambda state: {(state.source,): 1}, labels=("source",))
    gpus = Metric[State](
        "gpuwarden_gpus", "gauge", "", "Number of GPUs the driver enumerates.",
        lambda state: state.snapshot.enumerated, source="nvmlDeviceGetCount")
    gpus_asleep = Metric[State](
        "gpuwarden_gpus_asleep", "gauge", "", "Number of the machine's GPUs that sleep, whether they have said who they are or not.",
        lambda state: state.snapshot.asleep_count, source="/sys/bus/pci/devices/ADDRESS/power/runtime_status", opt_in="gpus.let_sleep")
    paused = Metric[State](
        "gpuwarden_paused", "gauge", "", "Whether the driver is let go of on request (gpuwarden pause), so that no GPU is read.",
        lambda state: float(state.snapshot.paused_until is not None))
    collector_success = Metric[State](
        "gpuwarden_collector_success", "gauge", "", "Whether the collector's last poll worked; each GPU's own health is gpuwarden_gpu_up.",
        lambda state: {("nvml",): float(state.snapshot.fault is None)} if state.snapshot.asked else None, labels=("collector",))
    collector_duration_seconds = Metric[State](
        "gpuwarden_collector_duration_seconds", "gauge", "seconds", "Duration of the collector's last poll.",
        lambda state: {("nvml",): state.snapshot.duration} if state.snapshot.asked else None, labels=("collector",))
    collector_last_success_timestamp_seconds = Metric[State](
        "gpuwarden_collector_last_success_timestamp_seconds", "gauge", "seconds", "When the collector last worked, in Unix time.",
        lambda state: {("nvml",): state.snapshot.last_success} if state.snapshot.last_success else None, labels=("collector",))
    collector_errors_total = Metric[State](
        "gpuwarden_collector_errors_total", "counter", "", "Failures of the driver as a whole, and of GPUs that have not said yet who they are, by NVML's error.",
        _collector_errors, labels=("collector", "error"))
    poll_timestamp_seconds = Metric[State](
        "gpuwarden_poll_timestamp_seconds", "gauge", "seconds", "When the poll that this page shows began, in Unix time.",
        lambda state: state.snapshot.time)
    poll_interval_seconds = Metric[State](
        "gpuwarden_poll_interval_seconds", "gauge", "seconds", "Configured time from one poll to the next.",
        lambda state: state.poll_interval, source="poll.interval")
    early_polls_total = Metric[State](
        "gpuwarden_early_polls_total", "counter", "", "Polls made before they were due, as something may have happened that a run is to be told of.",
        lambda state: state.counts.early_polls)
    reports_received_total = Metric[State](
        "gpuwarden_reports_received_total", "counter", "", "Messages taken from training runs.",
        lambda state: state.counts.reports_received)
    reports_rejected_total = Metric[State](
        "gpuwarden_reports_rejected_total", "counter", "", "Messages refused from training runs, by reason.",
        lambda state: {(reason,): state.counts.reports_rejected.get(reason, 0) for reason in get_args(Rejection)}, labels=("reason",))
    connections_refused_total = Metric[State](
        "gpuwarden_connections_refused_total", "counter", "", "Connections of training runs closed because there are too many, or no file descriptor is left.",
        lambda state: state.counts.run_connections_refused)
    advice_dropped_total = Metric[State](
        "gpuwarden_advice_dropped_total", "counter", "", "Advice that a run's connection did not take, as the run does not read; it is tried again while it holds.",
        lambda state: state.counts.advice_dropped)
    runs_ended_total = Metric[State](
        "gpuwarden_runs_ended_total", "counter", "", "Runs that ended, by how they did; one that goes on and ends that way again counts once.",
        lambda state: {(outcome,): count for outcome, count in state.counts.runs_ended.items()}, labels=("outcome",), source="docs/runs.md")
    series_dropped_total = Metric[State](
        "gpuwarden_series_dropped_total", "counter", "", "Series left out of a page by a limit, summed over polls.",
        lambda state: {(limit,): count for limit, count in state.counts.series_dropped.items()}, labels=("limit",))
    tree_processes_dropped_total = Metric[State](
        "gpuwarden_tree_processes_dropped_total", "counter", "", "Processes of runs left out of their run's figures because it has too many, summed over looks.",
        lambda state: state.counts.tree_processes_dropped)
    receipt_errors_total = Metric[State](
        "gpuwarden_receipt_errors_total", "counter", "", "Faults of the run database, each counted once until it is mended, and run records dropped because of them.",
        lambda state: state.counts.receipt_errors, source="receipts.path")
    alerts_dropped_total = Metric[State](
        "gpuwarden_alerts_dropped_total", "counter", "", "Alerts that the daemon itself tells nobody of, as too many fire.",
        lambda state: state.counts.alerts_dropped, source="docs/alertmanager.md")
    alertmanager_alerts_sent_total = Metric[State](
        "gpuwarden_alertmanager_alerts_sent_total", "counter", "", "Alerts that an Alertmanager has taken from the daemon itself, each time that one was told again included.",
        lambda state: {(url,): posted.sent for url, posted in state.counts.alerts_posted.items()}, labels=("alertmanager",), source="docs/alertmanager.md")
    alertmanager_errors_total = Metric[State](
        "gpuwarden_alertmanager_errors_total", "counter", "", "Messages of alerts that an Alertmanager did not take; the log says why.",
        lambda state: {(url,): posted.failed for url, posted in state.counts.alerts_posted.items()}, labels=("alertmanager",), source="docs/alertmanager.md")
    alertmanager_alerts_dropped_total = Metric[State](
        "gpuwarden_alertmanager_alerts_dropped_total", "counter", "", "Alerts that an Alertmanager was never sent: over before it took a message, or more at once than are kept.",
        lambda state: {(url,): posted.dropped for url, posted in state.counts.alerts_posted.items()}, labels=("alertmanager",), source="docs/alertmanager.md")
    notify_messages_total = Metric[State](
        "gpuwarden_notify_messages_total", "counter", "", "Messages about alerts that a target of notify has taken.",
        lambda state: {(name,): counts.sent for name, counts in state.counts.notified.items()}, labels=("target",), source="docs/notify.md")
    notify_errors_total = Metric[State](
        "gpuwarden_notify_errors_total", "counter", "", "Attempts to send a message about alerts that failed; the log says why, and it is tried again.",
        lambda state: {(name,): counts.failed for name, counts in state.counts.notified.items()}, labels=("target",), source="docs/notify.md")
    notify_alerts_dropped_total = Metric[State](
        "gpuwarden_notify_alerts_dropped_total", "counter", "", "Alerts that a target of notify was never told of: over for an hour before it took a message, or more at once than are kept.",
        lambda state: {(name,): counts.dropped for name, counts in state.counts.notified.items()}, labels=("target",), source="docs/notify.md")
    access = Metric[State](
        "gpuwarden_access", "gauge", "", "Whether the daemon may read a source that needs a permission, or a driver's support.",
        lambda state: {(source,): float(allowed) for source, allowed in state.access.items()}, labels=("source",))
    xid_events_dropped_total = Metric[State](
        "gpuwarden_xid_events_dropped_total", "counter", "", "XIDs that are not counted: unknown_gpu had for a minute an address of no GPU that has answered, which the log names, codes were more than a GPU has series for.",
        lambda state: {(reason,): count for reason, count in state.counts.xids_dropped.items()}, labels=("reason",))
    kernel_log_records_lost_total = Metric[State](
        "gpuwarden_kernel_log_records_lost_total", "counter", "", "Records of the kernel log that were overwritten before they were read.",
        lambda state: state.counts.kernel_log_records_lost, source="/dev/kmsg")
    http_requests_total = Metric[State](
        "gpuwarden_http_requests_total", "counter", "", "HTTP requests answered, by path and status code.",
        lambda state: {(path, str(code)): count for (path, code), count in state.counts.http_requests.items()}, labels=("path", "code"))
    http_connections_lost_total = Metric[State](
        "gpuwarden_http_connections_lost_total", "counter", "", "HTTP connections lost: evicted made room for a newer one, timed_out were too slow, not_accepted found no file descriptor.",
        lambda state: {(reason,): count for reason, count in state.counts.http_connections_lost.items()}, labels=("reason",))
    # fmt: on
