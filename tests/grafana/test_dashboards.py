"""Rules for every panel of the dashboards: layout, selection, links and existing names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import dashboards
from committed_dashboards import (
    ALL,
    COMMITTED,
    DASHBOARDS,
    HIDDEN,
    REPOSITORY,
    VARIABLES,
    drop_owner_label,
    each_dashboard,
    list_expressions,
    list_panels,
    panels,
    read_column_titles,
    read_overrides,
    substitute_variables,
)
from offenders import check_all
from promql import SAMPLES, TARGET, find_unknown_names, parse_grouping, parse_matchers, parse_selectors

from gpuwarden.alerts.alert_links import AlertLinks
from gpuwarden.alerts.prometheus_rules import Choices, render_annotations
from gpuwarden.config import thresholds
from gpuwarden.daemon.metrics_page import TABLES
from gpuwarden.gpu.metrics import MigReadings
from gpuwarden.health.conditions import ALERTS
from gpuwarden.health.model import Condition, fill_places
from gpuwarden.owners.metrics import ProcessReadings
from gpuwarden.pressure.metrics import PressureReadings
from gpuwarden.runs.metrics import RunReadings
from gpuwarden.usage.metrics import RunUsageReadings

COUNTERS = {row.name for table in TABLES for row in table.rows if row.kind == "counter"}
COUNTERS |= {f"{row.name}_bucket" for table in TABLES for row in table.rows if row.kind == "histogram"}
CHOSEN = {"cluster": "cluster", "instance": "instance", "uuid": "gpu", "run_id": "run", "owner": "owner"}
OF_DEVICES = {
    row.name for table in (MigReadings, PressureReadings, RunReadings, RunUsageReadings) for row in table.rows
}
OF_DEVICES |= {f"{row.name}_bucket" for row in RunReadings.rows if row.kind == "histogram"}
OF_PROCESSES = {row.name for row in ProcessReadings.rows}


def _legend_labels(text: str) -> set[str]:
    return set(re.findall(r"{{(\w+)}}", text))


def test_committed_dashboards_are_up_to_date(tmp_path: Path) -> None:
    """The committed files are the generator's output, and there are no others."""
    dashboards.main(tmp_path)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_text() for path in COMMITTED.iterdir()}
    assert committed == written, "run: make docs"


def test_dashboards_are_those_that_links_name() -> None:
    """Fleet, host and run keep their uids, which users' links and alerts contain."""
    assert {uid: dashboard["uid"] for uid, dashboard in DASHBOARDS.items()} == {
        uid: uid for uid in ("gpuwarden-box", "gpuwarden-fleet", "gpuwarden-run")
    }


@each_dashboard
def test_dashboard_works_in_every_grafana(dashboard: dict[str, Any]) -> None:
    """Dashboards are classic JSON, read-only, with one crosshair; alerts, runs and incidents are annotations."""
    assert dashboard["schemaVersion"] == 39
    assert not dashboard["editable"]
    assert dashboard["graphTooltip"] == 1
    assert {panel["type"] for panel in list_panels(dashboard)} <= {"stat", "table", "timeseries", "state-timeline"}
    marks = {mark["name"]: mark for mark in dashboard["annotations"]["list"]}
    assert list(marks) == ["Alerts", "Run starts", "Run ends", "Incidents"]
    assert [mark.get("useValueForTime") for mark in marks.values()] == [None, True, True, None]
    assert 'href="http://{{instance}}/#incidents"' in marks["Incidents"]["textFormat"]
    for mark in marks.values():
        assert mark["enable"]
        _follows(mark["expr"])
        expression = drop_owner_label(substitute_variables(mark["expr"]))
        assert not find_unknown_names(expression)
        carried = parse_grouping(expression).union(*(SAMPLES[name] for name, _labels in parse_selectors(expression)))
        assert _legend_labels(mark["titleFormat"] + mark["textFormat"]) <= carried


@each_dashboard
def test_panel_ids_are_unique(dashboard: dict[str, Any]) -> None:
    """Panel ids are unique, because links contain them."""
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


@each_dashboard
def test_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    """No two panels overlap within the 24 columns."""
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        apart = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart or below, (one, other)


@each_dashboard
def test_main_values_are_on_top(dashboard: dict[str, Any]) -> None:
    """Large values come first, then a table with the worst on top; they fit a screen, before any heading."""
    top = [panel for panel in dashboard["panels"] if panel["gridPos"]["y"] + panel["gridPos"]["h"] <= 22]
    assert top[0]["type"] == "stat"
    assert {"stat", "table"} <= {panel["type"] for panel in top}
    assert all(row["gridPos"]["y"] >= 8 for row in dashboard["panels"] if row["type"] == "row")


@panels
def test_panel_has_title_and_description(panel: dict[str, Any]) -> None:
    """A panel has a title, a unit, one sentence of description, and a text for when it is empty."""
    assert panel["title"]
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert re.fullmatch(r"[A-Z][^.]*(\.md[^.]*)?\.", panel["description"])
    assert panel["fieldConfig"]["defaults"]["noValue"] not in {"", "no data"}
    assert panel["targets"]


@panels
def test_names_exist(panel: dict[str, Any]) -> None:
    """Metrics and labels of queries are in the tables, those of legends in the queries' results."""
    for target, written in zip(panel["targets"], list_expressions(panel), strict=True):
        expression = drop_owner_label(written)
        assert not find_unknown_names(expression)
        carried = parse_grouping(expression).union(*(SAMPLES[name] for name, _labels in parse_selectors(expression)))
        assert _legend_labels(target["legendFormat"]) <= carried


@panels
def test_every_selector_follows_the_choices(panel: dict[str, Any]) -> None:
    """Each series is selected by host, and by GPU, run and owner if it has them, from the selected data source."""
    for target in panel["targets"]:
        assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        _follows(target["expr"])


def _follows(expression: str) -> None:
    """Check that the series of a query follow the selection."""
    for variable in ("__range_s", "__rate_interval", "__range", "__interval_ms", "__interval"):
        expression = re.sub(rf"\${variable}\b", ALL[variable], expression)
    for name, matched in parse_matchers(expression):
        chosen = {label: f"${variable}" for label, variable in CHOSEN.items() if label in SAMPLES[name]}
        if name in OF_DEVICES and "uuid" in chosen:
            chosen["uuid"] = "$gpu|$mig"  # an instance has a UUID of its own
        if name in OF_PROCESSES and "run_id" in chosen:
            chosen["run_id"] = "($run)|"  # and a process may belong to no run
        if name.startswith("ALERTS"):
            chosen = {label: f"({value})|" for label, value in {**chosen, "uuid": "$gpu|$mig"}.items()}
        patterns = {label: value for label, (how, value) in matched.items() if how == "MatchOp.Re"}
        assert chosen.items() <= patterns.items(), name


@panels
def test_a_site_may_label_its_targets(panel: dict[str, Any]) -> None:
    """Matches list their labels, cluster included, because targets may have further labels."""
    for expression in list_expressions(panel):
        for names in re.findall(r"\bon \(([^)]*)\)", expression):
            assert {"cluster", *TARGET} <= set(names.split(", ")), expression
        assert "ignoring" not in expression


@panels
def test_windows_are_grafanas(panel: dict[str, Any]) -> None:
    """Counters are read as rates over the interval that suits scrape and resolution; no window is fixed.

    Except in a table, whose rows have the total or the last value of the time range, or cover the time of an alert.
    """
    assert thresholds.MEMORY_ERRORS_SECONDS == 3600
    read = r"(rate|increase)\({}{{[^}}]*}}\[\$__rate_interval\]\)"
    if panel["type"] == "table":
        read = r"((last_over_time|increase)\({}{{[^}}]*}}\[(\$__range(:\$__interval)?|3600s)\]\)|\({}{{)"
    for target in panel["targets"]:
        windows = re.findall(r"\[([^\]]+)\]", target["expr"])
        fixed = {"3600s"} if panel["type"] == "table" else set()
        assert set(windows) <= {"$__rate_interval", "$__range", "$__range:$__interval"} | fixed
        for counter in COUNTERS & {name for name, _labels in parse_selectors(substitute_variables(target["expr"]))}:
            assert re.search(read.format(counter, counter), target["expr"])


@each_dashboard
def test_variables_accept_several_and_all(dashboard: dict[str, Any]) -> None:
    """Variables take one value, several or all, and follow the time range."""
    source, *others = dashboard["templating"]["list"]
    assert (source["name"], source["query"]) == ("datasource", "prometheus")
    assert tuple(variable["name"] for variable in others if not variable["hide"]) == VARIABLES
    for variable in others:
        if variable["hide"]:
            assert variable["name"] in HIDDEN
            assert variable["allValue"] is None
            continue
        assert variable["multi"]
        assert variable["includeAll"]
        assert variable["allValue"] == ALL[variable["name"]]
        assert variable["refresh"] == 2
        among: tuple[str, ...] = ("cluster", "instance")[: {"cluster": 0, "instance": 1}.get(variable["name"], 2)]
        assert all(f'{name}=~"${name}"' in variable["query"]["query"] for name in among)


def test_host_and_run_dashboards_start_with_one_host() -> None:
    """The host and run dashboards start with one host, because they draw every GPU and run."""
    for uid in ("gpuwarden-box", "gpuwarden-run"):
        chosen = {v["name"]: v["current"] for v in DASHBOARDS[uid]["templating"]["list"]}
        assert (chosen["instance"], chosen["gpu"]["value"]) == ({}, ["$__all"])


RED, ORANGE, YELLOW = "#D6293D", "#BA4F00", "#8A6B00"
# Lower bound of each color, by unit; the first and the last range are good or bad.
COLOR_STEPS: dict[str, list[list[tuple[str, float | None]]]] = {
    "percentunit": [
        [(RED, None), (ORANGE, thresholds.NEAR_OUT_OF_MEMORY), ("", thresholds.LITTLE_MEMORY)],
        [("", None), (YELLOW, thresholds.INPUT_BOUND)],
        [("", None), (ORANGE, thresholds.SLOWED)],
    ],
    # The driver reports whole degrees: one degree above the last that warns is good.
    "celsius": [[(RED, None), (ORANGE, thresholds.SLOWDOWN + 1), ("", thresholds.NEAR_SLOWDOWN + 1)]],
    "s": [
        [
            (RED, None),
            (ORANGE, thresholds.OUT_OF_MEMORY_SOON_SECONDS),
            ("", thresholds.OUT_OF_MEMORY_AHEAD_SECONDS),
        ]
    ],
    "short": [[("", None), (RED, 1)], [("", None), (ORANGE, 1)], [("", None)]],  # GPU lost, host down, alert; states
}


def _thresholds(panel: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, float | None]]]]:
    """Yield all thresholds of a panel with their units; good colors count as none."""
    unit = panel["fieldConfig"]["defaults"]["unit"]
    found = [(unit, panel["fieldConfig"]["defaults"].get("thresholds"))]
    units = read_overrides(panel, "unit")
    found += [(units.get(name, unit), value) for name, value in read_overrides(panel, "thresholds").items()]
    for measure, value in found:
        if value:
            bad = {RED, ORANGE, YELLOW}
            steps = [(step["color"] if step["color"] in bad else "", step["value"]) for step in value["steps"]]
            yield measure, steps


@panels
def test_colors_change_where_alerts_fire(panel: dict[str, Any]) -> None:
    """Thresholds are those of alert rules and pressure: red is critical, orange a warning, yellow a hint."""
    for unit, steps in _thresholds(panel):
        assert steps in COLOR_STEPS[unit]


@each_dashboard
def test_headroom_is_colored(dashboard: dict[str, Any]) -> None:
    """Headroom is colored on each dashboard."""
    all_steps = [steps for panel in list_panels(dashboard) for _unit, steps in _thresholds(panel)]
    assert COLOR_STEPS["percentunit"][0] in all_steps


@each_dashboard
def test_column_of_an_only_query_has_its_title_in_every_grafana(dashboard: dict[str, Any]) -> None:
    """Grafana's versions name the value of a table's only query differently: both names are renamed."""
    for panel in list_panels(dashboard):
        if panel["type"] == "table" and len(panel["targets"]) == 1:
            named = {step["id"]: step["options"] for step in panel["transformations"]}["organize"]["renameByName"]
            assert named["Value"] == named["Value #A"]


@each_dashboard
def test_alerts_have_a_summary(dashboard: dict[str, Any]) -> None:
    """The table of alerts has each alert's summary: the series that Prometheus writes have none."""
    (alerts,) = (panel for panel in list_panels(dashboard) if panel["title"] == "Alerts firing")
    (mapping,) = read_overrides(alerts, "mappings")["Summary"]
    summaries = {name: fill_places(alert.title, Choices().values()) for name, alert in ALERTS.items()}
    assert {name: value["text"] for name, value in mapping["options"].items()} == summaries
    assert not any("{" in text for text in summaries.values())


def _needs_run(panel: dict[str, Any]) -> bool:
    """Return whether every query selects a series of a run."""
    chosen = [{name for name, _labels in parse_selectors(expression)} for expression in list_expressions(panel)]
    return all(any(name.startswith("gpuwarden_run_") for name in names) for names in chosen)


@panels
def test_panels_of_runs_say_how_to_get_a_run(panel: dict[str, Any]) -> None:
    """Without a run, the panels that need one say how to add one, or that there is no problem."""
    text = panel["fieldConfig"]["defaults"]["noValue"]
    if panel["type"] != "stat" and _needs_run(panel):
        assert re.search("add the callback|no leak detected|reports its loss|no pressure", text), text


def test_rows_of_hosts_repeat() -> None:
    """Rows of a host repeat for each selected host, with its name."""
    rows = [panel for panel in DASHBOARDS["gpuwarden-box"]["panels"] if panel["type"] == "row"]
    assert [row.get("repeat") for row in rows] == ["instance"] * 4
    assert all("$instance" in row["title"] for row in rows)


# The column of a table that each variable of a link is taken from.
COLUMNS = {"cluster": "In cluster", "instance": "Host", "gpu": "UUID", "run": "Run id"}


def _links(value: Any) -> Iterator[str]:
    """Yield the URLs of all links."""
    if isinstance(value, dict):
        if isinstance(value.get("url"), str):
            yield value["url"]
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _links(each)


@each_dashboard
def test_links_lead_to_dashboards_with_the_time(dashboard: dict[str, Any]) -> None:
    """Each dashboard links to the others with the selection, and rows of tables with their subject."""
    ways = dashboard["links"]
    assert {way["url"] for way in ways} == {f"/d/{uid}" for uid in DASHBOARDS if uid != dashboard["uid"]}
    assert all(way["keepTime"] and way["includeVars"] for way in ways)
    linked = 0
    for panel in list_panels(dashboard):
        columns = set(read_column_titles(panel).values())
        for url in _links(panel["fieldConfig"]):
            if url.startswith("http://"):  # a page of the daemon
                continue
            linked += 1
            uid, _, query = url.removeprefix("/d/").partition("?")
            time, source, *chosen = query.split("&")
            assert (time, source) == ("${__url_time_range}", "${datasource:queryparam}")
            taken = dict(re.findall(r'var-(\w+)=\${__data\.fields\["([^"]+)"\]}', query))
            assert len(taken) == len(chosen)
            assert ("run" in taken) == (uid == "gpuwarden-run")
            assert taken.items() <= COLUMNS.items()
            assert set(taken.values()) <= columns
            assert {"cluster", "instance", *({"run"} if uid == "gpuwarden-run" else ())} <= taken.keys()
            assert taken.keys() <= {each["name"] for each in DASHBOARDS[uid]["templating"]["list"]}
    assert linked >= 3


@check_all(ALERTS)
def test_alerts_lead_to_what_they_are_about(alert: Condition) -> None:
    """An alert of a run links to the run dashboard, others to the host dashboard, with existing variables."""
    url = render_annotations(alert, Choices(links=AlertLinks(dashboard_url="https://grafana")))["dashboard_url"]
    uid, _, query = url.removeprefix("https://grafana/d/").partition("?")
    assert uid == {"run": "gpuwarden-run", "gpu": "gpuwarden-box", "box": "gpuwarden-box"}[alert.subject]
    wanted = {"run": {"instance", "run"}, "gpu": {"instance", "gpu"}, "box": {"instance"}}[alert.subject]
    assert set(re.findall(r"var-(\w+)=", query)) == wanted | {"cluster"}
    assert wanted | {"cluster"} <= {each["name"] for each in DASHBOARDS[uid]["templating"]["list"]}


def test_runbooks_name_panels_that_exist() -> None:
    """Panel titles in docs/reference/alerts.md exist."""
    text = (REPOSITORY / "docs" / "reference" / "alerts.md").read_text()
    named = {title for found in re.findall(r"panels?\s+\*([^*]+)\*(?: and \*([^*]+)\*)?", text) for title in found}
    assert len(named) > 3
    assert named - {""} <= {panel["title"] for dashboard in DASHBOARDS.values() for panel in list_panels(dashboard)}
