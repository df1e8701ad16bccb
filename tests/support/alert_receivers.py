"""Receivers of alerts in tests: the example configuration of Alertmanager filled in, a web server, a mail server."""

from __future__ import annotations

import contextlib
import email
import email.policy
import json
import re
import threading
from collections.abc import Iterator, Mapping
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session
from services import ROOT, free_port

CONFIGURATION = ROOT / "deploy/alertmanager/alertmanager.yml"
_PLACEHOLDER = re.compile(r"\*(REPLACE_\w+)")

# What a site would write, for checks that send nothing.
VALUES = {
    "REPLACE_smtp_host_and_port": "mail.example.org:587",
    "REPLACE_mail_from": "gpuwarden@example.org",
    "REPLACE_mail_to": "gpus@example.org",
    "REPLACE_smtp_user": "gpuwarden",
    "REPLACE_smtp_password": "secret",
    "REPLACE_slack_url_for_critical": "https://hooks.slack.com/services/T0/B0/x",
    "REPLACE_slack_url_for_warnings": "https://hooks.slack.com/services/T0/B1/x",
    "REPLACE_pagerduty_routing_key": "0123456789abcdef0123456789abcdef",
    "REPLACE_webhook_url": "https://example.org/alerts",
    "REPLACE_watchdog_url": "https://example.org/ping/gpuwarden",
}


def list_placeholders() -> set[str]:
    """Return the names of all that the example leaves to be filled in."""
    return set(_PLACEHOLDER.findall(CONFIGURATION.read_text()))


def fill_placeholders(values: Mapping[str, str] = VALUES) -> str:
    """Return the example configuration with these values; settings without a value are unchanged."""
    return _PLACEHOLDER.sub(lambda found: values.get(found[1], found[0]), CONFIGURATION.read_text())


class WebhookServer:
    """A server that answers every POST with 200 and keeps it, by path."""

    def __init__(self) -> None:
        self._posts: list[tuple[str, Any]] = []
        taken = self._posts

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                taken.append((self.path, json.loads(body)))
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"ok")

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def posts(self, path: str) -> list[Any]:
        """Return the JSON that was posted there, oldest first."""
        return [body for where, body in list(self._posts) if where == path]

    def stop(self) -> None:
        """End."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class MailServer:
    """An SMTP server that asks for a password and keeps its messages."""

    user, password = "gpuwarden", "secret"

    def __init__(self) -> None:
        self.messages: list[EmailMessage] = []
        self.port = free_port()
        self._controller = Controller(
            self,
            hostname="127.0.0.1",
            port=self.port,
            authenticator=self._authenticate,
            auth_require_tls=False,
            auth_exclude_mechanism=["LOGIN"],  # Alertmanager knows it by other words
        )
        self._controller.start()

    def _authenticate(
        self, _server: SMTP, _session: Session, _envelope: Envelope, _way: str, data: object
    ) -> AuthResult:
        return AuthResult(success=data == LoginPassword(self.user.encode(), self.password.encode()))

    async def handle_DATA(self, _server: SMTP, session: Session, envelope: Envelope) -> str:  # noqa: N802 - its name
        """Accept a message from a client that sent the password."""
        if not session.authenticated:
            return "530 Authentication required"
        content = envelope.original_content
        assert content is not None
        self.messages.append(email.message_from_bytes(content, policy=email.policy.default))
        return "250 OK"

    def stop(self) -> None:
        """End."""
        self._controller.stop()


@contextlib.contextmanager
def run_receivers() -> Iterator[tuple[WebhookServer, MailServer]]:
    """Return both servers, and end them."""
    web, mail = WebhookServer(), MailServer()
    try:
        yield web, mail
    finally:
        web.stop()
        mail.stop()


def make_values(web: WebhookServer, mail: MailServer) -> dict[str, str]:
    """Return the values that fill in the example to send there."""
    return VALUES | {
        "REPLACE_smtp_host_and_port": f"127.0.0.1:{mail.port}",
        "REPLACE_smtp_user": mail.user,
        "REPLACE_smtp_password": mail.password,
        "REPLACE_slack_url_for_critical": f"{web.url}/slack/critical",
        "REPLACE_slack_url_for_warnings": f"{web.url}/slack/warnings",
        "REPLACE_webhook_url": f"{web.url}/webhook",
    }


def read_text(message: EmailMessage) -> str:
    """Return the text of a message without HTML."""
    body = message.get_body(("plain",))
    assert body is not None
    return str(body.get_content()).replace("\r\n", "\n")


def use_local_servers(configuration: str, web: WebhookServer) -> str:
    """Return it with PagerDuty on this machine, and mail without TLS, as the test's server has no certificate."""
    changes = {
        "smtp_require_tls: true": "smtp_require_tls: false",
        "global:\n": f"global:\n  pagerduty_url: {web.url}/pagerduty\n",
    }
    return _replace_once(configuration, changes)


def shorten_waits(configuration: str) -> str:
    """Return it with a second for each time that it waits to gather more alerts."""
    return re.sub(r"(group_wait|group_interval): (?!0s)\w+", r"\1: 1s", configuration)


def _replace_once(text: str, changes: Mapping[str, str]) -> str:
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text
