"""Grafana's classic (v1) dashboard JSON as small functions.

Grafana takes it from files in every version; schema version 39 is what 11.1 writes, and later ones migrate it on load.
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
BAD, WARN, GOOD, PLAIN, NONE = "red", "orange", "green", "blue", "transparent"


@dataclass(frozen=True, slots=True)
class Query:
    """What a panel asks for; `now` asks for the end of the time range alone."""

    expression: str
    legend: str = "__auto"
    now: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel before it has its place. `id` is part of links to it and is never given to another one."""

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


@dataclass(frozen=True, slots=True)
class Row:
    """A heading over the panels that follow; it and they are there once for each value of the variable `repeat`."""

    id: int
    title: str
    panels: Sequence[Panel]
    repeat: str | None = None


def dashboard(uid: str, title: str, description: str, variables: Sequence[Json], rows: Sequence[Row | Panel]) -> Json:
    """Return the whole dashboard: read-only, with one crosshair through all panels."""
    return {
        "annotations": {"list": [_alerts_on_the_time_axis()]},
        "description": description,
        "editable": False,
        "fiscalYearStartMonth": 0,
        "graphTooltip": 1,
        "links": [],
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


def _alerts_on_the_time_axis() -> Json:
    return {
        "name": "Alerts",
        "datasource": SOURCE,
        "enable": True,
        "iconColor": BAD,
        "expr": 'ALERTS{alertstate="firing",job="gpuwarden",instance=~"($instance)|"}',
        "titleFormat": "{{alertname}}",
        "textFormat": "{{run_name}} GPU {{gpu}}",
        "tagKeys": "severity",
        "step": "15s",
    }


def _place(rows: Sequence[Row | Panel]) -> Iterator[Json]:
    """Lay panels side by side from the left, and under each other where a line of them is full."""
    x = y = line = 0
    for each in rows:
        panels = each.panels if isinstance(each, Row) else [each]
        if isinstance(each, Row):
            x, y = 0, y + line
            line = 0
            yield _row(each, y)
            y += 1
        for panel in panels:
            if x + panel.width > COLUMNS:
                x, y, line = 0, y + line, 0
            yield _panel(panel, x, y)
            x, line = x + panel.width, max(line, panel.height)


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


def good_from(limit: float, good: str = GOOD) -> Json:
    """Color a value: good from `limit` on, bad below."""
    return _steps((BAD, None), (good, limit))


def bad_from(limit: float, good: str = GOOD) -> Json:
    """Color a value: bad from `limit` on, good below."""
    return _steps((good, None), (BAD, limit))


def _steps(*steps: tuple[str, float | None]) -> Json:
    return {"mode": "absolute", "steps": [{"color": color, "value": value} for color, value in steps]}


def states(names: Mapping[float, tuple[str, str]]) -> list[Json]:
    """Show numbers as words: each number's text and color."""
    options = {f"{number:g}": {"text": text, "color": color} for number, (text, color) in names.items()}
    return [{"type": "value", "options": options}]


def override(field: str, **properties: Any) -> Json:
    """Set properties of the one field of that name; `__` in a property's name stands for a dot."""
    return {
        "matcher": {"id": "byName", "options": field},
        "properties": [{"id": name.replace("__", "."), "value": value} for name, value in properties.items()],
    }


def override_matching(pattern: str, **properties: Any) -> Json:
    """Set properties of the fields whose names match; without the slashes Grafana would match whole names."""
    return {**override("", **properties), "matcher": {"id": "byRegexp", "options": f"/{pattern}/"}}


def stat(
    id: int,  # noqa: A002 - the field's name in the JSON
    title: str,
    description: str,
    *queries: Query,
    unit: str = "short",
    width: int,
    thresholds: Json,
    empty: str,
    names: bool = False,
    overrides: Sequence[Json] = (),
) -> Panel:
    """Show one large value for each query, on its color; `names` writes the legend beside it."""
    options = {
        "colorMode": "background",
        "graphMode": "none",
        "justifyMode": "center",
        "orientation": "vertical",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "value_and_name" if names else "value",
    }
    defaults = {"color": {"mode": "thresholds"}, "thresholds": thresholds, "noValue": empty}
    return Panel(id, "stat", title, description, queries, unit, width, 5, options, defaults, overrides)


def timeseries(
    id: int,  # noqa: A002 - the field's name in the JSON
    title: str,
    description: str,
    *queries: Query,
    unit: str,
    width: int,
    empty: str = "no data",
    thresholds: Json | None = None,
    logarithmic: bool = False,
    overrides: Sequence[Json] = (),
    **defaults: Any,
) -> Panel:
    """Draw lines over time. A series keeps its color from panel to panel; `thresholds` color the ground."""
    options = {
        "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    custom: Json = {"drawStyle": "line", "fillOpacity": 0, "lineWidth": 1, "showPoints": "never"}
    if thresholds:
        custom["thresholdsStyle"] = {"mode": "area"}
        defaults["thresholds"] = thresholds
    if logarithmic:
        custom["scaleDistribution"] = {"type": "log", "log": 10}
    else:
        defaults["min"] = 0
    every = {"color": {"mode": "palette-classic-by-name"}, "custom": custom, "noValue": empty, **defaults}
    return Panel(id, "timeseries", title, description, queries, unit, width, 8, options, every, overrides)


def timeline(
    id: int,  # noqa: A002 - the field's name in the JSON
    title: str,
    description: str,
    query: Query,
    *,
    width: int,
    mappings: Sequence[Json],
    empty: str,
) -> Panel:
    """Draw colored bars over time, a line for each series."""
    options = {
        "alignValue": "left",
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "mergeValues": True,
        "rowHeight": 0.9,
        "showValue": "auto",
        "tooltip": {"mode": "single", "sort": "none"},
    }
    defaults = {
        "color": {"mode": "thresholds"},
        "custom": {"fillOpacity": 80, "lineWidth": 0},
        "mappings": list(mappings),
        "noValue": empty,
        "thresholds": _steps((PLAIN, None)),
    }
    return Panel(id, "state-timeline", title, description, [query], "short", width, 8, options, defaults)


def table(
    id: int,  # noqa: A002 - the field's name in the JSON
    title: str,
    description: str,
    *queries: Query,
    columns: Mapping[str, str],
    width: int,
    height: int,
    empty: str,
    sort: str,
    overrides: Sequence[Json],
    descending: bool = False,
) -> Panel:
    """Show rows joined by the labels that all queries share; a column's title maps to a label or a query's legend."""
    values = {query.legend: f"Value #{name}" for name, query in zip(ascii_uppercase, queries, strict=False)}
    fields = {values.get(source, source): title for title, source in columns.items()}
    if len(queries) == 1 and (title_of_value := fields.get("Value #A")):
        fields["Value"] = title_of_value  # Grafana's versions differ in what they call the only query's
    transformations = [
        {"id": "merge", "options": {}},
        {"id": "filterFieldsByName", "options": {"include": {"names": list(fields)}}},
        {
            "id": "organize",
            "options": {
                "excludeByName": {},
                "indexByName": {field: number for number, field in enumerate(fields)},
                "renameByName": fields,
            },
        },
        {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": sort, "desc": descending}]}},
    ]
    options = {"cellHeight": "sm", "showHeader": True}
    defaults = {"custom": {"align": "auto", "filterable": False}, "noValue": empty}
    return Panel(
        id, "table", title, description, queries, "short", width, height, options, defaults, overrides, transformations
    )


def variable(name: str, label: str, query: str, *, regex: str = "") -> Json:
    """Let people choose several values, all at first; they are looked up anew when the time range changes."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": f"Prometheus-{name}"},
        "regex": regex,
        "refresh": 2,
        "sort": 3,
        "multi": True,
        "includeAll": True,
        "allValue": ".+",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def source_variable() -> Json:
    """Let people choose which Prometheus to ask."""
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}}
