"""The story in a run's receipt: its memory on each device over time, and what happened to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, cast

from gpuwarden.analysis.memory.downsampling import downsample
from gpuwarden.analysis.memory.memory_history import MemoryWindow
from gpuwarden.formatting import format_bytes
from gpuwarden.records.builder import seconds_between
from gpuwarden.records.record import MemoryTimeline, RecordedDevice, RecordedError, RecordedEvent, RunRecord
from gpuwarden.runs.run_events import RunEvent, RunEventKind, bounded, joined
from gpuwarden.runs.run_snapshot import RunSnapshot

_OOMS = ("device_oom", "host_oom")
MAX_POINTS = 60  # of a device
MAX_RUN_POINTS = 480  # of all devices of a run
_COLUMNS = {  # of a MemoryStory, by the fields of a Window
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


def with_timeline(receipt: RunRecord, run: RunSnapshot, events: Iterable[RunEvent] = ()) -> RunRecord:
    """Return a run's record with what its memory did since this daemon watches it.

    `events` are those that its own reports do not tell of.
    """
    most = max_points(len(run.histories))
    devices = (
        replace(each, story=_story(downsample(run.histories[each.uuid].windows, most)))
        if each.uuid in run.histories
        else each
        for each in receipt.devices
    )
    failed = (_failed(error, receipt) for error in receipt.errors_told if error.kind in _OOMS)
    return replace(
        receipt, devices=tuple(devices), marks=_told(bounded(dict.fromkeys((*run.events, *events, *failed))))
    )


def without_timeline(receipt: RunRecord) -> RunRecord:
    """Return a receipt as it is among others: what its memory did over time makes most of its length."""
    devices = tuple(each if each.story is None else replace(each, story=None) for each in receipt.devices)
    return replace(receipt, devices=devices, marks=())


def continue_timeline(before: RunRecord, since: RunRecord) -> RunRecord:
    """Return the later receipt with the story that the earlier one begins."""
    later = seconds_between(before, since)
    told = {each.uuid: each.story for each in before.devices if each.story is not None}
    most = max_points(max(len(told), len(since.devices)))
    devices = (_continued(each, told.get(each.uuid), later, most) for each in since.devices)
    marks = joined(_marks(before.marks), (replace(mark, at=mark.at + later) for mark in _marks(since.marks)))
    return replace(since, devices=tuple(devices), marks=_told(marks))


def _continued(device: RecordedDevice, before: MemoryTimeline | None, later: float, most: int) -> RecordedDevice:
    if before is None and not later:
        return device
    windows = [
        *(_windows(before) if before else ()),
        *(_shifted(each, later) for each in (_windows(device.story) if device.story else ())),
    ]
    return replace(device, story=_story(downsample(windows, most)))


def _story(windows: Sequence[MemoryWindow]) -> MemoryTimeline | None:
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


def _windows(story: MemoryTimeline) -> list[MemoryWindow]:
    """Return what `_story` was made of, as far as it is kept."""
    unknown = (None,) * len(story.began_seconds)
    rows = zip(*(getattr(story, name) or unknown for name in _COLUMNS), strict=True)
    return [MemoryWindow(steps=0, **dict(zip(_COLUMNS.values(), row, strict=True))) for row in rows]


def _told(marks: Iterable[RunEvent]) -> tuple[RecordedEvent, ...]:
    return tuple(RecordedEvent(round(mark.at, 1), mark.kind, mark.text, mark.uuid) for mark in marks)


def _marks(told: Iterable[RecordedEvent]) -> list[RunEvent]:
    return [RunEvent(each.at_seconds, cast("RunEventKind", each.kind), each.text, each.uuid) for each in told]


def _failed(error: RecordedError, receipt: RunRecord) -> RunEvent:
    """Mark an out-of-memory, with the largest allocation that failed and why."""
    asked = max((each.requested_bytes or 0 for each in error.allocations), default=0)
    where = "host memory" if error.kind == "host_oom" else "device memory"
    wanted = f": {format_bytes(asked)} wanted" if asked else ""
    why = f" ({error.verdict.name.replace('_', ' ')})" if error.verdict else ""
    at = error.timestamp_seconds - receipt.began_timestamp_seconds  # the clock may have been set meanwhile
    return RunEvent(min(max(at, 0.0), receipt.duration_seconds), "oom", f"out of {where}{wanted}{why}")


def max_points(devices: int) -> int:
    """Return how many points each of so many devices may have."""
    return max(min(MAX_POINTS, MAX_RUN_POINTS // max(devices, 1)), 2)


def _shifted(window: MemoryWindow, seconds: float) -> MemoryWindow:
    """Return a window as seen from a begin that is so many seconds earlier."""
    return replace(window, began=window.began + seconds, ended=window.ended + seconds)
