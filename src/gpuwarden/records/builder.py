"""Builder of a run's record: from the run and its usage, and from the record that an earlier daemon began."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from gpuwarden.analysis.batch_size.cost_model import BatchSizeAdvice
from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.analysis.oom.diagnosis import Diagnosis
from gpuwarden.errors.kind_guides import find_text_guide
from gpuwarden.protocol.messages import OOM_KINDS, Report
from gpuwarden.records.record import (
    VERSION,
    RecordedAllocation,
    RecordedBatchMemory,
    RecordedBatchSizeAdvice,
    RecordedCensus,
    RecordedDevice,
    RecordedDeviceMemory,
    RecordedDiagnosis,
    RecordedError,
    RecordedNonFiniteLoss,
    RecordedTensors,
    RunRecord,
)
from gpuwarden.runs.outcome import Ending
from gpuwarden.runs.run_snapshot import KEPT_ERRORS, RunSnapshot, SeenCensus, SeenError
from gpuwarden.usage.run_usage import DeviceUsage, RunUsage

_MAX_CLOCK_DIFFERENCE_SECONDS = 1.0  # between two clocks that were not changed
# Forecasts of a run that leaks: none of one that has ended, and an earlier daemon's are out of date.
_HOST_FORECASTS = ("host_memory_growth_bytes_per_second", "seconds_to_host_oom")
_FORECASTS = ("memory_growth_bytes_per_second", "seconds_to_oom", "seconds_to_oom_lower", "seconds_to_oom_upper")

# Fields of a RecordedDevice by those of the DeviceUsage that they come from.
_MEMORY_FIELDS = {
    "memory_peak_bytes": "memory_peak",
    "memory_limit_bytes": "memory_limit",
    "headroom_at_peak_bytes": "headroom_at_peak",
    "lowest_headroom_bytes": "lowest_headroom",
}
_USAGE_FIELDS = _MEMORY_FIELDS | {
    "gpu_seconds": "seconds",
    "busy_seconds": "busy",
    "idle_seconds": "idle",
    "energy_joules": "joules",
    "energy_by_power_joules": "joules_by_power",
    "throttled_seconds": "throttled",
    "throttled_step_seconds": "throttled_steps",
}


def build_record(
    run: RunSnapshot,
    now: float,
    *,
    boot_id: str | None,
    user: str | None,
    usage: RunUsage,
    began_uptime: float | None = None,
    slept: float = 0.0,
) -> RunRecord:
    """Return the record of a run so far, or as a whole once it has ended; `now` is Unix time.

    `began_uptime` is its begin by the clock since boot, and `slept` how long the machine has slept since.
    """
    hello = run.hello
    until = run.ending.at if run.ending else now
    devices = tuple(_device(uuid, each, run) for uuid, each in usage.shares.items())
    return RunRecord(
        version=VERSION,
        run_id=run.peer.run_id,
        name=hello.name,
        framework=hello.framework,
        pid=run.peer.pid,
        uid=run.peer.uid,
        began_timestamp_seconds=run.began,
        updated_timestamp_seconds=until,
        duration_seconds=_duration(until - run.began, run.lasted + slept),
        boot_id=boot_id,
        began_uptime_seconds=began_uptime,
        user=user,
        job=hello.job,
        rank=hello.rank,
        world_size=hello.world_size,
        state=run.state,
        **(_ending(run.ending) if run.ending else {}),
        errors_told=tuple(map(_error, run.errors)),
        census=_census(run.census) if run.census else None,
        headroom_unknown=run.headroom_unknown,  # empty, not None: an earlier daemon's counts for nothing
        **(_training(run.report, run.stalls) if run.report else {}),
        nonfinite_loss=_nonfinite_loss(run),
        no_gpu=run.no_gpu,
        phase_seconds=usage.phases,
        devices=devices,
        **_sums(devices),
        batch_size_advice=_advice(run.batch_size_advice) if run.batch_size_advice else None,
        host_memory_peak_bytes=usage.host_memory_peak,
        **_host(run),
    )


def _duration(by_the_clock: float, truly: float) -> float:
    """Return how long a run has lasted; not by the clock where that was set meanwhile."""
    return by_the_clock if abs(by_the_clock - truly) < _MAX_CLOCK_DIFFERENCE_SECONDS else truly


def _ending(ending: Ending) -> dict[str, Any]:
    return {
        "ended_timestamp_seconds": ending.at,
        "outcome": ending.outcome,
        "evidence": ending.evidence,
        "exit_signal": ending.exit_signal,
    }


def _host(run: RunSnapshot) -> dict[str, Any]:
    host, leak = run.host_usage, run.host_leak
    return {
        "host_memory_growth_bytes_per_second": leak.bytes_per_second if leak else None,
        "seconds_to_host_oom": leak.left.seconds if leak and leak.left else None,
        "cpu_seconds": host.cpu_seconds if host else None,
        "read_bytes": host.read_bytes if host else None,
        "written_bytes": host.written_bytes if host else None,
    }


def _training(report: Report, stalls: int) -> dict[str, Any]:
    waited, observed = report.input_wait_seconds, report.input_observed_seconds
    return {
        "phase": report.phase,
        "epoch": report.epoch,
        "steps": report.steps,
        "examples": report.examples,
        "batch_size": report.batch_size,
        "step_seconds": report.step_seconds,
        "step_median_seconds": report.step_median,
        "step_p95_seconds": report.step_p95,
        "compile_seconds": report.compile_seconds,
        "stalls": stalls,
        "loss": report.loss,
        "input_wait_seconds": waited,
        "input_observed_seconds": observed,
        "input_wait_ratio": min(waited / observed, 1.0) if waited is not None and observed else None,
        "errors": report.errors,
        "actions": report.actions or None,
        "reports_dropped": report.dropped,
    }


def _nonfinite_loss(run: RunSnapshot) -> RecordedNonFiniteLoss | None:
    loss = run.nonfinite_loss
    if loss is None or run.last_report is None:
        return None
    noticed = max(run.last_report - loss.seconds_ago, 0.0)
    return RecordedNonFiniteLoss(loss.steps, loss.max_steps, loss.after, loss.first, noticed, loss.validations)


def _device(uuid: str, usage: DeviceUsage, run: RunSnapshot) -> RecordedDevice:
    # Where no time passed between polls, that it was idle and used no energy is not known.
    known = _USAGE_FIELDS if usage.seconds else _MEMORY_FIELDS
    values: dict[str, Any] = {name: getattr(usage, source) for name, source in known.items()}
    peaks, limit = run.batch_peaks.get(uuid, ()), run.headroom_limits.get(uuid)
    return RecordedDevice(
        uuid,
        usage.name,
        xids={str(code): count for code, count in usage.xids.items()},
        headroom_limit=limit.kind if limit else None,
        headroom_limit_bytes=limit.limit if limit else None,
        batch_memory=tuple(RecordedBatchMemory(each.batch_size, each.floor, each.peak) for each in peaks),
        **values,
        **_forecast(run.leaks.get(uuid)),
    )


def _forecast(leak: Leak | None) -> dict[str, Any]:
    left = leak.left if leak else None
    figures = (left.seconds, left.lower, left.upper) if left else (None, None, None)
    return dict(zip(_FORECASTS, (leak.bytes_per_second if leak else None, *figures), strict=True))


def _sums(devices: Iterable[RecordedDevice]) -> dict[str, Any]:
    """Return the sums over the devices."""
    devices = tuple(devices)
    busy, idle = _total(each.busy_seconds for each in devices), _total(each.idle_seconds for each in devices)
    return {
        "gpu_seconds": _total(each.gpu_seconds for each in devices),
        "gpu_idle_ratio": idle / (busy + idle) if busy is not None and idle is not None and busy + idle else None,
        "energy_joules": _total(each.energy_joules for each in devices),
        "throttled_seconds": _total_by_key(each.throttled_seconds or {} for each in devices),
        "throttled_step_seconds": _total_by_key(each.throttled_step_seconds or {} for each in devices),
        "xids": {code: int(count) for code, count in _total_by_key(each.xids or {} for each in devices).items()},
    }


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _total_by_key(mappings: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for mapping in mappings:
        for key, value in mapping.items():
            total[key] = total.get(key, 0.0) + value
    return total


def _advice(advice: BatchSizeAdvice) -> RecordedBatchSizeAdvice:
    return RecordedBatchSizeAdvice(
        batch_size=advice.present,
        advised=advice.advised,
        too_large=advice.too_large,
        confidence=advice.cost.confidence,
        sizes=advice.cost.sizes,
        needed_bytes=advice.needed,
        capacity_bytes=advice.capacity,
        per_example_bytes=advice.cost.per_example,
        residual_bytes=advice.cost.residual,
        text=advice.text,
    )


def _error(seen: SeenError) -> RecordedError:
    error, diagnosis = seen.error, seen.diagnosis
    return RecordedError(
        timestamp_seconds=seen.at,
        kind=error.kind,
        exception=error.exception,
        text=error.text,
        frame=error.frame,
        phase=error.phase,
        steps=error.steps,
        headroom_bytes=seen.headroom,
        least_headroom_bytes=seen.least_headroom,
        allocations=tuple(
            RecordedAllocation(each.requested, each.shape, each.dtype, each.op, each.device, each.allocator)
            for each in error.allocations
        ),
        memory={
            device: RecordedDeviceMemory(each.current, each.peak, each.limit, each.reserved)
            for device, each in error.memory.items()
        },
        verdict=record_diagnosis(diagnosis) if diagnosis else None,
        next_step=None
        if error.kind in OOM_KINDS
        else find_text_guide(error.kind, error.exception, error.text).next_step,
    )


def record_diagnosis(diagnosis: Diagnosis) -> RecordedDiagnosis:
    """Return a diagnosis as it is recorded and as the API has it."""
    return RecordedDiagnosis(diagnosis.cause, diagnosis.evidence, diagnosis.next_step, diagnosis.code)


def _census(seen: SeenCensus) -> RecordedCensus:
    census = seen.census
    return RecordedCensus(
        timestamp_seconds=seen.at,
        steps=census.steps,
        census_seconds=census.seconds,
        tensors=census.tensors,
        tensor_bytes=census.tensor_bytes,
        in_use_bytes=census.in_use,
        cut=census.is_cut,
        groups=tuple(
            RecordedTensors(each.count, each.bytes, each.shape, each.dtype, each.holder, each.place)
            for each in census.groups
        ),
    )


def usage_from_record(record: RunRecord) -> RunUsage:
    """Return the usage that a record has, to continue from."""
    shares = {each.uuid: _usage(each) for each in record.devices}
    return RunUsage(shares, dict(record.phase_seconds or {}), record.host_memory_peak_bytes)


def _usage(device: RecordedDevice) -> DeviceUsage:
    values = {source: getattr(device, name) for name, source in _USAGE_FIELDS.items()}
    known: dict[str, Any] = {source: value for source, value in values.items() if value is not None}
    return DeviceUsage(device.name, xids={int(code): count for code, count in (device.xids or {}).items()}, **known)


def continue_record(before: RunRecord, since: RunRecord) -> RunRecord:
    """Return a run's record where an earlier daemon has written one; the usage has been continued already."""
    earlier = ((each.name, getattr(before, each.name)) for each in fields(RunRecord))
    missing = {
        name: value
        for name, value in earlier
        if value is not None and getattr(since, name) is None and name not in _HOST_FORECASTS
    }
    began = before.began_timestamp_seconds  # part of its key
    return replace(
        replace(since, **missing),
        began_timestamp_seconds=began,
        began_uptime_seconds=before.began_uptime_seconds,
        duration_seconds=_duration(
            since.updated_timestamp_seconds - began, compute_seconds_between(before, since) + since.duration_seconds
        ),
        errors_told=(before.errors_told + since.errors_told)[-KEPT_ERRORS:],
        devices=tuple(_add_earlier_sizes(device, before.devices) for device in since.devices),
    )


def compute_seconds_between(before: RunRecord, since: RunRecord) -> float:
    """Return how long after a run's begin the later record begins."""
    if before.began_uptime_seconds is not None and since.began_uptime_seconds is not None:
        return max(since.began_uptime_seconds - before.began_uptime_seconds, 0.0)
    return max(since.began_timestamp_seconds - before.began_timestamp_seconds, before.duration_seconds)


def _add_earlier_sizes(device: RecordedDevice, before: Iterable[RecordedDevice]) -> RecordedDevice:
    """Add the batch sizes that an earlier daemon has seen: a peak shows itself only as it rises."""
    earlier = [size for each in before if each.uuid == device.uuid for size in each.batch_memory]
    by_size = {each.batch_size: each for each in (*earlier, *device.batch_memory)}
    return replace(device, batch_memory=tuple(by_size[size] for size in sorted(by_size)))


def conclude_record(record: RunRecord, evidence: str) -> RunRecord:
    """Return the record of a run whose end was not seen: it lasted until it was last seen, at least."""
    host_forecasts: dict[str, Any] = dict.fromkeys(_HOST_FORECASTS)
    forecasts: dict[str, Any] = dict.fromkeys(_FORECASTS)
    devices = tuple(replace(device, **forecasts) for device in record.devices)
    return replace(record, state="unknown", outcome="unknown", evidence=evidence, devices=devices, **host_forecasts)
