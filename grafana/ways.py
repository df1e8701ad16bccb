"""Ways from one dashboard to another, and marks on the time axis of all of them."""

from __future__ import annotations

from classic import BAD, GOOD, PLAIN, SOURCE, Json
from series import RUN, firing, series

from gpuwarden.runs.metrics import RunReadings

FLEET, BOX, ONE_RUN = "gpuwarden-fleet", "gpuwarden-box", "gpuwarden-run"
IN_CLUSTER = "In cluster"
_TITLES = {FLEET: "Fleet", BOX: "Box", ONE_RUN: "Run"}


def link(uid: str, title: str, **columns: str) -> Json:
    """Lead from a row of a table to a dashboard: each variable is taken from a column, the time is kept.

    The row's cluster goes along, in a column of that name that every such table has: boxes of two may have one name.
    """
    columns = {"cluster": IN_CLUSTER, **columns}
    chosen = "".join(f'&var-{name}=${{__data.fields["{column}"]}}' for name, column in columns.items())
    return {"title": title, "url": f"/d/{uid}?${{__url_time_range}}&${{datasource:queryparam}}{chosen}"}


def ways(uid: str) -> list[Json]:
    """Lead to the other dashboards, with all that is chosen and the time."""
    return [
        {
            "asDropdown": False,
            "icon": "dashboard",
            "includeVars": True,
            "keepTime": True,
            "tags": [],
            "targetBlank": False,
            "title": title,
            "tooltip": f"gpuwarden: {title}, for what is chosen here",
            "type": "link",
            "url": f"/d/{other}",
        }
        for other, title in _TITLES.items()
        if other != uid
    ]


def marks() -> list[Json]:
    """Mark when alerts fire, and when runs begin and end, in the colors of neither."""
    began = f"1000 * {series(RunReadings.start_timestamp_seconds)}"
    how = f"max by ({RUN}, outcome) ({series(RunReadings.outcome)} == 1)"
    ended = f"1000 * {series(RunReadings.ended_timestamp_seconds)} * on ({RUN}) group_left (outcome) {how}"
    named = f"* on ({RUN}) group_left (run_name) {series(RunReadings.info)}"
    return [
        _mark("Alerts", BAD, firing(), "{{alertname}}", "{{run_name}} GPU {{gpu}} {{instance}}", tagKeys="severity"),
        _mark("Runs begin", GOOD, f"{began} {named}", "{{run_name}} begins", "{{instance}}", useValueForTime=True),
        _mark("Runs end", PLAIN, f"{ended} {named}", "{{run_name}} {{outcome}}", "{{instance}}", useValueForTime=True),
    ]


def _mark(name: str, color: str, expression: str, title: str, text: str, **more: object) -> Json:
    return {
        "name": name,
        "datasource": SOURCE,
        "enable": True,
        "iconColor": color,
        "expr": expression,
        "titleFormat": title,
        "textFormat": text,
        "step": "15s",
        **more,
    }
