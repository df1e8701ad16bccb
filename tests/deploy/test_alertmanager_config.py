"""Example configuration of Alertmanager: placeholders, routes, inhibition and message templates."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from alert_receivers import (
    CONFIGURATION,
    VALUES,
    fill_placeholders,
    list_placeholders,
    make_values,
    read_text,
    run_receivers,
    shorten_waits,
    use_local_servers,
)
from commands import run_command
from promql import SITE
from services import ROOT, Alertmanager, end_processes, wait_until

from gpuwarden.health.conditions import ALERTS
from gpuwarden.health.inhibitions import INHIBITIONS
from system_parts import needs

pytestmark = pytest.mark.system

TEMPLATES = ROOT / "deploy/alertmanager/templates"
TEMPLATE = re.compile(r'{{ define "([\w.]+)"')
UNIT_TESTS = sorted((ROOT / "tests" / "rules").glob("*.yml"))


def amtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run amtool."""
    program = needs("amtool", "prometheus-alertmanager")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)


@pytest.fixture
def filled_example(tmp_path: Path) -> Path:
    """Write the example with its placeholders filled in."""
    path = tmp_path / "alertmanager.yml"
    path.write_text(fill_placeholders())
    return path


def test_filled_in_example_is_accepted(filled_example: Path) -> None:
    """Alertmanager accepts the example once its placeholders are filled in."""
    done = amtool("check-config", filled_example)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(INHIBITIONS)} inhibit rules" in done.stdout
    assert "4 receivers" in done.stdout


def test_remaining_placeholder_is_rejected(tmp_path: Path) -> None:
    """Each single placeholder makes amtool fail with its name."""
    path = tmp_path / "alertmanager.yml"
    for left in list_placeholders():
        path.write_text(fill_placeholders({name: value for name, value in VALUES.items() if name != left}))
        done = amtool("check-config", path)
        assert done.returncode != 0, left
        assert left in done.stdout + done.stderr


def test_alertmanager_does_not_start_with_a_placeholder(tmp_path: Path) -> None:
    """Alertmanager exits, and its log names the placeholder."""
    program = needs("prometheus-alertmanager", "prometheus-alertmanager")
    command = [program, f"--config.file={CONFIGURATION}", f"--storage.path={tmp_path}", "--cluster.listen-address="]
    done = subprocess.run(
        [*command, "--web.listen-address=127.0.0.1:0"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert any(name in done.stderr for name in list_placeholders())


def test_every_placeholder_is_tested() -> None:
    """The tests fill in exactly the placeholders of the example."""
    assert list_placeholders() == VALUES.keys()


def test_routes(filled_example: Path) -> None:
    """Each severity has its receiver, and the watchdog its own; routes use no other label."""
    for severity in sorted({rule.severity for rule in ALERTS.values()}):
        labels = ("alertname=RunDied", f"severity={severity}")
        done = amtool("config", "routes", "test", f"--config.file={filled_example}", *labels)
        assert (done.returncode, done.stdout.strip()) == (0, severity)
    watchdog = ("alertname=GpuwardenWatchdog", "severity=info")
    done = amtool("config", "routes", "test", f"--config.file={filled_example}", *watchdog)
    assert done.stdout.strip() == "watchdog"
    _first, *others = yaml.safe_load(fill_placeholders())["route"]["routes"]
    for route in others:
        assert {re.split("[=!]", each)[0].strip() for each in route["matchers"]} == {"severity"}


def test_alert_of_unknown_severity_is_sent(filled_example: Path) -> None:
    """Alerts of other rules are not lost."""
    done = amtool("config", "routes", "test", f"--config.file={filled_example}", "alertname=Other", "severity=page")
    assert done.stdout.strip() == "warning"


def test_inhibition_alerts_exist() -> None:
    """Inhibition rules name existing alerts, and none inhibits itself."""
    for each in INHIBITIONS:
        assert {each.source, *each.targets} <= ALERTS.keys()
        assert each.source not in each.targets


def test_inhibition_section_is_current() -> None:
    """The example ends in the output of `gpuwarden rules --inhibition` (make docs)."""
    printed = run_command("rules", "--inhibition").stdout
    assert CONFIGURATION.read_text().endswith(f"\n\n{printed}")


@functools.cache
def fired_labels() -> dict[str, list[dict[str, str]]]:
    """Return the labels of each alert that fires in the rule tests, as Prometheus sets them."""
    found = defaultdict(list)
    for path in UNIT_TESTS:
        for test in yaml.safe_load(path.read_text())["tests"]:
            for check in test.get("alert_rule_test", ()):
                for expected in check.get("exp_alerts", ()):
                    found[check["alertname"]].append(expected["exp_labels"])
    return found


def test_inhibition_labels_exist() -> None:
    """Each target has the labels in `equal`: without them, it would be inhibited by any source without them.

    The watchdog has none of them; GpuwardenDown, which inhibits all, always has a job.
    """
    for each in INHIBITIONS:
        for target in each.targets or ALERTS.keys() - {each.source, "GpuwardenWatchdog"}:
            for labels in fired_labels()[target]:
                assert set(each.equal) - SITE <= labels.keys(), (target, labels)
        assert any(set(each.equal) - SITE <= labels.keys() for labels in fired_labels()[each.source]), each


def test_group_labels_exist() -> None:
    """Each label that groups alerts exists on some alert."""
    carried = {"alertname"}.union(*(labels for every in fired_labels().values() for labels in every))
    route = yaml.safe_load(fill_placeholders())["route"]
    for each in [route, *route["routes"]]:
        assert set(each.get("group_by", ())) <= carried


BOX = {"cluster": "lab", "job": "gpuwarden", "instance": "box-1:9846"}
SUBJECT = {"uuid": "GPU-1", "gpu": "1", "run_id": "run-1", "run_name": "mnist"}


def _alert(alertname: str, /, **labels: str) -> dict[str, Any]:
    rule = ALERTS[alertname]
    annotations = {"summary": rule.title, "description": f"About {labels}.", "runbook_url": "https://docs/alerts"}
    return {
        "labels": {"alertname": alertname, "severity": rule.severity, **BOX, **labels},
        "annotations": annotations,
    }


def _suppressed(alertmanager: Alertmanager) -> dict[str, bool]:
    """Return whether Alertmanager inhibits each alert, by its number in the test."""
    by = {each["labels"]["number"]: each["status"]["inhibitedBy"] for each in alertmanager.alerts()}
    return {number: bool(inhibiting) for number, inhibiting in by.items()}


def test_inhibition(tmp_path: Path) -> None:
    """Alertmanager inhibits each target of the same subject, and none of another GPU, run or host."""
    alertmanager = Alertmanager(tmp_path / "alertmanager", configuration=fill_placeholders())
    expected: dict[str, bool] = {}
    alerts: list[dict[str, Any]] = []

    def add(name: str, equal: Mapping[str, str], *, hidden: bool) -> None:
        number = str(len(alerts))
        others = {label: f"{label}-{number}" for label in (*BOX, *SUBJECT) if label not in equal}
        alerts.append(_alert(name, number=number, **others, **equal))
        expected[number] = hidden

    for number, each in enumerate(INHIBITIONS):
        # A host for each rule, so that no source inhibits another rule's target.
        equal = {label: f"box-{number}" if label == "instance" else {**BOX, **SUBJECT}[label] for label in each.equal}
        add(each.source, equal, hidden=False)
        for target in each.targets or sorted(ALERTS.keys() - {each.source}):
            add(target, equal, hidden=True)
            for label in each.equal:
                add(target, equal | {label: f"another-{target}"}, hidden=False)
    with end_processes(alertmanager):
        alertmanager.post(*alerts)
        wait_until(lambda: _suppressed(alertmanager) == expected, "the inhibited alerts", 20)
        done = amtool(
            "alert", "query", "--inhibited", "--output=json", f"--alertmanager.url=http://{alertmanager.address}"
        )
    assert {each["labels"]["number"] for each in json.loads(done.stdout)} >= {
        n for n, hidden in expected.items() if hidden
    }


def test_missing_target_inhibits_nothing(tmp_path: Path) -> None:
    """GpuwardenDown without an instance, from absent(), inhibits no alert of a host."""
    alertmanager = Alertmanager(tmp_path / "alertmanager", configuration=fill_placeholders())
    nowhere = _alert("GpuwardenDown", number="0")
    del nowhere["labels"]["instance"]
    with end_processes(alertmanager):
        alertmanager.post(nowhere, _alert("GpuDown", number="1", uuid="GPU-1"))
        wait_until(lambda: _suppressed(alertmanager) == {"0": False, "1": False}, "both sent")


def test_second_gpu_is_sent_at_once(tmp_path: Path) -> None:
    """Critical alerts of two GPUs are two messages for each receiver, without a delay."""
    with run_receivers() as (web, mail):
        alertmanager = Alertmanager(
            tmp_path / "alertmanager", configuration=use_local_servers(fill_placeholders(make_values(web, mail)), web)
        )
        with end_processes(alertmanager):
            both = [_alert("GpuDown", uuid=f"GPU-{gpu}", gpu=str(gpu), name="NVIDIA H100") for gpu in (1, 2)]
            alertmanager.post(*both)
            wait_until(lambda: len(mail.messages) == 2, "two mails")
            wait_until(
                lambda: all(len(web.posts(f"/{way}")) == 2 for way in ("webhook", "slack/critical", "pagerduty")),
                "two messages for each receiver",
            )
    assert {letter["Subject"] for letter in mail.messages} == {
        f"CRITICAL: GpuDown, GPU {gpu}, {BOX['instance']}" for gpu in (1, 2)
    }
    (first, second) = web.posts("/pagerduty")
    assert first["dedup_key"] != second["dedup_key"]
    assert first["payload"]["severity"] == "critical"
    assert first["payload"]["source"] == BOX["instance"]
    assert web.posts("/slack/warnings") == []


def test_warnings_of_a_host_are_one_message(tmp_path: Path) -> None:
    """One message has the facts of each GPU."""
    with run_receivers() as (web, mail):
        config = shorten_waits(use_local_servers(fill_placeholders(make_values(web, mail)), web))
        alertmanager = Alertmanager(tmp_path / "alertmanager", configuration=config)
        with end_processes(alertmanager):
            alertmanager.post(
                *(_alert("GpuNearThermalSlowdown", uuid=f"GPU-{gpu}", gpu=str(gpu)) for gpu in range(8)),
                _alert("RunStalled", run_id="r1", run_name="<!channel> & co"),
            )
            wait_until(lambda: mail.messages, "a mail")
            wait_until(lambda: web.posts("/slack/warnings"), "a message in Slack")
    (letter,) = mail.messages
    assert letter["Subject"] == f"WARNING: 9 firing, {BOX['instance']}"
    text = read_text(letter)
    assert [f"GPU: {gpu} GPU-{gpu}" in text for gpu in range(8)] == [True] * 8
    assert text.count("Runbook: https://docs/alerts") == 9
    assert "Run: <!channel> & co r1" in text
    html = letter.get_body(("html",))
    assert html is not None
    assert "&lt;!channel&gt; &amp; co r1" in html.get_content()
    (said,) = [attachment for post in web.posts("/slack/warnings") for attachment in post["attachments"]]
    assert "run &lt;!channel&gt; &amp; co r1" in said["text"]
    assert "<!channel>" not in json.dumps(said)
    assert web.posts("/pagerduty") == []


def test_templates_exist() -> None:
    """Each template in the configuration exists; a missing one would only fail at the first message."""
    defined = {name for path in TEMPLATES.glob("*.tmpl") for name in TEMPLATE.findall(path.read_text())}
    used = re.findall(r'{{ template "([\w.]+)"', CONFIGURATION.read_text())
    assert used
    assert set(used) <= defined


def _rendered(name: str, data: Path, kind: str) -> str:
    glob, text = f"--template.glob={TEMPLATES}/*.tmpl", f'--template.text={{{{ template "{name}" . }}}}'
    done = amtool("template", "render", glob, text, f"--template.data={data}", f"--template.type={kind}")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("name", "kind"), [("text", "text"), ("slack.text", "text"), ("html", "html")])
def test_messages_are_bounded(name: str, kind: str, tmp_path: Path) -> None:
    """A hundred alerts are a message of twenty firing and ten resolved ones, with both counts."""

    def alert(status: str, number: int) -> dict[str, Any]:
        subject = {"run_id": f"{status}-{number}-", "run_name": "mnist"}
        times = {"startsAt": "2026-01-02T03:04:05Z", "endsAt": "2026-01-02T03:14:05Z"}
        return {"status": status, **_alert("RunStalled", **subject), **times}

    alerts = [alert(status, number) for status in ("firing", "resolved") for number in range(50)]
    data = tmp_path / "data.json"
    data.write_text(json.dumps({"status": "firing", "alerts": alerts, "commonLabels": {"severity": "warning"}}))
    said = _rendered(f"gpuwarden.{name}", data, kind)
    assert [f"{status}-{number}-" in said for status in ("firing", "resolved") for number in (19, 20)] == [
        True, False, False, False,
    ]  # fmt: skip
    assert "resolved-9-" in said
    assert "20 of 50" in said
    assert "50 alerts are resolved" in said
