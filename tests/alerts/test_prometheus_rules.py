"""Alert rules: names, thresholds and docs match the tables; test_rules_by_promtool.py evaluates them."""

from __future__ import annotations

import argparse
import functools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from promql import SAMPLES, SITE, find_unknown_names, parse_grouping, parse_numbers, parse_selectors

from gpuwarden.alerts import prometheus_rules
from gpuwarden.alerts.alert_docs import render_alerts
from gpuwarden.alerts.alert_links import AlertLinks
from gpuwarden.alerts.prometheus_rules import (
    Choices,
    render_prometheus_rule,
    render_rule_file,
    render_vmalert_rules,
)
from gpuwarden.cli import rules_flags
from gpuwarden.cli.main import main
from gpuwarden.config.rule_settings import SETTINGS, TIME
from gpuwarden.config.value_types import DURATION
from gpuwarden.health import conditions
from gpuwarden.health.model import fill_places
from gpuwarden.severity import Severity
from gpuwarden.xid.codes import codes, explain

REPOSITORY = Path(__file__).parents[2]
RULES = REPOSITORY / "deploy" / "prometheus" / "rules" / "gpuwarden.yml"
TESTS = sorted((REPOSITORY / "tests" / "rules").glob("*.yml"))

# Numbers that are not thresholds: "not up", "none", "all", halves and doubles, and unit conversions.
PLAIN = {0, 0.5, 1, 2, 60, 100, 3600, 86400, 2**10, 2**20, 2**30}


@functools.cache
def shipped_alerts() -> dict[str, dict[str, Any]]:
    """Return the alerts of the rules that are installed, by name."""
    return _alerts(RULES.read_text())


def _alerts(text: str) -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(text)["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


EXPRESSIONS = {**prometheus_rules.RECORDED, **{name: alert.expr for name, alert in conditions.ALERTS.items()}}
SHIPPED = Choices().values()


def test_every_alert_has_a_rule_test() -> None:
    """Each alert has a rule test in which it fires, with its text compared, and one in which it does not fire.

    Only the watchdog always fires.
    """
    checks = [check for path in TESTS for test in _tests(path) for check in test.get("alert_rule_test", ())]
    fired = {check["alertname"] for check in checks if check.get("exp_alerts")}
    silent = {check["alertname"] for check in checks if not check.get("exp_alerts")}
    assert shipped_alerts().keys() - fired == set()
    assert shipped_alerts().keys() - silent == {"GpuwardenWatchdog"}


def _tests(path: Path) -> list[dict[str, Any]]:
    tests: list[dict[str, Any]] = yaml.safe_load(path.read_text())["tests"]
    return tests


def test_metrics_and_labels_exist() -> None:
    """Rules and alert texts use only metrics and labels that the tables declare."""
    values = Choices().values()
    queries = {**prometheus_rules.RECORDED, **{name: alert.query for name, alert in conditions.ALERTS.items()}}
    wrong = {
        name: found for name, query in queries.items() if (found := find_unknown_names(fill_places(query, values)))
    }
    asked = {
        name: re.findall(r"gpuwarden[_:][\w:]+", row["annotations"]["description"])
        for name, row in shipped_alerts().items()
    }
    wrong_texts = {name: left for name, found in asked.items() if (left := set(found) - set(SAMPLES))}
    assert (wrong, wrong_texts) == ({}, {})


def test_tested_series_exist() -> None:
    """Rule tests use series as the daemon exports them: known names with all labels."""
    written = [each["series"] for path in TESTS for test in _tests(path) for each in test.get("input_series", ())]
    wrong = []
    for series in dict.fromkeys(written):
        ((name, labels),) = parse_selectors(series)
        if labels - SITE != SAMPLES[name] - SITE:
            wrong.append(series)
    assert wrong == []


def test_thresholds_are_settings() -> None:
    """Rules contain no hard-coded threshold: each is a placeholder that a setting fills."""
    ones = {each.name: "1s" if each.kind is TIME else "1" for each in SETTINGS}
    places = SHIPPED | ones | {f"{name}.seconds": "1" for name in ones}
    found = {name: set(parse_numbers(fill_places(expr, places))) - PLAIN for name, expr in EXPRESSIONS.items()}
    assert {name: left for name, left in found.items() if left} == {}


def test_each_setting_is_set() -> None:
    """Each setting is used in the expression or the `for` of a rule, not only in texts."""
    places = " ".join((*EXPRESSIONS.values(), *(alert.for_ for alert in conditions.ALERTS.values())))
    assert [each.name for each in SETTINGS if not re.search(rf"%{{{each.name}(\.seconds)?}}", places)] == []


def test_template_labels_are_in_the_result() -> None:
    """A description uses only labels of its expression's result."""
    wrong = {}
    for name, alert in shipped_alerts().items():
        carried = parse_grouping(alert["expr"]).union(
            *(SAMPLES[series] for series, _ in parse_selectors(alert["expr"]))
        )
        texts = alert["annotations"]["description"] + re.sub(
            r"{{ with .*?{{ end }}", "", alert["annotations"]["summary"]
        )
        used = set(re.findall(r"\$labels\.(\w+)", texts))
        if used - carried:
            wrong[name] = used - carried
    assert wrong == {}


def test_critical_alert_fires_over_a_daemon_restart() -> None:
    """A critical alert is not resolved by a daemon restart: it fires until GpuwardenDown does."""
    least = DURATION.read(shipped_alerts()["GpuwardenDown"]["for"]) + 15  # plus one scrape and one evaluation
    critical = [
        name for name, rule in conditions.ALERTS.items() if rule.severity == "critical" and name != "GpuwardenDown"
    ]
    assert [name for name in critical if DURATION.read(shipped_alerts()[name]["keep_firing_for"]) < least] == []


SUBJECTS = {"run": "$labels.run_name", "gpu": "$labels.gpu", "box": "$labels.instance"}  # in summaries


def test_alert_has_summary_and_links() -> None:
    """Each alert has a severity, a summary with its subject, and links to pages of its daemon, unless that is down."""
    wrong = [
        name
        for name, alert in shipped_alerts().items()
        for texts in [{"runbook_url": "", "dashboard_url": "", **alert["annotations"]}]
        if alert["labels"]["severity"] not in {"critical", "warning", "info"}
        or SUBJECTS[conditions.ALERTS[name].subject] not in texts["summary"]
        or texts["summary"].endswith(".")
        or texts["runbook_url"] != f"{{{{ with $labels.instance }}}}http://{{{{ . }}}}/alerts/{name}{{{{ end }}}}"
        or not texts["dashboard_url"].startswith("{{ with $labels.instance }}http://{{ . }}")
    ]
    assert wrong == ["GpuwardenDown"]
    assert {"runbook_url", "dashboard_url"}.isdisjoint(shipped_alerts()["GpuwardenDown"]["annotations"])


XID_ALERTS: dict[str, Severity] = {"GpuXidCritical": "critical", "GpuXidWarning": "warning"}


@pytest.mark.parametrize(("alert", "severity"), XID_ALERTS.items())
def test_xid_alert_has_the_severity_of_the_event(alert: str, severity: Severity) -> None:
    """Each of the two alerts matches the events of its severity, whatever their code."""
    assert re.findall(r"xid_severity_\w+\{(.*?)\}", shipped_alerts()[alert]["expr"]) == [f'severity="{severity}"']


@pytest.mark.parametrize(("alert", "severity"), XID_ALERTS.items())
def test_xid_description_has_the_tables_action(alert: str, severity: Severity) -> None:
    """For each code the description ends in the action from the table."""
    description = shipped_alerts()[alert]["annotations"]["description"]
    cases = re.findall(r'if match "\^\(([\d|]+)\)\$" \$labels.xid }}([^{]+?) *{{', description)
    otherwise = re.search(r"{{- else }}([^{]+){{ end }}$", description)
    assert otherwise is not None
    actions = {int(code): sentence for listed, sentence in cases for code in listed.split("|")}
    assert {code: actions.pop(code, otherwise[1]) for code in codes(severity)} == {
        code: explain(code, severity).action.value for code in codes(severity)
    }
    assert actions == {}  # no action for codes that the alert never matches
    assert explain(0).severity != severity or explain(0).action.value == otherwise[1]


def test_generated_files_are_current() -> None:
    """The shipped rules and docs/reference/alerts.md match the tables (make docs)."""
    assert RULES.read_text() == render_rule_file()
    assert (REPOSITORY / "docs" / "reference" / "alerts.md").read_text() == "".join(
        f"{line}\n" for line in render_alerts()
    )


def test_custom_settings_are_used() -> None:
    """Custom settings appear in the rules and in their texts."""
    chosen = Choices(
        numbers={"near_oom_ratio": 0.08, "peak_rise": 1800},
        job="gpu",
        links=AlertLinks("https://site/runbooks", "https://grafana"),
    )
    changed = _alerts(render_rule_file(chosen))
    assert "<= 0.08 *" in changed["RunNearOutOfMemory"]["expr"]
    assert "[30m]" in changed["RunPeakNearOutOfMemory"]["expr"]
    assert "30 minutes" in changed["RunPeakNearOutOfMemory"]["annotations"]["description"]
    assert 'up{job="gpu"}' in changed["GpuwardenDown"]["expr"]
    assert changed["GpuDown"]["annotations"]["runbook_url"] == "https://site/runbooks/GpuDown"
    assert changed["GpuDown"]["annotations"]["dashboard_url"].startswith("https://grafana/d/gpuwarden-box?")


def test_links_to_daemons_with_tls() -> None:
    """Each link to a page of a daemon has the chosen scheme."""
    rendered = render_rule_file(Choices(links=AlertLinks(scheme="https")))
    assert "http://" not in rendered
    assert "https://{{ . }}/alerts/GpuDown" in rendered


def test_expensive_rules_have_a_longer_interval() -> None:
    """Rules on each link and on a whole fleet have a longer interval, also with a custom interval."""
    for interval, others, links, fleet in ((5, "5s", "30s", "1m"), (60, "1m", "1m", "1m"), (120, "2m", "2m", "2m")):
        groups = yaml.safe_load(render_rule_file(Choices(interval=interval)))["groups"]
        assert {group["name"]: group["interval"] for group in groups} == {
            **{group.name: others for group in prometheus_rules.GROUPS},
            "gpuwarden-links": links,
            "gpuwarden-fleet": fleet,
            "gpuwarden-objectives": fleet,
        }


def test_vmalert_gets_the_same_rules() -> None:
    """The file for vmalert has the groups of the rules file, without the key that it does not know."""
    groups = yaml.safe_load(render_rule_file())["groups"]
    removed = [rule.pop("keep_firing_for", None) for group in groups for rule in group["rules"]]
    assert any(removed)
    assert yaml.safe_load(render_vmalert_rules())["groups"] == groups


def test_kubernetes_gets_the_same_rules() -> None:
    """The PrometheusRule resource for Kubernetes has the groups of the rules file."""
    resource = yaml.safe_load(render_prometheus_rule())
    assert (resource["apiVersion"], resource["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert resource["spec"]["groups"] == yaml.safe_load(render_rule_file())["groups"]


def test_invalid_names_and_links_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    """Names and links that break expressions or templates are rejected."""
    parser = argparse.ArgumentParser()
    rules_flags.add_rules_flags(parser)
    for flag, value in (
        ("--job", 'a"b'), ("--job", "a\\b"), ("--job", "{{x}}"), ("--job", "%{idle}"), ("--job", "a\nb"), ("--job", ""),
        ("--runbook-url", "https://x/{{"), ("--runbook-url", ""), ("--dashboard-url", "https://x/{{"),
        ("--dashboard-url", "x"),
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            parser.parse_args([flag, value])
        assert f"argument {flag}:" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--leak-still", "8m"], ["--leak-window", "10m"]])
def test_windows_that_never_fire_are_rejected(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A leak window is rejected unless its last part is less than half of it, for either setting."""
    assert main(["rules", *flags]) == 2
    assert "--leak-still must be less than half of --leak-window" in capsys.readouterr().err
