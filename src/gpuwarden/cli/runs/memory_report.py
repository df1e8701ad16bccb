"""Report on a run's memory for a terminal: a chart for each GPU, the events, and the conclusion.

The texts contain names that come from the run: the caller sanitizes them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TypeAlias

from gpuwarden.cli.runs.memory_chart import LABEL_WIDTH, MIN_WIDTH, render_chart
from gpuwarden.formatting import format_bytes, format_elapsed, format_forecast, format_growth
from gpuwarden.records.census_text import list_holders
from gpuwarden.records.record import RecordedDevice, RunRecord
from gpuwarden.records.record_parts import MemoryTimeline
from gpuwarden.runs.run_events import RunEvent

MAX_WIDTH = 140  # of a line
MAX_CHARTS = 2  # with more GPUs, only the one with the least headroom has a chart
MAX_MARKS = 9
STEADY_RATIO, STEADY_BYTES = 0.01, 32 << 20  # memory is steady if it changes by less than the larger of the two
MIN_POINTS, MIN_SECONDS = 8, 20.0  # needed to call it steady

_WEIGHT = {"out_of_memory": 0, "co_tenant": 1, "pressure": 2, "retry": 3, "event": 4, "batch_size": 5, "phase": 6}
_WEIGHT["oom"] = _WEIGHT["out_of_memory"]  # its name in records of before 2026-11-25

Line: TypeAlias = "tuple[str | None, str]"  # a label and a text, or None and a line of a chart


@dataclass(frozen=True, slots=True)
class TerminalFormat:
    """Width of the terminal in columns, the letters for charts, and the numbers of GPUs by UUID."""

    width: int
    letters: str
    gpus: Mapping[str, str] = field(default_factory=dict)


def gpu_name(uuid: str, gpus: Mapping[str, str]) -> str:
    """Return `GPU 7`, or the UUID of a GPU whose number is unknown."""
    return f"GPU {gpus[uuid]}" if uuid in gpus else uuid


def render_memory_timeline(record: RunRecord, page: TerminalFormat) -> Iterator[Line]:
    """Yield labels with texts of any length, and lines of charts as wide as the page."""
    devices = [each for each in record.devices if each.timeline is not None]
    devices.sort(key=lambda each: inf if (left := each.min_headroom_bytes) is None else left)
    if devices:
        yield from _render_devices(record, devices, page)
    if lines := list(render_conclusion(record, devices, page.gpus)):
        yield "", ""
        yield from lines


def _render_devices(record: RunRecord, devices: Sequence[RecordedDevice], page: TerminalFormat) -> Iterator[Line]:
    seconds = max(timeline.ended_seconds[-1] for each in devices if (timeline := each.timeline))
    width = max(min(page.width, MAX_WIDTH) - LABEL_WIDTH - 1, MIN_WIDTH)
    for number, device in enumerate(devices):
        yield "", ""
        yield from _render_title(device, page)
        if device.timeline is not None and (number == 0 or len(devices) <= MAX_CHARTS):
            yield "", f"{page.letters[-2]} in use  {page.letters[-1]} peak so far"
            yield from ((None, line) for line in render_chart(device.timeline, seconds, width, page.letters))
    events = _choose_marks(record.events)
    if events:
        yield "", ""
    for mark in events:
        yield time.strftime("%H:%M:%S", time.localtime(record.began_timestamp_seconds + mark.at_seconds)), mark.text
    if len(record.events) > len(events):
        yield "", f"and {len(record.events) - len(events)} minor events (--json has all)"


def _render_title(device: RecordedDevice, page: TerminalFormat) -> Iterator[Line]:
    timeline = device.timeline
    assert timeline is not None
    low, high = min(timeline.lowest_bytes[_first_settled_point(timeline) :]), max(timeline.highest_bytes)
    words = [
        f"{format_bytes(low)} to {format_bytes(high)} in use",
        f"peak {format_bytes(device.highest_peak_bytes or 0)}",
    ]
    if (left := device.min_headroom_bytes) is not None:
        words.append(f"minimum headroom {format_bytes(left)}")
    yield "memory on", gpu_name(device.uuid, page.gpus)
    yield "", ", ".join(words)


def _first_settled_point(timeline: MemoryTimeline) -> int:
    """Return the index of the first point with a model in memory: the first report comes before it is built."""
    return min(len(timeline.lowest_bytes) - 1, 1)


def _choose_marks(events: Sequence[RunEvent]) -> list[RunEvent]:
    """Return the most important events in order of time; of equally important ones the newest."""
    worth = sorted(events, key=lambda mark: (_WEIGHT.get(mark.kind, len(_WEIGHT)), -mark.at_seconds))
    return sorted(worth[:MAX_MARKS], key=lambda mark: mark.at_seconds)


def render_conclusion(record: RunRecord, devices: Sequence[RecordedDevice], gpus: Mapping[str, str]) -> Iterator[Line]:
    """Yield what follows: the OOM forecast, or that memory is steady; the headline; batch sizes."""
    headline, is_diagnosed = record.headline, any(each.diagnosis for each in record.reported_errors)
    growing = [device for device in devices if device.memory_growth_bytes_per_second is not None]
    for device in growing:
        yield "forecast", _forecast(device, gpu_name(device.uuid, gpus) if len(devices) > 1 else "")
    if record.host_memory_growth_bytes_per_second is not None:
        yield "forecast", _host_forecast(record.host_memory_growth_bytes_per_second, record.seconds_to_host_oom)
    if devices and not growing and not is_diagnosed:
        yield "memory", _describe_course(record, devices[0])
    if record.batch_size_advice is not None and not is_diagnosed:  # a diagnosis has the size in its next step
        advice = record.batch_size_advice
        yield "batch size", f"{advice.text} ({advice.confidence} confidence)"
    if headline:
        yield "cause", headline.text
        yield from (("" if place else "evidence", each) for place, each in enumerate(headline.reasons))
        yield "next step", headline.next_step
        yield from (("" if place else "code", line) for place, line in enumerate((headline.code or "").splitlines()))
    if record.census is not None:
        yield from (("tensors", each) for each in list_holders(record.census))
        when = time.strftime("%H:%M:%S", time.localtime(record.census.timestamp_seconds))
        yield "census", f"at {when}, after {record.census.steps:,} steps"


def _forecast(device: RecordedDevice, gpu: str) -> str:
    leak = f"leak{f' on {gpu}' if gpu else ''} of {format_growth(device.memory_growth_bytes_per_second or 0.0)}"
    if device.seconds_to_oom is None:
        return f"{leak}; time to out of memory unknown"
    left = format_forecast(device.seconds_to_oom, device.seconds_to_oom_lower, device.seconds_to_oom_upper)
    return f"{leak}: out of memory {left}"


def _host_forecast(growth: float, seconds: float | None) -> str:
    left = "" if seconds is None else f": host out of memory in about {format_elapsed(seconds)}"
    return f"leak in host memory of {format_growth(growth)}{left}"


def _describe_course(record: RunRecord, device: RecordedDevice) -> str:
    """Return a sentence that says whether memory is steady, by the timeline alone."""
    timeline = device.timeline
    assert timeline is not None
    verb = "is" if record.outcome is None else "was"
    first = _first_settled_point(timeline)
    lows = timeline.lowest_bytes[first:]
    lasted = timeline.ended_seconds[-1] - timeline.began_seconds[first]
    if len(lows) < MIN_POINTS or lasted < MIN_SECONDS:
        return f"reported for {format_elapsed(lasted)}: too short to say whether it {verb} steady"
    third = len(lows) // 3
    before, after = min(lows[third : 2 * third]), min(lows[-third:])
    if abs(after - before) <= max(STEADY_RATIO * before, STEADY_BYTES):
        left = device.min_headroom_bytes
        room = "" if left is None else f", headroom never below {format_bytes(left)}"
        return f"{verb} steady: {format_bytes(after)} in use between steps{room}"
    change = f"{'rose' if after > before else 'fell'} {format_bytes(abs(after - before))}"
    return f"{change} in the last third of the run; not a clear trend"
