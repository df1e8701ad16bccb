"""Layout of `gpuwarden top`: problems, GPUs, runs and events, as many lines of each as fit the terminal."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from gpuwarden.cli.top.gpu_table import MIN_WIDEST_COLUMNS, count_rows, make_gpu_table
from gpuwarden.cli.top.run_table import make_run_table
from gpuwarden.cli.top.state_reader import format_place, place_by_uuid
from gpuwarden.cli.top.style import RANK, STYLES, Column, condition_mark, draw_table, text_cell
from gpuwarden.cli.top.view import DEFAULT_ORDER, sort_gpus, sort_runs
from gpuwarden.formatting import format_bytes, format_elapsed
from gpuwarden.web.api.api_object import ApiObject

MAX_TROUBLES = 6
MIN_EVENT_LINES = 3  # if lines are scarce
_UNLIMITED = 10_000  # lines
_WORDS: Mapping[str, str] = {"critical": "critical", "warning": "warning", "unknown": "unknown", "ok": "OK"}


def render_box(answer: Any, width: int, height: int | None, now: float, order: str = DEFAULT_ORDER) -> RenderableType:
    """Draw an answer of `/api/v1/state` in `height` lines, or in full without a height. `now` is Unix time."""
    return Group(*_lines(ApiObject(answer), width, _UNLIMITED if height is None else height, now, order))


def _lines(box: ApiObject, width: int, height: int, now: float, order: str) -> Iterator[RenderableType]:
    gpus, runs, events = sort_gpus(box.parts("gpus"), order), sort_runs(box.parts("runs"), order), box.parts("events")
    models = {gpu.text("name") for gpu in gpus}
    head = [_title(box, gpus, runs, models if width >= MIN_WIDEST_COLUMNS else (), width), *_warnings(box, now)]
    head += _troubles(gpus, runs, min(MAX_TROUBLES, max(height // 6, 1)))
    yield from head
    dropped = max(int(box.number("runs_dropped") or 0), 0)
    titles = 3 if events else 2
    left = max(height - len(head) - titles, 0)
    wanted = count_rows(gpus), max(len(runs) + bool(dropped), 1), len(events)
    gap = [Text("")] if sum(wanted) + titles <= left else []
    # Events get a few lines, GPUs half of the rest or what runs leave free; events get the lines that remain.
    few = min(len(events), MIN_EVENT_LINES, left // 3)
    for_gpus = min(wanted[0], max((left - few) // 2, left - few - wanted[1]))
    for_runs = min(wanted[1], left - few - for_gpus)
    yield from gap
    fitting = _fitting(gpus, for_gpus)
    if fitting or not gpus:
        yield (
            make_gpu_table(fitting, runs, width, model_names=len(models) > 1) if gpus else Text("No GPUs found.", "dim")
        )
    if len(fitting) < len(gpus):
        yield _more(len(gpus) - len(fitting), "GPU")
    yield from gap
    shown = runs if len(runs) + bool(dropped) <= for_runs else runs[: max(for_runs - 1, 0)]
    yield make_run_table(shown, place_by_uuid(gpus), width) if runs else _no_runs(box)
    if more := len(runs) - len(shown) + dropped:
        yield _more(more, "run")
    if events:
        yield from gap
        yield _events(events[: left - for_gpus - for_runs], width)


def _fitting(gpus: Sequence[ApiObject], lines: int) -> Sequence[ApiObject]:
    """Return the GPUs that fit with their MIG instances and a line that counts the others."""
    if count_rows(gpus) <= lines:
        return gpus
    return gpus[: max((n for n in range(len(gpus)) if count_rows(gpus[:n]) < lines), default=0)]


def _more(count: int, of: str) -> Text:
    return Text(f"  and {count} more {of}{'' if count == 1 else 's'}", "dim")


def _title(
    box: ApiObject, gpus: Sequence[ApiObject], runs: Sequence[ApiObject], models: Collection[str], width: int
) -> Text:
    """Return the title: host, GPUs by condition, and the GPU model if there is one and it fits."""
    host = box.part("host")
    line = Text(no_wrap=True, overflow="crop")
    line.append_text(text_cell(host.text("name") or "gpuwarden", "bold"))
    counts = {level: sum(gpu.text("condition") == level for gpu in gpus) for level in RANK}
    parts = [Text(f"{count} {_WORDS[level]}", STYLES[level]) for level, count in counts.items() if count]
    model = f" {next(iter(models))}" if len(models) == 1 else ""
    line.append(f"  {len(gpus)}{model} GPU{'' if len(gpus) == 1 else 's'}: " if gpus else "  no GPUs")
    line.append_text(Text(", ").join(parts))
    running = sum(run.is_true("up") for run in runs)
    line.append(f"  {running} run{'' if running == 1 else 's'}")
    size, available = host.number("memory_size_bytes"), host.number("memory_available_bytes")
    if size is not None and available is not None:
        line.append(f"  host {format_bytes(size - available)} of {format_bytes(size)}")
    polled = box.number("polled_timestamp_seconds")
    row = [line, Text("" if polled is None else _clock(polled))]
    return draw_table([Column(""), Column("", 8, right=True)], [row], width, fill=True)


def _warnings(box: ApiObject, now: float) -> Iterator[Text]:
    """Return what applies to all that is shown: simulated GPUs, a driver fault, a pause, an old poll."""
    daemon, polled = box.part("daemon"), box.number("polled_timestamp_seconds")
    source = daemon.text("source")
    if source and source != "nvml":
        kind = "Demo data: simulated GPUs" if source == "simulated" else f"Replay of a {source}"
        yield text_cell(f"{kind}, not this machine's.", STYLES["warning"])
    if fault := daemon.text("fault"):
        parts = [f"The driver does not answer: {fault}", daemon.text("fault_advice")]
        yield text_cell("; ".join(filter(None, parts)), STYLES["critical"])
    until = daemon.number("paused_until_timestamp_seconds")
    if until is not None:
        yield Text(f"Paused until {_clock(until)}: GPUs are not polled. End with: gpuwarden resume", STYLES["warning"])
    stale = box.part("thresholds").number("poll_stale_seconds")
    if polled is not None and stale is not None and now - polled > stale:
        yield Text(f"The last poll was {format_elapsed(now - polled)} ago.", STYLES["critical"])


def _troubles(gpus: Sequence[ApiObject], runs: Sequence[ApiObject], most: int) -> Iterator[Text]:
    found = [(gpu, f"GPU {format_place(gpu)}") for gpu in gpus]
    found += [(run, f"run {run.text('name')}") for run in runs if run.is_true("up")]
    bad = [(of, where) for of, where in found if of.text("condition") in ("critical", "warning")]
    bad.sort(key=lambda each: RANK[each[0].text("condition")])
    shown = bad if len(bad) <= most else bad[: most - 1]
    for of, where in shown:
        line = condition_mark(of.text("condition")).append_text(text_cell(f" {where}: ", "bold"))
        line.append_text(text_cell("; ".join(each.text("text") for each in of.parts("troubles"))))
        line.no_wrap, line.overflow = True, "ellipsis"
        yield line
    if len(shown) < len(bad):
        yield Text(f"  and {len(bad) - len(shown)} more problems", "dim")


def _no_runs(box: ApiObject) -> Text:
    socket = box.part("daemon").text("runs_socket")
    where = f" to {socket}" if socket else ""
    return text_cell(f"No training run reports{where}; see docs/use/keras.md", "dim")


def _events(events: Sequence[ApiObject], width: int) -> Text:
    rows = []
    for event in events:
        at, level = event.number("timestamp_seconds"), event.text("level")
        when = Text("" if at is None else _clock(at), "dim")
        rows.append([when, text_cell(event.text("text"), STYLES.get(level, ""))])
    return draw_table([Column("EVENTS", 8), Column("")], rows, width, fill=True)


def _clock(seconds: float) -> str:
    """Format a time of day; the answer may have any number."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "?"
