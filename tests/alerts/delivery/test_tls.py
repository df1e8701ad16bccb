"""Targets behind TLS, with certificates that openssl makes."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest
from message_receivers import certificate, http_receiver
from services import until

from gpuwarden.config.schema import NotifyConfig
from gpuwarden.config.secrets import Secret
from tests.alerts.delivery.test_alertmanager_target import NEAR, see, telling
from tests.alerts.delivery.test_targets import TOKEN, refusal, send

pytestmark = pytest.mark.system


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
    with http_receiver(secure) as server, telling(server.url, options=options) as sink:
        see(sink, [NEAR])
        assert server.next().headers["Authorization"] == "Bearer first"
        token.write_text("second\n")
        until(lambda: server.next().headers["Authorization"] == "Bearer second", "the new token")
        token.unlink()
        until(lambda: sink.posted[server.url].failed, "its loss")


def test_tls_that_does_not_fit(papers: Path, secure: ssl.SSLContext, caplog: pytest.LogCaptureFixture) -> None:
    """A server that is not known, or that does not know the daemon, is told nothing."""
    for options, said in (
        ("", "self-signed certificate in certificate chain"),
        (f"ca_file: {papers}/ca.pem", "TLS error: "),
    ):
        with http_receiver(secure) as server, telling(server.url, options=options) as sink:
            see(sink, [NEAR])
            until(lambda: said in caplog.text, "the reason")  # noqa: B023 - called at once
            assert not server.asked


def test_http_over_tls(tmp_path: Path) -> None:
    """A certificate is trusted where notify.ca_file names it, and nothing is said to a server without."""
    made = certificate(tmp_path)
    with http_receiver(made.server()) as server:
        url = Secret(text=f"{server.url}/{TOKEN}")
        assert "certificate not trusted" in str(refusal(NotifyConfig(webhook=(url,))))
        assert server.asked == 0
        send(NotifyConfig(webhook=(url,), ca_file=made.file))
        assert "resnet50" in server.next().content["text"]
