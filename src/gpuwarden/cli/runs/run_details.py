"""Details of one training run: what it was and did, its devices, its errors, and the report of its memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.text import Text

from gpuwarden.cli.common.terminal import sanitize
from gpuwarden.cli.runs.memory_chart import choose_alphabet
from gpuwarden.cli.runs.memory_report import TerminalFormat, render_memory_story
from gpuwarden.cli.runs.run_list import state_text
from gpuwarden.formatting import format_bytes, format_duration, format_elapsed, format_energy, format_ratio
from gpuwarden.records.record import RecordedAllocation, RecordedDevice, RecordedError, RunRecord
from gpuwarden.records.summary import format_counts

LABEL_WIDTH = 14
INDENT = "  "
MAX_MESSAGE_CHARACTERS = 400  # of an error's message: what went wrong is at its end, after many others


def render_details(record: RunRecord, width: int) -> Iterator[str]:
    """Render a run in lines of a width in columns."""
    for label, text in _lines(record):
        yield from _wrapped(label, text, width)
    for device in record.devices:
        yield ""
        yield from _wrapped("", f"{device.name} {device.uuid}", width)
        for label, text in _device_lines(device):
            yield from _wrapped(f"{INDENT}{label}", text, width)
    last = next((error for error in reversed(record.errors_told) if error.verdict), None)  # the story ends with it
    for error in record.errors_told:
        yield ""
        yield from _wrapped("", f"{_moment(error.timestamp_seconds)} {error.kind}: {error.exception}", width)
        for label, text in _error_lines(replace(error, verdict=None) if error is last else error):
            yield from _wrapped(f"{INDENT}{label}", text, width)
    yield from _story(record, TerminalFormat(width, choose_alphabet(sys.stdout.encoding)))


def _story(record: RunRecord, page: TerminalFormat) -> Iterator[str]:
    """Write what its memory did: last, as that is what a terminal still shows."""
    for label, text in render_memory_story(record, page):
        if label is None:
            yield sanitize(text)
        else:
            yield from _wrapped(label, text, page.width)


def _wrapped(label: str, text: str, width: int) -> Iterator[str]:
    """Write a label and its text, which goes on below itself."""
    start = f"{label:<{LABEL_WIDTH}}" if label else ""
    wrapped = Text(sanitize(text)).wrap(Console(width=width), max(width - len(start), 20))
    for number, line in enumerate(wrapped):
        yield ((start if number == 0 else " " * len(start)) + line.plain).rstrip()


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _lines(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Say what the run was and did, as far as it is known."""
    yield "run", record.run_id
    yield "name", record.name
    yield "framework", record.framework
    yield from _maybe("job", _job(record))
    uid = f"uid {record.uid}"
    yield "process", f"pid {record.pid} of {f'{record.user} ({uid})' if record.user else uid}"
    yield "began", _moment(record.began_timestamp_seconds)
    if record.outcome is None:
        yield "so far", format_elapsed(record.duration_seconds)
    else:
        if record.ended_timestamp_seconds is not None:
            yield "ended", _moment(record.ended_timestamp_seconds)
        yield "lasted", format_elapsed(record.duration_seconds)
    yield "state", state_text(record) + (f" ({record.evidence})" if record.outcome else "")
    yield from _training_lines(record)
    yield from _cost_lines(record)


def _training_lines(record: RunRecord) -> Iterator[tuple[str, str]]:
    yield from _maybe("phase", None if record.outcome and record.phase == "idle" else record.phase)
    spent = {name: seconds for name, seconds in (record.phase_seconds or {}).items() if seconds}
    yield from _maybe("in phases", ", ".join(f"{name} {format_elapsed(seconds)}" for name, seconds in spent.items()))
    yield from _maybe("epoch", record.epoch, str)
    yield from _maybe("steps", record.steps, str)
    yield from _maybe("examples", record.examples, str)
    times = [("p50", record.step_median_seconds), ("p95", record.step_p95_seconds)]
    yield from _maybe(
        "step time", ", ".join(f"{name} {format_duration(each)}" for name, each in times if each is not None)
    )
    yield from _maybe("compiling", record.compile_seconds or None, format_duration)
    yield from _maybe("stalls", record.stalls or None)
    yield from _maybe("loss", record.loss, "{:.6g}".format)
    yield from _maybe("input wait", record.input_wait_ratio, lambda share: f"{format_ratio(share)} of step time")
    yield from _maybe("errors", _counts(record.errors, " "))


def _cost_lines(record: RunRecord) -> Iterator[tuple[str, str]]:
    yield from _maybe("GPU time", record.gpu_seconds, format_elapsed)
    yield from _maybe("idle", record.gpu_idle_ratio, lambda share: f"{format_ratio(share)} of GPU time")
    yield from _maybe("energy", record.energy_joules, format_energy)
    yield from _maybe("throttled", _reasons(record.throttled_seconds))
    yield from _maybe("in steps", _reasons(record.throttled_step_seconds))
    yield from _maybe("XIDs", _counts(record.xids, " x "))
    for uuid, reason in (record.headroom_unknown or {}).items():
        yield "headroom", f"unknown on {uuid or 'a device'}: {reason.replace('_', ' ')}"
    yield from _maybe("host memory", record.host_memory_peak_bytes, lambda count: f"{format_bytes(count)} at most")
    yield from _maybe("CPU time", record.cpu_seconds, format_elapsed)
    yield from _maybe("from storage", record.read_bytes, format_bytes)
    yield from _maybe("to storage", record.written_bytes, format_bytes)
    yield from _maybe("lost reports", record.reports_dropped or None, str)


def _device_lines(device: RecordedDevice) -> Iterator[tuple[str, str]]:
    yield from _maybe("held", device.gpu_seconds, format_elapsed)
    yield from _maybe("idle", device.idle_seconds, format_elapsed)
    yield from _maybe("energy", device.energy_joules, format_energy)
    yield from _maybe("throttled", _reasons(device.throttled_seconds))
    yield from _maybe("peak memory", device.memory_peak_bytes, format_bytes)
    yield from _maybe("limit", device.memory_limit_bytes, format_bytes)
    yield from _maybe("headroom", device.headroom_at_peak_bytes, lambda count: f"{format_bytes(count)} at that peak")
    yield from _maybe("least", device.lowest_headroom_bytes, lambda count: f"{format_bytes(count)} of headroom")
    yield from _maybe("XIDs", _counts(device.xids, " x "))


def _error_lines(error: RecordedError) -> Iterator[tuple[str, str]]:
    where = [error.phase or "", "" if error.steps is None else f"after {error.steps} steps"]
    yield from _maybe("in", " ".join(filter(None, where)))
    for allocation in error.allocations:
        yield "wanted", _allocation(allocation)
    for uuid, left in (error.headroom_bytes or {}).items():
        least = (error.least_headroom_bytes or {}).get(uuid, left)
        yield (
            "headroom",
            f"{format_bytes(left)} on {uuid}" + (f", {format_bytes(least)} at the peak" if least < left else ""),
        )
    for device, memory in (error.memory or {}).items():
        limit = f" of {format_bytes(memory.limit_bytes)}" if memory.limit_bytes is not None else ""
        yield "in use", f"{format_bytes(memory.in_use_bytes)}{limit} on {device}"
    if error.verdict:
        yield "verdict", f"{error.verdict.name.replace('_', ' ')}: {error.verdict.evidence}"
        yield "next step", error.verdict.next_step
    yield (
        "said",
        error.text if len(error.text) <= MAX_MESSAGE_CHARACTERS else f"… {error.text[-MAX_MESSAGE_CHARACTERS:]}",
    )


def _allocation(each: RecordedAllocation) -> str:
    shape = None if each.shape is None else f"[{each.shape}] {each.dtype or ''}".strip()
    words = [
        None if each.requested_bytes is None else format_bytes(each.requested_bytes),
        f"for {shape}" if shape else None,
        f"by {each.op}" if each.op else None,
        f"on {each.device}" if each.device else None,
        f"from {each.allocator}" if each.allocator else None,
    ]
    return " ".join(filter(None, words)) or "memory"


def _job(record: RunRecord) -> str | None:
    if record.job is None and record.rank is None:
        return None
    of = f" of {record.world_size}" if record.world_size is not None else ""
    rank = f"rank {record.rank}{of}" if record.rank is not None else ""
    return " ".join(filter(None, [record.job, rank]))


def _reasons(seconds: Mapping[str, float] | None) -> str:
    return ", ".join(f"{format_elapsed(each)} by {reason}" for reason, each in (seconds or {}).items() if each)


def _maybe(label: str, value: Any, write: Callable[[Any], str] = str) -> Iterator[tuple[str, str]]:
    if value is not None and value != "":
        yield label, write(value)


def _counts(counts: Mapping[str, int] | None, between: str) -> str:
    return format_counts(counts or {}).replace(",", ", ").replace(":", between)
