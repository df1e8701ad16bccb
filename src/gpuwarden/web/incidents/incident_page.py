"""Page of incidents: one self-contained HTML file without scripts, to open from disk and to send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from gpuwarden.web.html_document import render_document, render_prose
from gpuwarden.web.incidents.host_incident import ROOT, HostIncident, format_clock, format_moment, format_offset
from gpuwarden.web.incidents.incident_lines import (
    gpu_title,
    kernel_lines,
    process_lines,
    run_lines,
    versions_text,
    xid_lines,
)
from gpuwarden.web.incidents.incident_merge import IncidentGroup
from gpuwarden.web.incidents.incident_series import QUANTITIES, gpu_points, run_points, time_range
from gpuwarden.web.incidents.svg_chart import MAX_COLORS, ChartLine, render_chart_figure

_CHART_STYLE = """
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: .8rem; }
figure { margin: 0; } figcaption { font-size: .88rem; font-weight: 600; margin-bottom: .2rem; }
.plot { display: grid; grid-template-columns: 4.6rem 1fr; grid-template-rows: 7rem auto; }
.y { display: flex; flex-direction: column; justify-content: space-between; text-align: right; padding-right: .4rem; }
.x { grid-column: 2; display: flex; justify-content: space-between; }
.y, .x { font-size: .75rem; line-height: 1; color: var(--muted); font-variant-numeric: tabular-nums; }
.x { padding-top: .3rem; }
svg { width: 100%; height: 100%; overflow: visible; } svg * { vector-effect: non-scaling-stroke; fill: none; }
.grid { stroke: var(--edge); } .mark { stroke: var(--severity); stroke-dasharray: 4 3; } path { stroke-width: 1.8; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .85rem; margin-bottom: .5rem; }
.legend i { display: inline-block; width: 1.1rem; height: 3px; vertical-align: middle; margin-right: .35rem; }
""" + "".join(f".c{n} {{ stroke: var(--c{n}); }} i.b{n} {{ background: var(--c{n}); }}\n" for n in range(MAX_COLORS))


def render_page(groups: Sequence[IncidentGroup]) -> str:
    """Return the page of groups of incidents."""
    title = f"Incident {groups[0].incidents[0].id} on {', '.join(groups[0].hosts)}"
    body = "".join(part for group in groups for part in _group(group))
    return render_document(title, body, _CHART_STYLE)


def _group(group: IncidentGroup) -> Iterator[str]:
    first, several = group.incidents[0], len(group.incidents) > 1
    job = f"Job {', '.join(group.jobs)}: incident" if several and group.jobs else "Incident"
    yield f'<section class="{first.severity}">\n'
    yield f"<h1>{escape(job)} on {escape(', '.join(group.hosts))}</h1>\n"
    yield f'<p class="muted">{escape(format_moment(first.began))}</p>\n'
    for incident in group.incidents:
        label = f"<b>{escape(incident.host)} {escape(format_clock(incident.began))}</b>" if several else ""
        yield f'<div class="finding {incident.severity}">{label}{render_prose(incident.finding)}</div>\n'
        if incident.progress:
            yield f'<p class="muted">{escape(incident.progress.capitalize())}.</p>\n'
        if note := incident.incident.text("note"):
            yield f"<p>Note: {escape(note)}</p>\n"
    for note in group.notes:
        yield f"<p>{escape(note)}</p>\n"
    yield from _timeline(group)
    yield from _charts(group)
    for incident in group.incidents:
        yield from _details(incident, f" of {incident.host}" if several else "")
    yield "</section>\n"


def _timeline(group: IncidentGroup) -> Iterator[str]:
    start, several = group.incidents[0].began, len(group.hosts) > 1
    yield '<h2>Timeline</h2>\n<div class="card"><table>\n'
    for moment in group.moments():
        host = f'<td class="time">{escape(moment.host)}</td>' if several else ""
        time = f"{format_clock(moment.at)} <span>{format_offset(moment.at - start)}</span>"
        kind = " class=root" if moment.role == ROOT else ""
        yield f'<tr{kind}><td class="time">{time}</td>{host}<td>{render_prose(moment.line)}</td></tr>\n'
    yield "</table></div>\n"


def _charts(group: IncidentGroup) -> Iterator[str]:
    """Yield a chart for each quantity with a line for each GPU concerned, then the steps of the runs."""
    several = len(group.incidents) > 1
    each_host = max(MAX_COLORS // len(group.incidents), 1)
    shown = [(one, uuid) for one in group.incidents for uuid in one.concerned_gpus()[:each_host]][:MAX_COLORS]
    names = [(f"{one.host} " if several else "") + gpu_title(one, uuid) for one, uuid in shown]
    charts = []
    for quantity in QUANTITIES:
        lines = [
            ChartLine(name, number, gpu_points(one, uuid, quantity.key))
            for number, (name, (one, uuid)) in enumerate(zip(names, shown, strict=True))
        ]
        charts.append((quantity.title, lines, quantity.format))
    times = time_range([line.points for _title, lines, _format in charts for line in lines])
    if times is None:
        return
    mark = group.incidents[0].began
    yield f'<h2>GPUs</h2>\n<div class="card">{_legend(names)}<div class="charts">\n'
    for title, lines, text in charts:
        yield render_chart_figure(title, lines, times, mark, text)
    yield "</div></div>\n"
    runs = [(one, run) for one in group.incidents for run in one.incident.parts("runs")][:MAX_COLORS]
    steps = [
        ChartLine(_run_name(f"{one.host} " if several else "", run.text("name"), run.number("rank")), number, points)
        for number, (one, run) in enumerate(runs)
        if (points := run_points(one, run.text("run_id"), "steps"))
    ]
    figure = render_chart_figure("steps", steps, times, mark, lambda value: f"{value:.0f}")
    if figure:
        legend = _legend([line.label for line in steps])
        yield f'<h2>Steps of runs</h2>\n<div class="card">{legend}{figure}</div>\n'


def _run_name(host: str, name: str, rank: float | None) -> str:
    return f"{host}{name}" + ("" if rank is None else f" (rank {rank:.0f})")


def _legend(names: Sequence[str]) -> str:
    items = "".join(f'<span><i class="b{n % MAX_COLORS}"></i>{escape(name)}</span>' for n, name in enumerate(names))
    return f'<div class="legend">{items}</div>'


def _details(incident: HostIncident, of: str) -> Iterator[str]:
    for title, lines, style in (
        ("Processes", process_lines(incident), ""),
        ("Runs", run_lines(incident), ""),
        ("XIDs", xid_lines(incident), ""),
        ("Kernel log", kernel_lines(incident), ' class="log"'),
    ):
        if lines:
            items = "".join(f"<li>{escape(line)}</li>\n" for line in lines)
            yield f'<h2>{title}{escape(of)}</h2>\n<div class="card"><ul{style}>\n{items}</ul></div>\n'
    about = f"{incident.id} on {incident.host}: {versions_text(incident.incident.part('box'))}"
    yield f'<p class="muted">{escape(about)}</p>\n'
