"""Host names under which requests are answered: a page of another site cannot read the API by DNS rebinding."""

from __future__ import annotations

import http.client
import os
from pathlib import Path

import pytest
from services import Daemon, Prometheus, end_processes, wait_until

from gpuwarden.web import host_names
from gpuwarden.web.host_names import HostNames, find_own_names
from mock_nvml import MockNvml


@pytest.fixture(autouse=True)
def names_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give this machine the name gpu1 in two domains, and gpu1.cluster in its hosts file."""
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "gpu1", "", "", "")))
    for name, text in (
        ("HOSTS_FILE", "127.0.0.1 localhost\n127.0.1.1 gpu1.cluster gpu1 # us\n0.0.0.0 ads.example # gpu1\n"),
        ("RESOLVER_FILE", "nameserver 127.0.0.53\nsearch example.com lab.example.com.\n"),
    ):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(host_names, name, tmp_path / name)


@pytest.mark.parametrize(
    "header",
    [
        "",  # HTTP/1.0, of no browser
        "localhost:9846",
        "LOCALHOST",
        "localhost.",
        "127.0.0.1:9846",
        "10.1.2.3",
        "[::1]:9846",
        "[fe80::1]",
        "gpu1:9846",
        "gpuwarden:9846",  # of Docker's or Kubernetes' DNS
        "gpu1.example.com:9846",
        "GPU1.lab.example.com",
        "gpu1.cluster",
        "gpu1.cluster.:9846",
    ],
)
def test_names_that_no_other_site_can_have_are_answered(header: str) -> None:
    """Addresses, names without a dot, and the host's own names are answered without configuration."""
    assert HostNames().allow(header)


@pytest.mark.parametrize(
    "header",
    [
        "evil.example",
        "evil.example:9846",
        "gpu1.evil.example",
        "127.0.0.1.evil.example",
        "127.0.0.1.nip.io:9846",
        "localhost.evil.example",
        "ads.example",
        "gpu2.example.com",
        "[evil.example]:80",
        "example.com",
        "xgpu1.example.com",
    ],
)
def test_names_of_other_sites_are_refused(header: str) -> None:
    """A name with a dot that is not the host's is refused."""
    assert not HostNames().allow(header)


def test_further_names_are_allowed() -> None:
    """`web.allowed_hosts` has names, and patterns for all below a domain or for all."""
    names = HostNames(["GPU.example.net", "*.fleet.example"])
    assert names.allow("gpu.example.net:80")
    assert names.allow("a.b.fleet.example")
    assert not names.allow("fleet.example")
    assert not names.allow("evilfleet.example")
    assert HostNames(["*"]).allow("evil.example")


def test_missing_files_leave_the_name_of_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container without the two files, the name of the kernel is known."""
    for name in ("HOSTS_FILE", "RESOLVER_FILE"):
        monkeypatch.setattr(host_names, name, tmp_path / "absent")
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "gpu1.example.net", "", "", "")))
    assert find_own_names() == {"gpu1.example.net"}


def ask(daemon: Daemon, path: str, host: str) -> tuple[int, str]:
    """Return status and body of a request with a Host header."""
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=10)
    try:
        connection.request("GET", path, headers={"Host": host})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def test_rebound_name_reads_nothing_of_a_daemon(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """Every path of a real daemon refuses an unknown name, says what to set, and logs and counts it."""
    (tmp_path / "config.yaml").write_text("web: {allowed_hosts: [gpu.example.net]}\n")
    daemon = Daemon(tmp_path / "box", "--config", str(tmp_path / "config.yaml"), env=mock_nvml.env(gpus=1))
    with end_processes(daemon):
        for path in ("/", "/page/page.js", "/metrics", "/api/v1/state", "/api/v1/runs", "/-/healthy", "/nowhere"):
            status, body = ask(daemon, path, "evil.example:9846")
            assert status == 421
            assert body == (
                "'evil.example:9846' is not a known name of this machine; if it is one, add it to web.allowed_hosts\n"
            )
        for host in ("gpu.example.net", f"localhost:{daemon.port}", os.uname().nodename, "127.0.0.1"):
            assert ask(daemon, "/api/v1/state", host)[0] == 200
        assert daemon.output().count("request refused, unknown host name; set web.allowed_hosts host=evil.") == 1
        counted = wait_until(
            lambda: daemon.samples().value("gpuwarden_http_requests_total", path="/metrics", code="421"), "the count"
        )
        assert counted == 1


@pytest.mark.system
def test_prometheus_scrapes_by_name_and_address(tmp_path: Path, mock_nvml: MockNvml) -> None:
    """A real Prometheus scrapes by address, by loopback name, and by the machine's own name where that resolves."""
    daemon = Daemon(tmp_path / "box", env=mock_nvml.env(gpus=1))
    targets = [f"{host}:{daemon.port}" for host in ("127.0.0.1", "localhost")]
    with end_processes(daemon):
        prometheus = Prometheus(tmp_path / "prometheus", targets[0], more=targets[1:])
        with end_processes(prometheus):
            wait_until(lambda: sorted(prometheus.query("up == 1").values()) == [1.0, 1.0], "both targets are up")
