"""Page of incidents: one self-contained HTML file without scripts, to open from disk and to send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

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

STYLE = """
:root { color-scheme: light dark; --ground: #f3f5f7; --card: #fff; --edge: #d5dbe1; --text: #1b1f24; --muted: #56606b;
  --critical: #b3261e; --critical-ground: #fdecea; --c0: #2563c9; --c1: #b3541e; --c2: #16703f; --c3: #8e3bb0;
  --c4: #0f7c8a; --c5: #a3195b; --c6: #6b6b00; --c7: #56606b; }
@media (prefers-color-scheme: dark) { :root { --ground: #0f1317; --card: #171c22; --edge: #2e3741; --text: #e4e8ec;
  --muted: #9ba6b2; --critical: #ff8a80; --critical-ground: #2f1614; --c0: #5b95f5; --c1: #f0a060; --c2: #57c98a;
  --c3: #cf8ff0; --c4: #52c7d6; --c5: #f583b5; --c6: #cfcf50; --c7: #9ba6b2; } }
body { margin: 0 auto; padding: 1rem; max-width: 70rem; background: var(--ground); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.3rem; margin: 0 0 .3rem; } h2 { font-size: 1.05rem; margin: 1.4rem 0 .4rem; }
p { margin: .4rem 0; } .muted { color: var(--muted); font-size: .88rem; }
.finding { padding: .8rem 1rem; border-left: 6px solid var(--critical); border-radius: 6px; margin: .6rem 0;
  background: var(--critical-ground); font-size: 1.05rem; }
.finding b { display: block; font-size: .85rem; color: var(--muted); }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; padding: .7rem .9rem; }
table { border-collapse: collapse; width: 100%; } td { padding: .2rem .6rem .2rem 0; vertical-align: top; }
td.time { white-space: nowrap; font-variant-numeric: tabular-nums; color: var(--muted); }
tr.root td { color: var(--critical); font-weight: 600; }
ul { margin: 0; padding: 0 0 0 1.1rem; } li { margin: .15rem 0; } .log { font: .85rem/1.5 ui-monospace, monospace; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: .8rem; }
figure { margin: 0; } figcaption { font-size: .88rem; font-weight: 600; margin-bottom: .2rem; }
.plot { display: grid; grid-template-columns: 4.6rem 1fr; grid-template-rows: 7rem auto; }
.y { display: flex; flex-direction: column; justify-content: space-between; text-align: right; padding-right: .4rem; }
.x { grid-column: 2; display: flex; justify-content: space-between; }
.y, .x { font-size: .75rem; line-height: 1; color: var(--muted); font-variant-numeric: tabular-nums; }
.x { padding-top: .3rem; }
svg { width: 100%; height: 100%; overflow: visible; } svg * { vector-effect: non-scaling-stroke; fill: none; }
.grid { stroke: var(--edge); } .mark { stroke: var(--critical); stroke-dasharray: 4 3; } path { stroke-width: 1.8; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .85rem; margin-bottom: .5rem; }
.legend i { display: inline-block; width: 1.1rem; height: 3px; vertical-align: middle; margin-right: .35rem; }
""" + "".join(f".c{n} {{ stroke: var(--c{n}); }} i.b{n} {{ background: var(--c{n}); }}\n" for n in range(MAX_COLORS))

HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
"""


def render_page(groups: Sequence[IncidentGroup]) -> str:
    """Return the page of groups of incidents."""
    title = f"Incident {groups[0].incidents[0].id} on {', '.join(groups[0].hosts)}"
    body = "".join(part for group in groups for part in _group(group))
    return f"{HEAD.format(title=escape(title), style=STYLE)}{body}</body>\n</html>\n"


def _group(group: IncidentGroup) -> Iterator[str]:
    first, several = group.incidents[0], len(group.incidents) > 1
    job = f"Job {', '.join(group.jobs)}: incident" if several and group.jobs else "Incident"
    yield f"<h1>{escape(job)} on {escape(', '.join(group.hosts))}</h1>\n"
    yield f'<p class="muted">{escape(format_moment(first.began))}</p>\n'
    for incident in group.incidents:
        label = f"<b>{escape(incident.host)} {escape(format_clock(incident.began))}</b>" if several else ""
        yield f'<div class="finding">{label}{escape(incident.finding)}</div>\n'
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


def _timeline(group: IncidentGroup) -> Iterator[str]:
    start, several = group.incidents[0].began, len(group.hosts) > 1
    yield '<h2>Timeline</h2>\n<div class="card"><table>\n'
    for moment in group.moments():
        host = f'<td class="time">{escape(moment.host)}</td>' if several else ""
        role = f"{moment.role}: " if moment.role else ""
        yield (
            f'<tr{" class=root" if moment.role == ROOT else ""}><td class="time">{format_clock(moment.at)}<br>'
            f"{format_offset(moment.at - start)}</td>{host}<td>{escape(role + moment.text)}</td></tr>\n"
        )
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
