"""Metrics of a GPU that are known even while it does not answer: identity, health, errors and XIDs."""

from __future__ import annotations

from dataclasses import dataclass

from gpuwarden.gpu.snapshot import HUNG, Gpu, Snapshot
from gpuwarden.metrics.model import Metric, Reading, Table


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


def _gpu_errors(subject: GpuInPoll) -> Reading:
    # The gravest are exposed as 0 from the start: increase() does not see the first value of a counter.
    return {(name,): count for name, count in ({HUNG: 0, "gpu_is_lost": 0} | dict(subject.gpu.errors)).items()}


def _xid_severity_times(subject: GpuInPoll) -> Reading:
    xids = subject.gpu.xids
    return {(str(code), severity): at for code, xid in xids.items() for severity, at in xid.by_severity.items()}


class GpuHealth(Table[GpuInPoll], prefix="gpuwarden_gpu_", key=("uuid",)):
    """GPU identity, health and errors.

    They are exposed even while the GPU does not answer.
    """

    # fmt: off
    info = Metric[GpuInPoll](
        "gpuwarden_gpu_info", "info", "", "Identity of the GPU; join on uuid.", _gpu_info,
        labels=("gpu", "name", "pci_bus_id", "driver_version", "cuda_version", "vbios_version"),
        source="nvmlDeviceGetName, …PciInfo, …VbiosVersion, nvmlSystemGetDriverVersion, …CudaDriverVersion_v2", profile="minimal")
    hardware_info = Metric[GpuInPoll](
        "gpuwarden_gpu_hardware_info", "info", "", "Model, board and GSP firmware of the GPU; minor_number is that of /dev/nvidiaN.", _hardware_info,
        labels=("brand", "architecture", "compute_capability", "serial", "board_part_number", "minor_number", "gsp_firmware_version"),
        source="nvmlDeviceGetBrand, …Architecture, …CudaComputeCapability, …Serial, …BoardPartNumber, …MinorNumber, …GspFirmwareVersion")
    up = Metric[GpuInPoll](
        "gpuwarden_gpu_up", "gauge", "", "Whether the GPU answered in the last poll; no series if it was not polled.",
        lambda subject: float(subject.gpu.up) if subject.gpu.asked else None, source="the poll", profile="minimal")
    asleep = Metric[GpuInPoll](
        "gpuwarden_gpu_asleep", "gauge", "", "Whether the GPU is suspended (runtime D3) and therefore not polled.",
        lambda subject: subject.snapshot.asleep.get(subject.gpu.identity.uuid), source="/sys/bus/pci/devices/ADDRESS/power/runtime_status", opt_in="gpus.let_sleep")
    last_success_timestamp_seconds = Metric[GpuInPoll](
        "gpuwarden_gpu_last_success_timestamp_seconds", "gauge", "seconds", "Unix time at which the GPU last answered.",
        lambda subject: subject.gpu.last_success, source="the poll")
    errors_total = Metric[GpuInPoll](
        "gpuwarden_gpu_errors_total", "counter", "", "Failed reads of the GPU, by NVML error; timeout = a call hung, mig_reconfigured = a MIG instance was removed, driver_unbound = the driver was unbound from the GPU, implausible = a value that no GPU can have.",
        _gpu_errors, labels=("error",), source="the poll")
    processes = Metric[GpuInPoll](
        "gpuwarden_gpu_processes", "gauge", "", "Processes with a context on the GPU; those with both types count as compute.",
        _process_counts, labels=("type",), source="nvmlDeviceGetComputeRunningProcesses, …GraphicsRunningProcesses")
    xid_events_total = Metric[GpuInPoll](
        "gpuwarden_gpu_xid_events_total", "counter", "", "XIDs of the GPU since the daemon started, and earlier ones that the kernel log still has; codes: docs/reference/xids.md.",
        lambda subject: {(str(code),): xid.count for code, xid in subject.gpu.xids.items()}, labels=("xid",), source="nvmlEventSetWait_v2 or v3, and /dev/kmsg, each XID once", profile="minimal")
    xid_last_event_timestamp_seconds = Metric[GpuInPoll](
        "gpuwarden_gpu_xid_last_event_timestamp_seconds", "gauge", "seconds", "Unix time of the GPU's last XID with this code.",
        lambda subject: {(str(code),): xid.last for code, xid in subject.gpu.xids.items()}, labels=("xid",), source="nvmlEventSetWait_v2 or v3, and /dev/kmsg")
    xid_severity_last_event_timestamp_seconds = Metric[GpuInPoll](
        "gpuwarden_gpu_xid_severity_last_event_timestamp_seconds", "gauge", "seconds", "Unix time of the GPU's last XID with this code that had this severity (critical, warning, info).",
        _xid_severity_times, labels=("xid", "severity"), source="those of gpuwarden_gpu_xid_last_event_timestamp_seconds; severities: docs/reference/xids.md", profile="minimal")
    operational_events_total = Metric[GpuInPoll](
        "gpuwarden_gpu_operational_events_total", "counter", "", "GPU Operational Events since the daemon started, by severity and category; role = primary (origin of a fault), propagated or other.",
        lambda subject: {kind: each.count for kind, each in subject.gpu.operational.items()}, labels=("severity", "category", "role"), source="nvmlEventSetWait_v3, driver R615 and newer")
    operational_last_event_timestamp_seconds = Metric[GpuInPoll](
        "gpuwarden_gpu_operational_last_event_timestamp_seconds", "gauge", "seconds", "Unix time of the last GPU Operational Event of this kind, as the driver reports it.",
        lambda subject: {kind: each.last for kind, each in subject.gpu.operational.items()}, labels=("severity", "category", "role"), source="nvmlEventSetWait_v3, driver R615 and newer")
    # fmt: on
