"""Report of a run's memory for a terminal: a chart for each device, the events, and the conclusion.

Lines of charts are this program's own; names that a run gives itself are in the texts, which the caller escapes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gpuwarden.cli.runs.memory_chart import LABEL_WIDTH, MIN_WIDTH, render_chart
from gpuwarden.formatting import format_bytes, format_elapsed, format_forecast, format_growth
from gpuwarden.records.record import MemoryTimeline, RecordedDevice, RecordedEvent, RunRecord

MAX_WIDTH = 140  # of a line
MAX_CHARTS = 2  # devices beyond which only the tightest has one
MAX_MARKS = 9
STEADY_RATIO, STEADY_BYTES = 0.01, 32 << 20  # by which memory may differ that is steady
MIN_POINTS, MIN_SECONDS = 8, 20.0  # in which that shows

_WEIGHT = {"oom": 0, "neighbour": 1, "pressure": 2, "retry": 3, "event": 4, "batch_size": 5, "phase": 6}

Line: TypeAlias = "tuple[str | None, str]"  # a label and a text, or None and a line of a chart


@dataclass(frozen=True, slots=True)
class TerminalFormat:
    """Width of the terminal in columns, and the letters for charts."""

    width: int
    letters: str


def render_memory_story(receipt: RunRecord, page: TerminalFormat) -> Iterator[Line]:
    """Return texts of any length with their labels, and the lines of charts as wide as the page."""
    told = sorted((each for each in receipt.devices if each.story is not None), key=_min_headroom)
    if told:
        yield from _render_devices(receipt, told, page)
    if lines := list(render_conclusion(receipt, told)):
        yield "", ""
        yield from lines


def _render_devices(receipt: RunRecord, told: Sequence[RecordedDevice], page: TerminalFormat) -> Iterator[Line]:
    seconds = max(story.ended_seconds[-1] for each in told if (story := each.story))
    width = max(min(page.width, MAX_WIDTH) - LABEL_WIDTH - 1, MIN_WIDTH)
    for number, device in enumerate(told):
        yield "", ""
        yield from _render_title(device)
        if device.story is not None and (number == 0 or len(told) <= MAX_CHARTS):
            yield "", f"{page.letters[-2]} in use  {page.letters[-1]} peak so far"
            yield from ((None, line) for line in render_chart(device.story, seconds, width, page.letters))
    marks = _choose_marks(receipt.marks)
    if marks:
        yield "", ""
    for mark in marks:
        yield time.strftime("%H:%M:%S", time.localtime(receipt.began_timestamp_seconds + mark.at_seconds)), mark.text
    if len(receipt.marks) > len(marks):
        yield "", f"and {len(receipt.marks) - len(marks)} of less importance (--json)"


def _min_headroom(device: RecordedDevice) -> float:
    """Return the least headroom, to have the tightest device first."""
    return float("inf") if device.lowest_headroom_bytes is None else device.lowest_headroom_bytes


def _render_title(device: RecordedDevice) -> Iterator[Line]:
    story = device.story
    assert story is not None
    low, high = min(story.lowest_bytes[_first_settled_point(story) :]), max(story.highest_bytes)
    words = [f"{format_bytes(low)} to {format_bytes(high)} in use", f"peak {format_bytes(max(story.peak_bytes))}"]
    if device.lowest_headroom_bytes is not None:
        words.append(f"least headroom {format_bytes(device.lowest_headroom_bytes)}")
    yield "memory on", device.uuid
    yield "", ", ".join(words)


def _first_settled_point(story: MemoryTimeline) -> int:
    """Return from which point on the model has been there: the first reports come before it is built."""
    return min(len(story.lowest_bytes) - 1, 1)


def _choose_marks(marks: Sequence[RecordedEvent]) -> list[RecordedEvent]:
    """Choose the marks that matter most, in the order of time; the newest of those that matter alike."""
    worth = sorted(marks, key=lambda mark: (_WEIGHT.get(mark.kind, len(_WEIGHT)), -mark.at_seconds))
    return sorted(worth[:MAX_MARKS], key=lambda mark: mark.at_seconds)


def render_conclusion(receipt: RunRecord, told: Sequence[RecordedDevice]) -> Iterator[Line]:
    """Say what follows: why memory was out and what to do, when it will be, or that it is steady; and batch sizes."""
    verdict = next((each.verdict for each in reversed(receipt.errors_told) if each.verdict), None)
    growing = [device for device in told if device.memory_growth_bytes_per_second is not None]
    for device in growing:
        yield "forecast", _forecast(device, several=len(told) > 1)
    if receipt.host_memory_growth_bytes_per_second is not None:
        yield "forecast", _host_forecast(receipt.host_memory_growth_bytes_per_second, receipt.seconds_to_host_oom)
    if told and not growing and not verdict:
        yield "memory", _describe_course(receipt, told[0])
    if receipt.batch_size_advice is not None:
        advice = receipt.batch_size_advice
        yield "batch size", f"{advice.text} ({advice.confidence} confidence)"
    if verdict:
        yield "verdict", f"{verdict.name.replace('_', ' ')}: {verdict.evidence}"
        yield "next step", verdict.next_step


def _forecast(device: RecordedDevice, *, several: bool) -> str:
    where = f" on {device.uuid}" if several else ""
    grows = f"grows{where} by {format_growth(device.memory_growth_bytes_per_second or 0.0)}"
    if device.seconds_to_oom is None:
        return f"{grows}; how long that can last is not known"
    left = format_forecast(device.seconds_to_oom, device.seconds_to_oom_lower, device.seconds_to_oom_upper)
    return f"{grows}: out of memory {left}"


def _host_forecast(growth: float, seconds: float | None) -> str:
    left = "" if seconds is None else f": the host is out of it in about {format_elapsed(seconds)}"
    return f"host memory grows by {format_growth(growth)}{left}"


def _describe_course(receipt: RunRecord, device: RecordedDevice) -> str:
    """Say in a sentence whether memory is steady, by the story alone."""
    story = device.story
    assert story is not None
    ended = receipt.outcome is not None
    first = _first_settled_point(story)
    lows = story.lowest_bytes[first:]
    lasted = story.ended_seconds[-1] - story.began_seconds[first]
    if len(lows) < MIN_POINTS or lasted < MIN_SECONDS:
        return f"{'was' if ended else 'is'} known for {format_elapsed(lasted)}: too short to tell whether it is steady"
    third = len(lows) // 3
    before, after = min(lows[third : 2 * third]), min(lows[-third:])
    if abs(after - before) <= max(STEADY_RATIO * before, STEADY_BYTES):
        left = device.lowest_headroom_bytes
        room = "" if left is None else f", never less than {format_bytes(left)} of headroom"
        return f"{'was' if ended else 'is'} steady: {format_bytes(after)} in use between steps{room}"
    word = "rose" if after > before else "fell"
    moved = format_bytes(abs(after - before))
    return f"{word} by {moved} in the last third of its time; that is no trend that would be sure"
