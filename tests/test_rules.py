"""The alert rules: behavior by promtool, names by the tables, thresholds and documentation in step."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from promql import SAMPLES, grouping, numbers, selectors, unknown

from gpuwarden import thresholds
from gpuwarden.gpu.xid import Severity, codes, explain
from system_parts import needs

REPOSITORY = Path(__file__).parents[1]
PROMETHEUS = REPOSITORY / "deploy" / "prometheus"
RULES = PROMETHEUS / "rules" / "gpuwarden.yml"
TESTS = sorted((REPOSITORY / "tests" / "rules").glob("*.yml"))

# Each alert's numbers: its thresholds, and 0 where it asks for "not up" or "none".
NUMBERS: dict[str, set[float]] = {
    "RunNearOutOfMemory": {thresholds.NEAR_OUT_OF_MEMORY},
    "RunPeakNearOutOfMemory": {thresholds.NEAR_OUT_OF_MEMORY, thresholds.PEAK_RISE_SECONDS},
    "RunStalled": {1},
    "RunDied": {0, thresholds.DIED_SECONDS},
    "RunOutOfMemory": {thresholds.ERROR_SECONDS},
    "RunInputBound": {thresholds.INPUT_BOUND, thresholds.INPUT_BOUND_SECONDS},
    "GpuNearThermalSlowdown": {thresholds.NEAR_SLOWDOWN},
    "GpuDown": {0},
    "GpuMissing": {0},
    "GpuXidCritical": {thresholds.XID_SECONDS},
    "GpuXidWarning": {thresholds.XID_SECONDS},
    "GpuwardenDown": {0},
    "GpuwardenStale": {thresholds.STALE_POLLS, thresholds.STALE_POLL_SECONDS},
    "GpuwardenDriverFault": {0},
    "GpuwardenPaused": {1},
}


def _alerts() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


ALERTS = _alerts()


def _promtool(*arguments: str | Path) -> str:
    promtool = needs("promtool", "prometheus")
    done = subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_configuration_is_accepted() -> None:
    """Prometheus takes the shipped configuration, which finds the rules by its relative path."""
    assert f"{len(ALERTS)} rules found" in _promtool("check", "config", PROMETHEUS / "prometheus.yml")


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_alerts_behave(path: Path) -> None:
    """Each alert fires, stays silent, resolves and meets missing data as its unit test says."""
    _promtool("test", "rules", path)


@pytest.mark.parametrize("alert", ALERTS)
def test_every_alert_is_seen_firing(alert: str) -> None:
    """No alert ships whose text was never rendered and compared."""
    checks = [check for path in TESTS for test in yaml.safe_load(path.read_text())["tests"] for check in _checks(test)]
    fired = [check for check in checks if check["alertname"] == alert and check.get("exp_alerts")]
    silent = [check for check in checks if check["alertname"] == alert and not check.get("exp_alerts")]
    assert fired
    assert silent


def _checks(test: dict[str, Any]) -> list[dict[str, Any]]:
    return list(test.get("alert_rule_test", ()))


@pytest.mark.parametrize("alert", ALERTS)
def test_names_exist(alert: str) -> None:
    """A rule names only metrics and labels that the tables declare."""
    assert not unknown(ALERTS[alert]["expr"])


@pytest.mark.parametrize("alert", ALERTS)
def test_names_in_descriptions_exist(alert: str) -> None:
    """A description asks for series that the daemon has."""
    assert set(re.findall(r"gpuwarden_\w+", ALERTS[alert]["annotations"]["description"])) <= set(SAMPLES)


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_tested_series_exist(path: Path) -> None:
    """The unit tests feed series as the daemon writes them: known names with all their labels."""
    for test in yaml.safe_load(path.read_text())["tests"]:
        for written in test["input_series"]:
            ((name, labels),) = selectors(written["series"])
            assert labels == SAMPLES[name], written["series"]


@pytest.mark.parametrize("alert", ALERTS)
def test_thresholds_are_in_step(alert: str) -> None:
    """The numbers in a rule are the constants that the dashboards color by."""
    assert set(numbers(ALERTS[alert]["expr"])) == NUMBERS[alert]


@pytest.mark.parametrize("alert", ALERTS)
def test_template_labels_are_in_the_result(alert: str) -> None:
    """A description uses only labels that its expression's result carries."""
    carried = grouping(ALERTS[alert]["expr"]).union(*(SAMPLES[name] for name, _ in selectors(ALERTS[alert]["expr"])))
    used = set(re.findall(r"\$labels\.(\w+)", ALERTS[alert]["annotations"]["description"]))
    assert used <= carried


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_says_what_to_do(alert: str) -> None:
    """Each alert has a severity, a constant summary, and a section of docs/alerts.md its annotation leads to."""
    annotations = ALERTS[alert]["annotations"]
    assert ALERTS[alert]["labels"]["severity"] in {"critical", "warning", "info"}
    assert "{{" not in annotations["summary"]
    assert annotations["summary"].endswith(".")
    assert annotations["runbook"] == f"docs/alerts.md#{alert.lower()}"


XID_ALERTS: dict[str, Severity] = {"GpuXidCritical": "page", "GpuXidWarning": "warn"}


@pytest.mark.parametrize(("alert", "severity"), XID_ALERTS.items())
def test_xids_are_those_of_the_table(alert: str, severity: Severity) -> None:
    """Each of the two alerts takes the codes that the table gives its severity, and the warning all unknown ones."""
    matchers = re.findall(r'xid(=~|!~)"([\d|]+)"', ALERTS[alert]["expr"])
    assert matchers

    def taken(code: int) -> bool:
        return all((str(code) in listed.split("|")) is (how == "=~") for how, listed in matchers)

    assert [code for code in range(1000) if taken(code)] == [
        code for code in range(1000) if explain(code).severity == severity
    ]


@pytest.mark.parametrize(("alert", "severity"), XID_ALERTS.items())
def test_xid_alert_says_the_tables_action(alert: str, severity: Severity) -> None:
    """For every code the description ends in what the table says to do."""
    description = ALERTS[alert]["annotations"]["description"]
    cases = re.findall(r'if match "\^\(([\d|]+)\)\$" \$labels.xid }}([^{]+?) *{{', description)
    otherwise = re.search(r"{{- else }}([^{]+){{ end }}$", description)
    assert otherwise is not None
    told = {int(code): sentence for listed, sentence in cases for code in listed.split("|")}
    assert {code: told.pop(code, otherwise[1]) for code in codes(severity)} == {
        code: explain(code).action.value for code in codes(severity)
    }
    assert told == {}  # nothing is said of codes that the alert never takes
    assert explain(0).severity != severity or explain(0).action.value == otherwise[1]


def test_documentation_is_in_step() -> None:
    """docs/alerts.md has a section for each alert, with its severity, in the rules' order, and no other."""
    text = (REPOSITORY / "docs" / "alerts.md").read_text()
    sections = re.findall(r"^## (\w+)\n\n\*(\w+)", text, flags=re.MULTILINE)
    assert sections == [(name, rule["labels"]["severity"].capitalize()) for name, rule in ALERTS.items()]
