"""The Alertmanager target and its section of the configuration; test_delivery_to_alertmanagers has real ones."""

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
from message_receivers import http_receiver

from gpuwarden.alerts.delivery.alertmanager import AlertmanagerTarget
from gpuwarden.alerts.delivery.dispatcher import Dispatcher
from gpuwarden.alerts.delivery.message import Notification
from gpuwarden.alerts.delivery.validation import missing, warnings
from gpuwarden.config.loader import ConfigError, parse
from gpuwarden.config.schema import Config
from gpuwarden.health.conditions import CONDITIONS
from gpuwarden.health.model import Alert
from gpuwarden.state import State
from snapshots import snapshot
from tests.alerts.delivery.test_sender import Fires

NEAR = Alert(
    CONDITIONS["RunNearOutOfMemory"],
    {"run_id": "7-1", "run_name": "u & net", "uuid": "GPU-0", "gpu": "0", "name": "H100"},
    "Run unet can allocate only 1 GiB more.",
    1.0e9,
    "user alice",
)
STALLED = Alert(CONDITIONS["RunStalled"], {"run_id": "7-1", "run_name": ""}, "It hangs.", 1.0e9)


NOTHING = State("nvml", 1.0, snapshot(), ())


@contextmanager
def telling(*urls: str, options: str = "") -> Iterator[Dispatcher]:
    """Have a sink for these, which tells again every second."""
    listed = json.dumps(urls)
    config = parse(f"web: {{listen: '127.0.0.1:9846'}}\nalertmanager: {{url: {listed}, resend: 1s, {options}}}", "test")
    sink = Dispatcher(config, None)
    sink._evaluator = Fires()  # type: ignore[assignment]
    sink.start()
    try:
        yield sink
    finally:
        asyncio.run(sink.stop())


def see(sink: Dispatcher, firing: list[Alert]) -> None:
    """Let a poll be."""
    assert isinstance(sink._evaluator, Fires)
    sink._evaluator.alerts = firing
    sink.update(NOTHING, time.monotonic())


def test_what_is_told() -> None:
    """An alert bears the rule's labels and links, the daemon's own, external ones, and when it ends by itself."""
    with http_receiver() as server, telling(f"{server.url}/am/", options="labels: [cluster=a, gpu=x]") as sink:
        see(sink, [NEAR])
        got = server.next()
        (told,) = got.content
        assert (got.path, got.headers["Content-Type"]) == ("/am/api/v2/alerts", "application/json")
        assert told["labels"] == {
            **NEAR.labels,
            "alertname": "RunNearOutOfMemory",
            "severity": "critical",
            "job": "gpuwarden",
            "instance": "127.0.0.1:9846",
            "cluster": "a",
        }
        assert told["annotations"] == {
            "summary": "Training run almost out of GPU memory",
            "description": "Run unet can allocate only 1 GiB more. Owner: user alice.",
            "runbook_url": "docs/reference/alerts.md#runnearoutofmemory",
            "dashboard_url": "http://localhost:3000/d/gpuwarden-run?var-instance=127.0.0.1%3A9846&var-run=7-1"
            "&var-cluster=a",
        }
        assert told["startsAt"] == "2001-09-09T01:46:40.000Z"
        assert told["endsAt"] > time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() + 2))
        assert told["generatorURL"] == "http://127.0.0.1:9846/"


def test_empty_label_is_none() -> None:
    """Prometheus has no labels without a value, so neither has the same alert from here."""
    with http_receiver() as server, telling(server.url) as sink:
        see(sink, [STALLED])
        assert "run_name" not in server.next().content[0]["labels"]


def test_instance_is_that_of_prometheus() -> None:
    """Without one in the configuration it is where the daemon listens, as a target would name it."""
    for listen, instance, expected in (
        ("127.0.0.1:9846", "none", "127.0.0.1:9846"),
        ("0.0.0.0:9846", "none", f"{socket.gethostname()}:9846"),
        ("'[::]:9846'", "none", f"{socket.gethostname()}:9846"),
        ("'[::1]:1'", "none", "[::1]:1"),
        ("0.0.0.0:9846", "box 3", "box 3"),
    ):
        config = parse(f"web: {{listen: {listen}}}\nalertmanager: {{url: http://x, instance: {instance}}}", "test")
        told = AlertmanagerTarget("http://x", config).rendered(Notification(NEAR))
        assert told["labels"]["instance"] == expected
        assert told["generatorURL"].endswith(f":{config.web.listen.port}/")


def test_end_is_never_before_the_begin() -> None:
    """Alertmanager refuses such an alert; the clock was set back meanwhile."""
    over = Notification(NEAR, resolved_at=NEAR.since - 30.0)
    told = AlertmanagerTarget("http://x", Config()).rendered(over)
    assert told["startsAt"] == told["endsAt"]


@pytest.mark.parametrize(
    "date",
    ["x", "Fri, 31 Dec 9999 23:59:59 GMT", "Thu, 01 Jan 99999999999 00:00:00 GMT", "Mon, 99 Foo 2026 99:99:99 GMT"],
)
def test_clock_that_cannot_be(date: str) -> None:
    """An answer without a sensible date is one without a date."""
    target = AlertmanagerTarget("http://x", Config())
    before = target.rendered(Notification(NEAR))
    assert not target._adjust_clock(date)
    assert target.rendered(Notification(NEAR))["startsAt"] == before["startsAt"]


def test_basic_auth(tmp_path: Path) -> None:
    """A user and the password in a file are shown to the server."""
    (tmp_path / "password").write_text("open: %41\n")
    options = f"user: daemon, password: 'file:{tmp_path}/password'"
    with http_receiver() as server, telling(server.url, options=options) as sink:
        see(sink, [NEAR])
        expected = b64encode(b"daemon:open: %41").decode()
        assert server.next().headers["Authorization"] == f"Basic {expected}"


WRONG = {
    "url: ftp://x": "url: ftp://x is not a base URL",
    "url: 'http://me:secret@x'": "url: a user or password in a URL would be logged",
    "url: http://x:0": "url: this is not a URL",
    "url: http://x/api/v2/alerts": "url: omit /api/v2/alerts",
    "url: http://x, ca_file: /x": "ca_file: only for https:// URLs",
    "url: https://x, key_file: /etc/hostname": "key_file: set alertmanager.cert_file too",
    "url: http://x, bearer_token: secret": "bearer_token: this is not an optional secret",
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


def test_wrong_configurations() -> None:
    """Each says what is wrong with it, and where, without a secret."""
    for options, said in WRONG.items():
        with pytest.raises(ConfigError) as caught:
            parse(f"alertmanager: {{{options}}}", "file")
        (problem,) = caught.value.problems
        assert f"alertmanager.{said}" in str(problem)
        assert str(problem).startswith("file:1:")
        assert "secret@" not in str(problem)


def test_what_is_missing_stops_nothing() -> None:
    """A file that cannot be used now may be there tomorrow: the configuration is right, and says what is missing."""
    for options, said in UNREADY.items():
        ((key, why),) = missing(parse(f"alertmanager: {{{options}}}", "file"))
        assert f"{key.removeprefix('alertmanager.')}: {why}".startswith(said)


def test_name_that_every_box_has() -> None:
    """Alerts of several boxes would be the same ones to an Alertmanager that is not the box's own."""
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


def test_right_configurations() -> None:
    """One URL or several, with a path or without, labels, or none of it."""
    assert not parse("alertmanager: {url: none}", "file").alerting
    for options in ("url: 'https://[::1]:9093/a/b'", "url: [http://a, http://b:1], labels: [a=b, c=d]"):
        assert parse(f"alertmanager: {{{options}}}", "file").alerting
