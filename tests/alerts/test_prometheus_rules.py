"""The alert rules: names by the tables, thresholds and documentation in step; promtool has a file of its own."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from promql import SAMPLES, SITE, grouping, numbers, selectors, unknown

from gpuwarden.alerts import prometheus_rules
from gpuwarden.alerts.alert_docs import render_alerts
from gpuwarden.alerts.prometheus_rules import Choices, render_prometheus_rule, render_rule_file
from gpuwarden.alerts.recording_rules import RecordingRule
from gpuwarden.cli import rules_flags
from gpuwarden.cli.main import main
from gpuwarden.config.rule_settings import SETTINGS, TIME
from gpuwarden.config.value_types import DURATION
from gpuwarden.health import conditions
from gpuwarden.health.model import Condition, fill_places
from gpuwarden.xid.codes import Severity, codes, explain

REPOSITORY = Path(__file__).parents[2]
RULES = REPOSITORY / "deploy" / "prometheus" / "rules" / "gpuwarden.yml"
TESTS = sorted((REPOSITORY / "tests" / "rules").glob("*.yml"))

# Numbers that are no thresholds: "not up", "none", "all", halves and doubles, and conversions of units.
PLAIN = {0, 0.5, 1, 2, 60, 100, 3600, 86400, 2**10, 2**20, 2**30}


def _alerts(text: str) -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(text)["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


ALERTS = _alerts(RULES.read_text())
ALL: dict[str, Condition | RecordingRule] = {**prometheus_rules.RECORDED, **conditions.ALERTS}
SHIPPED = Choices().values()


def test_every_alert_has_a_rule_test() -> None:
    """No alert ships without a rule test in which it fires, with its text compared, and one in which it does not."""
    checks = [check for path in TESTS for test in _tests(path) for check in test.get("alert_rule_test", ())]
    fired = {check["alertname"] for check in checks if check.get("exp_alerts")}
    silent = {check["alertname"] for check in checks if not check.get("exp_alerts")}
    assert ALERTS.keys() - (fired & silent) == set()


def _tests(path: Path) -> list[dict[str, Any]]:
    tests: list[dict[str, Any]] = yaml.safe_load(path.read_text())["tests"]
    return tests


def test_names_exist() -> None:
    """A rule, and the text of an alert, name only metrics and labels that the tables declare."""
    values = Choices().values()
    wrong = {name: found for name, rule in ALL.items() if (found := unknown(fill_places(_query(rule), values)))}
    asked = {
        name: re.findall(r"gpuwarden[_:][\w:]+", row["annotations"]["description"]) for name, row in ALERTS.items()
    }
    wrong_texts = {name: left for name, found in asked.items() if (left := set(found) - set(SAMPLES))}
    assert (wrong, wrong_texts) == ({}, {})


def _query(rule: Condition | RecordingRule) -> str:
    return rule.query if isinstance(rule, Condition) else rule.expr


def test_tested_series_exist() -> None:
    """The rule tests feed series as the daemon writes them: known names with all their labels."""
    written = [each["series"] for path in TESTS for test in _tests(path) for each in test["input_series"]]
    wrong = []
    for series in dict.fromkeys(written):
        ((name, labels),) = selectors(series)
        if labels - SITE != SAMPLES[name] - SITE:
            wrong.append(series)
    assert wrong == []


def test_thresholds_are_settings() -> None:
    """No number that somebody may want otherwise stands in a rule itself: a place does, which a setting fills."""
    ones = {each.name: "1s" if each.kind is TIME else "1" for each in SETTINGS}
    places = SHIPPED | ones | {f"{name}.seconds": "1" for name in ones}
    found = {name: set(numbers(fill_places(rule.expr, places))) - PLAIN for name, rule in ALL.items()}
    assert {name: left for name, left in found.items() if left} == {}


def test_each_setting_is_set() -> None:
    """Each setting stands in the expression or the hold of a rule, not only in texts."""
    places = " ".join(rule.expr + (rule.for_ if isinstance(rule, Condition) else "") for rule in ALL.values())
    assert [each.name for each in SETTINGS if not re.search(rf"%{{{each.name}(\.seconds)?}}", places)] == []


def test_template_labels_are_in_the_result() -> None:
    """A description uses only labels that its expression's result carries."""
    wrong = {}
    for name, alert in ALERTS.items():
        carried = grouping(alert["expr"]).union(*(SAMPLES[series] for series, _ in selectors(alert["expr"])))
        used = set(re.findall(r"\$labels\.(\w+)", alert["annotations"]["description"]))
        if used - carried:
            wrong[name] = used - carried
    assert wrong == {}


def test_critical_alert_outlives_the_daemon() -> None:
    """Nobody is told that a fault is over as the daemon is down or restarted: it fires on until GpuwardenDown does."""
    least = DURATION.read(ALERTS["GpuwardenDown"]["for"]) + 15  # and its scrape and its evaluation
    critical = [
        name for name, rule in conditions.ALERTS.items() if rule.severity == "critical" and name != "GpuwardenDown"
    ]
    assert [name for name in critical if DURATION.read(ALERTS[name]["keep_firing_for"]) < least] == []


def test_alert_says_what_to_do() -> None:
    """Each alert has a severity, a constant summary, and links to its docs and a dashboard."""
    wrong = [
        name
        for name, alert in ALERTS.items()
        for texts in [alert["annotations"]]
        if alert["labels"]["severity"] not in {"critical", "warning", "info"}
        or "{{" in texts["summary"]
        or texts["summary"].endswith(".")  # a noun phrase
        or texts["runbook_url"] != f"docs/reference/alerts.md#{name.lower()}"
        or "/d/gpuwarden-" not in texts["dashboard_url"]
    ]
    assert wrong == []


XID_ALERTS: dict[str, Severity] = {"GpuXidCritical": "critical", "GpuXidWarning": "warning"}


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


def test_files_are_in_step() -> None:
    """The shipped rules and docs/reference/alerts.md are what the tables say (make docs)."""
    assert RULES.read_text() == render_rule_file()
    assert (REPOSITORY / "docs" / "reference" / "alerts.md").read_text() == render_alerts()


def test_rules_take_other_numbers() -> None:
    """What is chosen stands in the rules, and in their texts."""
    chosen = Choices(
        numbers={"near_oom_ratio": 0.08, "peak_rise": 1800}, job="gpu", docs="https://site/docs", grafana=""
    )
    changed = _alerts(render_rule_file(chosen))
    assert "<= 0.08 *" in changed["RunNearOutOfMemory"]["expr"]
    assert "[30m]" in changed["RunPeakNearOutOfMemory"]["expr"]
    assert "30 minutes" in changed["RunPeakNearOutOfMemory"]["annotations"]["description"]
    assert 'up{job="gpu"}' in changed["GpuwardenDown"]["expr"]
    assert changed["GpuDown"]["annotations"]["runbook_url"] == "https://site/docs/reference/alerts.md#gpudown"
    assert "dashboard_url" not in changed["GpuDown"]["annotations"]


def test_what_costs_most_is_evaluated_less_often() -> None:
    """Rules on each link of each GPU, and those on a whole fleet; whoever evaluates seldom does so for them too."""
    for interval, others, links, fleet in ((5, "5s", "30s", "1m"), (60, "1m", "1m", "1m"), (120, "2m", "2m", "2m")):
        groups = yaml.safe_load(render_rule_file(Choices(interval=interval)))["groups"]
        assert {group["name"]: group["interval"] for group in groups} == {
            **{group.name: others for group in prometheus_rules.GROUPS},
            "gpuwarden-links": links,
            "gpuwarden-fleet": fleet,
        }


def test_kubernetes_gets_the_same_rules() -> None:
    """The resource for Prometheus' operator has the groups of the file."""
    resource = yaml.safe_load(render_prometheus_rule())
    assert (resource["apiVersion"], resource["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert resource["spec"]["groups"] == yaml.safe_load(render_rule_file())["groups"]


def test_what_would_spoil_the_rules_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Names and links stand within expressions and templates of Prometheus'."""
    parser = argparse.ArgumentParser()
    rules_flags.add_rules_flags(parser)
    for flag, value in (
        ("--job", 'a"b'), ("--job", "a\\b"), ("--job", "{{x}}"), ("--job", "%{idle}"), ("--job", "a\nb"), ("--job", ""),
        ("--docs", "https://x/{{"), ("--docs", ""), ("--grafana", "https://x/{{"), ("--grafana", "{{ x"),
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            parser.parse_args([flag, value])
        assert f"argument {flag}:" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--leak-still", "8m"], ["--leak-window", "10m"]])
def test_windows_that_never_fire_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The last part of a leak's window must be less than half of it, whichever of the two was chosen."""
    assert main(["rules", *flags]) == 2
    assert "--leak-still must be less than half of --leak-window" in capsys.readouterr().err
