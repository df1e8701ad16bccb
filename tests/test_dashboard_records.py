"""When dashboards read what rules recorded in place of all samples, and that they show the same then."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import backfill
import history
import pytest
import yaml
from committed_dashboards import DASHBOARDS, expressions, panels_of, without_variables

from system_parts import needs

LAB, WEST = 'cluster="lab",job="gpuwarden",instance="box"', 'cluster="west",job="gpuwarden",instance="box"'
BESIDE = 'cluster="lab",job="gpuwarden",instance="another"'
DAEMON, RECORDED = "gpuwarden_build_info", "gpuwarden:box:build_info:group"
EVER, LATE, NEVER = "1x600", "_x120 1x480", ""  # samples a minute: eight hours and more, or all but the first two
SIX_HOURS = {"__range": "6h", "__range_s": "21600"}
BRIEF, AWAY, EARLY = "1x301 _x19 1x280", "1x300 _x150 1x150", "1x480"
# Values of the two series on each of up to three boxes, what is chosen, and whether what was recorded is read.
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
    "one of two boxes is of a Prometheus without rules": ((EVER, EVER, NEVER, NEVER, EVER, NEVER), SIX_HOURS, False),
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


@pytest.mark.parametrize("case", CASES)
def test_what_is_recorded_is_read_where_it_is_whole(case: str, tmp_path: Path) -> None:
    """In time ranges of hours, of all GPUs and runs, and where it is there of each box, all the time."""
    values, chosen, read = CASES[case]
    names = (f"{name}{{{box}}}" for box in (LAB, WEST, BESIDE) for name in (DAEMON, RECORDED))
    wanted = re.fullmatch(r"query_result\((.+)\)", _variable("gpuwarden-fleet")["query"]["query"])
    assert wanted
    seconds = float(chosen["__range_s"])
    labels = '{chosen=".* .*", label=".+"}' if read else '{label="none"}'
    check = {
        "expr": without_variables(wanted[1], **chosen),
        "eval_time": "9h",
        "exp_samples": [{"labels": labels, "value": seconds if read else 0}],
    }
    written = {
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [
                    {"series": name, "values": told} for name, told in zip(names, values, strict=False) if told
                ],
                "promql_expr_test": [check],
            }
        ],
    }
    path = tmp_path / "case.yml"
    path.write_text(yaml.safe_dump(written))
    promtool = needs("promtool", "prometheus")
    done = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("uid", ["gpuwarden-fleet", "gpuwarden-box"])
def test_grafana_takes_the_pattern_as_it_is(uid: str) -> None:
    """Grafana escapes patterns among several values; of Prometheus' result it takes the label, and none of a URL."""
    variable = _variable(uid)
    assert (variable["multi"], variable["includeAll"], variable["skipUrlSync"]) == (False, False, True)
    found = re.search(variable["regex"].strip("/"), '{chosen=".* .*", label=".+"} 21600 1763600000000')
    assert found
    assert found[1] == ".+"


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, float, float]]:
    """Serve a quarter of an hour of simulated boxes; yield Prometheus' URL and the times of both ends."""
    needs("prometheus", "prometheus")
    needs("promtool", "prometheus")
    directory = tmp_path_factory.mktemp("history")
    begin, end = history.record(directory, 15 * 60)
    with backfill.serving(directory, history.STEP) as url:
        yield url, begin, end


RECORDS = [
    pytest.param(panel, number, id=f"{panel['title']} {number}")
    for panel in panels_of(DASHBOARDS["gpuwarden-fleet"])
    for number, target in enumerate(panel["targets"])
    if "$recorded" in target["expr"]
]


def test_records_are_read_somewhere() -> None:
    """What a fleet's charts and sums were slow with over a week."""
    assert len(RECORDS) == 11


@pytest.mark.parametrize(("panel", "number"), RECORDS)
def test_records_tell_the_same(panel: dict[str, Any], number: int, boxes: tuple[str, float, float]) -> None:
    """The rows and lines are the same ones, and so are the numbers."""
    url, begin, end = boxes
    times = {"start": begin + 60, "end": end, "step": 60}
    # A record says over how long it was taken before, which matters at both ends of a time range.
    over = {"__range": "20m", "__range_s": "1200", "__interval": "15s", "__interval_ms": "15000"}
    close = 0.12 if panel["title"] == "GPUs now, worst first" else 1e-9
    told = []
    for recorded in ("none", ".+"):
        query = expressions(panel, recorded=recorded, **over)[number]
        found = backfill.ask(url, "query_range", query=query, **times)["result"]
        told.append(
            {
                (*sorted((key, value) for key, value in each["metric"].items() if key != "__name__"), time): float(
                    value
                )
                for each in found
                for time, value in each["values"]
            }
        )
    samples, records = told
    assert any(samples.values())
    assert records == pytest.approx(samples, abs=close)


# Seconds that a GPU's counter of a slowdown has after some hours; none while it is not there.
SLOWED: Mapping[str, Callable[[float], float | None]] = {
    "all the time": lambda hour: 3600 * hour,
    "never": lambda _hour: 0,
    "half of the hours that it was there": lambda hour: 1800 * hour if hour <= 3 else None,
    "in its one hour": lambda hour: 3600 * (hour - 5) if hour >= 5 else None,
    "of a daemon that restarts each hour": lambda hour: 3600 * (hour % 1),
}


def _slowdowns(begin: float) -> Iterator[str]:
    """Write six hours of a box with these GPUs, and the last of them of a second one."""
    for number in range(6 * 120 + 1):
        hour, time = number / 120, begin + number * 30
        told = {("box", uuid): count(hour) for uuid, count in SLOWED.items()}
        if hour >= 5:
            told["later", "all of its time"] = 3600 * (hour - 5)
        for instance in dict.fromkeys(instance for instance, _uuid in told):
            yield f'{DAEMON}{{job="gpuwarden",instance="{instance}"}} 1 {time}\n'
        for (instance, uuid), count in told.items():
            if count is not None:
                labels = f'job="gpuwarden",instance="{instance}",uuid="{uuid}",reason="sw_thermal_slowdown"'
                yield f"gpuwarden_gpu_clock_event_seconds_total{{{labels}}} {count} {time}\n"


def _asked_slowed(url: str, time: float, recorded: str) -> dict[str, float]:
    (panel, number) = next(
        (panel, number)
        for panel in panels_of(DASHBOARDS["gpuwarden-fleet"])
        for number, target in enumerate(panel["targets"])
        if "slowed_ratio" in target["expr"]
    )
    over = SIX_HOURS | {"__interval": "2m", "__interval_ms": "120000"}
    query = expressions(panel, recorded=recorded, **over)[number]
    found = backfill.ask(url, "query", query=query, time=time)["result"]
    return {each["metric"]["uuid"]: float(each["value"][1]) for each in found}


@pytest.mark.parametrize("interval", [60, 120])
def test_slowed_is_a_part_of_the_time_range(interval: int, tmp_path: Path) -> None:
    """Of what was not there all of it too, and however often the rules are evaluated."""
    needs("prometheus", "prometheus")
    needs("promtool", "prometheus")
    begin, end = history.BEGIN, history.BEGIN + 6 * 3600
    backfill.add(tmp_path, _slowdowns(begin))
    with backfill.serving(tmp_path, 30) as url:
        lines = [
            f"{backfill.sample_of(rule['record'], labels)} {value} {time}\n"
            for rule in backfill.rules(30)
            if rule.get("record") in {RECORDED, "gpuwarden:gpu:slowed_ratio:max"}
            for labels, told in backfill.values(url, rule["expr"], begin, end, interval)
            for time, value in told
        ]
    backfill.add(tmp_path, lines)
    with backfill.serving(tmp_path, interval) as url:
        samples, records = (_asked_slowed(url, end, recorded) for recorded in ("none", ".+"))
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
