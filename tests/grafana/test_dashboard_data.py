"""Dashboards on real data: a real Prometheus evaluates every query, on raw and on recorded series."""

from __future__ import annotations

import math
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import backfill
import history
import promql_parser
import pytest
import yaml
from committed_dashboards import (
    DASHBOARDS,
    PANELS,
    VARIABLES,
    list_expressions,
    list_panels,
    read_column_titles,
    substitute_variables,
)
from offenders import listing_offenders

from system_parts import needs

pytestmark = pytest.mark.system

Hosts = tuple[str, float, float]  # Prometheus' URL, and the Unix times of the start and end of its data
ONE_HOST = "gpu-box-1:9846"  # there is one in each of two clusters


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Serve a quarter of an hour of metrics of simulated hosts; yield Prometheus' URL and the times of both ends."""
    needs("prometheus", "prometheus")
    needs("promtool", "prometheus")
    directory = tmp_path_factory.mktemp("history")
    begin, end = history.record(directory, 15 * 60)
    with backfill.serving(directory, history.STEP) as url:
        yield url, begin, end


def test_every_query_returns_data(hosts: Hosts) -> None:
    """Each query of each panel returns numbers, and legends are unique."""
    with listing_offenders() as case:
        for name, panel in PANELS.items():
            with case(name):
                _returns_data(panel, hosts, one_host=name.startswith("gpuwarden-box"))


def _returns_data(panel: dict[str, Any], hosts: Hosts, *, one_host: bool) -> None:
    clusters = [{"instance": ONE_HOST, "cluster": cluster} for cluster in ("lab", "west")] if one_host else [{}]
    answered: Counter[str] = Counter()
    for chosen in clusters:
        legends: Counter[str] = Counter()
        for target, expression in zip(panel["targets"], list_expressions(panel, **chosen), strict=True):
            series = _evaluate(expression, hosts, now=target["instant"])
            answered[target["refId"]] += len(series)
            if panel["type"] != "table":
                legends.update(_legend(target["legendFormat"], each["metric"]) for each in series)
        assert [legend for legend, count in legends.items() if count > 1 or not legend] == []
    assert all(answered[target["refId"]] for target in panel["targets"]), answered


def _evaluate(expression: str, hosts: Hosts, *, now: bool) -> list[dict[str, Any]]:
    """Return Prometheus' result of a query, which must be numbers."""
    url, begin, end = hosts
    assert promql_parser.parse(expression)
    if now:
        series: list[dict[str, Any]] = backfill.ask(url, "query", query=expression, time=end)["result"]
        values = [float(each["value"][1]) for each in series]
    else:
        series = backfill.ask(url, "query_range", query=expression, start=begin, end=end, step=15)["result"]
        values = [float(value) for each in series for _time, value in each["values"]]
    assert not any(map(math.isnan, values)), expression
    return series


def _legend(text: str, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), text)


def test_annotations_are_found(hosts: Hosts) -> None:
    """Annotations show alerts that fired and runs that started and ended, at their time."""
    url, begin, end = hosts
    for mark in (mark for dashboard in DASHBOARDS.values() for mark in dashboard["annotations"]["list"]):
        expression = substitute_variables(mark["expr"])
        found = backfill.ask(url, "query_range", query=expression, start=begin, end=end, step=15)["result"]
        assert found
        if mark.get("useValueForTime"):
            times = [float(value) / 1000 for each in found for _time, value in each["values"]]
            assert begin - 1000 < min(times) <= max(times) <= end


def _query(uid: str, panel: str, legend: str) -> str:
    """Return a panel's query as it is written."""
    (found,) = (each for each in list_panels(DASHBOARDS[uid]) if each["title"] == panel)
    (query,) = (target["expr"] for target in found["targets"] if target["legendFormat"] == legend)
    return str(query)


def test_runs_on_instances_of_a_chosen_gpu_are_shown(hosts: Hosts) -> None:
    """Selecting a GPU with MIG shows its instances and their runs, by the hidden variable."""
    url, begin, end = hosts
    (gpu,) = (
        each["metric"]["gpu_uuid"]
        for each in backfill.ask(url, "query", query="gpuwarden_mig_info", time=end)["result"]
    )
    variables = {each["name"]: each for each in DASHBOARDS["gpuwarden-box"]["templating"]["list"]}
    values = re.fullmatch(r"label_values\((.+), uuid\)", variables["mig"]["query"]["query"])
    assert values

    def offered(**chosen: str) -> list[str]:
        found = backfill.ask(
            url, "series", **{"match[]": substitute_variables(values[1], **chosen)}, start=begin, end=end
        )
        return [each["uuid"] for each in found]

    assert offered() == []  # all GPUs: no name has to be listed
    (instance,) = offered(gpu=gpu)
    for panel in ("Memory in use by allocators", "Headroom", "Memory used"):
        (found,) = (each for each in list_panels(DASHBOARDS["gpuwarden-box"]) if each["title"] == panel)
        parts = [
            each
            for expression in list_expressions(found, gpu=gpu, mig=instance)
            for each in _evaluate(expression, hosts, now=False)
            if each["metric"].get("uuid") == instance
        ]
        assert {each["metric"]["gpu"] for each in parts} == {"0/0/0"}, panel
    for legend in ("headroom", "runs", "identity", "used", "state"):
        query = substitute_variables(_query("gpuwarden-fleet", "GPUs now, worst first", legend), gpu=gpu, mig=instance)
        rows = {each["metric"]["uuid"]: each["metric"] for each in _evaluate(query, hosts, now=True)}
        assert instance in rows
        assert legend != "identity" or rows[instance]["board"] == gpu  # the target of its row's link


def test_hosts_of_one_name_stay_separate(hosts: Hosts) -> None:
    """A row of a table links to the host in its own cluster, or to all clusters if targets have none."""
    for uid, panel, legend in (
        ("gpuwarden-fleet", "GPUs now, worst first", "identity"),
        ("gpuwarden-fleet", "Runs in this time range", "identity"),
        ("gpuwarden-box", "Alerts firing", "severity"),
    ):
        rows = _evaluate(substitute_variables(_query(uid, panel, legend)), hosts, now=True)
        places = {(each["metric"]["instance"], each["metric"]["place"]) for each in rows}
        assert places <= {(ONE_HOST, "lab"), (ONE_HOST, "west"), ("gpu-box-2:9846", "All")}
        assert (ONE_HOST, "lab") in places
        (table,) = (each for each in list_panels(DASHBOARDS[uid]) if each["title"] == panel)
        assert read_column_titles(table)["place"] == "In cluster"


def test_a_host_that_is_down_is_in_the_table(hosts: Hosts) -> None:
    """A host that does not answer Prometheus is above all GPUs, because nothing else shows it."""
    url, begin, end = hosts
    answers = [
        backfill.ask(url, "query", query='up{cluster="west"}', time=time)["result"][0]["value"]
        for time in range(int(begin), int(end), 5)
    ]
    time = next(time for time, up in answers if up == "0")
    for legend, expected in (("state", 10), ("identity", 1)):
        query = substitute_variables(_query("gpuwarden-fleet", "GPUs now, worst first", legend))
        rows = backfill.ask(url, "query", query=query, time=time)["result"]
        ((labels, value),) = (
            (each["metric"], float(each["value"][1])) for each in rows if each["metric"]["uuid"] == "none"
        )
        assert (labels["instance"], labels["cluster"]) == (ONE_HOST, "west")
        assert legend != "state" or value == expected == max(float(each["value"][1]) for each in rows)
        assert legend != "identity" or (labels["gpu"], labels["board"], labels["place"]) == ("all", "All", "west")


def test_a_lost_gpu_keeps_its_owner_and_run(hosts: Hosts) -> None:
    """The row of a lost GPU has the owner and the run that it had, of which no metric says anything anymore."""
    url, begin, _end = hosts
    gone = 'gpuwarden_gpu_up{cluster="lab"} == 0 unless on (uuid) gpuwarden_owner_gpu_memory_used_bytes'
    # Later the driver is lost too, and with it all GPUs.
    (lost,) = backfill.ask(url, "query_range", query=gone, start=begin, end=begin + 10 * 60, step=5)["result"]
    uuid, time = lost["metric"]["uuid"], lost["values"][-1][0]
    for legend, label, expected in (("owners", "owner", "grace"), ("runs", "run_name", "tabular-embedding")):
        query = substitute_variables(_query("gpuwarden-fleet", "GPUs now, worst first", legend))
        rows = backfill.ask(url, "query", query=query, time=time)["result"]
        assert [each["metric"][label] for each in rows if each["metric"]["uuid"] == uuid] == [expected]
        assert len({each["metric"]["uuid"] for each in rows}) == len(rows) > 3  # one for each GPU that has any


def test_state_is_red_where_a_critical_alert_fires(hosts: Hosts) -> None:
    """A GPU with a critical alert is red in the table, except while the alert outlasts its condition."""
    url, begin, end = hosts
    (table,) = (each for each in list_panels(DASHBOARDS["gpuwarden-fleet"]) if each["title"] == "GPUs now, worst first")
    (look,) = (each for each in table["fieldConfig"]["overrides"] if each["matcher"]["options"] == "State")
    (mappings,) = (each["value"] for each in look["properties"] if each["id"] == "mappings")
    colors = {float(number): shown["color"] for number, shown in mappings[0]["options"].items()}
    query = substitute_variables(_query("gpuwarden-fleet", "GPUs now, worst first", "state"))
    critical = 'ALERTS{alertstate="firing",severity="critical",uuid!=""}'
    red: list[set[str]] = []
    for time in range(int(begin) + 60, int(end), 15):
        states = backfill.ask(url, "query", query=query, time=time)["result"]
        firing = {each["metric"]["uuid"] for each in backfill.ask(url, "query", query=critical, time=time)["result"]}
        red.append({each["metric"]["uuid"] for each in states if colors[float(each["value"][1])] == "#D6293D"})
        assert firing <= set().union(*red[-7:]), time - begin
    assert any(red)


def test_choices_have_names_and_values(hosts: Hosts) -> None:
    """Each variable offers the values of the hosts, parsed from a result in Grafana's format."""
    with listing_offenders() as case:
        for name in VARIABLES:
            with case(name):
                _offers(name, hosts)


def _offers(name: str, hosts: Hosts) -> None:
    url, begin, end = hosts
    variables = {each["name"]: each for each in DASHBOARDS["gpuwarden-fleet"]["templating"]["list"]}
    written = substitute_variables(variables[name]["query"]["query"])
    if values := re.fullmatch(r"label_values\((.+), (\w+)\)", written):
        found = backfill.ask(url, "series", **{"match[]": values[1]}, start=begin, end=end)
        wanted = {
            "cluster": {"lab", "west"},
            "instance": {ONE_HOST, "gpu-box-2:9846"},
            "owner": {"ada", "grace", "hedy"},
        }
        assert {each[values[2]] for each in found if values[2] in each} >= wanted[name]
        return
    query = re.fullmatch(r"query_result\((.+)\)", written)
    assert query
    pattern = re.sub(r"\?<(\w+)>", r"?P<\1>", variables[name]["regex"].strip("/"))
    key, called = {"gpu": ("uuid", "gpu"), "run": ("run_id", "run_name")}[name]
    results = backfill.ask(url, "query", query=query[1], time=end)["result"]
    assert results
    for each in results:
        metric = dict(each["metric"])
        labels = ",".join(f'{label}="{value}"' for label, value in metric.items() if label != "__name__")
        match = re.search(pattern, f"{metric.get('__name__', '')}{{{labels}}} {each['value'][1]} {end * 1000:.0f}")
        assert match
        assert match["value"] == metric[key]
        assert match["text"].startswith(f"{metric[called]} · ")


LAB, WEST = 'cluster="lab",job="gpuwarden",instance="box"', 'cluster="west",job="gpuwarden",instance="box"'
SECOND = 'cluster="lab",job="gpuwarden",instance="another"'
DAEMON, RECORDED = "gpuwarden_build_info", "gpuwarden:box:build_info:group"
EVER, LATE, NEVER = "1x600", "_x120 1x480", ""  # samples a minute: eight hours and more, or all but the first two
SIX_HOURS = {"__range": "6h", "__range_s": "21600"}
BRIEF, AWAY, EARLY = "1x301 _x19 1x280", "1x300 _x150 1x150", "1x480"
# Values of the two series on each of up to three hosts, the selection, and whether recorded series are read.
CASES: dict[str, tuple[tuple[str, ...], Mapping[str, str], bool]] = {
    "all of it is recorded": ((EVER, EVER, EVER, EVER), SIX_HOURS, True),
    "there was nothing before": ((LATE, LATE, LATE, LATE), SIX_HOURS | {"__range": "9h"}, True),
    "a box came later": ((EVER, EVER, LATE, LATE), SIX_HOURS | {"__range": "9h"}, True),
    "a box came on the whole hour": ((EVER, EVER, "_x360 1x240", "_x361 1x239"), SIX_HOURS, True),
    "a box was away for hours": ((EVER, EVER, AWAY, AWAY), SIX_HOURS, True),
    "a restart took ten minutes": (("1x303 _x10 1x287", "1x302 _x12 1x286", EVER, EVER), SIX_HOURS, True),
    "the time range ends in an hour": ((EARLY, EARLY, EARLY, EARLY), SIX_HOURS, True),
    "a short time is read as it was": ((EVER, EVER, EVER, EVER), {"__range": "3h", "__range_s": "10800"}, False),
    "nothing is recorded": ((EVER, NEVER, EVER, NEVER), SIX_HOURS, False),
    "rules came later": ((EVER, LATE, EVER, LATE), SIX_HOURS | {"__range": "9h"}, False),
    "rules were away for hours": ((EVER, AWAY, EVER, EVER), SIX_HOURS, False),
    "rules were away for twenty minutes": ((EVER, BRIEF, EVER, BRIEF), SIX_HOURS, False),
    "rules were away for hours, between whole ones": ((EVER, "1x361 _x117 1x122", EVER, EVER), SIX_HOURS, False),
    "one of two hosts is of a Prometheus without rules": ((EVER, EVER, NEVER, NEVER, EVER, NEVER), SIX_HOURS, False),
    "rules came after the time range": ((EARLY, NEVER, EARLY, NEVER), SIX_HOURS, False),
    "there is nothing": ((NEVER, NEVER, NEVER, NEVER), SIX_HOURS, False),
    "one cluster has no rules": ((EVER, EVER, EVER, NEVER), SIX_HOURS, False),
    "another cluster has none": ((EVER, EVER, EVER, NEVER), SIX_HOURS | {"cluster": "lab"}, True),
    "a GPU is chosen": ((EVER, EVER, EVER, EVER), SIX_HOURS | {"gpu": "GPU-a"}, False),
    "a run is chosen": ((EVER, EVER, EVER, EVER), SIX_HOURS | {"run": "1-2"}, False),
}


def _variable(uid: str) -> dict[str, Any]:
    (found,) = (each for each in DASHBOARDS[uid]["templating"]["list"] if each["name"] == "recorded")
    return dict(found)


def _rule_test(values: tuple[str, ...], chosen: Mapping[str, str], *, read: bool) -> dict[str, Any]:
    """Return a case in promtool's format."""
    names = (f"{name}{{{box}}}" for box in (LAB, WEST, SECOND) for name in (DAEMON, RECORDED))
    wanted = re.fullmatch(r"query_result\((.+)\)", _variable("gpuwarden-fleet")["query"]["query"])
    assert wanted
    seconds = float(chosen["__range_s"])
    labels = '{chosen=".* .*", label=".+"}' if read else '{label="none"}'
    check = {
        "expr": substitute_variables(wanted[1], **chosen),
        "eval_time": "9h",
        "exp_samples": [{"labels": labels, "value": seconds if read else 0}],
    }
    return {
        "interval": "1m",
        "input_series": [
            {"series": name, "values": samples} for name, samples in zip(names, values, strict=False) if samples
        ],
        "promql_expr_test": [check],
    }


def test_what_is_recorded_is_read_where_it_is_whole(tmp_path: Path) -> None:
    """Recorded series are read in ranges of hours, for all GPUs and runs, if they are complete for each host."""
    tests = [{"name": name, **_rule_test(*case[:2], read=case[2])} for name, case in CASES.items()]
    path = tmp_path / "cases.yml"
    path.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": tests}))
    promtool = needs("promtool", "prometheus")
    done = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_takes_the_pattern_as_it_is() -> None:
    """Grafana escapes patterns among several values; of Prometheus' result it uses the label, and none of a URL."""
    for uid in ("gpuwarden-fleet", "gpuwarden-box"):
        variable = _variable(uid)
        assert (variable["multi"], variable["includeAll"], variable["skipUrlSync"]) == (False, False, True)
        found = re.search(variable["regex"].strip("/"), '{chosen=".* .*", label=".+"} 21600 1763600000000')
        assert found
        assert found[1] == ".+"


RECORDS = [
    (panel, number)
    for panel in list_panels(DASHBOARDS["gpuwarden-fleet"])
    for number, target in enumerate(panel["targets"])
    if "$recorded" in target["expr"]
]


def test_records_are_read() -> None:
    """Queries of fleet panels that were slow over a week read recorded series."""
    assert len(RECORDS) == 11


def test_records_agree_with_samples(hosts: Hosts) -> None:
    """Rows, lines and numbers are the same from recorded and from raw series."""
    with listing_offenders() as case:
        for panel, number in RECORDS:
            with case(f"{panel['title']} {number}"):
                _compare_records(panel, number, hosts)


def _compare_records(panel: dict[str, Any], number: int, hosts: Hosts) -> None:
    url, begin, end = hosts
    times = {"start": begin + 60, "end": end, "step": 60}
    # A record covers the time before it, which matters at both ends of a time range.
    over = {"__range": "20m", "__range_s": "1200", "__interval": "15s", "__interval_ms": "15000"}
    # An owner without any process stays for a step of 15 s in recorded series: a step more than in the samples.
    step_hours = 15 / 3600 + 1e-9
    close = {"GPUs now, worst first": 0.12, "Cost by owner in this time range": step_hours}.get(panel["title"], 1e-9)
    answers = []
    for recorded in ("none", ".+"):
        query = list_expressions(panel, recorded=recorded, **over)[number]
        found = backfill.ask(url, "query_range", query=query, **times)["result"]
        answers.append(
            {
                (*sorted((key, value) for key, value in each["metric"].items() if key != "__name__"), time): float(
                    value
                )
                for each in found
                for time, value in each["values"]
            }
        )
    samples, records = answers
    assert any(samples.values())
    assert records == pytest.approx(samples, abs=close)


# Seconds that a GPU's slowdown counter has after some hours; none while the GPU is absent.
SLOWED: Mapping[str, Callable[[float], float | None]] = {
    "all the time": lambda hour: 3600 * hour,
    "never": lambda _hour: 0,
    "half of the hours that it was there": lambda hour: 1800 * hour if hour <= 3 else None,
    "in its one hour": lambda hour: 3600 * (hour - 5) if hour >= 5 else None,
    "of a daemon that restarts each hour": lambda hour: 3600 * (hour % 1),
}


def _slowdowns(begin: float) -> Iterator[str]:
    """Yield six hours of a host with these GPUs, and the last hours of a second one."""
    for number in range(6 * 120 + 1):
        hour, time = number / 120, begin + number * 30
        counts = {("box", uuid): count(hour) for uuid, count in SLOWED.items()}
        if hour >= 5:
            counts["later", "all of its time"] = 3600 * (hour - 5)
        for instance in dict.fromkeys(instance for instance, _uuid in counts):
            yield f'{DAEMON}{{job="gpuwarden",instance="{instance}"}} 1 {time}\n'
        for (instance, uuid), count in counts.items():
            if count is not None:
                labels = f'job="gpuwarden",instance="{instance}",uuid="{uuid}",reason="sw_thermal_slowdown"'
                yield f"gpuwarden_gpu_clock_event_seconds_total{{{labels}}} {count} {time}\n"


def _evaluate_slowed(url: str, time: float, recorded: str) -> dict[str, float]:
    (panel, number) = next(
        (panel, number)
        for panel in list_panels(DASHBOARDS["gpuwarden-fleet"])
        for number, target in enumerate(panel["targets"])
        if "slowed_ratio" in target["expr"]
    )
    over = SIX_HOURS | {"__interval": "2m", "__interval_ms": "120000"}
    query = list_expressions(panel, recorded=recorded, **over)[number]
    found = backfill.ask(url, "query", query=query, time=time)["result"]
    return {each["metric"]["uuid"]: float(each["value"][1]) for each in found}


@pytest.mark.parametrize("interval", [60, 120])
def test_slowed_is_a_part_of_the_time_range(interval: int, tmp_path: Path) -> None:
    """Recorded shares are right for GPUs that were not there all the time, at any evaluation interval."""
    needs("prometheus", "prometheus")
    needs("promtool", "prometheus")
    begin, end = history.BEGIN, history.BEGIN + 6 * 3600
    backfill.add(tmp_path, _slowdowns(begin))
    with backfill.serving(tmp_path, 30) as url:
        lines = [
            f"{backfill.sample_of(rule['record'], labels)} {value} {time}\n"
            for rule in backfill.rules(30)
            if rule.get("record") in {RECORDED, "gpuwarden:gpu:slowed_ratio:max"}
            for labels, points in backfill.values(url, rule["expr"], begin, end, interval)
            for time, value in points
        ]
    backfill.add(tmp_path, lines)
    with backfill.serving(tmp_path, interval) as url:
        samples, records = (_evaluate_slowed(url, end, recorded) for recorded in ("none", ".+"))
    assert samples == pytest.approx(
        {
            "all the time": 1,
            "never": 0,
            "half of the hours that it was there": 1 / 4,
            "in its one hour": 1 / 6,
            "of a daemon that restarts each hour": 1,
            "all of its time": 1 / 6,
        },
        abs=0.05,
    )
    assert records == pytest.approx(samples, abs=0.05)
