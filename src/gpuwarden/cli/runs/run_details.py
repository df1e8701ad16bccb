"""Report of one training run: what it did and cost, its GPUs, its errors, and its memory over time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from gpuwarden.analysis.findings import list_findings
from gpuwarden.analysis.memory.headroom import headroom_limit_text
from gpuwarden.cli.runs.memory_chart import choose_alphabet
from gpuwarden.cli.runs.memory_report import (
    TerminalFormat,
    gpu_name,
    render_memory_timeline,
)
from gpuwarden.cli.runs.run_list import state_text
from gpuwarden.errors.kind_guides import describe_error, find_text_guide
from gpuwarden.formatting import (
    cut_middle,
    format_bytes,
    format_elapsed,
    sanitize,
)
from gpuwarden.protocol.messages import OOM_KINDS
from gpuwarden.records.figure import list_figure_rows
from gpuwarden.records.record import RecordedDevice, RunRecord
from gpuwarden.records.record_parts import RecordedAllocation, RecordedError, RecordedHeadline

LABEL_WIDTH = 14
INDENT = "  "
MAX_MESSAGE_CHARACTERS = 600  # of an error's message: a framework's may have its stack, or a layer's arguments


def render_details(record: RunRecord, gpus: Mapping[str, str], width: int, page: str | None = None) -> Iterator[str]:
    """Yield the lines of the report, `width` columns wide.

    `gpus` has the numbers of GPUs by UUID, `page` is the URL of the run's page.
    """
    for label, text in _lines(record, gpus, page):
        yield from wrap_text(label, text, width)
    for device in sorted(record.devices, key=lambda each: (len(name := gpu_name(each.uuid, gpus)), name)):
        yield ""
        number = f"GPU {gpus[device.uuid]}  " if device.uuid in gpus else ""
        yield from wrap_text("", f"{number}{device.name} {device.uuid}", width)
        for label, text in _device_lines(device):
            yield from wrap_text(f"{INDENT}{label}", text, width)
    for error in record.reported_errors:
        yield ""
        yield from wrap_text(
            "", f"{_moment(error.timestamp_seconds)} {describe_error(error.kind, error.exception)}", width
        )
        for label, text in _error_lines(error, gpus, record.headline):
            yield from wrap_text(f"{INDENT}{label}", text, width)
    yield from _memory_lines(record, TerminalFormat(width, choose_alphabet(sys.stdout.encoding), gpus))


def _memory_lines(record: RunRecord, page: TerminalFormat) -> Iterator[str]:
    """Yield the report on memory; it comes last, so that a terminal still shows it."""
    for label, text in render_memory_timeline(record, page):
        if label is None:
            yield sanitize(text)
        else:
            yield from wrap_text(label, text, page.width)


def wrap_text(label: str, text: str, width: int, label_width: int = LABEL_WIDTH) -> Iterator[str]:
    """Yield a label and its text, wrapped to the right of the label."""
    start = f"{label:<{label_width}}" if label else ""
    wrapped = Text(sanitize(text)).wrap(Console(width=width), max(width - len(start), 20))
    for number, line in enumerate(wrapped):
        yield ((start if number == 0 else " " * len(start)) + line.plain).rstrip()


def _moment(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _lines(record: RunRecord, gpus: Mapping[str, str], page: str | None) -> Iterator[tuple[str, str]]:
    yield "run", record.run_id
    yield from _known("page", page)
    yield "name", record.name
    yield "framework", record.framework
    yield from _known("job", _job(record))
    yield "user", f"{record.user} (uid {record.uid})" if record.user else f"uid {record.uid}"
    yield from _known("pid", record.pid or None)
    yield "started", _moment(record.began_timestamp_seconds)
    if record.outcome is None:
        yield "elapsed", format_elapsed(record.duration_seconds)
    else:
        yield from _known("ended", record.ended_timestamp_seconds, _moment)
        yield "duration", format_elapsed(record.duration_seconds)
    yield "state", state_text(record) + (f" ({record.evidence})" if record.evidence else "")
    yield from _finding_lines(record)
    yield from _known("phase", None if record.outcome and record.phase == "idle" else record.phase)
    yield from list_figure_rows(record)
    yield from _headroom_lines(record, gpus)


def _finding_lines(record: RunRecord) -> Iterator[tuple[str, str]]:
    if loss := record.nonfinite_loss:
        reported, noticed = loss.reported, f" Noticed at {_moment(loss.first_timestamp_seconds)}."
    else:
        reported, noticed = None, ""
    for finding in list_findings(reported, record.no_gpu, None):
        if record.headline is not None and record.headline.name == finding.name:
            continue  # the report ends with it
        yield "finding", finding.text + (noticed if finding.name == "nonfinite_loss" else "")
        yield "next step", finding.next_step


def _headroom_lines(record: RunRecord, gpus: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for uuid, reason in (record.headroom_unknown or {}).items():
        yield "headroom", f"unknown on {gpu_name(uuid, gpus) if uuid else 'a GPU'}: {reason.replace('_', ' ')}"


def _device_lines(device: RecordedDevice) -> Iterator[tuple[str, str]]:
    yield from list_figure_rows(device)
    yield from _known("peak memory", device.highest_peak_bytes, format_bytes)
    under = headroom_limit_text(device.headroom_limit, device.headroom_limit_bytes)
    yield from _known("headroom", device.min_headroom_bytes, lambda count: f"{format_bytes(count)} minimum{under}")


def _error_lines(
    error: RecordedError, gpus: Mapping[str, str], headline: RecordedHeadline | None
) -> Iterator[tuple[str, str]]:
    where = [
        error.phase or "",
        "" if error.steps is None else f"after {error.steps:,} step{'' if error.steps == 1 else 's'}",
    ]
    yield from _known("during", " ".join(filter(None, where)))
    yield from _known("at", error.frame)
    for allocation in error.allocations:
        yield "requested", _allocation(allocation)
    for uuid, left in (error.headroom_bytes or {}).items():
        least = (error.least_headroom_bytes or {}).get(uuid, left)
        at_peak = f", {format_bytes(least)} at the peak" if least < left else ""
        yield "headroom", f"{format_bytes(left)} on {gpu_name(uuid, gpus)}{at_peak}"
    for device, memory in (error.memory or {}).items():
        limit = f" of {format_bytes(memory.limit_bytes)}" if memory.limit_bytes is not None else ""
        yield "in use", f"{format_bytes(memory.in_use_bytes)}{limit} on {device}"
    is_last = headline is not None and headline.is_of(error)  # the report ends with it
    if error.diagnosis and not is_last:
        yield "diagnosis", f"{error.diagnosis.name.replace('_', ' ')}: {error.diagnosis.evidence}"
        yield "next step", error.diagnosis.next_step
    elif error.kind not in OOM_KINDS and not is_last:  # records of earlier versions have no next step
        yield "next step", error.next_step or find_text_guide(error.kind, error.exception, error.text).next_step
    yield from _known("message", cut_middle(error.text, MAX_MESSAGE_CHARACTERS))


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


def _known(label: str, value: Any, write: Callable[[Any], str] = str) -> Iterator[tuple[str, str]]:
    if value is not None and value != "":
        yield label, write(value)
