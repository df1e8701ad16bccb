"""One picture of the box: what is wrong, then GPUs, runs and events, as much of each as there is room for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from gpuwarden import thresholds
from gpuwarden.quantities import amount, lasting
from gpuwarden.top.answer import Part
from gpuwarden.top.gpus import gpu_lines, gpu_table, place_of, worst_first
from gpuwarden.top.look import ASCII, RANK, STYLES, Column, Letters, mark, table, text
from gpuwarden.top.room import shared_out
from gpuwarden.top.runs import run_table

MOST_TROUBLES = 6
FEW_EVENTS = 3  # where lines are scarce
_EVERYTHING = 10_000  # lines of a terminal without an end
_WORDS: Mapping[str, str] = {"critical": "critical", "warning": "to look at", "unknown": "not asked", "ok": "ok"}
_LEVELS: Mapping[str, str] = {"info": "", "warning": STYLES["warning"], "critical": STYLES["critical"]}


class Frame(NamedTuple):
    """Where the picture is to fit: columns, lines (None: as many as it takes), and letters."""

    width: int
    height: int | None
    letters: Letters


def picture(answer: Any, frame: Frame, now: float) -> RenderableType:
    """Draw an answer of `/api/v1/state`; `now` is Unix time."""
    return Group(*_lines(Part(answer), frame, now))


def _lines(box: Part, frame: Frame, now: float) -> Iterator[RenderableType]:
    gpus, runs, events = worst_first(box.parts("gpus")), box.parts("runs"), box.parts("events")
    head = [_title(box, gpus, runs, frame), *_warnings(box, frame.letters, now), *_troubles(gpus, runs, frame)]
    yield from head
    names = {run.text("run_id"): run.text("name") for run in runs}
    dropped = max(int(box.number("runs_dropped") or 0), 0)
    titles = 3 if events else 2
    left = _EVERYTHING if frame.height is None else frame.height - len(head) - titles
    wanted = (gpu_lines(gpus), max(len(runs) + bool(dropped), 1), len(events))
    between = [Text("")] if frame.height is None or sum(wanted) + titles <= left else []
    yield from between
    for_gpus, for_runs, for_events = shared_out(left, wanted, FEW_EVENTS)
    chosen = _fitting(gpus, for_gpus)
    if chosen or not gpus:
        yield gpu_table(chosen, names, frame.width, frame.letters) if gpus else Text("No GPU is known.", "dim")
    if len(chosen) < len(gpus):
        yield _more(len(gpus) - len(chosen), "GPU")
    yield from between
    shown = runs if len(runs) + bool(dropped) <= for_runs else runs[: max(for_runs - 1, 0)]
    yield run_table(shown, _places(gpus), frame.width, frame.letters) if runs else _no_runs(box, frame)
    if more := len(runs) - len(shown) + dropped:
        yield _more(more, "run")
    if events:
        yield from between
        yield _events(events[:for_events], frame)


def _fitting(gpus: Sequence[Part], lines: int) -> Sequence[Part]:
    """Choose the GPUs that there is room for with their MIG instances; a line says how many more there are."""
    if gpu_lines(gpus) <= lines:
        return gpus
    most = 0
    while most < len(gpus) and gpu_lines(gpus[: most + 1]) <= lines - 1:
        most += 1
    return gpus[:most]


def _more(count: int, of: str) -> Text:
    return Text(f"  and {count} more {of}{'' if count == 1 else 's'}", "dim")


def _title(box: Part, gpus: Sequence[Part], runs: Sequence[Part], frame: Frame) -> RenderableType:
    """Say in a line which box this is, and how it is."""
    host = box.part("host")
    line = Text(no_wrap=True, overflow="crop")
    line.append_text(text(host.text("name") or "gpuwarden", frame.letters, "bold"))
    counts = {level: sum(gpu.text("condition") == level for gpu in gpus) for level in RANK}
    parts = [Text(f"{count} {_WORDS[level]}", STYLES[level]) for level, count in counts.items() if count]
    line.append(f"  {len(gpus)} GPU{'' if len(gpus) == 1 else 's'}: " if gpus else "  no GPUs")
    line.append_text(Text(", ").join(parts))
    going = sum(run.truth("up") for run in runs)
    line.append(f"  {going} run{'' if going == 1 else 's'}")
    size, available = host.number("memory_size_bytes"), host.number("memory_available_bytes")
    if size is not None and available is not None:
        line.append(f"  host {amount(size - available)} of {amount(size)}")
    made = table(Column(""), Column("", 8, right=True))
    made.show_header = False
    polled = box.number("polled_timestamp_seconds")
    made.add_row(line, "" if polled is None else _clock(polled))
    return made


def _warnings(box: Part, letters: Letters, now: float) -> Iterator[Text]:
    """Say what holds for all of the picture."""
    daemon, polled = box.part("daemon"), box.number("polled_timestamp_seconds")
    source = daemon.text("source")
    if source and source != "nvml":
        yield text(f"These are not this machine's GPUs: the source is {source}.", letters, STYLES["warning"])
    if fault := daemon.text("fault"):
        told = f"The driver does not answer: {fault}"
        yield text("; ".join(filter(None, [told, daemon.text("fault_advice")])), letters, STYLES["critical"])
    until = daemon.number("paused_until_timestamp_seconds")
    if until is not None:
        yield Text(f"Paused until {_clock(until)}: no GPU is read. gpuwarden resume ends it.", STYLES["warning"])
    interval = daemon.number("poll_interval_seconds") or 0.0
    age = 0.0 if polled is None else now - polled
    if age > max(thresholds.STALE_POLLS * interval, thresholds.STALE_POLL_SECONDS):
        yield Text(f"The last poll was {lasting(age)} ago.", STYLES["critical"])


def _troubles(gpus: Sequence[Part], runs: Sequence[Part], frame: Frame) -> Iterator[Text]:
    """Say what is wrong, a line a GPU or run, the worst first; what ended has its own row, and an event."""
    found = [(gpu, f"GPU {place_of(gpu)}") for gpu in gpus]
    found += [(run, f"run {run.text('name')}") for run in runs if run.truth("up")]
    bad = [(of, where) for of, where in found if of.text("condition") in ("critical", "warning")]
    bad.sort(key=lambda each: RANK[each[0].text("condition")])
    most = MOST_TROUBLES if frame.height is None else min(MOST_TROUBLES, max(frame.height // 6, 1))
    shown = bad if len(bad) <= most else bad[: most - 1]
    for of, where in shown:
        condition = of.text("condition")
        line = mark(condition, frame.letters)
        line.append_text(text(f" {where}: ", frame.letters, "bold"))
        line.append_text(text("; ".join(each.text("text") for each in of.parts("troubles")), frame.letters))
        line.no_wrap, line.overflow = True, "crop" if frame.letters is ASCII else "ellipsis"
        yield line
    if len(shown) < len(bad):
        yield Text(f"  and {len(bad) - len(shown)} more that are not well", "dim")


def _places(gpus: Sequence[Part]) -> Mapping[str, str]:
    """Return the numbers of GPUs and MIG instances by UUID."""
    found = {}
    for gpu in gpus:
        found[gpu.text("uuid")] = place_of(gpu)
        found |= {each.text("uuid"): place_of(gpu, each) for each in gpu.parts("mig")}
    return found


def _no_runs(box: Part, frame: Frame) -> Text:
    socket = box.part("daemon").text("runs_socket")
    where = f" to {socket}" if socket else ""
    return text(f"No run reports{where}; docs/keras.md says how.", frame.letters, "dim")


def _events(events: Sequence[Part], frame: Frame) -> RenderableType:
    made = table(Column("EVENTS", 8), Column(""))
    for event in events:
        at = event.number("timestamp_seconds")
        when = Text("" if at is None else _clock(at), "dim")
        made.add_row(when, text(event.text("text"), frame.letters, _LEVELS.get(event.text("level"), "")))
    return made


def _clock(seconds: float) -> str:
    """Write the time of a day; an answer may hold any number."""
    try:
        return time.strftime("%H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "?"
