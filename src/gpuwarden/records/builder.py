"""Content of a run's record: its reports, its end, its usage; and the continuation of an earlier daemon's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from gpuwarden.analysis.batch_size.cost_model import BatchSizeAdvice
from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.host.process_tree import HostUsage
from gpuwarden.protocol.messages import Report
from gpuwarden.records.record import (
    VERSION,
    RecordedAllocation,
    RecordedBatchMemory,
    RecordedBatchSizeAdvice,
    RecordedDevice,
    RecordedDeviceMemory,
    RecordedDiagnosis,
    RecordedError,
    RunRecord,
)
from gpuwarden.runs.run_snapshot import KEPT_ERRORS, RunSnapshot, SeenError
from gpuwarden.usage.run_usage import DeviceUsage, RunUsage

_SLACK_SECONDS = 1.0  # by which two clocks may differ that nobody has set
# What is ahead of a run: it is so while that grows, and of none that has ended; an earlier daemon's is out of date.
_OF_HOST_GROWTH = ("host_memory_growth_bytes_per_second", "seconds_to_host_oom")
_OF_GROWTH = ("memory_growth_bytes_per_second", "seconds_to_oom", "seconds_to_oom_lower", "seconds_to_oom_upper")

# Fields of DeviceShare by those of the Share that they are made of.
_FIELDS_OF_MEMORY = {
    "memory_peak_bytes": "memory_peak",
    "memory_limit_bytes": "memory_limit",
    "headroom_at_peak_bytes": "headroom_at_peak",
    "lowest_headroom_bytes": "lowest_headroom",
}
_FIELDS_OF_SHARE = _FIELDS_OF_MEMORY | {
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
    hello, ending = run.hello, run.ending
    until = ending.at if ending else now
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
        ended_timestamp_seconds=ending.at if ending else None,
        outcome=ending.outcome if ending else None,
        evidence=ending.evidence if ending else None,
        errors_told=tuple(map(_told, run.errors)),
        headroom_unknown=run.headroom_unknown,  # empty, not None: an earlier daemon's counts for nothing
        **(_training(run.report, run.stalls) if run.report else {}),
        **_devices(usage, run),
        batch_size_advice=_advice(run.batch_size_advice) if run.batch_size_advice else None,
        **(_host(run.usage) if run.usage else {}),
    )


def _duration(by_the_clock: float, truly: float) -> float:
    """Return how long a run has lasted; not by the clock where that was set meanwhile."""
    return by_the_clock if abs(by_the_clock - truly) < _SLACK_SECONDS else truly


def _training(report: Report, stalls: int) -> dict[str, Any]:
    waited, observed = report.input_wait_seconds, report.input_observed_seconds
    return {
        "phase": report.phase,
        "epoch": report.epoch,
        "steps": report.steps,
        "examples": report.examples,
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
        "reports_dropped": report.dropped,
    }


def _devices(usage: RunUsage, run: RunSnapshot) -> dict[str, Any]:
    """Return the fields of the devices, of their sums, and of the host."""
    devices = tuple(
        _growing(replace(_device(uuid, share), batch_memory=_batch_memory(run, uuid)), run.growth.get(uuid))
        for uuid, share in usage.shares.items()
    )
    busy, idle = _total(each.busy_seconds for each in devices), _total(each.idle_seconds for each in devices)
    return {
        "phase_seconds": usage.phases,
        "gpu_seconds": _total(each.gpu_seconds for each in devices),
        "gpu_idle_ratio": idle / (busy + idle) if busy is not None and idle is not None and busy + idle else None,
        "energy_joules": _total(each.energy_joules for each in devices),
        "throttled_seconds": _by_key(each.throttled_seconds or {} for each in devices),
        "throttled_step_seconds": _by_key(each.throttled_step_seconds or {} for each in devices),
        "devices": devices,
        "xids": {code: int(count) for code, count in _by_key(each.xids or {} for each in devices).items()},
        "host_memory_growth_bytes_per_second": run.host_growth.bytes_per_second if run.host_growth else None,
        "seconds_to_host_oom": run.host_growth.left.seconds if run.host_growth and run.host_growth.left else None,
        "host_memory_peak_bytes": usage.host_memory_peak,
    }


def _growing(device: RecordedDevice, growth: Leak | None) -> RecordedDevice:
    if growth is None:
        return device
    left = growth.left
    return replace(
        device,
        memory_growth_bytes_per_second=growth.bytes_per_second,
        seconds_to_oom=left.seconds if left else None,
        seconds_to_oom_lower=left.lower if left else None,
        seconds_to_oom_upper=left.upper if left else None,
    )


def _batch_memory(run: RunSnapshot, uuid: str) -> tuple[RecordedBatchMemory, ...]:
    seen = run.batch_sizes.peaks(uuid, run.histories) if run.batch_sizes else ()
    return tuple(RecordedBatchMemory(each.batch_size, each.floor, each.peak) for each in seen)


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


def _host(usage: HostUsage) -> dict[str, Any]:
    return {
        "cpu_seconds": usage.cpu_seconds,
        "read_bytes": usage.read_bytes,
        "written_bytes": usage.written_bytes,
    }


def usage_from_record(record: RunRecord) -> RunUsage:
    """Return what the run had had of GPUs, to go on with."""
    shares = {each.uuid: _share(each) for each in record.devices}
    return RunUsage(shares, dict(record.phase_seconds or {}), record.host_memory_peak_bytes)


def continue_record(before: RunRecord, since: RunRecord) -> RunRecord:
    """Return a run's record where an earlier daemon has written one of it; its account has been taken up already."""
    said = ((each.name, getattr(before, each.name)) for each in fields(RunRecord))
    missed = {
        name: value
        for name, value in said
        if value is not None and getattr(since, name) is None and name not in _OF_HOST_GROWTH
    }
    began = before.began_timestamp_seconds  # the name of its file has it
    return replace(
        replace(since, **missed),
        began_timestamp_seconds=began,
        began_uptime_seconds=before.began_uptime_seconds,
        duration_seconds=_duration(
            since.updated_timestamp_seconds - began, seconds_between(before, since) + since.duration_seconds
        ),
        errors_told=(before.errors_told + since.errors_told)[-KEPT_ERRORS:],
        devices=tuple(_with_sizes_of(device, before.devices) for device in since.devices),
    )


def seconds_between(before: RunRecord, since: RunRecord) -> float:
    """Return how long after a run's begin the daemon that is there now first heard of it."""
    if before.began_uptime_seconds is not None and since.began_uptime_seconds is not None:
        return max(since.began_uptime_seconds - before.began_uptime_seconds, 0.0)
    return max(since.began_timestamp_seconds - before.began_timestamp_seconds, before.duration_seconds)


def _with_sizes_of(device: RecordedDevice, before: Iterable[RecordedDevice]) -> RecordedDevice:
    """Add the batch sizes that an earlier daemon has seen: a peak shows itself only as it rises."""
    earlier = [seen for each in before if each.uuid == device.uuid for seen in each.batch_memory]
    by_size = {seen.batch_size: seen for seen in (*earlier, *device.batch_memory)}
    return replace(device, batch_memory=tuple(by_size[size] for size in sorted(by_size)))


def conclude_record(record: RunRecord, evidence: str) -> RunRecord:
    """Return the record of a run whose end nobody saw: it lasted until it was last seen, at least."""
    of_host: dict[str, Any] = dict.fromkeys(_OF_HOST_GROWTH)
    of_device: dict[str, Any] = dict.fromkeys(_OF_GROWTH)
    devices = tuple(replace(device, **of_device) for device in record.devices)
    return replace(record, outcome="unknown", evidence=evidence, devices=devices, **of_host)


def _device(uuid: str, share: DeviceUsage) -> RecordedDevice:
    # Where no time passed between polls, that it was idle and used no energy is not known.
    known = _FIELDS_OF_SHARE if share.seconds else _FIELDS_OF_MEMORY
    values: dict[str, Any] = {name: getattr(share, source) for name, source in known.items()}
    return RecordedDevice(uuid, share.name, xids={str(code): count for code, count in share.xids.items()}, **values)


def _share(device: RecordedDevice) -> DeviceUsage:
    """Return what `_device` was made of."""
    values = {source: getattr(device, name) for name, source in _FIELDS_OF_SHARE.items()}
    known: dict[str, Any] = {source: value for source, value in values.items() if value is not None}
    return DeviceUsage(device.name, xids={int(code): count for code, count in (device.xids or {}).items()}, **known)


def _told(seen: SeenError) -> RecordedError:
    error = seen.error
    return RecordedError(
        timestamp_seconds=seen.at,
        kind=error.kind,
        exception=error.exception,
        text=error.text,
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
        verdict=RecordedDiagnosis(seen.verdict.cause, seen.verdict.evidence, seen.verdict.next_step)
        if seen.verdict
        else None,
    )


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _by_key(mappings: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for mapping in mappings:
        for key, value in mapping.items():
            total[key] = total.get(key, 0.0) + value
    return total
