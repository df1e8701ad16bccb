"""Annotations of incidents in Grafana: promtool evaluates their query."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from committed_dashboards import DASHBOARDS, substitute_variables

from system_parts import needs

pytestmark = pytest.mark.system

COUNTER = 'gpuwarden_incidents_total{cluster="",instance="box:9846",job="gpuwarden",kind="GpuXidCritical"}'
MARKED = '{instance="box:9846",job="gpuwarden",kind="GpuXidCritical"}'


@pytest.mark.parametrize("interval", ["15s", "60s"])
def test_an_incident_is_marked_once(tmp_path: Path, interval: str) -> None:
    """The mark begins with the incident and ends; neither a restart of the daemon nor an old incident has one."""
    per_minute = 60 // int(interval.removesuffix("s"))
    values = f"3x{5 * per_minute} 4x{5 * per_minute} 0x{5 * per_minute}"
    written = {mark["name"]: mark["expr"] for mark in DASHBOARDS["gpuwarden-box"]["annotations"]["list"]}
    expression = substitute_variables(written["Incidents"])
    checks = [
        {"expr": expression, "eval_time": at, "exp_samples": [{"labels": MARKED, "value": 1}] if is_marked else []}
        for at, is_marked in {"4m": False, "6m": True, "8m": False, "12m30s": False, "14m": False}.items()
    ]
    test = {
        "interval": interval,
        "input_series": [{"series": COUNTER, "values": values}],
        "promql_expr_test": checks,
    }
    path = tmp_path / "marks.yml"
    path.write_text(yaml.safe_dump({"evaluation_interval": interval, "tests": [test]}))
    promtool = needs("promtool", "prometheus")
    done = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
