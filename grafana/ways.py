"""Links between dashboards, and annotations on the time axis."""

from __future__ import annotations

from classic import BAD, GOOD, PLAIN, SOURCE, Json
from series import RUN, firing, series

from gpuwarden.daemon.metrics import DaemonReadings
from gpuwarden.runs.metrics import RunReadings
from gpuwarden.web.api.api_paths import RUN_PAGE

MARK_SECONDS = 60  # length of an incident's mark: a scrape interval of one minute does not miss it

FLEET, BOX, ONE_RUN = "gpuwarden-fleet", "gpuwarden-box", "gpuwarden-run"
IN_CLUSTER = "In cluster"
_TITLES = {FLEET: "Fleet", BOX: "Host", ONE_RUN: "Run"}


def link(uid: str, title: str, **columns: str) -> Json:
    """Return a link from a table row to a dashboard: variables come from columns, and the time range is kept.

    The cluster comes from a hidden column of each such table, because hosts in two clusters can have the same name.
    """
    columns = {"cluster": IN_CLUSTER, **columns}
    chosen = "".join(f'&var-{name}=${{__data.fields["{column}"]}}' for name, column in columns.items())
    return {"title": title, "url": f"/d/{uid}?${{__url_time_range}}&${{datasource:queryparam}}{chosen}"}


def page(title: str, path: str) -> Json:
    """Return a link from a table row to a page of the daemon on the row's host.

    The address is the one that Prometheus scrapes, raw, because an encoded port would be part of the host's name.
    """
    return {"title": title, "url": f'http://${{__data.fields["Host"]:raw}}{path}', "targetBlank": True}


def run_links(title: str) -> list[Json]:
    """Return the links from a run to its dashboard, called `title`, and to the page of the run on its host."""
    dashboard = link(ONE_RUN, title, instance="Host", run="Run id")
    return [dashboard, page("Diagnosis and history, on its host", f'{RUN_PAGE}${{__data.fields["Run id"]}}')]


def ways(uid: str) -> list[Json]:
    """Return links to the other dashboards, with the selection and the time range."""
    return [
        {
            "asDropdown": False,
            "icon": "dashboard",
            "includeVars": True,
            "keepTime": True,
            "tags": [],
            "targetBlank": False,
            "title": title,
            "tooltip": f"{title} dashboard, with the selection of this one",
            "type": "link",
            "url": f"/d/{other}",
        }
        for other, title in _TITLES.items()
        if other != uid
    ]


# Findings are texts and no labels: the mark links to those of the daemon's status page.
_FINDINGS = '<a href="http://{{instance}}/#incidents" target="_blank">findings on {{instance}}</a>'


def marks() -> list[Json]:
    """Return annotations for firing alerts, for the start and end of runs, and for incidents."""
    started = f"1000 * {series(RunReadings.start_timestamp_seconds)}"
    how = f"max by ({RUN}, outcome) ({series(RunReadings.outcome)} == 1)"
    ended = f"1000 * {series(RunReadings.ended_timestamp_seconds)} * on ({RUN}) group_left (outcome) {how}"
    named = f"* on ({RUN}) group_left (run_name) {series(RunReadings.info)}"
    recorded = series(DaemonReadings.incidents_total)
    opened = f"{recorded} - {recorded} offset {MARK_SECONDS}s > 0"  # negative after a restart of the daemon
    return [
        _mark("Alerts", BAD, firing(), "{{alertname}}", "{{run_name}} GPU {{gpu}} {{instance}}", tagKeys="severity"),
        _mark("Run starts", GOOD, f"{started} {named}", "{{run_name}} started", "{{instance}}", useValueForTime=True),
        _mark("Run ends", PLAIN, f"{ended} {named}", "{{run_name}} {{outcome}}", "{{instance}}", useValueForTime=True),
        _mark("Incidents", BAD, opened, "incident: {{kind}}", _FINDINGS),
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
