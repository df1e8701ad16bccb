"""Report of incidents for a terminal: finding, timeline in words, charts, processes, runs, XIDs and kernel log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpuwarden.cli.runs.memory_chart import LABEL_WIDTH, MIN_WIDTH, render_columns
from gpuwarden.cli.runs.memory_report import MAX_WIDTH, TerminalFormat
from gpuwarden.cli.runs.run_details import wrap_text
from gpuwarden.web.incidents.host_incident import (
    ROOT,
    HostIncident,
    format_clock,
    format_moment,
    format_offset,
)
from gpuwarden.web.incidents.incident_lines import (
    gpu_title,
    kernel_lines,
    process_lines,
    run_lines,
    versions_text,
    xid_lines,
)
from gpuwarden.web.incidents.incident_merge import IncidentGroup
from gpuwarden.web.incidents.incident_series import TERMINAL_QUANTITIES, Point, gpu_points, time_range

CHART_HEIGHT = 4  # lines
MAX_CHARTED_GPUS = 2  # of a host
INDENT = "  "


def render_group(group: IncidentGroup, page: TerminalFormat) -> Iterator[str]:
    """Yield the lines of the report of a group."""
    several = len(group.incidents) > 1
    if several:
        yield from wrap_text("job" if group.jobs else "incidents", ", ".join(group.jobs) or "several", page.width)
        yield from wrap_text("hosts", ", ".join(group.hosts), page.width)
        for note in group.notes:
            yield from wrap_text("clocks", note, page.width)
        yield ""
    for number, incident in enumerate(group.incidents):
        if number:
            yield ""
        yield from _head(incident, page.width)
    yield ""
    yield from _timeline(group, page.width)
    for incident in group.incidents:
        yield from _details(incident, page, of=f" of {incident.host}" if several else "")


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
    yield from wrap_text("versions", versions_text(box), width)


def _timeline(group: IncidentGroup, width: int) -> Iterator[str]:
    several = len(group.hosts) > 1
    start = group.incidents[0].began
    hosts = max(map(len, group.hosts)) + 2 if several else 0
    yield "timeline"
    for moment in group.moments():
        label = f"{INDENT}{format_clock(moment.at)} {format_offset(moment.at - start):>7}  "
        label += f"{moment.host if several else '':<{hosts}}"
        yield from wrap_text(label, moment.line, width)


def _details(incident: HostIncident, page: TerminalFormat, of: str) -> Iterator[str]:
    for uuid in incident.concerned_gpus()[:MAX_CHARTED_GPUS]:
        yield from _charts(incident, uuid, page, of)
    for title, lines in (
        ("processes", process_lines(incident)),
        ("runs", run_lines(incident)),
        ("XIDs", xid_lines(incident)),
        ("kernel log", kernel_lines(incident)),
    ):
        if lines:
            yield from ("", f"{title}{of}")
        for line in lines:
            yield from wrap_text(INDENT, line, page.width, len(INDENT))


def _charts(incident: HostIncident, uuid: str, page: TerminalFormat, of: str) -> Iterator[str]:
    width = max(min(page.width, MAX_WIDTH) - LABEL_WIDTH - 1, MIN_WIDTH)
    charts = [(each, gpu_points(incident, uuid, each.key)) for each in TERMINAL_QUANTITIES]
    charts = [(each, points) for each, points in charts if any(value is not None for _at, value in points)]
    times = time_range([points for _each, points in charts])
    if times is None:
        return
    yield ""
    yield from wrap_text("", gpu_title(incident, uuid) + of, page.width)
    for quantity, points in charts:
        values = [value for _at, value in points if value is not None]
        spread = " to ".join(dict.fromkeys(map(quantity.format, (min(values), max(values)))))
        yield f"{INDENT}{quantity.title}: {spread}"
        columns = _columns(points, times, width)
        yield from render_columns(columns, columns, page.letters[:-1] + " ", CHART_HEIGHT, quantity.format)
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
