"""Kinds of panels: large values, lines over time, states over time, a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from types import MappingProxyType
from typing import Any, Literal

from classic import NONE, Json, Panel, Query, override, override_matching, steps


def stat(
    id: int,  # noqa: A002 - the field's name in the JSON
    title: str,
    description: str,
    *queries: Query,
    unit: str = "short",
    width: int,
    thresholds: Json,
    empty: str,
    overrides: Sequence[Json] = (),
) -> Panel:
    """Show one large value per query, colored if it is bad, under its legend."""
    options = {
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "center",
        "orientation": "vertical",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "text": {"titleSize": 12, "valueSize": 42},  # pixels: the same in all panels of a row
        "textMode": "value_and_name",
        "wideLayout": False,  # the name above the value, with the full width
    }
    defaults = {"color": {"mode": "thresholds"}, "thresholds": thresholds, "noValue": empty}
    return Panel(id, "stat", title, description, queries, unit, width, 4, options, defaults, overrides)


def timeseries(
    id: int,  # noqa: A002 - the field's name in the JSON
    title: str,
    description: str,
    *queries: Query,
    unit: str,
    width: int,
    empty: str,
    thresholds: Json | None = None,
    logarithmic: bool = False,
    overrides: Sequence[Json] = (),
    points: int | None = None,
    height: int = 8,
    worst: Literal["lowest", "highest"] | None = None,
    **defaults: Any,
) -> Panel:
    """Draw lines over time, in the colors of the palette in turn; `thresholds` color the background.

    `worst` is for the lines of a whole fleet, too many for a legend: these come first in the tooltip.
    """
    options = {
        "legend": {"calcs": [], "displayMode": "list", "placement": "bottom", "showLegend": worst is None},
        "tooltip": {"mode": "multi", "sort": "asc" if worst == "lowest" else "desc"},
    }
    custom: Json = {"drawStyle": "line", "fillOpacity": 0, "lineWidth": 1, "showPoints": "never"}
    if thresholds:
        custom["thresholdsStyle"] = {"mode": "area"}
        defaults["thresholds"] = thresholds
    if defaults.get("decimals") == 0:
        custom["axisSoftMax"] = 1  # of counts; an axis for zeros alone would end at 100
    if logarithmic:
        custom["scaleDistribution"] = {"type": "log", "log": 2 if unit == "bytes" else 10}
    else:
        defaults["min"] = 0
    # In turn: by name, two lines may get colors that look the same.
    every = {"color": {"mode": "palette-classic"}, "custom": custom, "noValue": empty, **defaults}
    return Panel(
        id, "timeseries", title, description, queries, unit, width, height, options, every, overrides, points=points
    )


def timeline(
    id: int,  # noqa: A002 - the field's name in the JSON
    title: str,
    description: str,
    query: Query,
    *,
    width: int,
    mappings: Sequence[Json],
    empty: str,
    points: int | None = None,
) -> Panel:
    """Draw states over time as colored bars, one row per series."""
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
        "custom": {"fillOpacity": 100, "lineWidth": 0},  # the colors as they are, for the contrast of the text
        "mappings": list(mappings),
        "noValue": empty,
        "thresholds": steps((NONE, None)),
    }
    return Panel(id, "state-timeline", title, description, [query], "short", width, 8, options, defaults, points=points)


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
    needs: str | None = None,
    ratios: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    points: int | None = None,
) -> Panel:
    """Show a table joined by the labels that all queries share; `columns` maps titles to a label or a query's legend.

    Rows without a value in the column `needs` are left out. `ratios` adds columns at the end: one column over another.
    """
    values = {query.legend: f"Value #{name}" for name, query in zip(ascii_uppercase, queries, strict=False)}
    fields = {values.get(source, source): title for title, source in columns.items()}
    if len(queries) == 1 and (title_of_value := fields.get("Value #A")):
        fields["Value"] = title_of_value  # Grafana's versions name the value of a single query differently
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
    transformations += [
        {
            "id": "calculateField",
            "options": {
                "mode": "binary",
                "binary": {"left": one, "operator": "/", "right": other},
                "alias": title,
                "replaceFields": False,
            },
        }
        for title, (one, other) in ratios.items()
    ]
    if needs:
        empty_rows = {"fieldName": needs, "config": {"id": "isNull", "options": {}}}
        filters = {"type": "exclude", "match": "any", "filters": [empty_rows]}
        transformations.append({"id": "filterByValue", "options": filters})
    # The default is for the whole panel, this one for a cell.
    cells = [override_matching(".*", noValue="-")]
    # A user, job or run may be called 4711, which is not 4.71 K.
    cells += [override(title, unit="string") for title, source in columns.items() if source not in values]
    options = {"cellHeight": "sm", "showHeader": True}
    defaults = {"custom": {"align": "auto", "filterable": False}, "noValue": empty}
    return Panel(
        id,
        "table",
        title,
        description,
        queries,
        "short",
        width,
        height,
        options,
        defaults,
        [*cells, *overrides],
        transformations,
        points,
    )
