"""The sink beside real Alertmanagers, and beside servers that hang, refuse, or want to know who asks."""

from __future__ import annotations

import asyncio
import http.server
import json
import logging
import socket
import ssl
import subprocess
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from services import until
from test_delivery_sender import Fires

from gpuwarden.alerts.alert import Alert
from gpuwarden.alerts.delivery.alertmanager import AlertmanagerTarget
from gpuwarden.alerts.delivery.dispatcher import Dispatcher
from gpuwarden.alerts.delivery.message import Notification
from gpuwarden.alerts.validation import missing, warnings
from gpuwarden.config import Config, ConfigError, parse
from gpuwarden.state import State
from snapshots import snapshot

NEAR = Alert(
    "RunNearOutOfMemory",
    {"run_id": "7-1", "run_name": "u & net", "uuid": "GPU-0", "gpu": "0", "name": "H100"},
    "Run unet can allocate only 1 GiB more.",
    1.0e9,
    "user alice",
)
STALLED = Alert("RunStalled", {"run_id": "7-1", "run_name": ""}, "It hangs.", 1.0e9)


NOTHING = State("nvml", 1.0, snapshot(), ())


@contextmanager
def telling(*urls: str, options: str = "") -> Iterator[Dispatcher]:
    """Have a sink for these, which tells again every second."""
    listed = json.dumps(urls)
    config = parse(f"web: {{listen: '127.0.0.1:9846'}}\nalertmanager: {{url: {listed}, resend: 1s, {options}}}", "test")
    sink = Dispatcher(config, None)
    sink._firing = Fires()  # type: ignore[assignment]
    sink.start()
    try:
        yield sink
    finally:
        asyncio.run(sink.stop())


def see(sink: Dispatcher, firing: list[Alert]) -> None:
    """Let a poll be."""
    assert isinstance(sink._firing, Fires)
    sink._firing.alerts = firing
    sink.update(NOTHING, time.monotonic())


@dataclass
class Server:
    """A small server in the place of an Alertmanager: what it was asked, and how it answers."""

    status: int = 200
    wait: threading.Event | None = None
    secure: ssl.SSLContext | None = None
    asked: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    url: str = ""

    @contextmanager
    def serving(self) -> Iterator[Server]:
        """Serve."""
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if outer.wait is not None:
                    outer.wait.wait(60)
                headers = {name.lower(): value for name, value in self.headers.items()}
                outer.asked.append((self.path, headers, json.loads(body)))
                self.send_response(outer.status)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            server.daemon_threads = True
            if self.secure is not None:
                server.socket = self.secure.wrap_socket(server.socket, server_side=True)
            self.url = f"http{'s' if self.secure else ''}://127.0.0.1:{server.server_port}"
            thread = threading.Thread(target=server.serve_forever, args=(0.05,))
            thread.start()
            try:
                yield self
            finally:
                if self.wait is not None:
                    self.wait.set()
                server.shutdown()
                thread.join()


def test_what_is_told() -> None:
    """An alert bears the rule's labels and links, the daemon's own, external ones, and when it ends by itself."""
    with Server().serving() as server, telling(f"{server.url}/am/", options="labels: [cluster=a, gpu=x]") as sink:
        see(sink, [NEAR])
        until(lambda: server.asked, "a message")
        path, headers, (told,) = server.asked[0]
        assert (path, headers["content-type"]) == ("/am/api/v2/alerts", "application/json")
        assert told["labels"] == {
            **NEAR.labels,
            "alertname": "RunNearOutOfMemory",
            "severity": "critical",
            "job": "gpuwarden",
            "instance": "127.0.0.1:9846",
            "cluster": "a",
        }
        assert told["annotations"] == {
            "summary": "A training run is about to run out of device memory.",
            "description": "Run unet can allocate only 1 GiB more. Owner: user alice.",
            "runbook_url": "docs/alerts.md#runnearoutofmemory",
            "dashboard_url": "http://localhost:3000/d/gpuwarden-run?var-instance=127.0.0.1%3A9846&var-run=7-1"
            "&var-cluster=a",
        }
        assert told["startsAt"] == "2001-09-09T01:46:40.000+00:00"
        assert told["endsAt"] > time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(time.time() + 2))
        assert told["generatorURL"] == "http://127.0.0.1:9846/"


def test_empty_label_is_none() -> None:
    """Prometheus has no labels without a value, so neither has the same alert from here."""
    with Server().serving() as server, telling(server.url) as sink:
        see(sink, [STALLED])
        assert "run_name" not in until(lambda: server.asked, "a message")[0][2][0]["labels"]


@pytest.mark.parametrize(
    ("listen", "instance", "expected"),
    [
        ("127.0.0.1:9846", "none", "127.0.0.1:9846"),
        ("0.0.0.0:9846", "none", f"{socket.gethostname()}:9846"),
        ("'[::]:9846'", "none", f"{socket.gethostname()}:9846"),
        ("'[::1]:1'", "none", "[::1]:1"),
        ("0.0.0.0:9846", "box 3", "box 3"),
    ],
)
def test_instance_is_that_of_prometheus(listen: str, instance: str, expected: str) -> None:
    """Without one in the configuration it is where the daemon listens, as a target would name it."""
    config = parse(f"web: {{listen: {listen}}}\nalertmanager: {{url: http://x, instance: {instance}}}", "test")
    told = AlertmanagerTarget("http://x", config).rendered(Notification(NEAR))
    assert told["labels"]["instance"] == expected
    assert told["generatorURL"].endswith(f":{config.web.listen.port}/")


def test_end_is_never_before_the_begin() -> None:
    """Alertmanager refuses such an alert; the clock was set back meanwhile."""
    over = Notification(NEAR, resolved_at=NEAR.since - 30.0)
    told = AlertmanagerTarget("http://x", Config()).rendered(over)
    assert told["startsAt"] == told["endsAt"]


def test_one_that_hangs_delays_no_other() -> None:
    """All get everything, each in its own time."""
    hung = Server(wait=threading.Event())
    with ExitStack() as stack:
        servers = [stack.enter_context(each.serving()) for each in (hung, Server(), Server())]
        sink = stack.enter_context(telling(*(each.url for each in servers), options="timeout: 500ms"))
        see(sink, [NEAR])
        for each in servers[1:]:
            until(lambda: each.asked, "the alert")  # noqa: B023 - called at once
        until(lambda: sink.posted[hung.url].failed, "a failure")
        assert sink.posted[servers[1].url].failed == 0
        assert not hung.asked


def test_server_that_does_not_take_it(caplog: pytest.LogCaptureFixture) -> None:
    """It is tried again, counted, and logged once, until it is taken."""
    caplog.set_level(logging.INFO)
    with Server(500).serving() as server, telling(server.url) as sink:
        see(sink, [NEAR])
        until(lambda: len(server.asked) > 1, "another try")
        assert caplog.text.count("the server answers 500") == 1
        assert sink.posted[server.url].sent == 0
        server.status = 200
        until(lambda: sink.posted[server.url].sent, "its success")
        assert "messages are delivered again" in caplog.text


def test_nothing_is_told_where_nothing_fires() -> None:
    """No alert, no message, and no connection."""
    with Server().serving() as server, telling(server.url) as sink:
        see(sink, [])
        see(sink, [NEAR])
        until(lambda: server.asked, "the alert")
        assert len(server.asked[0][2]) == 1


def test_stop_tells_what_is_new() -> None:
    """The last poll's alert still goes out, and the threads end."""
    with Server().serving() as server:
        with telling(server.url) as sink:
            see(sink, [NEAR])
        assert len(server.asked) == 1
        until(
            lambda: not any(each.name.startswith("notify ") for each in threading.enumerate()), "the end of the threads"
        )


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an authority, a server's and a client's certificate."""
    folder = tmp_path_factory.mktemp("papers")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=authority")
    for name in ("server", "client"):
        openssl("req", *new, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-days", "2", "-extfile", "names")
        openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.pem")
    return folder


@pytest.fixture
def secure(papers: Path) -> ssl.SSLContext:
    """Serve by that certificate, to clients that have one."""
    made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=papers / "ca.pem")
    made.load_cert_chain(papers / "server.pem", papers / "server.key")
    made.verify_mode = ssl.CERT_REQUIRED
    return made


def test_tls_with_certificates_on_both_sides_and_a_token(papers: Path, secure: ssl.SSLContext) -> None:
    """The server is known by the authority, the daemon by its certificate and a token, which may change."""
    token = papers / "token"
    token.write_text("first\n")
    own = f"cert_file: {papers}/client.pem, key_file: {papers}/client.key, bearer_token: 'file:{token}'"
    options = f"ca_file: {papers}/ca.pem, {own}"
    with Server(secure=secure).serving() as server, telling(server.url, options=options) as sink:
        see(sink, [NEAR])
        until(lambda: server.asked, "the alert")
        assert server.asked[0][1]["authorization"] == "Bearer first"
        token.write_text("second\n")
        until(lambda: server.asked[-1][1]["authorization"] == "Bearer second", "the new token")
        token.unlink()
        until(lambda: sink.posted[server.url].failed, "its loss")


def test_tls_that_does_not_fit(papers: Path, secure: ssl.SSLContext, caplog: pytest.LogCaptureFixture) -> None:
    """A server that is not known, or that does not know the daemon, is told nothing."""
    for options, said in (
        ("", "self-signed certificate in certificate chain"),
        (f"ca_file: {papers}/ca.pem", "TLS fails: "),
    ):
        with Server(secure=secure).serving() as server, telling(server.url, options=options) as sink:
            see(sink, [NEAR])
            until(lambda: said in caplog.text, "the reason")  # noqa: B023 - called at once
            assert not server.asked


def test_basic_auth(tmp_path: Path) -> None:
    """A user and the password in a file are shown to the server."""
    (tmp_path / "password").write_text("open: sesame\n")
    options = f"user: daemon, password: 'file:{tmp_path}/password'"
    with Server().serving() as server, telling(server.url, options=options) as sink:
        see(sink, [NEAR])
        until(lambda: server.asked, "the alert")
        expected = b64encode(b"daemon:open: sesame").decode()
        assert server.asked[0][1]["authorization"] == f"Basic {expected}"


WRONG = {
    "url: ftp://x": "url: ftp://x is not a server's URL",
    "url: 'http://me:secret@x'": "url: a user or a password in a URL would be in logs",
    "url: http://x:0": "url: this is not a URL",
    "url: http://x/api/v2/alerts": "url: leave out /api/v2/alerts",
    "url: http://x, ca_file: /x": "ca_file: there is no https:// URL",
    "url: https://x, key_file: /etc/hostname": "key_file: is the key to a certificate",
    "url: http://x, bearer_token: secret": "bearer_token: this is not an optional secret",
    "url: http://x, bearer_token: 'env:HOME', user: me, password: 'env:HOME'": "bearer_token: a server takes either",
    "url: http://x, user: me": "user: needs a password too",
    "url: http://x, password: 'env:HOME'": "password: needs a user too",
    "url: http://x, labels: job=x": "labels: job is a label of the alert itself",
    "url: http://x, labels: [a=1, b=2, a=1]": "labels: a is there twice",
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


@pytest.mark.parametrize(
    ("url", "instance", "listen", "warned"),
    [
        ("http://alerts:9093", "none", "127.0.0.1:9846", True),
        ("[http://127.0.0.1:9093, https://alerts]", "'[::1]:9846'", "0.0.0.0:9846", True),
        ("http://alerts:9093", "localhost:9846", "127.0.0.1:9846", True),
        ("http://alerts:9093", "box-3:9846", "127.0.0.1:9846", False),
        ("http://alerts:9093", "none", "0.0.0.0:9846", False),
        ("['http://localhost:9093', 'http://[::1]:9093']", "none", "127.0.0.1:9846", False),
        ("none", "none", "127.0.0.1:9846", False),
    ],
)
def test_name_that_every_box_has(url: str, instance: str, listen: str, *, warned: bool) -> None:
    """Alerts of several boxes would be the same ones to an Alertmanager that is not the box's own."""
    config = parse(f"web: {{listen: '{listen}'}}\nalertmanager: {{url: {url}, instance: {instance}}}", "file")
    assert [each.partition(": ")[0] for each in warnings(config)] == ["alertmanager.instance"] * warned


@pytest.mark.parametrize(
    "options", ["{url: none}", "{url: 'https://[::1]:9093/a/b'}", "{url: [http://a, http://b:1], labels: [a=b, c=d]}"]
)
def test_right_configurations(options: str) -> None:
    """One URL or several, with a path or without, labels, or none of it."""
    assert parse(f"alertmanager: {options}", "file").alerting is (options != "{url: none}")
