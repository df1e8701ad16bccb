"""The alert rules: behavior by promtool, names by the tables, thresholds and documentation in step."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

import pytest
import yaml
from promql import SAMPLES, SITE, grouping, numbers, selectors, unknown

from gpuwarden.alerts import command, rules
from gpuwarden.alerts.page import page
from gpuwarden.alerts.rule import AlertRule, RecordingRule, filled
from gpuwarden.alerts.rules import Choices, prometheus_rule, rule_file
from gpuwarden.alerts.settings import SETTINGS, TIME, Setting
from gpuwarden.cli import main
from gpuwarden.config_values import DURATION
from gpuwarden.gpu.xid import Severity, codes, explain
from system_parts import needs

REPOSITORY = Path(__file__).parents[1]
PROMETHEUS = REPOSITORY / "deploy" / "prometheus"
RULES = PROMETHEUS / "rules" / "gpuwarden.yml"
TESTS = sorted((REPOSITORY / "tests" / "rules").glob("*.yml"))

# Numbers that are no thresholds: "not up", "none", "all", halves and doubles, and conversions of units.
PLAIN = {0, 0.5, 1, 2, 60, 100, 3600, 86400, 2**10, 2**20, 2**30}


def _alerts(text: str) -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(text)["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"] if "alert" in rule}


ALERTS = _alerts(RULES.read_text())
ALL: dict[str, AlertRule | RecordingRule] = {**rules.RECORDED, **rules.ALERTS}
SHIPPED = Choices().values()


def _promtool(*arguments: str | Path) -> str:
    promtool = needs("promtool", "prometheus")
    done = subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_configuration_is_accepted() -> None:
    """Prometheus takes the shipped configuration, which finds the rules by its relative path."""
    assert f"{len(ALERTS) + len(rules.RECORDED)} rules found" in _promtool(
        "check", "config", PROMETHEUS / "prometheus.yml"
    )


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_alerts_behave(path: Path, tmp_path: Path) -> None:
    """Each alert fires, stays silent, resolves and meets missing data as its unit test says."""
    written = yaml.safe_load(path.read_text())
    written["rule_files"] = [str(RULES)]
    for test in written["tests"]:
        parents = _parents(test)
        for check in _checks(test):
            for expected in check.get("exp_alerts", ()):
                expected["exp_annotations"] |= _links(check["alertname"], expected["exp_labels"], parents)
    complete = tmp_path / path.name
    complete.write_text(yaml.safe_dump(written))
    _promtool("test", "rules", complete)


def _parents(test: dict[str, Any]) -> dict[str, str]:
    """Return the UUIDs of GPUs by those of their MIG instances."""
    written = " ".join(each["series"] for each in test["input_series"])
    return dict(re.findall(r'gpuwarden_mig_info{[^}]*\buuid="([^"]+)",gpu_uuid="([^"]+)"', written))


def _links(alert: str, labels: dict[str, str], parents: dict[str, str]) -> dict[str, str]:
    """Return the annotations that are links, which the tests do not repeat, for an alert with these labels.

    On a dashboard a MIG instance is chosen by its GPU, and a cluster where there is one.
    """
    subject = rules.ALERTS[alert].subject
    uuid = labels.get("uuid", "")
    chosen = {"instance": labels.get("instance")}
    if subject == "run":
        chosen["run"] = labels.get("run_id")
    elif subject == "gpu":
        chosen["gpu"] = parents.get(uuid, uuid)
    chosen["cluster"] = labels.get("cluster")
    query = "&".join(f"var-{name}={quote_plus(value)}" for name, value in chosen.items() if value)
    return {
        "runbook_url": f"docs/alerts.md#{alert.lower()}",
        "dashboard_url": f"http://localhost:3000/d/gpuwarden-{'run' if subject == 'run' else 'box'}?{query}",
    }


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


@pytest.mark.parametrize("name", ALL)
def test_names_exist(name: str) -> None:
    """A rule names only metrics and labels that the tables declare."""
    assert not unknown(filled(ALL[name].expr, Choices().values()))


@pytest.mark.parametrize("alert", ALERTS)
def test_names_in_descriptions_exist(alert: str) -> None:
    """A description asks for series that the daemon has."""
    assert set(re.findall(r"gpuwarden[_:][\w:]+", ALERTS[alert]["annotations"]["description"])) <= set(SAMPLES)


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_tested_series_exist(path: Path) -> None:
    """The unit tests feed series as the daemon writes them: known names with all their labels."""
    for test in yaml.safe_load(path.read_text())["tests"]:
        for written in test["input_series"]:
            ((name, labels),) = selectors(written["series"])
            assert labels - SITE == SAMPLES[name] - SITE, written["series"]


@pytest.mark.parametrize("name", ALL)
def test_thresholds_are_settings(name: str) -> None:
    """No number that somebody may want otherwise stands in a rule itself: a place does, which a setting fills."""
    ones = {each.name: "1s" if each.kind is TIME else "1" for each in SETTINGS}
    places = SHIPPED | ones | {f"{name}.seconds": "1" for name in ones}
    assert set(numbers(filled(ALL[name].expr, places))) <= PLAIN


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_each_setting_is_set(setting: Setting) -> None:
    """What is chosen changes a rule, beside its texts, and shows in no place of another setting."""
    places = [rule.expr + (rule.hold if isinstance(rule, AlertRule) else "") for rule in ALL.values()]
    assert any(re.search(rf"%{{{setting.name}(\.seconds)?}}", place) for place in places)
    assert rule_file(Choices(numbers={setting.name: setting.default / 2})) != RULES.read_text()


@pytest.mark.parametrize("alert", ALERTS)
def test_template_labels_are_in_the_result(alert: str) -> None:
    """A description uses only labels that its expression's result carries."""
    carried = grouping(ALERTS[alert]["expr"]).union(*(SAMPLES[name] for name, _ in selectors(ALERTS[alert]["expr"])))
    used = set(re.findall(r"\$labels\.(\w+)", ALERTS[alert]["annotations"]["description"]))
    assert used <= carried


@pytest.mark.parametrize("alert", [name for name, rule in rules.ALERTS.items() if rule.severity == "critical"])
def test_critical_alert_outlives_the_daemon(alert: str) -> None:
    """Nobody is told that a fault is over as the daemon is down or restarted: it fires on until GpuwardenDown does."""
    if alert != "GpuwardenDown":
        kept, down = (DURATION.read(ALERTS[alert]["keep_firing_for"]), DURATION.read(ALERTS["GpuwardenDown"]["for"]))
        assert kept >= down + 15  # and its scrape and its evaluation


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_says_what_to_do(alert: str) -> None:
    """Each alert has a severity, a constant summary, and a section of docs/alerts.md its annotation leads to."""
    annotations = ALERTS[alert]["annotations"]
    assert ALERTS[alert]["labels"]["severity"] in {"critical", "warning", "info"}
    assert "{{" not in annotations["summary"]
    assert annotations["summary"].endswith(".")
    assert annotations["runbook_url"] == f"docs/alerts.md#{alert.lower()}"
    assert "/d/gpuwarden-" in annotations["dashboard_url"]


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


def test_files_are_in_step() -> None:
    """The shipped rules and docs/alerts.md are what the tables say (make docs)."""
    assert RULES.read_text() == rule_file()
    assert (REPOSITORY / "docs" / "alerts.md").read_text() == page()


def test_rules_take_other_numbers() -> None:
    """What is chosen stands in the rules, and in their texts."""
    chosen = Choices(
        numbers={"near_oom_ratio": 0.08, "peak_rise": 1800}, job="gpu", docs="https://site/docs", grafana=""
    )
    changed = _alerts(rule_file(chosen))
    assert "<= 0.08 *" in changed["RunNearOutOfMemory"]["expr"]
    assert "[30m]" in changed["RunPeakNearOutOfMemory"]["expr"]
    assert "30 minutes" in changed["RunPeakNearOutOfMemory"]["annotations"]["description"]
    assert 'up{job="gpu"}' in changed["GpuwardenDown"]["expr"]
    assert changed["GpuDown"]["annotations"]["runbook_url"] == "https://site/docs/alerts.md#gpudown"
    assert "dashboard_url" not in changed["GpuDown"]["annotations"]


def test_what_costs_most_is_evaluated_less_often() -> None:
    """Rules on each link of each GPU, and those on a whole fleet; whoever evaluates seldom does so for them too."""
    for interval, others, links, fleet in ((5, "5s", "30s", "1m"), (60, "1m", "1m", "1m"), (120, "2m", "2m", "2m")):
        groups = yaml.safe_load(rule_file(Choices(interval=interval)))["groups"]
        assert {group["name"]: group["interval"] for group in groups} == {
            **{group.name: others for group in rules.GROUPS},
            "gpuwarden-links": links,
            "gpuwarden-fleet": fleet,
        }


def test_kubernetes_gets_the_same_rules() -> None:
    """The resource for Prometheus' operator has the groups of the file."""
    resource = yaml.safe_load(prometheus_rule())
    assert (resource["apiVersion"], resource["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    assert resource["spec"]["groups"] == yaml.safe_load(rule_file())["groups"]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--job", 'a"b'), ("--job", "a\\b"), ("--job", "{{x}}"), ("--job", "%{idle}"), ("--job", "a\nb"), ("--job", ""),
        ("--docs", "https://x/{{"), ("--docs", ""), ("--grafana", "https://x/{{"), ("--grafana", "{{ x"),
    ],
)  # fmt: skip
def test_what_would_spoil_the_rules_is_refused(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Names and links stand within expressions and templates of Prometheus'."""
    parser = argparse.ArgumentParser()
    command.add_flags(parser)
    with pytest.raises(SystemExit):
        parser.parse_args([flag, value])
    assert f"argument {flag}:" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--leak-still", "8m"], ["--leak-window", "10m"]])
def test_windows_that_never_fire_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The last part of a leak's window has to be less than half of it, whichever of the two was chosen."""
    assert main(["rules", *flags]) == 2
    assert "--leak-still has to be less than half of --leak-window" in capsys.readouterr().err


def test_odd_names_are_taken(tmp_path: Path) -> None:
    """Prometheus takes what is not refused."""
    parser = argparse.ArgumentParser()
    command.add_flags(parser)
    flags = ["--job", "it's 100 % ✓", "--docs", "https://x/a%20'b\"/", "--grafana", ""]
    file = tmp_path / "rules.yml"
    file.write_text(command.written(parser.parse_args(flags)))
    _promtool("check", "rules", file)


def test_odd_labels_do_not_spoil_a_description(tmp_path: Path) -> None:
    """What a description asks Prometheus for has the alert's labels in it, whatever characters these have."""
    odd = 'it\'s "box" \\3 %s {{x}}'
    (test, *_others) = yaml.safe_load((REPOSITORY / "tests" / "rules" / "runs.yml").read_text())["tests"]
    for row in test["input_series"]:
        row["series"] = row["series"].replace('"box"', json.dumps(odd))
    (expected,) = [alert for check in _checks(test) for alert in check.get("exp_alerts", ())]
    expected["exp_labels"]["instance"] = odd
    expected["exp_annotations"] |= _links("RunStalled", expected["exp_labels"], {})
    told = expected["exp_annotations"]["description"]
    expected["exp_annotations"]["description"] = told.replace("of box", f"of {odd}")
    file = tmp_path / "runs.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": "5s", "tests": [test]}))
    _promtool("test", "rules", file)
    assert "'%" not in RULES.read_text()
