"""Continuation of a run's record that an earlier daemon began."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from gpuwarden.records.record import RecordedDevice, RunRecord, choose_duration
from gpuwarden.runs.run_snapshot import KEPT_ERRORS
from gpuwarden.usage.run_usage import DeviceUsage, RunUsage

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
        duration_seconds=choose_duration(
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
