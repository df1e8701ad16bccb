"""The dashboards' queries as Grafana asks them: variables filled in, and the step that it chooses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DASHBOARDS = Path(__file__).parents[1] / "grafana" / "dashboards"
SCRAPED = 15.0  # seconds; the data source's interval, below which no step goes
COLUMN = 78  # pixels of a panel's width, of 24 in a window of 1920
FEW = 100  # points of annotations
MOST = 11_000  # points that Prometheus gives
# Grafana rounds a step to the second number if it is below the first, in seconds (rangeutil.roundInterval).
_ROUNDED = (
    (17.5, 15), (25, 20), (45, 30), (90, 60), (210, 120), (450, 300), (750, 600), (1050, 900), (1500, 1200),
    (2700, 1800), (5400, 3600), (9000, 7200), (16200, 10800), (32400, 21600), (86400, 43200),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asked:
    """A query of a panel, an annotation or a variable; `step` is seconds, None for one asked of the end alone.

    `label` is whose values are asked for, of the series that `expression` selects, in place of a query.
    """

    dashboard: str
    panel: str
    expression: str
    step: float | None = None
    label: str | None = None


def queries(span: float, box: str, found: Callable[[str], Mapping[str, str]]) -> Iterator[Asked]:
    """Yield what all dashboards ask over so many seconds; that of a box is opened for one, the others for all.

    Of variables whose value a query finds, `found` returns the labels of its result.
    """
    for path in sorted(DASHBOARDS.glob("*.json")):
        dashboard = json.loads(path.read_text(encoding="utf-8"))
        yield from _of_dashboard(dashboard, path.stem.removeprefix("gpuwarden-"), span, box, found)


def step(span: float, points: float) -> float:
    """Return the seconds between so many points that Grafana asks for."""
    wanted = max(span / points, SCRAPED)
    return max(next(rounded for below, rounded in _ROUNDED if wanted < below), span / MOST)


def _of_dashboard(
    dashboard: Mapping[str, Any], name: str, span: float, box: str, found: Callable[[str], Mapping[str, str]]
) -> Iterator[Asked]:
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    # What is chosen at first is all, or of a variable that has no choice the first.
    chosen = {name: each["allValue"] if each["current"] else box for name, each in _several(variables).items()}
    for variable, each in variables.items():
        if each.get("includeAll") is False:
            query = _filled(each["query"]["query"], chosen, span, SCRAPED)
            chosen[variable] = found(_of_variable(name, "", query).expression)["label"]
    for panel in dashboard["panels"]:
        points = panel.get("maxDataPoints", panel["gridPos"]["w"] * COLUMN)
        for number, target in enumerate(panel.get("targets", ()), 1):
            title = panel["title"] + (f", {number}" if len(panel["targets"]) > 1 else "")
            every = step(span, points)
            expression = _filled(target["expr"], chosen, span, every)
            yield Asked(name, title, expression, None if target["instant"] else every)
    for mark in dashboard["annotations"]["list"]:
        every = step(span, FEW)
        yield Asked(name, f"mark: {mark['name']}", _filled(mark["expr"], chosen, span, every), every)
    for variable, each in variables.items():
        if variable != "datasource":
            yield _of_variable(name, f"choice: {each['label']}", _filled(each["query"]["query"], chosen, span, SCRAPED))


def _several(variables: Mapping[str, Any]) -> dict[str, Any]:
    return {name: each for name, each in variables.items() if each.get("includeAll")}


def _of_variable(dashboard: str, panel: str, query: str) -> Asked:
    if values := re.fullmatch(r"label_values\((.+), (\w+)\)", query):
        return Asked(dashboard, panel, values[1], label=values[2])
    return Asked(dashboard, panel, query.removeprefix("query_result(").removesuffix(")"))


def _filled(expression: str, chosen: Mapping[str, str], span: float, every: float) -> str:
    values = {
        **chosen,
        "__rate_interval": f"{max(every + SCRAPED, 4 * SCRAPED):g}s",
        "__interval": f"{every:g}s",
        "__interval_ms": f"{1000 * every:g}",
        "__range": f"{span:.0f}s",
        "__range_s": f"{span:.0f}",
    }
    return re.sub(r"\$(\w+)", lambda found: values.get(found[1], found[0]), expression)
