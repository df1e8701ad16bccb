"""Timeline in a run's record: its memory on each device over time, and its events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from gpuwarden.analysis.memory.downsampling import downsample
from gpuwarden.analysis.memory.memory_history import MemoryWindow
from gpuwarden.formatting import format_bytes
from gpuwarden.protocol.messages import OOM_KINDS
from gpuwarden.records.record import RunRecord
from gpuwarden.records.record_parts import MemoryTimeline, RecordedError
from gpuwarden.runs.run_events import RunEvent, bounded
from gpuwarden.runs.run_snapshot import RunSnapshot

MAX_POINTS = 60  # of a device
MAX_RUN_POINTS = 480  # of all devices of a run
_COLUMNS = {  # of a MemoryTimeline, by the fields of a MemoryWindow
    "began_seconds": "began",
    "ended_seconds": "ended",
    "lowest_bytes": "lowest",
    "highest_bytes": "highest",
    "peak_bytes": "peak",
    "phase": "phase",
    "headroom_bytes": "headroom",
    "others_bytes": "others",
    "epoch": "epoch",
    "batch_size": "batch_size",
}


def add_timeline(record: RunRecord, run: RunSnapshot, events: Iterable[RunEvent] = ()) -> RunRecord:
    """Return a run's record with its timeline since this daemon watches it.

    `events` are those that its own reports do not have.
    """
    most = compute_max_points(len(run.memory_windows))
    devices = (
        replace(each, timeline=_timeline(downsample(run.memory_windows[each.uuid], most)))
        if each.uuid in run.memory_windows
        else each
        for each in record.devices
    )
    ooms = (_oom_event(error, record) for error in record.reported_errors if error.kind in OOM_KINDS)
    bound = bounded(dict.fromkeys((*run.events, *events, *ooms)))
    rounded = tuple(replace(each, at_seconds=round(each.at_seconds, 1)) for each in bound)
    return replace(record, devices=tuple(devices), events=rounded)


def remove_timeline(record: RunRecord) -> RunRecord:
    """Return a record as it is listed: its timeline makes most of its length."""
    devices = tuple(each if each.timeline is None else replace(each, timeline=None) for each in record.devices)
    return replace(record, devices=devices, events=())


def shift_timeline(record: RunRecord, seconds: float) -> RunRecord:
    """Return a record with the timeline as seen from a begin that is so many seconds earlier."""
    devices = (
        replace(
            each,
            timeline=replace(
                timeline,
                began_seconds=tuple(round(at + seconds, 1) for at in timeline.began_seconds),
                ended_seconds=tuple(round(at + seconds, 1) for at in timeline.ended_seconds),
            ),
        )
        if (timeline := each.timeline)
        else each
        for each in record.devices
    )
    events = tuple(replace(each, at_seconds=round(each.at_seconds + seconds, 1)) for each in record.events)
    return replace(record, devices=tuple(devices), events=events)


def limit_timeline(record: RunRecord) -> RunRecord:
    """Return a record with as many points as its devices may have."""
    most = compute_max_points(len(record.devices))
    devices = (
        replace(each, timeline=_timeline(downsample(_windows(each.timeline), most))) if each.timeline else each
        for each in record.devices
    )
    return replace(record, devices=tuple(devices))


def _timeline(windows: Sequence[MemoryWindow]) -> MemoryTimeline | None:
    if not windows:
        return None
    columns: dict[str, Any] = {
        name: tuple(_plain(name, getattr(each, source)) for each in windows) for name, source in _COLUMNS.items()
    }
    return MemoryTimeline(**{name: column for name, column in columns.items() if set(column) != {None}})


def _plain(name: str, value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return int(value) if name.endswith("_bytes") else round(value, 1)


def _windows(timeline: MemoryTimeline) -> list[MemoryWindow]:
    """Return the windows of a timeline, as far as it has them."""
    unknown = (None,) * len(timeline.began_seconds)
    rows = zip(*(getattr(timeline, name) or unknown for name in _COLUMNS), strict=True)
    return [MemoryWindow(steps=0, **dict(zip(_COLUMNS.values(), row, strict=True))) for row in rows]


def _oom_event(error: RecordedError, record: RunRecord) -> RunEvent:
    """Return the event of an out-of-memory, with the largest allocation that failed and its cause."""
    asked = max((each.requested_bytes or 0 for each in error.allocations), default=0)
    where = "host memory" if error.kind == "host_oom" else "device memory"
    wanted = f": {format_bytes(asked)} requested" if asked else ""
    why = f" ({error.diagnosis.name.replace('_', ' ')})" if error.diagnosis else ""
    at = error.timestamp_seconds - record.began_timestamp_seconds  # the clock may have been set meanwhile
    text = f"out of {where}{wanted}{why}"
    return RunEvent(min(max(at, 0.0), record.duration_seconds), "out_of_memory", text, level="warning")


def compute_max_points(devices: int) -> int:
    """Return how many points each of so many devices may have."""
    return max(min(MAX_POINTS, MAX_RUN_POINTS // max(devices, 1)), 2)
