"""TLS, client certificates and logins of the HTTP server over real sockets, and their reload."""

from __future__ import annotations

import asyncio
import base64
import http.client
import itertools
import json
import ssl
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import bcrypt
import pytest
from certificates import make_certificates
from served_pages import (
    HUGE,
    MAX_WAIT_SECONDS,
    PAGE,
    Answer,
    Loop,
    connect,
    exchange,
    fetch,
    run_server,
    wait_until_closed,
)
from services import Daemon, Prometheus, end_processes, wait_until

from gpuwarden.config.web_config import TlsSettings, WebConfigError
from gpuwarden.web.access import access_control, basic_auth
from gpuwarden.web.access.access_control import AccessControl
from gpuwarden.web.access.basic_auth import BasicAuth
from gpuwarden.web.http_server import WebServer

pytestmark = pytest.mark.system  # openssl, Prometheus

TLS = "tls_server_config: {cert_file: server.pem, key_file: server.key}\n"
MUTUAL = TLS.replace("}", ", client_auth_type: RequireAndVerifyClientCert, client_ca_file: ca.pem}")


def users(**passwords: str) -> str:
    """Return the section of logins with these passwords."""
    hashes = {name: bcrypt.hashpw(each.encode(), bcrypt.gensalt(4)).decode() for name, each in passwords.items()}
    return f"basic_auth_users: {json.dumps(hashes)}\n"


def login(name: str, password: str) -> str:
    """Return the Authorization header of a login."""
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create an authority and certificates of a server and a client."""
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, "server", "client")
    return folder


@pytest.fixture
def file(tmp_path: Path, certificates: Path) -> Path:
    """Return the path of a web configuration next to the certificates."""
    for each in certificates.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    return tmp_path / "web.yml"


def fetch_tls(
    server: WebServer, folder: Path, path: str = "/metrics", *, client: bool = False
) -> tuple[Answer, bytes | None]:
    """Send one request over TLS; return the answer and the server's certificate."""
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    if client:
        context.load_cert_chain(folder / "client.pem", folder / "client.key")
    connection = http.client.HTTPSConnection(*server.address, timeout=MAX_WAIT_SECONDS, context=context)
    try:
        connection.request("GET", path)
        certificate = connection.sock.getpeercert(binary_form=True)
        response = connection.getresponse()
        return Answer(response.status, dict(response.getheaders()), response.read()), certificate
    finally:
        connection.close()


def test_tls(loop: Loop, file: Path) -> None:
    """Pages arrive over TLS, large ones complete; a plain http request gets an answer that says https."""
    file.write_text(TLS)
    with run_server(loop, access=AccessControl(file)) as server:
        answer, _ = fetch_tls(server, file.parent)
        assert (answer.status, answer.body) == (200, PAGE)
        assert fetch_tls(server, file.parent, "/huge")[0].body == HUGE
        assert b"this server speaks https" in exchange(server, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        loop.wait_until(lambda: not server.pool.connections)


def test_client_certificate(loop: Loop, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Mutual TLS refuses a client without a certificate of the authority; the log has the reason, once a minute."""
    file.write_text(MUTUAL)
    with run_server(loop, access=AccessControl(file)) as server:
        assert fetch_tls(server, file.parent, client=True)[0].body == PAGE
        for _ in range(2):
            with pytest.raises(OSError):  # noqa: PT011 - SSLError where asyncio sends the alert, else a closed connection
                fetch_tls(server, file.parent)
        loop.wait_until(lambda: not server.pool.connections)
    assert caplog.text.count('TLS handshake failed address=127.0.0.1 error="peer did not return a certificate"') == 1


def test_handshake_has_a_deadline(loop: Loop, file: Path) -> None:
    """A client that does not complete the handshake is disconnected, and one with an older request makes room."""
    file.write_text(TLS)
    with run_server(loop, access=AccessControl(file), max_connections=2) as server:
        for sent in (b"", b"\x16", b"\x16\x03\x01"):
            with connect(server, sent) as client:
                loop.wait_until(lambda: bool(server.pool.connections))
                loop.advance(server.pool.timeout * 1.1)
                wait_until_closed(client)
        assert server.pool.timed_out == 3
        with ExitStack() as stack:
            slow = [stack.enter_context(connect(server, sent)) for sent in (b"", b"\x16", b"\x16\x03\x01")]
            assert fetch_tls(server, file.parent)[0].body == PAGE
            for client in slow[:2]:
                wait_until_closed(client)
            assert server.pool.evicted == 2


def test_logins(loop: Loop, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every path needs a login; a password that was right is checked by bcrypt once."""
    checked: list[bytes] = []
    check = bcrypt.checkpw

    def count(password: bytes, stored: bytes) -> bool:
        checked.append(password)
        return check(password, stored)

    monkeypatch.setattr(bcrypt, "checkpw", count)
    file.write_text(users(prometheus="right", other="x" * 72))
    with run_server(loop, access=AccessControl(file)) as server:
        for path in ("/metrics", "/", "/-/healthy", "/none"):
            refused = fetch(server, path)
            assert (refused.status, refused.body) == (401, b"a login is required\n")
            assert refused.headers["www-authenticate"].startswith("Basic ")
        for header in (
            *("Basic", "Basic !", "Bearer right", "Basic " + base64.b64encode(b"prometheus").decode()),
            *(login(*given) for given in (("prometheus", "wrong"), ("absent", "right"), ("other", "x" * 73), ("", ""))),
        ):
            assert fetch(server, authorization=header).status == 401, header
        checked.clear()
        for _ in range(3):
            assert fetch(server, authorization=login("prometheus", "right")).body == PAGE
        assert checked == [b"right"]
        assert fetch(server, authorization=login("other", "x" * 72)).status == 200


def test_guessing_takes_a_fifth_of_a_core(loop: Loop, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a wrong password the thread of checks pauses for four times the check's CPU time; a right one is free."""
    paused: list[float] = []
    clock = SimpleNamespace(thread_time=iter([10.0, 10.05, 20.0]).__next__, sleep=paused.append)
    monkeypatch.setattr(basic_auth, "time", clock)  # of this module alone: other threads must go on sleeping
    file.write_text(users(prometheus="right"))
    with run_server(loop, access=AccessControl(file)) as server:
        assert fetch(server, authorization=login("prometheus", "wrong")).status == 401
        assert fetch(server, authorization=login("prometheus", "right")).status == 200
    assert paused == [pytest.approx(0.2)]


def test_guesses_from_one_address_do_not_delay_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A login from another address is checked next, whatever number of guesses waits."""
    checked: list[bytes] = []

    def check(password: bytes, _stored: bytes) -> bool:
        checked.append(password)
        return password == b"right"

    async def log_in() -> list[bool]:
        auth, hashes = BasicAuth(), {"prometheus": "hash"}
        guesses = [auth.allow(login("prometheus", f"wrong{each}"), hashes, "192.0.2.1") for each in range(20)]
        return await asyncio.gather(*guesses, auth.allow(login("prometheus", "right"), hashes, "192.0.2.2"))

    monkeypatch.setattr(bcrypt, "checkpw", check)
    assert asyncio.run(log_in()) == [False] * 20 + [True]
    assert len(checked) == 21
    assert checked[1] == b"right"


@pytest.mark.parametrize("address", ["127.0.0.1", "::ffff:127.9.9.9", "192.0.2.1"])
def test_guesses_do_not_delay_a_login_from_the_same_machine(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Two hundred clients that guess without end, each from an address of its own, wait for the newest login."""
    checked: list[bytes] = []

    def check(password: bytes, _stored: bytes) -> bool:
        checked.append(password)
        return password == b"right"

    async def guess(auth: BasicAuth, number: int) -> None:
        for each in itertools.count():
            await auth.allow(login("prometheus", f"{number}-{each}"), {"prometheus": "hash"}, f"127.0.{number}.7")

    async def log_in() -> list[int]:
        auth, delays = BasicAuth(), []
        guesses = [asyncio.create_task(guess(auth, number)) for number in range(200)]
        for number in range(3):
            while len(checked) < 20 * (number + 1):
                await asyncio.sleep(0)
            before = len(checked)
            assert await auth.allow(login("prometheus", "right"), {"prometheus": f"hash{number}"}, address)
            delays.append(checked.index(b"right", before) - before)
        for each in guesses:
            each.cancel()
        await asyncio.gather(*guesses, return_exceptions=True)
        return delays

    monkeypatch.setattr(bcrypt, "checkpw", check)
    assert max(asyncio.run(log_in())) <= 2  # the one being checked, and one that was next


def test_reload(loop: Loop, file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A changed file or certificate counts from the next connection on; an invalid one changes nothing."""
    folder = file.parent
    file.write_text(TLS + users(a="1"))
    with run_server(loop, access=AccessControl(file)) as server:
        answer, first = fetch_tls(server, folder)
        assert answer.status == 401
        file.write_text(TLS)
        assert fetch_tls(server, folder)[0].status == 200
        make_certificates(folder, "server", key=("rsa:2048",))  # of another kind of key
        answer, second = fetch_tls(server, folder)
        assert (answer.status, first != second) == (200, True)
        file.write_text(TLS.replace("server.key", "missing.key"))
        for _ in range(2):
            assert fetch_tls(server, folder)[1] == second
        assert caplog.text.count("web configuration invalid, keeping the previous one") == 1
        assert "missing.key: cannot read: No such file or directory" in caplog.text
        (folder / "missing.key").write_bytes((folder / "server.key").read_bytes())
        assert fetch_tls(server, folder)[0].status == 200
        file.write_text("")  # as an editor truncates it before it writes
        assert fetch_tls(server, folder)[0].status == 200
        assert "empty; restart the daemon to serve without TLS and logins" in caplog.text
        file.write_text(MUTUAL)
        with pytest.raises(OSError):  # noqa: PT011 - see test_client_certificate
            fetch_tls(server, folder)
        assert fetch_tls(server, folder, client=True)[0].status == 200


def test_change_while_the_files_are_read(loop: Loop, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that arrives just after its new certificate was read counts from the next connection on."""
    folder, make_context = file.parent, access_control.make_context
    file.write_text(TLS)
    with run_server(loop, access=AccessControl(file)) as server:
        _, first = fetch_tls(server, folder)
        make_certificates(folder, "renewed")

        def read_and_change(settings: TlsSettings) -> ssl.SSLContext:
            monkeypatch.setattr(access_control, "make_context", make_context)
            try:
                return make_context(settings)
            finally:
                (folder / "renewed.key").replace(folder / "server.key")

        monkeypatch.setattr(access_control, "make_context", read_and_change)
        (folder / "renewed.pem").replace(folder / "server.pem")
        assert fetch_tls(server, folder)[1] == first
        assert fetch_tls(server, folder)[1] != first


def test_mistakes_in_certificates(file: Path) -> None:
    """A key that is not the certificate's, or no PEM at all, is an error that names the files."""
    for text, message in (
        (TLS.replace("server.key", "client.key"), r"server\.pem and .*client\.key do not fit: key values mismatch"),
        (TLS.replace("server.pem", "web.yml"), r"web\.yml and .*server\.key do not fit"),
        (MUTUAL.replace("ca.pem", "web.yml"), r"web\.yml has no PEM certificate"),
        (TLS.replace("server.pem", "/dev/zero"), r"/dev/zero: cannot read: not a regular file"),
    ):
        file.write_text(text)
        with pytest.raises(WebConfigError, match=message):
            AccessControl(file)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of gpuwarden."""
    command = [sys.executable, "-m", "gpuwarden", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_prometheus_and_commands(file: Path) -> None:
    """Prometheus scrapes with certificate and login; commands on the host use the Unix socket."""
    folder = file.parent
    file.write_text(MUTUAL + users(prometheus="secret"))
    config = folder / "config.yaml"
    config.write_text(f"web: {{config_file: {file}}}\nruns: {{socket: {folder}/run.sock}}\n")
    own = {"cert_file": f"{folder}/client.pem", "key_file": f"{folder}/client.key"}
    access = {
        "scheme": "https",
        "tls_config": {"ca_file": f"{folder}/ca.pem", **own},
        "basic_auth": {"username": "prometheus", "password": "secret"},
    }
    daemon = Daemon(folder, "--source", "simulated", "--config", str(config))
    with end_processes(daemon):
        target = f"127.0.0.1:{daemon.port}"
        prometheus = Prometheus(folder / "prometheus", target, access=access)
        with end_processes(prometheus):
            wait_until(lambda: prometheus.value('up{job="gpuwarden"}'), "a scrape")
        for arguments in (("top", "--once"), ("runs",), ("runs", "show", "resnet50-imagenet"), ("incidents",)):
            done = run(*arguments, "--config", str(config))
            assert (done.returncode, done.stderr) == (0, "")
        refused = run("runs", "--listen", target)
        assert refused.returncode == 1
        assert "needs TLS or a login; on its machine, pass --config" in refused.stderr
