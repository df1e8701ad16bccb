"""Timeline in a run record: limited, equal to the history, and continued across a restart of the daemon."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

import pytest
from run_record_cases import BEGAN, USAGE, example_record, run

from gpuwarden.analysis.memory.downsampling import downsample
from gpuwarden.analysis.memory.memory_history import MemoryHistory, MemoryWindow
from gpuwarden.health.conditions import severity_of
from gpuwarden.protocol.messages import STEP_BUCKETS, DeviceMemory, NonFiniteLoss, Report
from gpuwarden.records.joining import join_records
from gpuwarden.records.record import RunRecord, build_record, record_from_json
from gpuwarden.records.record_json import RunRecordError, json_from_record
from gpuwarden.records.record_parts import MemoryTimeline
from gpuwarden.records.store import render_record, row_from_record
from gpuwarden.records.timeline import (
    MAX_POINTS,
    add_timeline,
    compute_max_points,
    remove_timeline,
)
from gpuwarden.runs.run_events import MAX_EVENT_TEXT, MAX_EVENTS_PER_KIND, ReportEvents, RunEvent, bounded
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.usage.run_usage import RunUsage
from snapshots import GIB

REPORT = Report("train", 0, 0.0, (0,) * (len(STEP_BUCKETS) + 1), {})


def busy_history(seconds: int, *, polls: bool = True) -> MemoryHistory:
    """Return the history of a run that reported four times a second and was polled each second."""
    history = MemoryHistory()
    for each in range(seconds * 4):
        current = 70 * GIB + each * 123_457 % (5 * GIB)
        report = replace(REPORT, steps=each, epoch=each // 400, batch_size=64)
        history.add_report(DeviceMemory(current, current + 3 * GIB + each), report, each / 4)
        if polls and each % 4 == 0:
            history.add_poll(9.0 * GIB - each, 1.0 * GIB + each)
    return history


def make_run(devices: int, history: MemoryHistory) -> RunSnapshot:
    """Make a run on this many devices, with the same history on each."""
    uuids = [f"GPU-12345678-1234-1234-1234-{each:012}" for each in range(devices)]
    return replace(run(), memory_windows=dict.fromkeys(uuids, tuple(history.windows)))


def make_usage(uuids: Iterable[str]) -> RunUsage:
    """Make the usage of a run on these devices."""
    full = next(iter(USAGE.devices.values()))
    return replace(USAGE, devices=dict.fromkeys(uuids, full))


def make_record(made: RunSnapshot) -> RunRecord:
    """Make the run's record."""
    usage = make_usage(made.memory_windows)
    return add_timeline(build_record(made, BEGAN + 7980, boot_id="b0", user="alice", usage=usage), made)


def test_long_run_has_few_points() -> None:
    """Points keep every low, high and peak, have no gaps, and share the time evenly."""
    windows = busy_history(4000).windows
    points = downsample(windows, MAX_POINTS)
    assert MAX_POINTS / 2 < len(points) <= MAX_POINTS
    assert min(each.lowest for each in points) == min(each.lowest for each in windows)
    assert max(each.highest for each in points) == max(each.highest for each in windows)
    assert points[-1].peak == max(each.peak for each in windows)
    assert (points[0].began, points[-1].ended) == (windows[0].began, windows[-1].ended)
    assert [each.began for each in points[1:]] == [each.ended for each in points[:-1]]
    lengths = [each.ended - each.began for each in points[:-1]]
    assert max(lengths) < 4 * min(lengths)


@pytest.mark.parametrize(("devices", "points"), [(1, 60), (8, 60), (16, 30), (64, 7), (1000, 2)])
def test_devices_share_the_points(devices: int, points: int) -> None:
    """A run with many devices has fewer points on each."""
    assert compute_max_points(devices) == points


def test_record_of_many_devices_stays_small() -> None:
    """Eight devices with all values: under 50 KB as JSON, and a third of that in the database."""
    made = make_record(make_run(8, busy_history(4000)))
    timeline = made.devices[0].timeline
    assert timeline is not None
    assert len(timeline.peak_bytes) > 40
    assert len(render_record(made)) < 50_000
    assert len(render_record(remove_timeline(made))) < 8_000
    assert len(row_from_record(made).whole) < 15_000


def test_timeline_survives_json() -> None:
    """A timeline is read from JSON as it was written; a column without values has no key."""
    made = make_record(make_run(1, busy_history(100)))
    assert record_from_json(json.loads(render_record(made))) == made
    plain = json_from_record(make_record(make_run(1, busy_history(100, polls=False))))["devices"][0]["timeline"]
    assert "headroom_bytes" not in plain
    assert {len(column) for column in plain.values()} == {len(plain["peak_bytes"])}


@pytest.mark.parametrize(
    "change",
    [
        {"peak_bytes": [1]},
        {"peak_bytes": [None] * 10},
        {"headroom_bytes": [-1.0] * 10},
        {"epoch": [0.5] * 10},
        {"phase": "train"},
        {"batch_size": [1] * 513},
        {"ended_seconds": []},
        {name: [] for name in json_from_record(example_record())["devices"][0]["timeline"]},
    ],
)
def test_invalid_timeline_is_rejected(change: dict[str, object]) -> None:
    """Columns of different lengths and wrong types are rejected."""
    plain = json_from_record(example_record())
    timeline = {**plain["devices"][0]["timeline"], **change}
    with pytest.raises(RunRecordError):
        record_from_json({**plain, "devices": [{**plain["devices"][0], "timeline": timeline}]})


def test_timeline_is_continued_after_a_restart() -> None:
    """The timeline of the next daemon follows that of the previous one, with the gap between them."""
    before = make_record(make_run(1, busy_history(100)))
    later = replace(
        make_run(1, busy_history(50)), began=BEGAN + 160, events=(RunEvent(7.0, "pressure", "memory: critical"),)
    )
    usage = make_usage(later.memory_windows)
    since = add_timeline(build_record(later, BEGAN + 300, boot_id="b0", user=None, usage=usage), later)
    uptime = 1000.0
    before = replace(before, began_uptime_seconds=uptime)
    since = replace(since, began_uptime_seconds=uptime + 160, began_timestamp_seconds=BEGAN - 1e6)  # the clock was set
    both = join_records(before, since)
    timeline = both.devices[0].timeline
    assert timeline is not None
    assert len(timeline.began_seconds) <= MAX_POINTS
    assert (timeline.began_seconds[0], timeline.ended_seconds[-1]) == (0.0, 160 + 49.8)
    gaps = [b - a for a, b in zip(timeline.ended_seconds, timeline.began_seconds[1:], strict=False)]
    assert sum(gap > 30 for gap in gaps) <= 1  # points next to the gap are joined across it
    assert [(mark.at_seconds, mark.text) for mark in both.events if mark.kind == "pressure"] == [
        (167.0, "memory: critical")
    ]
    assert [mark.text for mark in both.events].count("training starts") == 1
    assert record_from_json(json.loads(render_record(both))) == both


def test_timeline_of_a_silent_run() -> None:
    """A daemon without reports of memory keeps the timeline of the previous one."""
    before = make_record(make_run(1, busy_history(100)))
    silent = replace(make_run(1, MemoryHistory()), memory_windows={}, began=BEGAN + 160)
    usage = make_usage(make_run(1, MemoryHistory()).memory_windows)
    since = add_timeline(build_record(silent, BEGAN + 300, boot_id="b0", user=None, usage=usage), silent)
    assert join_records(before, since).devices[0].timeline == before.devices[0].timeline


def test_marks_keep_first_and_newest() -> None:
    """The first and the newest events of each kind are kept, in order of time."""
    events = [RunEvent(float(each), "co_tenant", f"{each}") for each in range(100)]
    kept = bounded([*events, RunEvent(50.5, "out_of_memory", "x" * 1000)])
    newest = [float(each) for each in range(100 - MAX_EVENTS_PER_KIND + 1, 100)]
    assert [event.at_seconds for event in kept] == [0.0, 50.5, *newest]
    assert {len(event.text) for event in kept if event.kind == "out_of_memory"} == {MAX_EVENT_TEXT}


def test_reports_add_marks_of_changes() -> None:
    """A new phase, fit, batch size, retry or action adds a mark; the validation of each epoch does not."""
    found = ReportEvents()
    before = None
    steps = [
        replace(REPORT, largest_batch_size=64),
        replace(REPORT, phase="test", largest_batch_size=64),
        replace(REPORT, largest_batch_size=64),
        replace(REPORT, phase="test", largest_batch_size=64),
        replace(REPORT, phase="idle", largest_batch_size=64),
        replace(REPORT, largest_batch_size=128),
        replace(REPORT, largest_batch_size=128, batch_size=32, oom_retries=1),
        replace(REPORT, largest_batch_size=128, batch_size=32, oom_retries=1, actions={"stop": 1}),
        replace(REPORT, largest_batch_size=128, batch_size=32, oom_retries=1, actions={"stop": 1}),
    ]
    for at, report in enumerate(steps):
        found.add_report(before, report, float(at))
        before = report
    assert [(event.at_seconds, event.text) for event in found.events] == [
        (0.0, "training starts"),
        (0.0, "batch size 64"),
        (1.0, "first evaluation"),
        (5.0, "training starts again"),
        (5.0, "batch size 128"),
        (6.0, "restarts with batch size 32 after an out-of-memory error"),
        (7.0, "on_pressure stops training"),
    ]


def test_out_of_memory_is_marked() -> None:
    """An out-of-memory error is among the events, with the requested size."""
    assert [(mark.at_seconds, mark.text) for mark in example_record().events if mark.kind == "out_of_memory"] == [
        (7000.0, "out of device memory: 4.00 GiB requested (too big)")
    ]


def test_marks_have_the_severity_of_their_alerts() -> None:
    """An out-of-memory and a loss that is no number are as severe as their alerts; what is no problem has no level."""
    levels = {mark.kind: mark.level for mark in example_record().events}
    assert levels["out_of_memory"] == severity_of("RunOutOfMemory")
    found = ReportEvents()
    loss = NonFiniteLoss(steps=1, first=7, seconds_ago=0.0, validations=1)
    found.add_report(None, replace(REPORT, nonfinite_loss=loss, largest_batch_size=64), 1.0)
    assert {event.kind: event.level for event in found.events} == {
        "event": severity_of("RunLossNotFinite"),
        "phase": None,
        "batch_size": None,
    }


def test_device_without_history_has_no_timeline() -> None:
    """A device without reports of memory has no timeline."""
    made = replace(run(), memory_windows={"GPU-9": ()})
    assert make_record(made).devices[0].timeline is None
    assert isinstance(example_record().devices[0].timeline, MemoryTimeline)
    assert downsample([], MAX_POINTS) == []
    window = MemoryWindow(0.0, 0.0, 0, "train", None, 1, 1, 1)
    assert downsample([window] * 100, MAX_POINTS) != []
