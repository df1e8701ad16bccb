"""The dashboard: rules every panel keeps, names that exist, and data in every panel from a real Prometheus."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import dashboards
import history
import promql_parser
import pytest
import yaml
from promql import SAMPLES, grouping, selectors, unknown

from gpuwarden import thresholds
from gpuwarden.exposition import TABLES
from system_parts import needs

REPOSITORY = Path(__file__).parents[1]
COMMITTED = REPOSITORY / "grafana" / "dashboards"
DASHBOARD: dict[str, Any] = json.loads((COMMITTED / "gpuwarden-box.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ROWS = [panel for panel in DASHBOARD["panels"] if panel["type"] == "row"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
COUNTERS = {row.name for table in TABLES for row in table.rows if row.kind == "counter"}
COUNTERS |= {f"{row.name}_bucket" for table in TABLES for row in table.rows if row.kind == "histogram"}

panels = pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])


def _without_variables(expression: str) -> str:
    """Write an expression as Grafana sends it when all is chosen."""
    for name, value in {"__rate_interval": "1m", "__range": "1h", **dict.fromkeys(VARIABLES, ".+")}.items():
        expression = re.sub(rf"\${name}\b", value, expression)
    assert "$" not in expression
    return expression


def _expressions(panel: dict[str, Any]) -> list[str]:
    return [_without_variables(target["expr"]) for target in panel["targets"]]


def _legend_labels(text: str) -> set[str]:
    return set(re.findall(r"{{(\w+)}}", text))


def test_committed_dashboards_are_in_step(tmp_path: Path) -> None:
    """The committed files are what the generator writes, and there is no other."""
    dashboards.main(tmp_path)
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    committed = {path.name: path.read_text() for path in COMMITTED.iterdir()}
    assert committed == written, "run: make docs"


def test_dashboard_is_one_every_grafana_takes() -> None:
    """Classic JSON with a constant uid, read-only, one crosshair, and alerts on the time axis."""
    assert (DASHBOARD["uid"], DASHBOARD["schemaVersion"]) == ("gpuwarden-box", 39)
    assert not DASHBOARD["editable"]
    assert DASHBOARD["graphTooltip"] == 1
    (annotation,) = DASHBOARD["annotations"]["list"]
    assert not unknown(_without_variables(annotation["expr"]))
    assert _legend_labels(annotation["titleFormat"] + annotation["textFormat"]) <= SAMPLES["ALERTS"]


def test_panel_ids_are_unique() -> None:
    """Links name a panel by its id, so no two share one."""
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


def test_panels_do_not_overlap() -> None:
    """Every panel has its own place within the 24 columns."""
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or below, (one, other)


@panels
def test_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
    """A panel has a title, a unit, one sentence of description, and a word for when it is empty."""
    assert panel["title"]
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert re.fullmatch(r"[A-Z][^.]*(\.md[^.]*)?\.", panel["description"])
    assert panel["fieldConfig"]["defaults"]["noValue"]
    assert panel["targets"]


@panels
def test_names_exist(panel: dict[str, Any]) -> None:
    """Metrics and labels of queries are in the tables, those of legends in the queries' results."""
    for target, expression in zip(panel["targets"], _expressions(panel), strict=True):
        assert not unknown(expression)
        carried = grouping(expression).union(*(SAMPLES[name] for name, _labels in selectors(expression)))
        assert _legend_labels(target["legendFormat"]) <= carried


@panels
def test_every_selector_follows_the_choices(panel: dict[str, Any]) -> None:
    """Each series is chosen by box, and by GPU and run where it has them; the data source is the chosen one."""
    for target, expression in zip(panel["targets"], _expressions(panel), strict=True):
        assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for name, matched in selectors(expression):
            wanted = {"instance"} if name == "ALERTS" else {"instance", "uuid", "run_id"} & SAMPLES[name]
            assert wanted <= matched, (name, expression)


@panels
def test_windows_are_grafanas(panel: dict[str, Any]) -> None:
    """Counters are read as rates over the interval that suits scrape and resolution; no window is fixed.

    But in a table, of which each row sums a run up: there it is what the counter said last in the time range.
    """
    read = r"(rate|increase)\({}{{[^}}]*}}\[\$__rate_interval\]\)"
    if panel["type"] == "table":
        read = r"last_over_time\({}{{[^}}]*}}\[\$__range\]\)"
    for target in panel["targets"]:
        windows = re.findall(r"\[([^\]]+)\]", target["expr"])
        assert set(windows) <= {"$__rate_interval", "$__range"}
        for counter in COUNTERS & {name for name, _labels in selectors(_without_variables(target["expr"]))}:
            assert re.search(read.format(counter), target["expr"])


@pytest.mark.parametrize("name", ["instance", "gpu", "run"])
def test_variables_take_several_and_all(name: str) -> None:
    """Boxes, GPUs and runs can be chosen singly, several or all, and follow the time range."""
    variable = VARIABLES[name]
    assert variable["multi"]
    assert variable["includeAll"]
    assert variable["allValue"] == ".+"
    assert variable["refresh"] == 2
    assert VARIABLES["datasource"]["query"] == "prometheus"


def _steps(value: Any) -> Iterator[float]:
    """Find the values of all threshold steps."""
    if isinstance(value, dict):
        if value.get("mode") == "absolute":
            yield from (step["value"] for step in value["steps"] if step["value"] is not None)
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _steps(each)


def test_colors_change_where_alerts_fire() -> None:
    """Every threshold on the dashboard is an alert rule's; a whole degree above it is the first good margin."""
    one_gpu_down = 1
    allowed = {thresholds.NEAR_OUT_OF_MEMORY, thresholds.NEAR_SLOWDOWN + 1, thresholds.INPUT_BOUND, one_gpu_down}
    assert set(_steps(DASHBOARD["panels"])) == allowed


def test_column_of_an_only_query_has_its_title_in_every_grafana() -> None:
    """Grafana's versions call the value of a table's only query by one of two names: both are renamed."""
    (xids,) = (panel for panel in PANELS if panel["title"] == "XIDs")
    named = {step["id"]: step["options"] for step in xids["transformations"]}["organize"]["renameByName"]
    assert named["Value"] == named["Value #A"] == "Last one ago"


def test_panels_of_runs_say_how_to_get_a_run() -> None:
    """Without any run, the panels that need one say what to add to the training."""
    runs = [panel for panel in PANELS if panel["type"] != "stat" and _needs_run(panel)]
    assert len(runs) > 6
    for panel in runs:
        assert "add the callback" in panel["fieldConfig"]["defaults"]["noValue"], panel["title"]


def _needs_run(panel: dict[str, Any]) -> bool:
    """Tell whether every query selects a series of a run."""
    return all(any("run_id" in SAMPLES[name] for name, _ in selectors(e)) for e in _expressions(panel)) and not any(
        name == "ALERTS" for e in _expressions(panel) for name, _ in selectors(e)
    )


def test_rows_of_boxes_repeat() -> None:
    """What belongs to one box is there once for each chosen box, under its name."""
    assert [row.get("repeat") for row in ROWS] == ["instance", "instance", "instance", None]
    assert all("$instance" in row["title"] for row in ROWS if "repeat" in row)


def test_runbooks_name_panels_that_exist() -> None:
    """docs/alerts.md sends people to panels by the titles they have."""
    text = (REPOSITORY / "docs" / "alerts.md").read_text()
    named = {title for found in re.findall(r"panels?\s+\*([^*]+)\*(?: and \*([^*]+)\*)?", text) for title in found}
    assert len(named) > 3
    assert named - {""} <= {panel["title"] for panel in PANELS}


def test_provisioning_fits_the_shipped_prometheus() -> None:
    """Grafana's data source asks Prometheus' own port at the scrape interval that is shipped beside it."""
    provisioning = REPOSITORY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "gpuwarden.yaml").read_text())["datasources"]
    scrapes = yaml.safe_load((REPOSITORY / "deploy" / "prometheus" / "prometheus.yml").read_text())
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "gpuwarden.yaml").read_text())["providers"]
    assert (source["type"], source["url"]) == ("prometheus", "http://localhost:9090")
    assert source["jsonData"]["timeInterval"] == scrapes["global"]["scrape_interval"]
    assert (provider["type"], provider["allowUiUpdates"]) == ("file", False)
    assert Path(provider["options"]["path"]).is_absolute()


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, float, float]]:
    """Serve a quarter of an hour of a simulated box's pages; yield Prometheus' URL and the times of both ends."""
    needs("prometheus", "prometheus")
    needs("promtool", "prometheus")
    directory = tmp_path_factory.mktemp("history")
    begin, end = history.record(directory, 15 * 60)
    with history.serving(directory) as url:
        yield url, begin, end


@panels
def test_every_query_returns_data(panel: dict[str, Any], box: tuple[str, float, float]) -> None:
    """Prometheus answers each query of a panel with numbers."""
    url, begin, end = box
    for target, expression in zip(panel["targets"], _expressions(panel), strict=True):
        assert promql_parser.parse(expression)
        if target["instant"]:
            series = history.ask(url, "query", query=expression, time=end)["result"]
            values = [float(each["value"][1]) for each in series]
        else:
            series = history.ask(url, "query_range", query=expression, start=begin, end=end, step=15)["result"]
            values = [float(value) for each in series for _time, value in each["values"]]
        assert values, expression
        assert not any(map(math.isnan, values)), expression


@pytest.mark.parametrize("name", ["gpu", "run"])
def test_choices_have_names_and_values(name: str, box: tuple[str, float, float]) -> None:
    """From each result, written as Grafana writes it, the variable takes what people read and what series carry."""
    url, _begin, end = box
    query = re.fullmatch(r"query_result\((.+)\)", VARIABLES[name]["query"]["query"])
    assert query
    pattern = re.sub(r"\?<(\w+)>", r"?P<\1>", VARIABLES[name]["regex"].strip("/"))
    key, called = {"gpu": ("uuid", "gpu"), "run": ("run_id", "run_name")}[name]
    results = history.ask(url, "query", query=_without_variables(query[1]), time=end)["result"]
    assert results
    for each in results:
        metric = dict(each["metric"])
        labels = ",".join(f'{label}="{value}"' for label, value in metric.items() if label != "__name__")
        found = re.search(pattern, f"{metric.get('__name__', '')}{{{labels}}} {each['value'][1]} {end * 1000:.0f}")
        assert found
        assert found["value"] == metric[key]
        assert found["text"].startswith(f"{metric[called]} · ")
