"""GPUs and their MIG instances in `/api/v1/state`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from gpuwarden.config import thresholds
from gpuwarden.gpu.metrics import GpuReadings, MigReadings
from gpuwarden.gpu.snapshot import Gpu, MigInstance
from gpuwarden.health.status import BoxStatus, Trouble, gpu_health
from gpuwarden.nvml.troubleshooting import suggest_gpu_fix
from gpuwarden.owners.kinds import NAMES
from gpuwarden.pressure.levels import headroom_ratio
from gpuwarden.protocol.messages import RESOURCES
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.state import State
from gpuwarden.web.api.document import collect_readings
from gpuwarden.xid.codes import explain, worst_severity

_IN_USE = "Memory in use by the allocators of reporting runs; absent without such a run."
_HEADROOM = (
    "Headroom of the reporting run that has the least; free memory without one; absent if a run's headroom is unknown."
)
_SHARE = "That headroom as a share of the run's used memory plus headroom."
_PRESSURE = "Pressure by resource (memory, thermal): none, warning or critical."
Number = float | None
Numbers = Mapping[str, float] | None


# fmt: off
@dataclass(frozen=True, slots=True)
class XidDocument:
    """XID: a GPU fault that the driver reported (docs/reference/xids.md)."""

    xid: Annotated[int, "Code."]
    count: Annotated[int, "Number of events, as far as known."]
    last_timestamp_seconds: Annotated[float, "Last event."]
    meaning: Annotated[str, "Meaning of the code."]
    action: Annotated[str, "Recommended action."]
    severity: Annotated[str, "Severity: critical, warning or info."]
    level: Annotated[str, "The same as `severity`."]


@dataclass(frozen=True, slots=True)
class OwnerDocument:
    """Owner of memory on the GPU. A process has owners of several kinds, and counts for each."""

    kind: Annotated[str, f"Kind: {', '.join(NAMES[:-1])} or {NAMES[-1]}."]
    name: Annotated[str, "Name; the id of a run."]
    memory_bytes: Annotated[int, "Memory of its processes."]


@dataclass(frozen=True, slots=True, kw_only=True)
class MigDocument:
    """MIG instance of the GPU."""

    uuid: Annotated[str, "UUID of the instance."]
    gpu_instance: Annotated[int, "Number of the GPU instance."]
    compute_instance: Annotated[int, "Number of the compute instance in it."]
    profile: Annotated[str | None, "Profile, such as 1g.10gb."] = None
    memory_size_bytes: Annotated[Number, MigReadings.memory_size_bytes] = None
    memory_used_bytes: Annotated[Number, MigReadings.memory_used_bytes] = None
    memory_free_bytes: Annotated[Number, MigReadings.memory_free_bytes] = None
    memory_reserved_bytes: Annotated[Number, MigReadings.memory_reserved_bytes] = None
    memory_in_use_bytes: Annotated[int | None, _IN_USE] = None
    headroom_bytes: Annotated[Number, _HEADROOM] = None
    headroom_at_peak_bytes: Annotated[Number, "That headroom at the run's memory peak."] = None
    headroom_ratio: Annotated[Number, _SHARE] = None
    headroom_run_id: Annotated[str | None, "Run that has the least headroom."] = None
    pressure: Annotated[Mapping[str, str] | None, _PRESSURE] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDocument:
    """GPU, in the order of the driver. Without readings if it did not answer."""

    uuid: Annotated[str, "UUID of the GPU; its PCI address while it has not answered since the daemon started."]
    index: Annotated[int, "The driver's index, which a restart can change."]
    name: Annotated[str, "Model; unidentified while it has not answered since the daemon started."]
    pci_bus_id: Annotated[str | None, "PCI address."] = None
    serial: Annotated[str | None, "Serial number."] = None
    architecture: Annotated[str | None, "Architecture."] = None
    vbios_version: Annotated[str | None, "Version of the VBIOS."] = None
    status: Annotated[str, "Status: up, fault (not responding), asleep or not_asked (paused)."]
    fault: Annotated[str | None, "The driver's error, if it does not respond."] = None
    fault_advice: Annotated[str | None, "Recommended action."] = None
    condition: Annotated[str, "Worst severity of its problems: ok, warning or critical; unknown if it was not polled, or has no reading."]
    troubles: Annotated[Sequence[Trouble], "Problems of the GPU, the worst first."] = ()
    last_success_timestamp_seconds: Annotated[Number, "Last answer."] = None
    memory_size_bytes: Annotated[Number, GpuReadings.memory_size_bytes] = None
    memory_used_bytes: Annotated[Number, GpuReadings.memory_used_bytes] = None
    memory_free_bytes: Annotated[Number, GpuReadings.memory_free_bytes] = None
    memory_reserved_bytes: Annotated[Number, GpuReadings.memory_reserved_bytes] = None
    memory_unified: Annotated[bool | None, GpuReadings.memory_unified] = None
    memory_used_peak_bytes: Annotated[Numbers, GpuReadings.memory_used_peak_bytes] = None
    memory_in_use_bytes: Annotated[int | None, _IN_USE] = None
    headroom_bytes: Annotated[Number, _HEADROOM] = None
    headroom_at_peak_bytes: Annotated[Number, "That headroom at the run's memory peak."] = None
    headroom_ratio: Annotated[Number, _SHARE] = None
    headroom_run_id: Annotated[str | None, "Run that has the least headroom."] = None
    temperature_celsius: Annotated[Numbers, GpuReadings.temperature_celsius] = None
    temperature_threshold_celsius: Annotated[Numbers, GpuReadings.temperature_threshold_celsius] = None
    temperature_margin_celsius: Annotated[Number, GpuReadings.temperature_margin_celsius] = None
    temperature_margin_threshold_celsius: Annotated[Numbers, GpuReadings.temperature_margin_threshold_celsius] = None
    fan_speed_ratio: Annotated[Numbers, GpuReadings.fan_speed_ratio] = None
    utilization_ratio: Annotated[Number, GpuReadings.utilization_ratio] = None
    memory_bandwidth_utilization_ratio: Annotated[Number, GpuReadings.memory_bandwidth_utilization_ratio] = None
    clock_hertz: Annotated[Numbers, GpuReadings.clock_hertz] = None
    clock_max_hertz: Annotated[Numbers, GpuReadings.clock_max_hertz] = None
    clock_event_reasons: Annotated[Sequence[str], "Reasons that limit the clocks now. `gpuwarden_gpu_clock_event_active`."] = ()
    performance_state: Annotated[Number, GpuReadings.performance_state] = None
    power_usage_watts: Annotated[Number, GpuReadings.power_usage_watts] = None
    power_limit_watts: Annotated[Numbers, GpuReadings.power_limit_watts] = None
    pressure: Annotated[Mapping[str, str] | None, _PRESSURE] = None
    xids: Annotated[Sequence[XidDocument], "XIDs of the last hour, the latest first."] = ()
    ecc_errors: Annotated[Mapping[str, Mapping[str, float]] | None, "Memory errors by type and lifetime, summed over all locations. `gpuwarden_gpu_ecc_errors_total`."] = None
    remapped_rows: Annotated[Numbers, GpuReadings.remapped_rows] = None
    row_remap_pending: Annotated[bool | None, GpuReadings.row_remap_pending] = None
    row_remap_failed: Annotated[bool | None, GpuReadings.row_remap_failed] = None
    retired_pages: Annotated[Numbers, GpuReadings.retired_pages] = None
    retired_pages_pending: Annotated[bool | None, GpuReadings.retired_pages_pending] = None
    memory_unrepairable: Annotated[bool | None, GpuReadings.memory_unrepairable] = None
    reset_required: Annotated[bool | None, GpuReadings.reset_required] = None
    owners: Annotated[Sequence[OwnerDocument], "Owners of its memory, the largest first."] = ()
    mig: Annotated[Sequence[MigDocument], "MIG instances."] = ()
# fmt: on


def gpu_documents(status: BoxStatus) -> list[GpuDocument]:
    """Return the GPUs of a poll."""
    state = status.state
    memory = _memory_by_device(state.runs)
    owners = _owners(state)
    return [_gpu(gpu, troubles, state, memory, owners.get(gpu.identity.uuid, ())) for gpu, troubles in status.gpus]


def _gpu(
    gpu: Gpu,
    troubles: Sequence[Trouble],
    state: State,
    memory: Mapping[str, Mapping[str, Any]],
    owners: Sequence[OwnerDocument],
) -> GpuDocument:
    identity = gpu.identity
    free = {"headroom_bytes": gpu.value(GpuReadings.memory_free_bytes)}
    return GpuDocument(
        uuid=identity.uuid,
        index=identity.index,
        name=identity.name,
        pci_bus_id=identity.pci_bus_id or None,
        serial=identity.serial or None,
        architecture=identity.architecture or None,
        vbios_version=identity.vbios_version or None,
        status=_status(gpu, state),
        fault=gpu.fault,
        fault_advice=suggest_gpu_fix(gpu.fault) if gpu.fault else None,
        condition=gpu_health(gpu, troubles),
        troubles=troubles,
        last_success_timestamp_seconds=gpu.last_success,
        clock_event_reasons=gpu.active(GpuReadings.clock_event_active),
        pressure=_pressure(identity.uuid, state),
        xids=_xids(gpu, state.snapshot.time),
        ecc_errors=_ecc_errors(gpu),
        owners=owners,
        mig=[_mig(each, state, memory) for each in gpu.mig],
        **memory.get(identity.uuid, free),
        **collect_readings(GpuDocument, gpu.readings),
    )


def _mig(instance: MigInstance, state: State, memory: Mapping[str, Mapping[str, Any]]) -> MigDocument:
    identity = instance.identity
    free = {"headroom_bytes": instance.value(MigReadings.memory_free_bytes)}
    return MigDocument(
        uuid=identity.uuid,
        gpu_instance=identity.gpu_instance,
        compute_instance=identity.compute_instance,
        profile=identity.profile or None,
        pressure=_pressure(identity.uuid, state),
        **memory.get(identity.uuid, free),
        **collect_readings(MigDocument, instance.readings),
    )


def _memory_by_device(runs: Iterable[RunSnapshot]) -> Mapping[str, Mapping[str, Any]]:
    """Return what verified runs have of each GPU and MIG instance, by UUID: in use, and the tightest run's headroom."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        for uuid, memory in run.memory.items():
            if not run.devices.get(uuid):
                continue
            device = found.setdefault(uuid, {"memory_in_use_bytes": 0})
            device["memory_in_use_bytes"] += memory.current
            headroom = run.headroom.get(uuid)
            if headroom is not None:
                ratio = headroom_ratio(headroom, memory.current)
                if ratio < device.get("headroom_ratio", float("inf")):
                    at_peak = run.headroom_at_peak.get(uuid)
                    device |= {
                        "headroom_bytes": headroom,
                        "headroom_at_peak_bytes": at_peak,
                        "headroom_ratio": ratio,
                        "headroom_run_id": run.peer.run_id,
                    }
    return found


def _owners(state: State) -> Mapping[str, Sequence[OwnerDocument]]:
    """Return the owners of memory on each GPU, by UUID, those with most first."""
    found: dict[str, list[OwnerDocument]] = {}
    for (uuid, kind, name), size in sorted(state.owners.memory.items(), key=lambda each: -each[1]):
        found.setdefault(uuid, []).append(OwnerDocument(kind, name, size))
    return found


def _status(gpu: Gpu, state: State) -> str:
    if not gpu.asked:
        return "asleep" if state.snapshot.asleep.get(gpu.identity.uuid) else "not_asked"
    return "up" if gpu.fault is None else "fault"


def _pressure(uuid: str, state: State) -> dict[str, str]:
    return {resource: level for resource in RESOURCES if (level := state.pressure.levels.get((uuid, resource)))}


def _xids(gpu: Gpu, now: float) -> list[XidDocument]:
    recent = [(code, each) for code, each in gpu.xids.items() if now - each.last < thresholds.XID_SECONDS]
    recent.sort(key=lambda pair: -pair[1].last)
    return [
        XidDocument(code, each.count, each.last, xid.meaning, xid.action.value, xid.severity, xid.severity)
        for code, each in recent
        for xid in (explain(code, worst_severity(code, each, now - thresholds.XID_SECONDS)),)
    ]


def _ecc_errors(gpu: Gpu) -> dict[str, dict[str, int]]:
    """Return the errors summed over all places in memory."""
    found: dict[str, dict[str, int]] = {}
    for (kind, lifetime, _location), count in gpu.values(GpuReadings.ecc_errors_total).items():
        of_kind = found.setdefault(kind, {})
        of_kind[lifetime] = of_kind.get(lifetime, 0) + int(count)
    return found
