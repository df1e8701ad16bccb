"""Run and daemon alerts on pages of the real daemon: of the simulated host, and of captures."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from rule_pages import RULES, STEP, Episode, Scrapes, evaluate_rules, scrape_capture, scrape_simulation

from gpuwarden.alerts.prometheus_rules import Choices, render_rule_file
from system_parts import needs

pytestmark = pytest.mark.system

GOLDENS = Path(__file__).parents[1] / "goldens"


@pytest.fixture(scope="module")
def pages() -> Scrapes:
    """Scrape the simulated host for 15 minutes, in which a run leaks until it dies and another one stalls."""
    return scrape_simulation(15 * 60)


@pytest.fixture(scope="module")
def fired_alerts(pages: Scrapes, tmp_path_factory: pytest.TempPathFactory) -> list[Episode]:
    """Return the alerts that fired on it."""
    return evaluate_rules(pages, tmp_path_factory.mktemp("rules"))


def alerts_of_run(fired_alerts: list[Episode], name: str) -> list[str]:
    """Return the alerts about a run in the order in which they started."""
    return [each.alert for each in fired_alerts if each.labels.get("run_name") == name]


def test_leaking_run_fires_until_it_ends(fired_alerts: list[Episode]) -> None:
    """The leak fires minutes before the run is near out of memory, and runs out of memory; its death is no other."""
    found = [each for each in fired_alerts if each.labels.get("run_name") == "unet-segmentation"]
    expected, near, out = (
        next(each for each in found if each.alert == alert)
        for alert in ("RunOutOfMemoryExpected", "RunNearOutOfMemory", "RunOutOfMemory")
    )
    assert expected.begin + 120 < near.begin < out.begin
    assert {each.alert for each in found} - {"RunPeakNearOutOfMemory"} == {each.alert for each in (expected, near, out)}
    assert [each for each in fired_alerts if each.alert == "RunDied"] == []


def test_stalled_run_fires(pages: Scrapes, fired_alerts: list[Episode]) -> None:
    """The stall fires for as long as the daemon reports it."""
    (stalled,) = [each for each in fired_alerts if each.alert == "RunStalled"]
    (values,) = pages.series("gpuwarden_run_stalled", run_id=stalled.labels["run_id"]).values()
    assert stalled.labels["run_name"] == "tabular-embedding"
    assert [value == "1.0" for value in values] == [
        stalled.begin <= number * 5 <= stalled.end for number in range(len(values))
    ]


def test_nothing_else_fires(fired_alerts: list[Episode]) -> None:
    """Apart from the leak, the stall and the board with blocked air flow, nothing on the host fires."""
    blocked = "4"
    others = [
        str(each)
        for each in fired_alerts
        if each.labels.get("run_name") not in {"unet-segmentation", "tabular-embedding"}
        and each.labels.get("gpu") != blocked
    ]
    assert others == []


def test_run_that_reserves_its_gpu_fires_nothing(fired_alerts: list[Episode]) -> None:
    """The run uses half of the 97 % of device memory that it reserves."""
    assert alerts_of_run(fired_alerts, "resnet50-imagenet") == []


def test_idle_notebook_fires_with_its_owner(tmp_path: Path) -> None:
    """The idle notebook is the only GPU allocated for nothing, among those that train, validate and are free."""
    rules = tmp_path / "rules.yml"
    rules.write_text(render_rule_file(Choices(numbers={"idle": 300.0})))
    idle = [
        each
        for each in evaluate_rules(scrape_simulation(480), tmp_path, rules=rules)
        if each.alert == "GpuAllocatedButIdle"
    ]
    assert [(each.labels["gpu"], each.labels["owner"]) for each in idle] == [("6", "hedy")]
    assert 300 <= idle[0].begin <= 330


def test_dead_daemon_fires(tmp_path: Path) -> None:
    """The daemon's series are stale at once, so that nothing else fires."""
    scrapes = scrape_simulation(60)
    for _ in range(30):
        scrapes.add(None)
    (down,) = [each for each in evaluate_rules(scrapes, tmp_path) if each.begin > 100]
    assert (down.alert, down.begin, down.end) == ("GpuwardenDown", 110, scrapes.seconds)


def test_captures_of_idle_hosts_fire_nothing(tmp_path: Path) -> None:
    """A healthy GPU with MIG instances, over repeated frames of the capture, fires nothing."""
    assert [str(each) for each in evaluate_rules(scrape_capture(GOLDENS / "mig.json", 5 * 60), tmp_path)] == []


def test_recorded_series_of_a_host_are_few(pages: Scrapes, tmp_path: Path) -> None:
    """A host with 8 GPUs, runs and alerts has at most 30 series for a global store."""
    recorded = '{__name__=~"gpuwarden:box:.+",instance="box"}'
    rows = [
        {"expr": f"{check} <= bool {limit}", "eval_time": "10m", "exp_samples": [{"labels": "{}", "value": 1}]}
        for check, limit in ((f"count({recorded})", 30), (f"15 - count({recorded})", 0))
    ]
    names = {"up", *re.findall(r"gpuwarden_\w+", RULES.read_text())}
    test = {"interval": f"{STEP:g}s", "input_series": pages.input_series(names), "promql_expr_test": rows}
    file = tmp_path / "few.yml"
    file.write_text(json.dumps({"rule_files": [str(RULES.absolute())], "evaluation_interval": "1m", "tests": [test]}))
    command = [needs("promtool", "prometheus"), "test", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
