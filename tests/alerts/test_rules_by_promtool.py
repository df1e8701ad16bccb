"""Shipped rules in promtool and vmalert: they accept the configuration, and promtool runs the rule tests."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml

from gpuwarden.alerts import prometheus_rules
from gpuwarden.alerts.alert_links import AlertLinks, fill_labels
from gpuwarden.cli import rules_flags
from gpuwarden.cli.commands import rules_command
from gpuwarden.health.conditions import ALERTS
from system_parts import needs

pytestmark = pytest.mark.system

REPOSITORY = Path(__file__).parents[2]
PROMETHEUS = REPOSITORY / "deploy" / "prometheus"
RULES = PROMETHEUS / "rules" / "gpuwarden.yml"


def promtool(*arguments: str | Path) -> str:
    """Run promtool; fail with its output."""
    program = needs("promtool", "prometheus")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_configuration_is_accepted() -> None:
    """Prometheus accepts the shipped configuration, which finds the rules by its relative path."""
    number = len(ALERTS) + len(prometheus_rules.RECORDED)
    assert f"{number} rules found" in promtool("check", "config", PROMETHEUS / "prometheus.yml")


@pytest.mark.parametrize("file", sorted((REPOSITORY / "tests" / "rules").glob("*.yml")), ids=lambda file: file.stem)
def test_rule_tests_pass_as_shipped(file: Path, tmp_path: Path) -> None:
    """Each alert of a file fires, stays silent, resolves and handles missing data as its rule test expects."""
    content = yaml.load(file.read_text(), yaml.CSafeLoader)
    with_queries = [test for test in content["tests"] if "promql_expr_test" in test]
    alerts_alone = [test for test in content["tests"] if "promql_expr_test" not in test]
    named = tmp_path / "named.yml"
    named.write_text(yaml.safe_dump({"groups": list(_groups_of(alerts_alone))}))
    for number, (tests, rule_file) in enumerate([(with_queries, RULES), (alerts_alone, named)]):
        if tests:
            part = tmp_path / f"{number}.yml"
            part.write_text(yaml.safe_dump({**content, "rule_files": [str(rule_file)], "tests": tests}))
            promtool("test", "rules", part)


def _groups_of(tests: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the shipped groups with the alerts that tests name: promtool evaluates all rules at each step."""
    named = {check["alertname"] for test in tests for check in test["alert_rule_test"]}
    for group in yaml.load(RULES.read_text(), yaml.CSafeLoader)["groups"]:
        if rules := [rule for rule in group["rules"] if rule.get("alert") in named or "record" in rule]:
            yield {**group, "rules": rules}


def test_vmalert_accepts_its_rules(tmp_path: Path) -> None:
    """Debian's vmalert parses each expression and template of its form of the rules, and refuses Prometheus' form."""
    program, nowhere = needs("vmalert", "victoria-metrics"), "http://127.0.0.1:1"
    file = tmp_path / "rules.yml"

    def check(rules: str) -> subprocess.CompletedProcess[str]:
        file.write_text(rules)
        command = [program, f"-rule={file}", "-dryRun", f"-datasource.url={nowhere}", f"-notifier.url={nowhere}"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    done = check(prometheus_rules.render_vmalert_rules())
    assert done.returncode == 0, done.stderr
    promtool("check", "rules", file)
    refused = check(prometheus_rules.render_rule_file())
    assert refused.returncode != 0
    assert "keep_firing_for" in refused.stderr


def test_unusual_names_are_accepted(tmp_path: Path) -> None:
    """Prometheus accepts every name that the settings accept."""
    parser = argparse.ArgumentParser()
    rules_flags.add_rules_flags(parser)
    flags = ["--job", "it's 100 % ✓", "--runbook-url", "https://x/a%20'b\"/", "--dashboard-url", "https://x/%22"]
    file = tmp_path / "rules.yml"
    file.write_text(rules_command.render_rules(parser.parse_args(flags)))
    promtool("check", "rules", file)


def test_links_to_grafana_and_to_own_runbooks(tmp_path: Path) -> None:
    """Links to Grafana select the subject, for a MIG instance its GPU; runbooks have the alert's name."""
    rules = tmp_path / "rules.yml"
    links = AlertLinks("https://runbooks", "https://grafana")
    rules.write_text(prometheus_rules.render_rule_file(prometheus_rules.Choices(links=links)))
    for name, variables in (
        ("run_memory.yml", {"run": "r1"}),
        ("device_memory.yml", {"gpu": "GPU-a"}),
    ):
        tests = yaml.safe_load((REPOSITORY / "tests" / "rules" / name).read_text())["tests"]
        (test,) = (each for each in tests if re.search("^a (run on a|full) MIG instance fires", each["name"]))
        for check in test["alert_rule_test"]:
            for alert in check.get("exp_alerts", ()):
                uid = "run" if "run" in variables else "box"
                query = urlencode({"var-instance": "box", **{f"var-{key}": value for key, value in variables.items()}})
                alert["exp_annotations"] |= {
                    "runbook_url": f"https://runbooks/{check['alertname']}",
                    "dashboard_url": f"https://grafana/d/gpuwarden-{uid}?{query}",
                }
        file = tmp_path / name
        file.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "5s", "tests": [test]}))
        promtool("test", "rules", file)


def test_daemon_renders_as_prometheus() -> None:
    """The daemon's own alerts have the summaries and links that promtool confirms for those of Prometheus."""
    compared = 0
    for path in sorted((REPOSITORY / "tests" / "rules").glob("*.yml")):
        for test in yaml.safe_load(path.read_text())["tests"]:
            for check in test.get("alert_rule_test", ()):
                templates = prometheus_rules.render_annotations(ALERTS[check["alertname"]], prometheus_rules.Choices())
                for alert in check.get("exp_alerts", ()):
                    expected = alert["exp_annotations"]
                    rendered = {name: fill_labels(text, alert["exp_labels"]) for name, text in templates.items()}
                    assert rendered | {"description": expected["description"]} == expected
                    compared += 1
    assert compared >= len(ALERTS)


def test_unusual_labels_in_a_description(tmp_path: Path) -> None:
    """A description quotes the alert's labels correctly in its queries, for any characters."""
    odd = 'it\'s "box" \\3 %s {{x}}'
    (test, *_others) = yaml.safe_load((REPOSITORY / "tests" / "rules" / "runs.yml").read_text())["tests"]
    for row in test["input_series"]:
        row["series"] = row["series"].replace('"box"', json.dumps(odd))
    (expected,) = [alert for check in test["alert_rule_test"] for alert in check.get("exp_alerts", ())]
    expected["exp_labels"]["instance"] = odd
    annotations = expected["exp_annotations"]
    for name, text in annotations.items():
        annotations[name] = text.replace("on box", f"on {odd}").replace("//box/", f"//{odd}/")
    file = tmp_path / "runs.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "5s", "tests": [test]}))
    promtool("test", "rules", file)
    assert "'%" not in RULES.read_text()
