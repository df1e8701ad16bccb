"""Alertmanager target and its configuration section; test_real_alertmanagers.py covers delivery to real servers."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from alert_samples import alert
from message_receivers import http_receiver

from gpuwarden.alerts.delivery.alertmanager import AlertmanagerTarget
from gpuwarden.alerts.delivery.message import Notification
from gpuwarden.alerts.delivery.validation import missing, warnings
from gpuwarden.config.loader import ConfigError, parse
from gpuwarden.config.schema import Config
from gpuwarden.state import State
from snapshots import snapshot
from tests.alerts.delivery.test_sender import ScriptedDispatcher

NEAR = alert(
    "RunNearOutOfMemory",
    {"run_id": "7-1", "run_name": "u & net", "uuid": "GPU-0", "gpu": "0", "name": "H100"},
    "Run unet can allocate only 1 GiB more.",
    1.0e9,
    "user alice",
)
STALLED = alert("RunStalled", {"run_id": "7-1", "run_name": ""}, "It hangs.", 1.0e9)


NOTHING = State("nvml", 1.0, snapshot(), ())


@contextmanager
def resending_dispatcher(*urls: str, options: str = "") -> Iterator[ScriptedDispatcher]:
    """Run a dispatcher that re-sends alerts to these URLs every second."""
    listed = json.dumps(urls)
    config = parse(f"web: {{listen: '127.0.0.1:9846'}}\nalertmanager: {{url: {listed}, resend: 1s, {options}}}", "test")
    sink = ScriptedDispatcher(config, None)
    sink.start()
    try:
        yield sink
    finally:
        asyncio.run(sink.stop())


def test_alert_content() -> None:
    """An alert has the rule's labels and links, the daemon's and the external labels, and an expiry time."""
    with (
        http_receiver() as server,
        resending_dispatcher(f"{server.url}/am/", options="labels: [cluster=a, gpu=x]") as sink,
    ):
        sink.fire(NEAR)
        got = server.receive()
        (sent,) = got.content
        assert (got.path, got.headers["Content-Type"]) == ("/am/api/v2/alerts", "application/json")
        assert sent["labels"] == {
            **NEAR.labels,
            "alertname": "RunNearOutOfMemory",
            "severity": "critical",
            "job": "gpuwarden",
            "instance": "127.0.0.1:9846",
            "cluster": "a",
        }
        assert sent["annotations"] == {
            "summary": "Run u & net on GPU 0 of 127.0.0.1:9846 is almost out of GPU memory",
            "description": "Run unet can allocate only 1 GiB more. Owner: user alice.",
            "runbook_url": "http://127.0.0.1:9846/alerts/RunNearOutOfMemory",
            "dashboard_url": "http://127.0.0.1:9846/run/7-1",
        }
        assert sent["startsAt"] == "2001-09-09T01:46:40.000Z"
        assert sent["endsAt"] > time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() + 2))
        assert sent["generatorURL"] == "http://127.0.0.1:9846/"


def test_empty_label_is_omitted() -> None:
    """An empty label is left out, as Prometheus does."""
    with http_receiver() as server, resending_dispatcher(server.url) as sink:
        sink.fire(STALLED)
        assert "run_name" not in server.receive().content[0]["labels"]


def test_default_instance_is_the_scrape_address() -> None:
    """The default instance is the daemon's listen address, as a scrape target would name it."""
    for listen, instance, expected in (
        ("127.0.0.1:9846", "none", "127.0.0.1:9846"),
        ("0.0.0.0:9846", "none", f"{socket.gethostname()}:9846"),
        ("'[::]:9846'", "none", f"{socket.gethostname()}:9846"),
        ("'[::1]:1'", "none", "[::1]:1"),
        ("0.0.0.0:9846", "box 3", "box 3"),
    ):
        config = parse(f"web: {{listen: {listen}}}\nalertmanager: {{url: http://x, instance: {instance}}}", "test")
        sent = AlertmanagerTarget("http://x", config).rendered(Notification(NEAR))
        assert sent["labels"]["instance"] == expected
        assert sent["generatorURL"].endswith(f":{config.web.listen.port}/")


def test_links_of_a_daemon_with_tls(tmp_path: Path) -> None:
    """Links lead to https where the daemon serves it."""
    file = tmp_path / "web.yml"
    file.write_text("tls_server_config: {cert_file: server.pem, key_file: server.key}")
    config = parse(f"web: {{config_file: {file}}}\nalertmanager: {{url: http://x}}", "test")
    sent = AlertmanagerTarget("http://x", config).rendered(Notification(NEAR))
    assert sent["annotations"]["runbook_url"] == "https://127.0.0.1:9846/alerts/RunNearOutOfMemory"
    assert sent["annotations"]["dashboard_url"] == "https://127.0.0.1:9846/run/7-1"


def test_end_is_never_before_the_start() -> None:
    """`endsAt` is never before `startsAt`, which Alertmanager rejects, even if the clock was set back."""
    over = Notification(NEAR, resolved_at=NEAR.since - 30.0)
    sent = AlertmanagerTarget("http://x", Config()).rendered(over)
    assert sent["startsAt"] == sent["endsAt"]


@pytest.mark.parametrize(
    "date",
    ["x", "Fri, 31 Dec 9999 23:59:59 GMT", "Thu, 01 Jan 99999999999 00:00:00 GMT", "Mon, 99 Foo 2026 99:99:99 GMT"],
)
def test_invalid_date_is_ignored(date: str) -> None:
    """An invalid Date header is ignored."""
    target = AlertmanagerTarget("http://x", Config())
    before = target.rendered(Notification(NEAR))
    assert not target._adjust_clock(date)
    assert target.rendered(Notification(NEAR))["startsAt"] == before["startsAt"]


def test_basic_auth(tmp_path: Path) -> None:
    """Basic authentication sends the user and the password from a file."""
    (tmp_path / "password").write_text("open: %41\n")
    options = f"user: daemon, password: 'file:{tmp_path}/password'"
    with http_receiver() as server, resending_dispatcher(server.url, options=options) as sink:
        sink.fire(NEAR)
        expected = b64encode(b"daemon:open: %41").decode()
        assert server.receive().headers["Authorization"] == f"Basic {expected}"


WRONG = {
    "url: ftp://x": "url: ftp://x is not a base URL",
    "url: 'http://me:secret@x'": "url: a user or password in a URL would be logged",
    "url: http://x:0": "url: this is not a URL",
    "url: http://x/api/v2/alerts": "url: omit /api/v2/alerts",
    "url: http://x, ca_file: /x": "ca_file: only for https:// URLs",
    "url: https://x, key_file: /etc/hostname": "key_file: set alertmanager.cert_file too",
    "url: http://x, bearer_token: secret": "bearer_token: this is not a secret",
    "url: http://x, bearer_token: 'env:HOME', user: me, password: 'env:HOME'": "bearer_token: set either this or ",
    "url: http://x, user: me": "user: set alertmanager.password too",
    "url: http://x, password: 'env:HOME'": "password: set alertmanager.user too",
    "url: http://x, labels: job=x": "labels: label job is set by the alert itself",
    "url: http://x, labels: [a=1, b=2, a=1]": "labels: duplicate label a",
    "url: http://x, labels: [a=b, c]": "labels: c is not a label",
}


UNREADY = {
    "url: https://x, ca_file: /x": "ca_file: /x cannot be read: No such file",
    "url: https://x, ca_file: /etc/hostname": "ca_file: /etc/hostname cannot be used",
    "url: https://x, cert_file: /etc/hostname": "cert_file: /etc/hostname with its key cannot be used",
    "url: http://x, bearer_token: 'file:/x'": "bearer_token: the file /x cannot be read: No such file",
}


def test_invalid_configurations() -> None:
    """Each error names the key and the problem, without a secret."""
    for options, message in WRONG.items():
        with pytest.raises(ConfigError) as caught:
            parse(f"alertmanager: {{{options}}}", "file")
        (problem,) = caught.value.problems
        assert f"alertmanager.{message}" in str(problem)
        assert str(problem).startswith("file:1:")
        assert "secret@" not in str(problem)


def test_missing_files_are_warnings() -> None:
    """A file that is missing now is a warning, not an error: it may exist later."""
    for options, message in UNREADY.items():
        ((key, why),) = missing(parse(f"alertmanager: {{{options}}}", "file"))
        assert f"{key.removeprefix('alertmanager.')}: {why}".startswith(message)


def test_ambiguous_instance_is_a_warning() -> None:
    """An instance that is the same on every host is a warning, unless the Alertmanager is local."""
    for url, instance, listen, warned in (
        ("http://alerts:9093", "none", "127.0.0.1:9846", True),
        ("[http://127.0.0.1:9093, https://alerts]", "'[::1]:9846'", "0.0.0.0:9846", True),
        ("http://alerts:9093", "localhost:9846", "127.0.0.1:9846", True),
        ("http://alerts:9093", "box-3:9846", "127.0.0.1:9846", False),
        ("http://alerts:9093", "none", "0.0.0.0:9846", False),
        ("['http://localhost:9093', 'http://[::1]:9093']", "none", "127.0.0.1:9846", False),
        ("none", "none", "127.0.0.1:9846", False),
    ):
        config = parse(f"web: {{listen: '{listen}'}}\nalertmanager: {{url: {url}, instance: {instance}}}", "file")
        found = [each.partition(": ")[0] for each in warnings(config)]
        assert found == ["alertmanager.instance"] * warned, (url, instance, listen)


def test_valid_configurations() -> None:
    """One URL or several, with or without a path or labels, or no URL."""
    assert not parse("alertmanager: {url: none}", "file").alerting
    for options in ("url: 'https://[::1]:9093/a/b'", "url: [http://a, http://b:1], labels: [a=b, c=d]"):
        assert parse(f"alertmanager: {{{options}}}", "file").alerting
