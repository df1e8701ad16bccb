"""Grafana's classic (v1) dashboard JSON, from small functions.

Every version of Grafana loads it from files; 11.1 writes schema version 39, and later versions migrate it on load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any, TypeAlias

Json: TypeAlias = "dict[str, Any]"

SCHEMA_VERSION = 39
COLUMNS = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Grafana's text on these, and they as large text on either theme, have a contrast of at least 4.5 and 3 to 1 (WCAG AA);
# Grafana's own red, orange and yellow have less, and differ by theme.
BAD, WARN, MILD = "#D6293D", "#BA4F00", "#8A6B00"
DARK_BLUE, DARK_PURPLE, DARK_GRAY = "#2468D0", "#8F49B8", "#6E6E6E"
GOOD, PLAIN, TEXT, NONE = "green", "blue", "text", "transparent"  # GOOD for lines and marks only: well is calm


@dataclass(frozen=True, slots=True)
class Query:
    """Query of a panel; with `now` for the end of the time range only."""

    expression: str
    legend: str = "__auto"
    now: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """Panel without its position. `id` is part of links to it and is never reused."""

    id: int
    kind: str
    title: str
    description: str
    queries: Sequence[Query]
    unit: str
    width: int
    height: int
    options: Json
    defaults: Json
    overrides: Sequence[Json] = ()
    transformations: Sequence[Json] = ()
    points: int | None = None  # maximum number of points, if fewer than its width in pixels are enough


@dataclass(frozen=True, slots=True)
class Row:
    """Heading with its panels, repeated for each value of the variable `repeat`."""

    id: int
    title: str
    panels: Sequence[Panel]
    repeat: str | None = None


def dashboard(
    uid: str,
    title: str,
    description: str,
    rows: Sequence[Row | Panel],
    *,
    variables: Sequence[Json],
    links: Sequence[Json],
    annotations: Sequence[Json],
) -> Json:
    """Return a dashboard: read-only, with a shared crosshair."""
    return {
        "annotations": {"list": list(annotations)},
        "description": description,
        "editable": False,
        "fiscalYearStartMonth": 0,
        "graphTooltip": 1,
        "links": list(links),
        "panels": list(_place(rows)),
        "refresh": "10s",
        "schemaVersion": SCHEMA_VERSION,
        "tags": ["gpuwarden"],
        "templating": {"list": list(variables)},
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "title": title,
        "uid": uid,
    }


def _place(rows: Sequence[Row | Panel]) -> Iterator[Json]:
    """Place each panel as high as possible, then as far left as possible; a row is below all before it."""
    heights = [0] * COLUMNS
    for each in rows:
        panels = each.panels if isinstance(each, Row) else [each]
        if isinstance(each, Row):
            yield _row(each, max(heights))
            heights = [max(heights) + 1] * COLUMNS
        for panel in panels:
            y, x = min((max(heights[x : x + panel.width]), x) for x in range(COLUMNS - panel.width + 1))
            heights[x : x + panel.width] = [y + panel.height] * panel.width
            yield _panel(panel, x, y)


def _row(row: Row, y: int) -> Json:
    return {
        "id": row.id,
        "type": "row",
        "title": row.title,
        "collapsed": False,
        "panels": [],
        "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
        **({"repeat": row.repeat} if row.repeat else {}),
    }


def _panel(panel: Panel, x: int, y: int) -> Json:
    return {
        "id": panel.id,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": panel.height},
        "targets": [_target(*named, panel.kind) for named in zip(ascii_uppercase, panel.queries, strict=False)],
        "fieldConfig": {"defaults": {"unit": panel.unit, **panel.defaults}, "overrides": list(panel.overrides)},
        "options": panel.options,
        "transformations": list(panel.transformations),
        **({"maxDataPoints": panel.points} if panel.points else {}),
    }


def _target(name: str, query: Query, kind: str) -> Json:
    return {
        "refId": name,
        "datasource": SOURCE,
        "expr": query.expression,
        "legendFormat": query.legend,
        "instant": query.now,
        "range": not query.now,
        "format": "table" if kind == "table" else "time_series",
    }


def bad_from(limit: float, good: str = TEXT, bad: str = BAD) -> Json:
    """Color a value: `bad` from `limit` on, `good` below."""
    return steps((good, None), (bad, limit))


def steps(*bounds: tuple[str, float | None]) -> Json:
    """Color a value by the last bound that it reaches; the first bound is None."""
    return {"mode": "absolute", "steps": [{"color": color, "value": value} for color, value in bounds]}


def states(names: Mapping[float, tuple[str, str]]) -> list[Json]:
    """Show numbers as words, with a color each."""
    options = {f"{number:g}": {"text": text, "color": color} for number, (text, color) in names.items()}
    return [{"type": "value", "options": options}]


def override(field: str, **properties: Any) -> Json:
    """Set properties of the field called `field`; `__` in a property's name stands for a dot."""
    return {
        "matcher": {"id": "byName", "options": field},
        "properties": [{"id": name.replace("__", "."), "value": value} for name, value in properties.items()],
    }


def override_matching(pattern: str, **properties: Any) -> Json:
    """Set properties of the fields whose names match; without slashes Grafana would match whole names."""
    return {**override("", **properties), "matcher": {"id": "byRegexp", "options": f"/{pattern}/"}}
