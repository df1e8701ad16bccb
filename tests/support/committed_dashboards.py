"""The committed dashboards, and their queries as Grafana sends them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from offenders import check_all

REPOSITORY = Path(__file__).parents[2]
COMMITTED = REPOSITORY / "grafana" / "dashboards"
DASHBOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in sorted(COMMITTED.iterdir())
}
PANELS: dict[str, dict[str, Any]] = {
    f"{uid} {panel['title']} {panel['id']}": panel
    for uid, dashboard in DASHBOARDS.items()
    for panel in dashboard["panels"]
    if panel["type"] != "row"
}
VARIABLES = ("cluster", "instance", "gpu", "owner", "run")
ALL = {"__rate_interval": "1m", "__interval": "1m", "__range": "1h", "__range_s": "3600", "__interval_ms": "60000"}
ALL |= dict.fromkeys(VARIABLES, ".*")
# What Grafana makes of all of nothing, and that nothing recorded is read in place of samples.
HIDDEN = {"mig": "()", "recorded": "none"}

# Decorators: one test of all panels, or of all dashboards, which lists those that fail.
panels = check_all(PANELS)
each_dashboard = check_all(DASHBOARDS)


def list_panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Return all panels but the headings."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def substitute_variables(expression: str, **chosen: str) -> str:
    """Write an expression as Grafana sends it when "All" is selected, except for `chosen`."""
    for name, value in {**ALL, **HIDDEN, **chosen}.items():
        expression = re.sub(rf"\${name}\b", value, expression)
    assert not re.search(r"\$(?!1\b)", expression)  # $1 is label_replace's
    return expression


def list_expressions(panel: dict[str, Any], **chosen: str) -> list[str]:
    """Return a panel's queries, likewise."""
    return [substitute_variables(target["expr"], **chosen) for target in panel["targets"]]


def drop_owner_label(expression: str) -> str:
    """Leave out the label that no sample has on purpose."""
    return re.sub(r'(gpuwarden_gpu_up{[^}]*),owner=~"[^"]*"', r"\1", expression)


def read_column_titles(panel: dict[str, Any]) -> dict[str, str]:
    """Return the titles of a table's columns, by the labels or values that they show."""
    steps = {step["id"]: step["options"] for step in panel["transformations"]}
    return dict(steps["organize"]["renameByName"]) if "organize" in steps else {}


def read_overrides(panel: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a property by the fields that overrides give it to."""
    return {
        override["matcher"]["options"]: each["value"]
        for override in panel["fieldConfig"]["overrides"]
        for each in override["properties"]
        if each["id"] == name
    }
