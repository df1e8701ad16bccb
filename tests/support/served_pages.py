"""HTTP server on the loop of a thread, and blocking clients of it."""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from gpuwarden.web.http_messages import Handler, HttpRequest, HttpResponse
from gpuwarden.web.http_server import WebServer

PAGE = b"".join(b'gpuwarden_gpu_up{uuid="GPU-%04d"} 1\n' % number for number in range(4000))
HUGE = bytes(16 << 20)  # more than the kernel buffers for a client that does not read
MAX_WAIT_SECONDS = 60.0  # seconds until a test gives up; not a measurement
ENTRY = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n"
GET = ENTRY + b"\r\n"
GET_HUGE = GET.replace(b"/metrics", b"/huge")
LAST_GET = ENTRY + b"Connection: close\r\n\r\n"
T = TypeVar("T")


class Loop:
    """Event loop on a thread with an adjustable clock, so that a test can be a blocking client."""

    def __init__(self) -> None:
        self.errors: list[dict[str, Any]] = []
        self.loop = asyncio.new_event_loop()
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(MAX_WAIT_SECONDS)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition on the server is true; it is evaluated on the loop."""

        async def wait() -> None:
            while not holds():
                await asyncio.sleep(0.001)

        self.run(asyncio.wait_for(wait(), MAX_WAIT_SECONDS))

    def advance(self, seconds: float) -> None:
        """Advance the loop's clock."""
        real = self.loop.time
        self.loop.time = lambda: real() + seconds  # type: ignore[method-assign] # the loop's own clock
        self.run(asyncio.sleep(0))

    def close(self) -> None:
        """Stop the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(MAX_WAIT_SECONDS)
        self.loop.close()


def metrics(_: HttpRequest) -> HttpResponse:
    """Respond like the metrics endpoint: with the same bytes until the next poll."""
    return HttpResponse(200, PAGE, "text/plain; version=0.0.4", {"vary": "accept"})


def healthy(_: HttpRequest) -> HttpResponse:
    """Respond with two bytes."""
    return HttpResponse(200, b"OK")


def broken(_: HttpRequest) -> HttpResponse:
    """Raise an error."""
    raise RuntimeError("a fault of the handler")


def echo_path(request: HttpRequest) -> HttpResponse:
    """Respond with the path and a content security policy."""
    return HttpResponse(200, request.path.encode() * 200, headers={"content-security-policy": "default-src 'self'"})


ROUTES: Mapping[str, Handler] = {
    "/": healthy,
    "/metrics": metrics,
    "/-/healthy": healthy,
    "/broken": broken,
    "/huge": lambda _: HttpResponse(200, HUGE),
    "/runs/": echo_path,
}


@contextmanager
def run_server(
    loop: Loop, host: str = "127.0.0.1", routes: Mapping[str, Handler] = ROUTES, **limits: Any
) -> Iterator[WebServer]:
    """Run a server on the loop."""

    async def make() -> WebServer:
        server = WebServer(routes, **limits)
        await server.start(host, 0)
        return server

    server = loop.run(make())
    try:
        yield server
    finally:
        loop.run(server.stop())


def connect(server: WebServer, sent: bytes = b"", receive_buffer: int = 0) -> socket.socket:
    """Connect and send, with a small receive buffer if one is given."""
    client = socket.socket(socket.AF_INET6 if ":" in server.address[0] else socket.AF_INET)
    client.settimeout(MAX_WAIT_SECONDS)
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect(server.address)
    client.sendall(sent)
    return client


def read_all(client: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    received = bytearray()
    while piece := client.recv(1 << 20):
        received += piece
    return bytes(received)


def wait_until_closed(client: socket.socket) -> None:
    """Wait until the server closes or resets the connection; fail if it never does."""
    with suppress(ConnectionError):
        read_all(client)


def exchange(server: WebServer, sent: bytes) -> bytes:
    """Send bytes and return everything received until the server closes the connection."""
    with connect(server, sent) as client:
        return read_all(client)


def parse_status(answer: bytes) -> int:
    """Return the status code of a raw response."""
    return int(answer.split(b" ", 2)[1])


@dataclass(frozen=True, slots=True)
class Answer:
    """Response as parsed by the standard library's client."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def fetch(server: WebServer, path: str = "/metrics", method: str = "GET", **headers: str) -> Answer:
    """Send one request with the standard library's client; header names are written with underscores."""
    connection = http.client.HTTPConnection(*server.address, timeout=MAX_WAIT_SECONDS)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
    finally:
        connection.close()
