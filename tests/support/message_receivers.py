"""Receivers of notifications: real servers on this machine, of HTTP and of SMTP. Each ends with its context."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, AuthResult, Envelope, LoginPassword, Session
from services import free_port

from system_parts import needs

MAX_WAIT_SECONDS = 60.0  # seconds until a test that waits fails


@dataclass(frozen=True)
class Certificate:
    """A certificate of 127.0.0.1, signed by itself, and its key."""

    file: Path
    key: Path

    def server(self) -> ssl.SSLContext:
        """Return the TLS context of a server."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.file, self.key)
        return context


def make_certificate(folder: Path) -> Certificate:
    """Make one, with openssl."""
    made = Certificate(folder / "cert.pem", folder / "key.pem")
    command = [needs("openssl", "openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", made.key, "-out", made.file], check=True, capture_output=True, timeout=60)
    return made


@dataclass(frozen=True)
class PostedRequest:
    """One request."""

    path: str
    headers: Mapping[str, str]
    content: Any


class HttpReceiver:
    """A web server that keeps what is posted; `status`, `answer` and `headers` are its next answers.

    While `may_answer` is not set it does not answer, and while `may_finish` is not, no answer ends.
    """

    def __init__(self, server: ThreadingHTTPServer, scheme: str) -> None:
        self.port = server.server_address[1]
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self.received: queue.Queue[PostedRequest] = queue.Queue()
        self.request_count = 0
        self.status, self.answer = 200, b"ok"
        self.headers: dict[str, str] = {}
        self.may_answer, self.may_finish = threading.Event(), threading.Event()
        self.may_answer.set()
        self.may_finish.set()

    def receive(self, extra_seconds: float = 0.0) -> PostedRequest:
        """Wait for the next request that was answered with success; `extra_seconds` are more to wait."""
        return self.received.get(timeout=MAX_WAIT_SECONDS + extra_seconds)


@contextlib.contextmanager
def http_receiver(tls: ssl.SSLContext | None = None) -> Iterator[HttpReceiver]:
    """Serve one."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.request_count += 1
            receiver.may_answer.wait(MAX_WAIT_SECONDS)
            status = receiver.status
            if status == 200:
                receiver.received.put(PostedRequest(self.path, dict(self.headers), json.loads(body)))
            self.send_response(status)
            for name, value in receiver.headers.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(OSError):  # the client has gone
                self.wfile.write(receiver.answer)
                self.wfile.flush()
            receiver.may_finish.wait(MAX_WAIT_SECONDS)

        def log_message(self, *_arguments: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_arguments: Any) -> None:  # a client that does not trust it
            pass

    with Server(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        receiver = HttpReceiver(server, "https" if tls else "http")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield receiver
        finally:
            receiver.may_answer.set()
            receiver.may_finish.set()
            server.shutdown()
            thread.join()


@dataclass
class MailReceiver:
    """A mail server that keeps its messages; it refuses addresses of `refused`, and knows users with `passwords`."""

    port: int = 0
    refused: set[str] = field(default_factory=set)
    passwords: dict[str, str] = field(default_factory=dict)
    refusal: str = "550 5.1.1 no such user here"
    recipients: list[list[str]] = field(default_factory=list)
    received: queue.Queue[EmailMessage] = field(default_factory=queue.Queue)

    @property
    def address(self) -> str:
        """Address on which it listens."""
        return f"127.0.0.1:{self.port}"

    def receive(self) -> EmailMessage:
        """Wait for the next mail."""
        return self.received.get(timeout=MAX_WAIT_SECONDS)

    async def handle_RCPT(  # noqa: N802 - named by aiosmtpd, as the next
        self, _server: SMTP, _session: Session, envelope: Envelope, address: str, _options: list[str]
    ) -> str:
        """Accept or refuse an address."""
        if address in self.refused:
            return self.refusal
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, _server: SMTP, _session: Session, envelope: Envelope) -> str:  # noqa: N802
        """Keep a mail."""
        content = envelope.content
        assert isinstance(content, bytes)
        mail = message_from_bytes(content, policy=policy.default)
        assert isinstance(mail, EmailMessage)
        self.recipients.append(list(envelope.rcpt_tos))
        self.received.put(mail)
        return "250 taken"


@contextlib.contextmanager
def mail_receiver(passwords: Mapping[str, str] | None = None) -> Iterator[MailReceiver]:
    """Serve one; with `passwords` it takes mail of users alone."""
    receiver = MailReceiver(passwords=dict(passwords or {}))

    def authenticate(_server: SMTP, _session: Session, _envelope: Envelope, _mechanism: str, who: Any) -> AuthResult:
        assert isinstance(who, LoginPassword)
        known = receiver.passwords.get(who.login.decode())
        return AuthResult(success=known == who.password.decode(), handled=False)

    controller = Controller(
        receiver,
        hostname="127.0.0.1",
        port=free_port(),
        auth_required=bool(passwords),
        auth_require_tls=False,
        authenticator=authenticate,
    )
    receiver.port = controller.port
    controller.start()
    try:
        yield receiver
    finally:
        controller.stop()


@contextlib.contextmanager
def dripping_receiver(answer: bytes, pause: float) -> Iterator[int]:
    """Answer the first client, and continue forever with a byte every `pause` seconds; return the port."""
    ended = threading.Event()

    def drip(server: socket.socket) -> None:
        with contextlib.suppress(OSError), server.accept()[0] as client:
            client.sendall(answer)
            while not ended.wait(pause):
                client.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, args=(server,))
        thread.start()
        yield int(server.getsockname()[1])
        ended.set()
        thread.join()


@contextlib.contextmanager
def closing_receiver(answer: bytes) -> Iterator[int]:
    """Answer the first client and close, without reading its request; return the port."""

    def refuse(server: socket.socket) -> None:
        with server.accept()[0] as client:
            client.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=refuse, args=(server,))
        thread.start()
        yield int(server.getsockname()[1])
        thread.join()


@contextlib.contextmanager
def silent_receiver() -> Iterator[int]:
    """Listen, and never answer; return the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])
