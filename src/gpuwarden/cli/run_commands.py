"""Command `gpuwarden runs`: gets run records from the daemon, and writes them for a person or as JSON.

Names and messages are a training process's own: they reach the terminal without anything that it would obey.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from gpuwarden.cli.api_client import NoAnswerError, StatusError, daemon_url, fetch_json, sanitize
from gpuwarden.cli.memory_chart import choose_alphabet
from gpuwarden.cli.run_report import TerminalFormat, render_memory_story
from gpuwarden.config.schema import Config
from gpuwarden.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_elapsed,
    format_energy,
    format_ratio,
)
from gpuwarden.records.paths import database_folder, user_database_folder
from gpuwarden.records.record import (
    MAX_LISTED,
    RecordedAllocation,
    RecordedDevice,
    RecordedError,
    RunRecord,
    RunRecordError,
    record_from_json,
)
from gpuwarden.records.summary import format_counts

NAME_WIDTH = 16  # least width of a run's name
LABEL_WIDTH = 14
INDENT = "  "
SAID = 400  # characters of an error's message: what went wrong stands at its end, behind a long way there


def listing(config: Config, which: Sequence[str], limit: int | None, *, as_json: bool) -> str:
    """Return the runs in words or as JSON, those that go on first; `which` is of live and past. Raises OSError."""
    answer = _listed(config, limit)
    chosen = {name: answer[name][:limit] for name in which}
    if as_json:
        return json.dumps({**answer, "live": [], "past": [], **chosen}, indent=2) + "\n"
    found = [each for name in which for each in chosen[name]]
    if not found:
        return f"no training run has reported to the daemon at {daemon_url(config.web.listen)}\n"
    receipts: list[RunRecord] = []
    unread: list[str] = []
    for each in found:
        try:
            receipts.append(record_from_json(each))
        except RunRecordError as error:  # of another version, or damaged: the others are as good as ever
            unread.append(f"{_name_of(each)} can't be read: {sanitize(str(error))}")
    if not receipts:
        raise OSError(None, f"none of {len(found)} runs can be read by this version; {unread[0]}")
    return "\n".join([*_table(receipts, _width()), *unread]) + "\n"


def one(config: Config, prefix: str, *, as_json: bool) -> str:
    """Return one run, named by the begin of its id, in words or as JSON. Raises OSError."""
    answer = _listed(config)
    found: dict[str, Any] = {}
    for each in (*answer["live"], *answer["past"]):
        if isinstance(each, dict) and str(each.get("run_id", "")).startswith(prefix):
            found.setdefault(str(each["run_id"]), each)  # of several boots' the newest
    if len(found) > 1 and prefix not in found:
        some = ", ".join(sanitize(run_id) for run_id in list(found)[:8])
        raise OSError(None, f"{sanitize(prefix)} is the begin of {len(found)} runs: {some}")
    run_id = prefix if prefix in found else next(iter(found), prefix)  # a whole id may be of a run too old for the list
    whole = _ask(config, f"/{urllib.parse.quote(run_id, safe='', errors='surrogateescape')}") or found.get(run_id)
    if whole is None:
        raise OSError(None, f"no run {sanitize(prefix)} is known; gpuwarden runs lists them. {_where(config, answer)}")
    if as_json:
        return json.dumps(whole, indent=2) + "\n"
    try:
        receipt = record_from_json(whole)
    except RunRecordError as error:
        raise OSError(None, f"the daemon's answer is not of this version: {error}") from None
    return "\n".join(_whole(receipt, _width())) + "\n"


def _listed(config: Config, limit: int | None = None) -> dict[str, Any]:
    """Return the records of all runs that go on, and of the newest that ended, without their stories."""
    answer = _ask(config, f"?limit={min(limit, MAX_LISTED)}" if limit else "")
    if not (isinstance(answer, dict) and all(isinstance(answer.get(name), list) for name in ("live", "past"))):
        raise OSError(None, f"{daemon_url(config.web.listen)} is no gpuwarden that knows of runs")
    return answer


def _ask(config: Config, path: str) -> Any:
    url = daemon_url(config.web.listen)
    try:
        return fetch_json(config.web.listen, f"/api/v1/runs{path}")
    except StatusError as error:
        if path.startswith("/") and error.status == HTTPStatus.NOT_FOUND:  # it was forgotten meanwhile
            return None
        if path.startswith("/") and error.status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise OSError(None, f"the daemon at {url} cannot read its run database now; its log says why") from None
        raise OSError(
            None, f"{url} is no gpuwarden that knows of runs: it answers with status {error.status}"
        ) from None
    except NoAnswerError as error:
        raise OSError(
            None,
            f"no daemon answers at {url}: {error}; if it runs, say where with --listen or --config. "
            + _where(config, {}),
        ) from None


def _where(config: Config, answer: Mapping[str, Any]) -> str:
    """Say where receipts of past runs lie."""
    if "folder" in answer:
        return f"Receipts lie in {sanitize(str(answer['folder']))}"
    if answer:
        return "This daemon keeps receipts in memory alone, those of its own time"
    own = user_database_folder()
    folders = [config.receipts.path, database_folder(config.receipts), own if own and own.is_dir() else None]
    names = dict.fromkeys(sanitize(str(folder)) for folder in folders if folder)
    return f"Receipts of past runs lie in {' or '.join(names)}" if names else "Receipts are not kept"


def _name_of(listed: Any) -> str:
    run_id = listed.get("run_id") if isinstance(listed, dict) else None
    return f"run {sanitize(str(run_id))}" if run_id is not None else "a run without an id"


def _width() -> int:
    return shutil.get_terminal_size((80, 24)).columns


def _fit(text: str, width: int) -> str:
    """Cut or pad a text to so many columns."""
    return set_cell_size(text, width) if cell_len(text) <= width else f"{set_cell_size(text, width - 1)}…"


def _peak(receipt: RunRecord) -> str:
    peaks = [each.memory_peak_bytes for each in receipt.devices if each.memory_peak_bytes is not None]
    return format_bytes(max(peaks)) if peaks else ""


def _began(seconds: float) -> str:
    """Write the time of a run of today and the day of an earlier one, as ps does: the line has little room."""
    began, today = time.localtime(seconds), time.localtime()
    return time.strftime("%H:%M" if began[:3] == today[:3] else "%m-%d", began)


_COLUMNS: Mapping[str, Callable[[RunRecord], str]] = {
    "RUN": lambda receipt: receipt.run_id,
    "STATE": lambda receipt: receipt.outcome or (receipt.phase or "reports"),
    "BEGAN": lambda receipt: _began(receipt.began_timestamp_seconds),
    "FOR": lambda receipt: format_elapsed(receipt.duration_seconds),
    "STEPS": lambda receipt: "" if receipt.steps is None else format_count(receipt.steps),
    "PEAK": _peak,
}
_RIGHT = ("FOR", "STEPS", "PEAK")


def _table(receipts: Sequence[RunRecord], width: int) -> Iterator[str]:
    """Write a line a run; the name takes the room that is left, and the id is never cut."""
    columns = {title: [sanitize(write(each)) for each in receipts] for title, write in _COLUMNS.items()}
    widths = {title: max(len(title), *map(cell_len, texts)) for title, texts in columns.items()}
    left = max(width - sum(widths.values()) - 2 * len(widths), NAME_WIDTH)
    names = [sanitize(each.name) for each in receipts]
    room = min(left, max(len("NAME"), *map(cell_len, names)))
    for row in range(-1, len(receipts)):
        cells = []
        for title in _COLUMNS:
            text = title if row < 0 else columns[title][row]
            cells.append(f"{text:>{widths[title]}}" if title in _RIGHT else _fit(text, widths[title]))
        cells.insert(1, _fit("NAME" if row < 0 else names[row], room))
        yield "  ".join(cells).rstrip()


def _whole(receipt: RunRecord, width: int) -> Iterator[str]:
    for label, text in _lines(receipt):
        yield from _wrapped(label, text, width)
    for device in receipt.devices:
        yield ""
        yield from _wrapped("", f"{device.name} {device.uuid}", width)
        for label, text in _device_lines(device):
            yield from _wrapped(f"{INDENT}{label}", text, width)
    last = next((error for error in reversed(receipt.errors_told) if error.verdict), None)  # the story ends with it
    for error in receipt.errors_told:
        yield ""
        yield from _wrapped("", f"{_moment(error.timestamp_seconds)} {error.kind}: {error.exception}", width)
        for label, text in _error_lines(replace(error, verdict=None) if error is last else error):
            yield from _wrapped(f"{INDENT}{label}", text, width)
    yield from _story(receipt, TerminalFormat(width, choose_alphabet(sys.stdout.encoding)))


def _story(receipt: RunRecord, page: TerminalFormat) -> Iterator[str]:
    """Write what its memory did: last, as that is what a terminal still shows."""
    for label, text in render_memory_story(receipt, page):
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


def _lines(receipt: RunRecord) -> Iterator[tuple[str, str]]:
    """Say what the run was and did, as far as it is known."""
    yield "run", receipt.run_id
    yield "name", receipt.name
    yield "framework", receipt.framework
    yield from _maybe("job", _job(receipt))
    uid = f"uid {receipt.uid}"
    yield "process", f"pid {receipt.pid} of {f'{receipt.user} ({uid})' if receipt.user else uid}"
    yield "began", _moment(receipt.began_timestamp_seconds)
    if receipt.outcome is None:
        yield "so far", format_elapsed(receipt.duration_seconds)
    else:
        if receipt.ended_timestamp_seconds is not None:
            yield "ended", _moment(receipt.ended_timestamp_seconds)
        yield "lasted", format_elapsed(receipt.duration_seconds)
        yield "outcome", f"{receipt.outcome} ({receipt.evidence})"
    yield from _training_lines(receipt)
    yield from _cost_lines(receipt)


def _training_lines(receipt: RunRecord) -> Iterator[tuple[str, str]]:
    yield from _maybe("phase", None if receipt.outcome and receipt.phase == "idle" else receipt.phase)
    spent = {name: seconds for name, seconds in (receipt.phase_seconds or {}).items() if seconds}
    yield from _maybe("in phases", ", ".join(f"{name} {format_elapsed(seconds)}" for name, seconds in spent.items()))
    yield from _maybe("epoch", receipt.epoch, str)
    yield from _maybe("steps", receipt.steps, str)
    yield from _maybe("examples", receipt.examples, str)
    times = [("p50", receipt.step_median_seconds), ("p95", receipt.step_p95_seconds)]
    yield from _maybe(
        "step time", ", ".join(f"{name} {format_duration(each)}" for name, each in times if each is not None)
    )
    yield from _maybe("compiling", receipt.compile_seconds or None, format_duration)
    yield from _maybe("stalls", receipt.stalls or None)
    yield from _maybe("loss", receipt.loss, "{:.6g}".format)
    yield from _maybe("input wait", receipt.input_wait_ratio, lambda share: f"{format_ratio(share)} of step time")
    yield from _maybe("errors", format_counts(receipt.errors or {}).replace(",", ", ").replace(":", " "))


def _cost_lines(receipt: RunRecord) -> Iterator[tuple[str, str]]:
    yield from _maybe("GPU time", receipt.gpu_seconds, format_elapsed)
    yield from _maybe("idle", receipt.gpu_idle_ratio, lambda share: f"{format_ratio(share)} of GPU time")
    yield from _maybe("energy", receipt.energy_joules, format_energy)
    yield from _maybe("throttled", _reasons(receipt.throttled_seconds))
    yield from _maybe("in steps", _reasons(receipt.throttled_step_seconds))
    yield from _maybe("XIDs", format_counts(receipt.xids or {}).replace(",", ", ").replace(":", " x "))
    for uuid, reason in (receipt.headroom_unknown or {}).items():
        yield "headroom", f"unknown on {uuid or 'a device'}: {reason.replace('_', ' ')}"
    yield from _maybe("host memory", receipt.host_memory_peak_bytes, lambda count: f"{format_bytes(count)} at most")
    yield from _maybe("CPU time", receipt.cpu_seconds, format_elapsed)
    yield from _maybe("from storage", receipt.read_bytes, format_bytes)
    yield from _maybe("to storage", receipt.written_bytes, format_bytes)
    yield from _maybe("lost reports", receipt.reports_dropped or None, str)


def _device_lines(device: RecordedDevice) -> Iterator[tuple[str, str]]:
    yield from _maybe("held", device.gpu_seconds, format_elapsed)
    yield from _maybe("idle", device.idle_seconds, format_elapsed)
    yield from _maybe("energy", device.energy_joules, format_energy)
    yield from _maybe("throttled", _reasons(device.throttled_seconds))
    yield from _maybe("peak memory", device.memory_peak_bytes, format_bytes)
    yield from _maybe("limit", device.memory_limit_bytes, format_bytes)
    yield from _maybe("headroom", device.headroom_at_peak_bytes, lambda count: f"{format_bytes(count)} at that peak")
    yield from _maybe("least", device.lowest_headroom_bytes, lambda count: f"{format_bytes(count)} of headroom")
    yield from _maybe("XIDs", format_counts(device.xids or {}).replace(",", ", ").replace(":", " x "))


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
    yield "said", error.text if len(error.text) <= SAID else f"… {error.text[-SAID:]}"


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


def _job(receipt: RunRecord) -> str | None:
    if receipt.job is None and receipt.rank is None:
        return None
    of = f" of {receipt.world_size}" if receipt.world_size is not None else ""
    rank = f"rank {receipt.rank}{of}" if receipt.rank is not None else ""
    return " ".join(filter(None, [receipt.job, rank]))


def _reasons(seconds: Mapping[str, float] | None) -> str:
    return ", ".join(f"{format_elapsed(each)} by {reason}" for reason, each in (seconds or {}).items() if each)


def _maybe(label: str, value: Any, write: Callable[[Any], str] = str) -> Iterator[tuple[str, str]]:
    if value is not None and value != "":
        yield label, write(value)
