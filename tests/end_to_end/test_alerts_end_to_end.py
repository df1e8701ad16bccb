"""Alerts on their whole way to people: driver and allocator, daemon, Prometheus, Alertmanager, web and mail servers.

Rules, configuration and messages are the shipped ones; only their waits are shorter, and the links lead somewhere.
"""

from __future__ import annotations

import re
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import pytest
from alert_receivers import (
    MailServer,
    WebhookServer,
    fill_placeholders,
    make_values,
    read_text,
    run_receivers,
    shorten_waits,
    use_local_servers,
)
from services import Alertmanager, Daemon, Prometheus, end_processes, wait_until
from training_process import LIMIT_MIB, MIB, Trainer

from gpuwarden.alerts.alert_links import AlertLinks
from gpuwarden.alerts.prometheus_rules import Choices, render_rule_file
from mock_nvml import MockNvml

pytestmark = pytest.mark.system

HOT, COOL = 0, 1  # GPUs: one that gets too hot, and the training run's
SLOWED = 0x48  # clock event reasons: slowed down by the hardware, and that for heat
SLOWDOWN, MARGIN = 85, 3  # °C: the mock's threshold, and what is left in the test
RUNBOOKS, GRAFANA = "https://docs.example.org/alerts", "https://grafana.example.org"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Write a configuration with short intervals."""
    path = tmp_path / "config.yaml"
    path.write_text("poll:\n  interval: 500ms\n  slow_interval: 1s\n")
    return path


def rules() -> str:
    """Return the shipped rules, with links of a site, evaluated each second and with short holds."""
    shipped = render_rule_file(Choices(numbers={"slowed_window": 10}, interval=1, links=AlertLinks(RUNBOOKS, GRAFANA)))
    return re.sub(r"^    (for|keep_firing_for): (\d+s|[12]m)$", r"    \1: 2s", shipped, flags=re.MULTILINE)


class People:
    """Receivers of notifications: alerts by name, as JSON from the webhook and as text from mail."""

    def __init__(self, web: WebhookServer, mail: MailServer) -> None:
        self._web = web
        self._mail = mail

    def hear(self, alert: str, status: str = "firing") -> tuple[dict[str, Any], EmailMessage]:
        """Wait for both messages about an alert, and return the alert and the mail."""
        said = wait_until(lambda: self._posted(alert, status), f"{alert}, {status}, by the webhook", 120)
        over = "Resolved: " if status == "resolved" else ""
        words = rf"^{over}{re.escape(said['annotations']['summary'])}\n(.+\n)?Alert: {alert}, "
        return said, wait_until(lambda: self._letters(words), f"a letter of {alert}, {status}", 20)[0]

    def _letters(self, words: str) -> list[EmailMessage]:
        return [each for each in self._mail.messages if re.search(words, read_text(each), re.MULTILINE)]

    def _posted(self, alert: str, status: str) -> dict[str, Any]:
        alerts = [each for post in self._web.posts("/webhook") for each in post["alerts"]]
        return next((a for a in alerts if (a["labels"]["alertname"], a["status"]) == (alert, status)), {})


def see_the_heat(people: People, box: str, uuid: str) -> None:
    """Receive the warning with the hot GPU and the degrees left."""
    said, letter = people.hear("GpuNearThermalSlowdown")
    assert (said["labels"]["uuid"], said["labels"]["gpu"], said["labels"]["instance"]) == (uuid, str(HOT), box)
    assert f" is hot: {MARGIN} °C below" in said["annotations"]["description"]
    assert letter["Subject"].startswith("WARNING: ")
    text = read_text(letter)
    assert said["annotations"]["description"] in text
    assert f"GPU: {HOT} NVIDIA H100 80GB HBM3 {uuid}\n" in text
    assert f"Runbook: {RUNBOOKS}/GpuNearThermalSlowdown\n" in text
    assert f"Dashboard: {GRAFANA}/d/gpuwarden-box?" in text


def see_the_slowdown(people: People, alertmanager: Alertmanager, box: str, uuid: str) -> None:
    """Receive the critical alert with the share of time lost, and not the warning that it inhibits."""
    said, letter = people.hear("GpuHardwareThermalSlowdown")
    assert said["labels"]["uuid"] == uuid
    share = re.search(r"for ([\d.]+)% of the last 10 seconds", said["annotations"]["description"])
    assert share is not None
    assert 10 < float(share[1]) <= 100
    assert letter["Subject"] == f"CRITICAL: GpuHardwareThermalSlowdown, GPU {HOT}, {box}"
    assert f"Runbook: {RUNBOOKS}/GpuHardwareThermalSlowdown\n" in read_text(letter)
    held = {each["labels"]["alertname"]: each["status"]["state"] for each in alertmanager.alerts()}
    assert held["GpuNearThermalSlowdown"] == "suppressed"


def see_the_run(people: People, prometheus: Prometheus, box: str, uuid: str) -> None:
    """Receive the critical alert with run, GPU and headroom."""
    said, letter = people.hear("RunNearOutOfMemory")
    (run,) = prometheus.query("gpuwarden_run_info")
    run_id = dict(run)["run_id"]
    assert (said["labels"]["uuid"], said["labels"]["run_id"]) == (uuid, run_id)
    left = re.search(r"has ([\d.]+)MiB of memory left", said["annotations"]["description"])
    assert left is not None
    assert 0 < float(left[1]) < LIMIT_MIB
    assert float(left[1]) <= 0.05 * LIMIT_MIB or "At its current growth" in said["annotations"]["description"]
    assert letter["Subject"] == f"CRITICAL: RunNearOutOfMemory, GPU {COOL}, {box}, run trainer"
    text = read_text(letter)
    assert said["annotations"]["description"] in text
    assert f"Run: trainer {run_id}\n" in text
    assert f"Runbook: {RUNBOOKS}/RunNearOutOfMemory\n" in text
    assert f"var-run={run_id}\n" in text


def see_the_end(people: People, alert: str) -> None:
    """Receive the resolution, with its subject, start and end."""
    said, letter = people.hear(alert, "resolved")
    text = read_text(letter)
    assert re.search(r" UTC to \d\d:\d\d:\d\d UTC\n", text)
    assert said["labels"]["uuid"] in text


def resolved(web: WebhookServer) -> set[str]:
    """Return the alerts whose incidents PagerDuty opened and then resolved."""
    opened: dict[str, str] = {}
    ended = set()
    for event in web.posts("/pagerduty"):
        if event["event_action"] == "trigger":
            opened[event["dedup_key"]] = event["payload"]["class"]
        elif event["dedup_key"] in opened:
            ended.add(opened[event["dedup_key"]])
    return ended


def colors(web: WebhookServer) -> set[str]:
    """Return the colors of Slack's messages about critical alerts."""
    return {attachment["color"] for post in web.posts("/slack/critical") for attachment in post["attachments"]}


def test_alerts_reach_people_and_end(tmp_path: Path, config: Path, mock_nvml: MockNvml) -> None:
    """A hot GPU and a run near out of memory are sent by webhook and mail, with names and numbers, and resolved."""
    daemon = Daemon(tmp_path / "daemon", "--config", str(config), env=mock_nvml.env(gpus=2))
    with run_receivers() as (web, mail), end_processes(daemon):
        alertmanager = Alertmanager(
            tmp_path / "alertmanager",
            configuration=shorten_waits(use_local_servers(fill_placeholders(make_values(web, mail)), web)),
        )
        target = daemon.url.removeprefix("http://")
        prometheus = Prometheus(tmp_path / "prometheus", target, alertmanager.address, rules())
        with end_processes(alertmanager, prometheus):
            up = wait_until(lambda: daemon.samples().all("gpuwarden_gpu_up"), "both GPUs")
            uuids = sorted(dict(labels)["uuid"] for labels in up)
            trainer = Trainer(tmp_path, daemon, uuids[COOL])
            with end_processes(trainer):
                mock_nvml.processes(COOL, {trainer.pid: 600 * MIB})
                trainer.send_line("grow")
                mock_nvml.set(HOT, "temp", SLOWDOWN - MARGIN)
                people = People(web, mail)
                see_the_heat(people, target, uuids[HOT])
                mock_nvml.set(HOT, "throttle", SLOWED)
                see_the_slowdown(people, alertmanager, target, uuids[HOT])
                see_the_run(people, prometheus, target, uuids[COOL])
                mock_nvml.set(HOT, "throttle", 0)
                mock_nvml.set(HOT, "temp", 50)
                trainer.send_line("free")
                see_the_end(people, "GpuHardwareThermalSlowdown")
                see_the_end(people, "RunNearOutOfMemory")
                both = {"GpuHardwareThermalSlowdown", "RunNearOutOfMemory"}
                wait_until(lambda: both <= resolved(web), "both incidents of PagerDuty resolved")
                wait_until(lambda: {"danger", "good"} <= colors(web), "Slack's messages of both")
