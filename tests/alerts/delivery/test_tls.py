"""Targets behind TLS, with certificates made by openssl."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from certificates import make_certificates
from message_receivers import http_receiver, make_certificate
from services import wait_until

from gpuwarden.config.schema import NotifyConfig
from gpuwarden.config.secrets import Secret
from tests.alerts.delivery.test_alertmanager_target import NEAR, resending_dispatcher
from tests.alerts.delivery.test_targets import TOKEN, delivery_error, send

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a certificate authority and a certificate each for server and client."""
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, "server", "client")
    return folder


@pytest.fixture
def server_context(certificates: Path) -> ssl.SSLContext:
    """Return a server context that requires a client certificate."""
    made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates / "ca.pem")
    made.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    made.verify_mode = ssl.CERT_REQUIRED
    return made


def test_tls_with_certificates_on_both_sides_and_a_token(certificates: Path, server_context: ssl.SSLContext) -> None:
    """Both sides verify certificates, and the daemon sends a token that may change."""
    token = certificates / "token"
    token.write_text("first\n")
    own = f"cert_file: {certificates}/client.pem, key_file: {certificates}/client.key, bearer_token: 'file:{token}'"
    options = f"ca_file: {certificates}/ca.pem, {own}"
    with http_receiver(server_context) as server, resending_dispatcher(server.url, options=options) as sink:
        sink.fire(NEAR)
        assert server.receive().headers["Authorization"] == "Bearer first"
        token.write_text("second\n")
        wait_until(lambda: server.receive().headers["Authorization"] == "Bearer second", "the new token")
        token.unlink()
        wait_until(lambda: sink.posted[server.url].failed, "the failure")


def test_untrusted_certificates(
    certificates: Path, server_context: ssl.SSLContext, caplog: pytest.LogCaptureFixture
) -> None:
    """No alert is sent to an untrusted server, or to one that rejects the daemon's certificate."""
    for options, said in (
        ("", "self-signed certificate in certificate chain"),
        (f"ca_file: {certificates}/ca.pem", "TLS error: "),
    ):
        with http_receiver(server_context) as server, resending_dispatcher(server.url, options=options) as sink:
            sink.fire(NEAR)
            wait_until(lambda: said in caplog.text, "the reason")  # noqa: B023 - called at once
            assert not server.request_count


def test_webhook_over_tls(tmp_path: Path) -> None:
    """An HTTPS receiver is trusted through notify.ca_file; without it nothing is sent."""
    made = make_certificate(tmp_path)
    with http_receiver(made.server()) as server:
        url = Secret(text=f"{server.url}/{TOKEN}")
        assert "certificate not trusted" in str(delivery_error(NotifyConfig(webhook=(url,))))
        assert server.request_count == 0
        send(NotifyConfig(webhook=(url,), ca_file=made.file))
        assert "resnet50" in server.receive().content["text"]
