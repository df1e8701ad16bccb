"""Single panels: units that fit the metrics, columns and overrides that match something, stable ids."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from committed_dashboards import (
    PANELS,
    each_dashboard,
    list_expressions,
    list_panels,
    panels,
    read_column_titles,
    read_overrides,
)
from promql import SAMPLES, parse_created_labels, parse_grouping, parse_selectors
from promql_units import unit

# Grafana's units of a query's result, by its dimensions.
UNITS: dict[tuple[tuple[str, int], ...], set[str]] = {
    (): {"short", "percentunit", "locale"},
    (("bytes", 1),): {"bytes"},
    (("bytes", 1), ("seconds", -1)): {"Bps"},
    (("celsius", 1),): {"celsius"},
    (("joules", 1),): {"kwatth"},
    (("joules", 1), ("seconds", -1)): {"watt"},
    (("seconds", 1),): {"s", "dateTimeAsIsoNoDateIfToday"},
    (("seconds", -1),): {"hertz", "ops", "short"},
}
# Units that numbers in the query change.
CONVERTED = {
    ("Growth per minute", "bytes"),
    ("Host memory growth per minute", "bytes"),
    ("Cost by owner in this time range", "kwatth"),
    ("GPUs now, worst first", "percentunit"),
}


@panels
def test_unit_fits_the_metrics(panel: dict[str, Any]) -> None:
    """The unit of a panel or column fits the metrics in it."""
    units, columns = read_overrides(panel, "unit"), read_column_titles(panel)
    for target, expression in zip(panel["targets"], list_expressions(panel), strict=True):
        shown = panel["fieldConfig"]["defaults"]["unit"]
        if panel["type"] == "table":
            column = columns.get(f"Value #{target['refId']}")
            if column is None:  # only its labels are used
                continue
            shown = units.get(column, shown)
        if panel["type"] != "state-timeline" and (panel["title"], shown) not in CONVERTED:
            assert shown in UNITS[tuple(sorted(unit(expression).items()))], expression


@panels
def test_labels_are_not_shown_as_numbers(panel: dict[str, Any]) -> None:
    """A user, a job or a run may be named 4711, which must not be shown as 4.71 K."""
    units = read_overrides(panel, "unit")
    for source, title in read_column_titles(panel).items():
        if not source.startswith("Value"):
            assert units[title] == "string"


@panels
def test_columns_are_in_the_query_results(panel: dict[str, Any]) -> None:
    """A table shows labels and values of its queries' results, and is sorted by one of them."""
    if panel["type"] != "table":
        return
    steps = {step["id"]: step["options"] for step in panel["transformations"]}
    columns = read_column_titles(panel)
    assert (
        set(steps["filterFieldsByName"]["include"]["names"])
        == columns.keys()
        == steps["organize"]["indexByName"].keys()
    )
    labels: set[str] = set()
    for expression in list_expressions(panel):
        labels |= (parse_grouping(expression) | parse_created_labels(expression)).union(
            *(SAMPLES[name] for name, _labels in parse_selectors(expression))
        )
    values = {f"Value #{target['refId']}" for target in panel["targets"]} | {"Value"}
    assert columns.keys() <= labels | values
    (sort,) = steps["sortBy"]["sort"]
    assert sort["field"] in columns.values()
    # The worst, the newest and the largest first; only names are in ascending order.
    assert sort["desc"] == (sort["field"] not in {"GPU", "Age"})


@panels
def test_overrides_match_something(panel: dict[str, Any]) -> None:
    """Overrides match a column or a line that can exist."""
    names = list(read_column_titles(panel).values()) or [target["legendFormat"] for target in panel["targets"]]
    calculated = [each for each in panel.get("transformations", ()) if each["id"] == "calculateField"]
    names += [each["options"]["alias"] for each in calculated]
    for override in panel["fieldConfig"]["overrides"]:
        how, what = override["matcher"]["id"], override["matcher"]["options"]
        if how == "byName":
            assert what in names or "{{severity}}" in names
        else:
            pattern = what.strip("/").replace("container|pod|slurm job|systemd unit", r"{{owner_kind}}")
            assert any(re.search(pattern, name) for name in names), what


@pytest.mark.parametrize(
    ("panel", "legend", "shown"),
    [
        ("gpuwarden-box Memory by owner 19", "slurm_job 4711", "slurm job 4711"),
        ("gpuwarden-box Memory by owner 19", "systemd_unit my_unit.service", "systemd unit my_unit.service"),
        ("gpuwarden-box Clock event reasons 18", "GPU 4 hw_slowdown", "GPU 4 hardware slowdown"),
        ("gpuwarden-run Errors, advice and actions 66", "my_net 7 device_oom", "my_net 7 out of device memory"),
    ],
)
def test_legends_have_words(panel: str, legend: str, shown: str) -> None:
    """Legends show the words of a label's value, and leave names alone."""
    for step in PANELS[panel]["transformations"]:
        if step["id"] == "renameByRegex":
            legend = re.sub(step["options"]["regex"].strip("/"), step["options"]["renamePattern"], legend)
    assert legend == shown


@panels
def test_unlisted_lines_are_gray(panel: dict[str, Any]) -> None:
    """Lines that the legend leaves out have no color of the palette, which would be that of another line."""
    hidden = read_overrides(panel, "custom.hideFrom") if panel["type"] == "timeseries" else {}
    assert {name: read_overrides(panel, "color").get(name, {}).get("fixedColor") for name in hidden} == dict.fromkeys(
        hidden, "gray"
    )


@panels
def test_queries_fit_the_kind_of_panel(panel: dict[str, Any]) -> None:
    """Values and tables query the end of the time range only, lines and states all of it."""
    for target in panel["targets"]:
        assert target["instant"] == (panel["type"] in {"stat", "table"}) == (not target["range"])
        assert target["format"] == ("table" if panel["type"] == "table" else "time_series")
        assert parse_selectors(list_expressions(panel)[0])
    names = [target["refId"] for target in panel["targets"]]
    assert len(names) == len(set(names))


@each_dashboard
def test_panel_ids_stay(dashboard: dict[str, Any]) -> None:
    """Panel ids are stable and never reused; add a new panel's id to the file."""
    path = Path(__file__).parent / "panel_ids.json"
    ids = {str(panel["id"]): panel["title"] for panel in dashboard["panels"]}
    assert json.loads(path.read_text())[dashboard["uid"]] == ids


@each_dashboard
def test_titles_are_unique(dashboard: dict[str, Any]) -> None:
    """Panel titles are unique within a dashboard."""
    found = [panel["title"] for panel in list_panels(dashboard)]
    assert len(found) == len(set(found))
