"""Report of an incident for a terminal: finding, timeline in words, charts, processes, runs, XIDs and kernel log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from gpuwarden.cli.incidents.host_incident import (
    ROOT,
    HostIncident,
    Point,
    format_clock,
    format_moment,
    format_offset,
    time_of,
)
from gpuwarden.cli.runs.memory_chart import LABEL_WIDTH, MIN_WIDTH, render_columns
from gpuwarden.cli.runs.memory_report import MAX_WIDTH, TerminalFormat
from gpuwarden.cli.runs.run_details import wrap_text
from gpuwarden.errors.kind_guides import describe_error
from gpuwarden.formatting import cut_middle, format_bytes, format_count, sanitize
from gpuwarden.nvml.troubleshooting import error_text
from gpuwarden.records.census_text import list_holders
from gpuwarden.records.record_json import RunRecordError, parse_document
from gpuwarden.records.record_parts import RecordedCensus
from gpuwarden.web.api.api_object import ApiObject

CHART_HEIGHT = 4  # lines
MAX_CHARTED_GPUS = 2
MAX_KERNEL_LINES = 20
MAX_MESSAGE = 600  # characters
INDENT = "  "

# Columns of a GPU's series with a chart, each with its title and format.
_CHARTS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("memory_used_bytes", "memory used", format_bytes),
    ("temperature_celsius", "temperature", lambda value: f"{value:.0f} °C"),
    ("power_watts", "power", lambda value: f"{value:.0f} W"),
)


def render_report(incident: HostIncident, page: TerminalFormat) -> Iterator[str]:
    """Yield the lines of the report."""
    yield from _head(incident, page.width)
    yield ""
    yield "timeline"
    for moment in incident.moments():
        label = f"{INDENT}{format_clock(moment.at)} {format_offset(moment.at - incident.began):>7}  "
        yield from wrap_text(label, moment.line, page.width)
    for uuid in incident.concerned_gpus()[:MAX_CHARTED_GPUS]:
        yield from _charts(incident, uuid, page)
    for title, lines in (
        ("processes", _process_lines(incident)),
        ("runs", run_lines(incident)),
        ("XIDs", _xid_lines(incident)),
        ("kernel log", _kernel_lines(incident)),
    ):
        if lines:
            yield from ("", title)
        for line in lines:
            yield from wrap_text(INDENT, line, page.width, len(INDENT))


def _head(incident: HostIncident, width: int) -> Iterator[str]:
    whole, box = incident.incident, incident.incident.part("box")
    yield from wrap_text("incident", incident.id, width)
    yield from wrap_text("host", incident.host, width)
    yield from wrap_text("time", format_moment(incident.began), width)
    if incident.progress:
        yield from wrap_text("", incident.progress, width)
    yield from wrap_text("finding", incident.finding, width)
    if note := whole.text("note"):
        yield from wrap_text("note", note, width)
    yield from wrap_text("versions", _versions_text(box), width)


def _charts(incident: HostIncident, uuid: str, page: TerminalFormat) -> Iterator[str]:
    width = max(min(page.width, MAX_WIDTH) - LABEL_WIDTH - 1, MIN_WIDTH)
    series = [(title, format_value, incident.gpu_points(uuid, key)) for key, title, format_value in _CHARTS]
    charts = [each for each in series if any(value is not None for _at, value in each[2])]
    moments = [at for _title, _format, points in charts for at, _value in points]
    if not moments:
        return
    times = min(moments), max(moments)
    yield ""
    yield from wrap_text("", _gpu_title(incident, uuid), page.width)
    for title, format_value, points in charts:
        values = [value for _at, value in points if value is not None]
        spread = " to ".join(dict.fromkeys(map(format_value, (min(values), max(values)))))
        yield f"{INDENT}{title}: {spread}"
        columns = _columns(points, times, width)
        yield from render_columns(columns, columns, page.letters[:-1] + " ", CHART_HEIGHT, format_value)
    yield f"{'':>{LABEL_WIDTH}}+{'-' * width}"
    yield _axis(incident, times, width)


def _columns(points: Sequence[Point], times: tuple[float, float], width: int) -> list[float]:
    """Return the highest value of each column; a column without one repeats the last, up to an unknown value."""
    start, seconds = times[0], (times[1] - times[0]) or 1.0
    highest: dict[int, float | None] = {}
    for at, value in points:
        column = min(int((at - start) / seconds * width), width - 1)
        known = highest.get(column)
        highest[column] = value if known is None else known if value is None else max(known, value)
    found, last = [], 0.0
    for column in range(width):
        last = (highest[column] or 0.0) if column in highest else last
        found.append(last)
    return found


def _axis(incident: HostIncident, times: tuple[float, float], width: int) -> str:
    """Return a line with the first and the last time, and the first cause in its place."""
    start, seconds = times[0], (times[1] - times[0]) or 1.0
    left, right = format_clock(times[0]), format_clock(times[1])
    mark = f"^ {ROOT}"
    place = round((incident.began - start) / seconds * width)
    row = list(f"{left}{right:>{width - len(left)}}")
    if 0 <= place < width:
        place = max(min(place, width - len(right) - len(mark) - 1), 0)
        if place > len(left):
            row[place : place + len(mark)] = mark
    return " " * (LABEL_WIDTH + 1) + "".join(row)


def _versions_text(box: ApiObject) -> str:
    """Return the versions of a host in one line."""
    names = (("driver", "driver_version"), ("CUDA", "cuda_version"), ("kernel", "kernel"), ("gpuwarden", "version"))
    return ", ".join(f"{name} {text}" for name, key in names if (text := box.text(key)))


def _gpu_title(incident: HostIncident, uuid: str) -> str:
    """Return a GPU's name, model, and fault."""
    gpu = next((each for each in incident.incident.parts("gpus") if each.text("uuid") == uuid), ApiObject(None))
    fault = gpu.text("fault")
    words = (incident.gpu_names.get(uuid, uuid), gpu.text("name"), f"({error_text(fault)})" if fault else "")
    return " ".join(filter(None, words))


def _process_lines(incident: HostIncident) -> list[str]:
    """Return a line for each process: GPU, pid, program, memory, owners."""
    lines = []
    for process in incident.incident.parts("processes"):
        memory, pid = process.number("memory_bytes"), process.number("pid")
        owners = process.part("owners")
        words = (
            f"{incident.gpu_names.get(process.text('uuid'), 'GPU ?')}: {process.text('command') or 'process'}",
            "" if pid is None else f"(pid {pid:.0f})",
            "" if memory is None else f"has {format_bytes(memory)}",
        )
        of = ", ".join(f"{kind.replace('_', ' ')} {owners.text(kind)}" for kind in owners.names())
        lines.append(" ".join(filter(None, words)) + (f"; {of}" if of else ""))
    return lines


def run_lines(incident: HostIncident) -> list[str]:
    """Return a line for each run, each with lines for its errors and the holders of its tensors."""
    lines = []
    for run in incident.incident.parts("runs"):
        state = (run.text("state") or run.text("outcome") or "running").replace("_", " ")
        rank, size, steps = run.number("rank"), run.number("world_size"), run.number("steps")
        peaks = [peak for device in run.parts("devices") if (peak := device.number("memory_peak_bytes")) is not None]
        words = (
            "" if rank is None else f"rank {rank:.0f}" + ("" if size is None else f" of {size:.0f}"),
            run.text("framework"),
            f"user {run.text('user')}" if run.text("user") else "",
            "" if steps is None else f"{format_count(int(steps))} steps",
            f"peak memory {format_bytes(max(peaks))}" if peaks else "",
        )
        evidence = f" ({run.text('evidence')})" if run.text("evidence") else ""
        about = "; ".join(filter(None, words))
        lines.append(f"{run.text('run_id')} {run.text('name')}: {state}{evidence}; {about}")
        for error in run.parts("reported_errors"):
            text = cut_middle(error.text("text", 4 * MAX_MESSAGE), MAX_MESSAGE)
            what = describe_error(error.text("kind"), error.text("exception"))
            lines.append(f"error at {format_clock(time_of(error))}: {what}: {text}")
        lines += _census_lines(run)
    return lines


def _census_lines(run: ApiObject) -> Iterator[str]:
    """Yield a line for each holder of a run's tensors at its last census."""
    try:
        census = parse_document(RecordedCensus, run.value("census"))
    except RunRecordError:  # none, or of another version
        return
    when = format_clock(time_of(run.part("census")))
    for holder in list_holders(census):
        yield f"tensors at {when}: {sanitize(holder)}"


def _xid_lines(incident: HostIncident) -> list[str]:
    """Return a line for each XID."""
    return [
        f"{format_clock(time_of(xid))} {incident.gpu_names.get(xid.text('uuid'), 'GPU ?')} "
        f"XID {xid.number('code') or 0:.0f} ({xid.text('severity')}): {xid.text('meaning')} {xid.text('action')}"
        for xid in incident.incident.parts("xids")
    ]


def _kernel_lines(incident: HostIncident) -> list[str]:
    """Return the last lines of the kernel log."""
    lines = [f"{format_clock(time_of(line))} {line.text('text')}" for line in incident.incident.parts("kernel_lines")]
    more = len(lines) - MAX_KERNEL_LINES
    return [*([f"{more} earlier lines (--json has all)"] if more > 0 else []), *lines[-MAX_KERNEL_LINES:]]
