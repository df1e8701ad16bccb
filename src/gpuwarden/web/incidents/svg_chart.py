"""Chart as inline SVG with labels in HTML: it stretches to any width, and its text does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from gpuwarden.web.incidents.host_incident import format_clock
from gpuwarden.web.incidents.incident_series import Point

WIDTH, HEIGHT = 1000, 100  # units of the drawing, without a size on the screen
MAX_COLORS = 8


@dataclass(frozen=True, slots=True)
class ChartLine:
    """Line of a chart; `color` is its number among those of the page."""

    label: str
    color: int
    points: Sequence[Point]


def render_chart_figure(
    title: str, lines: Sequence[ChartLine], times: tuple[float, float], mark: float, text: Callable[[float], str]
) -> str:
    """Return a figure with a line for each series from 0 up, and a mark at a time; empty without a known value."""
    known = [value for line in lines for _at, value in line.points if value is not None]
    if not known:
        return ""
    top = max(known) or 1.0
    start, seconds = times[0], (times[1] - times[0]) or 1.0
    place = (mark - start) / seconds * WIDTH
    drawn = "".join(_path(line, start, seconds, top) for line in lines)
    rule = f'<line class="mark" x1="{place:.1f}" x2="{place:.1f}" y1="0" y2="{HEIGHT}"/>' if 0 <= place <= WIDTH else ""
    grid = "".join(f'<line class="grid" x1="0" x2="{WIDTH}" y1="{y}" y2="{y}"/>' for y in (0, HEIGHT // 2))
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><div class="plot">'
        f'<div class="y"><span>{escape(text(top))}</span><span>{escape(text(top / 2))}</span><span>0</span></div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{escape(title)}">'
        f"{grid}{rule}{drawn}</svg>"
        f'<div class="x"><span>{format_clock(start)}</span><span>{format_clock(times[1])}</span></div></div></figure>'
    )


def _path(line: ChartLine, start: float, seconds: float, top: float) -> str:
    """Return a path with a gap where values are unknown."""
    steps, is_open = [], False
    for at, value in line.points:
        if value is None:
            is_open = False
            continue
        x, y = (at - start) / seconds * WIDTH, HEIGHT - max(value, 0.0) / top * (HEIGHT - 4)
        steps.append(f"{'L' if is_open else 'M'}{x:.1f} {y:.1f}")
        is_open = True
    return f'<path class="c{line.color % MAX_COLORS}" d="{"".join(steps)}"><title>{escape(line.label)}</title></path>'
