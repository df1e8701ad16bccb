"""One record of a run from those of several daemons, and the record of a run whose end no daemon saw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpuwarden.records.figure import join_figures
from gpuwarden.records.record import (
    RecordedDevice,
    RunRecord,
    choose_duration,
    compute_idle_ratio,
    join_devices_by_uuid,
    set_headline,
)
from gpuwarden.records.timeline import limit_timeline, shift_timeline
from gpuwarden.runs.run_events import join_events
from gpuwarden.runs.run_snapshot import KEPT_ERRORS
from gpuwarden.usage.run_usage import DeviceUsage


def join_records(before: RunRecord, since: RunRecord) -> RunRecord:
    """Return one record of a run: that of an earlier daemon, and that since."""
    later = compute_seconds_between(before, since)
    since = shift_timeline(since, later)
    joined = join_figures(before, since)
    by_wall_clock = since.updated_timestamp_seconds - before.began_timestamp_seconds
    whole = replace(
        joined,
        duration_seconds=choose_duration(by_wall_clock, later + since.duration_seconds),
        gpu_idle_ratio=compute_idle_ratio(joined.devices),
        reported_errors=(before.reported_errors + since.reported_errors)[-KEPT_ERRORS:],
        events=join_events(before.events, since.events),
    )
    return set_headline(limit_timeline(whole))


def compute_seconds_between(before: RunRecord, since: RunRecord) -> float:
    """Return how long after a run's begin the later record begins."""
    if before.began_uptime_seconds is not None and since.began_uptime_seconds is not None:
        return max(since.began_uptime_seconds - before.began_uptime_seconds, 0.0)
    return max(since.began_timestamp_seconds - before.began_timestamp_seconds, before.duration_seconds)


def conclude_record(record: RunRecord, evidence: str) -> RunRecord:
    """Return the record of a run whose end was not seen: it lasted until it was last seen, at least."""
    ended = (RecordedDevice(uuid=each.uuid, name=each.name) for each in record.devices)  # without a forecast
    devices = tuple(map(join_figures, record.devices, ended))
    concluded = replace(
        record,
        state="unknown",
        outcome="unknown",
        evidence=evidence,
        devices=devices,
        host_memory_growth_bytes_per_second=None,
        seconds_to_host_oom=None,
    )
    return set_headline(concluded)


def add_usage(before: RunRecord, devices: Mapping[str, DeviceUsage]) -> Mapping[str, DeviceUsage]:
    """Return a run's usage of each device, by UUID; what an earlier daemon recorded is included."""
    return join_devices_by_uuid(before.devices, devices, lambda each: DeviceUsage(each.name))
