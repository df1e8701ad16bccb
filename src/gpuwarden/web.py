"""The HTTP server: sends bytes that others have made ready, and lets no client hold it up.

Everything runs on one event loop without a thread. h11 reads the protocol; this file owns the sockets, the deadlines
and the limits. A connection that waits for its client is the server's to cut: by deadline, or earlier when its slot
is needed, the one without progress for longest first.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, NamedTuple

import h11

from gpuwarden.listening import listen

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 16 * 1024  # room for the cookies that browsers send to every port of localhost
WRITE_BYTES = 64 * 1024  # what the loop may copy of a page for one slow reader (Python 3.11 copies what is unsent)
GZIP_FROM_BYTES = 1024
LINGER_SECONDS = 2.0
STOP_SECONDS = 0.5
NO_SLOT_PAUSE_SECONDS = 0.5
LOG_AGAIN_SECONDS = 60.0

OTHER = "other"  # counts requests for what is no route, so that strangers cannot make label values

ALWAYS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


class Request(NamedTuple):
    """What a client asks for; header names are in lower case, `path` is as sent (not percent-decoded)."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Response:
    """An answer, `body` as it is to be sent; header names are in lower case and override the server's own.

    `gzipped` is the body compressed, where somebody has done so already.
    """

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)
    gzipped: bytes = b""


Handler = Callable[[Request], Response]


@dataclass(slots=True)
class Counts:
    """What the server has done since it was made."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)  # by route (or OTHER) and status code
    evicted: int = 0  # connections cut to make room for a newer one
    timed_out: int = 0  # connections cut because a request or the reading of a response took too long
    accept_errors: int = 0


class WebServer:
    """Serves `routes` (path to handler) until stopped; belongs to the event loop that starts it.

    A path that ends in a slash, other than the root, stands for every name below it.
    A handler runs on the loop and must not block; if it raises, its client gets status 500. `timeout` bounds the
    arrival of a request and, separately, the reading of a response; `keep_alive` bounds the silence between requests
    (all in seconds). Keep `max_connections` well below the limit of open files.
    """

    def __init__(
        self,
        routes: Mapping[str, Handler],
        *,
        max_connections: int = 256,
        timeout: float = 10.0,
        keep_alive: float = 180.0,
    ) -> None:
        self.counts = Counts()
        self.timeout = timeout
        self.keep_alive = keep_alive
        self.read_buffer = memoryview(bytearray(MAX_HEAD_BYTES))  # one for all: the loop empties it before it goes on
        self._routes = dict(routes)
        self._max_connections = max_connections
        self._connections: dict[_Connection, None] = {}  # the one that made progress last is the last
        self._all_gone = asyncio.Event()
        self._listeners: list[socket.socket] = []
        self._joining: set[asyncio.Task[Any]] = set()  # the loop itself keeps no task alive
        self._gzipped: dict[str, tuple[bytes, bytes]] = {}  # by route: the last body and its compressed form
        self._quiet_until: dict[str, float] = {}

    async def start(self, host: str, port: int) -> None:
        """Listen on every address of `host` (an IPv6 address has no brackets; empty for all interfaces).

        Blocks while a host name is looked up. Raises OSError that says what to do.
        """
        self._listeners = listen(host, port)
        for listener in self._listeners:
            self._listen_to(listener)

    @property
    def address(self) -> tuple[str, int]:
        """The first address listened on, with the port that the kernel chose if 0 was asked for."""
        host, port = self._listeners[0].getsockname()[:2]
        return host, port

    @property
    def open_connections(self) -> int:
        """How many clients are connected now."""
        return len(self._connections)

    async def stop(self) -> None:
        """Stop listening, let responses in progress finish for half a second, cut the rest."""
        while self._listeners:
            listener = self._listeners.pop()
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()
        await asyncio.gather(*self._joining, return_exceptions=True)
        for connection in list(self._connections):
            connection.retire()
        if self._connections:
            self._all_gone.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._all_gone.wait(), STOP_SECONDS)
        for connection in list(self._connections):
            connection.abort()
        await asyncio.sleep(0)  # the loop closes aborted sockets in its next round

    def _listen_to(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:  # else closed while accepting paused
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        # Not loop.create_server: out of file descriptors, it logs once for each place in the backlog and accepts
        # nobody for a second. One client a round of the loop also keeps the number of open sockets near the limit.
        loop = asyncio.get_running_loop()
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            self.counts.accept_errors += 1
            if self._may_log("accept"):
                log.warning("cannot accept a connection error=%r open_connections=%d", error, self.open_connections)
            if not self._evict():  # the listener stays readable: without a pause this would spin
                loop.remove_reader(listener)
                loop.call_later(NO_SLOT_PAUSE_SECONDS, self._listen_to, listener)
            return
        client.settimeout(0)
        joining = loop.create_task(loop.connect_accepted_socket(lambda: _Connection(self), client))
        self._joining.add(joining)
        joining.add_done_callback(self._joining.discard)

    def admit(self, connection: _Connection) -> None:
        """Take in a new connection, at the cost of the one without progress for longest if there are too many.

        So a client keeps its slot until `max_connections` others have connected or finished a request after it did:
        far longer than a scrape needs, whatever the others do with theirs. Refusing the newest would let idle clients
        lock out the scrape.
        """
        if len(self._connections) >= self._max_connections:
            self._evict()
        self._connections[connection] = None

    def progressed(self, connection: _Connection) -> None:
        """Put a connection last in the order of eviction: its request has come whole."""
        del self._connections[connection]
        self._connections[connection] = None

    def forget(self, connection: _Connection) -> None:
        """Drop a connection that is gone."""
        self._connections.pop(connection, None)
        if not self._connections:
            self._all_gone.set()

    def _evict(self) -> bool:
        oldest = next(iter(self._connections), None)
        if oldest is None:
            return False
        self.counts.evicted += 1
        oldest.abort()
        self.forget(oldest)
        return True

    def respond(self, request: Request) -> Response:
        """Return the answer to a request, complete with the headers that describe it."""
        route = self._name(request.path)
        response = self._encode(request, route, self._answer(request, route))
        self.counts.requests[route, response.status] += 1
        return response

    def reject(self, status: int, text: str) -> Response:
        """Return the answer to what never became a request."""
        self.counts.requests[OTHER, status] += 1
        return _text(status, text)

    def _name(self, path: str) -> str:
        """Return the route that a path belongs to; OTHER for none."""
        if path in self._routes:
            return path
        below = path[: path.rfind("/") + 1]
        return below if below != "/" and below in self._routes else OTHER

    def _answer(self, request: Request, route: str) -> Response:
        handler = self._routes.get(route)
        if handler is None:
            return _text(HTTPStatus.NOT_FOUND, "no such page; there are: " + " ".join(sorted(self._routes)))
        if request.method not in ("GET", "HEAD"):
            refusal = _text(HTTPStatus.METHOD_NOT_ALLOWED, "this page only answers GET and HEAD")
            return replace(refusal, headers={"allow": "GET, HEAD"})
        if _has_body(request):
            return _text(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "a request here has no body; send it without one")
        try:
            return handler(request)
        except Exception:  # whatever a handler raises costs its own client an answer, never the server
            if self._may_log(route):
                log.exception("handler failed path=%s", request.path)
            return _text(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; the log of the daemon says more")

    def _encode(self, request: Request, route: str, response: Response) -> Response:
        if response.status != HTTPStatus.OK or len(response.body) < GZIP_FROM_BYTES:
            return response
        vary = response.headers.get("vary", "")
        if "accept-encoding" not in vary:
            vary = ", ".join(filter(None, (vary, "accept-encoding")))
        headers = {**response.headers, "vary": vary}
        if not accepts_gzip(request.headers.get("accept-encoding", "")):
            return replace(response, headers=headers)
        body = response.gzipped or self._gzip(route, response.body)
        return replace(response, body=body, headers={**headers, "content-encoding": "gzip"})

    def forget_pages(self) -> None:
        """Keep no page and no compressed form of one: there are new ones, which nobody may ask for."""
        self._gzipped.clear()

    def _gzip(self, route: str, body: bytes) -> bytes:
        source, compressed = self._gzipped.get(route, (b"", b""))
        if source is not body:  # the same object: a page stays one until the next poll
            packer = zlib.compressobj(level=1, wbits=31)  # higher levels cost 3 to 9 times as much to save a quarter
            compressed = packer.compress(body) + packer.flush()
            self._gzipped[route] = (body, compressed)
        return compressed

    def _may_log(self, subject: str) -> bool:
        now = time.monotonic()
        if now < self._quiet_until.get(subject, now):
            return False
        self._quiet_until[subject] = now + LOG_AGAIN_SECONDS
        return True


class _Connection(asyncio.BufferedProtocol):
    """One client, from its first byte to its last; waits only under a deadline.

    Reading pauses while a response waits for its reader, so that a client which pipelines costs one buffer.
    """

    _transport: asyncio.Transport
    _deadline: asyncio.TimerHandle

    def __init__(self, server: WebServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._http = h11.Connection(h11.SERVER, MAX_HEAD_BYTES)
        self._unsent = memoryview(b"")
        self._blocked = False  # the kernel takes no more: the client does not read
        self._idle = False  # between two requests
        self._last = False  # no request after the present one
        self._lingering = False  # answered for good; what comes is thrown away

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=0)
        self._deadline = self._loop.call_later(self._server.timeout, self._too_slow)
        self._server.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._deadline.cancel()
        self._server.forget(self)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        return self._server.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._lingering:
            return
        if self._idle:
            self._expect_request()
        self._http.receive_data(bytes(self._server.read_buffer[:nbytes]))
        self._advance()

    def pause_writing(self) -> None:
        self._blocked = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._blocked = False
        self._loop.call_soon(self._flush)  # not from inside the transport's own write, which finishes after us

    def retire(self) -> None:
        """End after the response in progress; at once if there is none."""
        self._last = True
        if not self._unsent and not self._blocked:
            self.abort()

    def abort(self) -> None:
        """End now."""
        self._deadline.cancel()
        self._transport.abort()

    def _expect_request(self) -> None:
        self._idle = False
        self._arm(self._server.timeout, self._too_slow)

    def _arm(self, seconds: float, callback: Callable[[], None]) -> None:
        self._deadline.cancel()
        self._deadline = self._loop.call_later(seconds, callback)

    def _too_slow(self) -> None:
        self._server.counts.timed_out += 1
        received, _ = self._http.trailing_data
        if received:
            self._reject(HTTPStatus.REQUEST_TIMEOUT, "the request took too long to arrive")
        else:
            self.abort()

    def _cut_reader(self) -> None:
        self._server.counts.timed_out += 1
        self.abort()

    def _advance(self) -> None:
        if self._lingering or self._transport.is_closing():
            return
        try:
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            self._reject(error.error_status_hint, f"not understood as plain HTTP/1.1 (nor is https, here): {error}")
            return
        if isinstance(event, h11.Request):
            request = _request(event)
            self._last = self._last or _has_body(request)
            if not self._last:
                self._http.next_event()  # EndOfMessage
            self._send(self._server.respond(request), with_body=request.method != "HEAD")
        elif event is h11.NEED_DATA:
            self._transport.resume_reading()

    def _reject(self, status: int, text: str) -> None:
        self._last = True
        self._send(self._server.reject(status, text), with_body=True)

    def _send(self, response: Response, *, with_body: bool) -> None:
        self._server.progressed(self)
        self._arm(self._server.timeout, self._cut_reader)
        head = self._http.send(_head(response, close=self._last))
        if with_body:
            self._http.send_with_data_passthrough(h11.Data(data=response.body))
            self._unsent = memoryview(response.body)
        self._http.send(h11.EndOfMessage())
        first, self._unsent = self._unsent[:WRITE_BYTES], self._unsent[WRITE_BYTES:]
        self._transport.write(head + first)
        self._flush()

    def _flush(self) -> None:
        while self._unsent and not self._blocked and not self._transport.is_closing():
            self._transport.write(self._unsent[:WRITE_BYTES])
            self._unsent = self._unsent[WRITE_BYTES:]
        if not self._blocked and not self._transport.is_closing():
            self._delivered()

    def _delivered(self) -> None:
        if self._last or self._http.our_state is not h11.DONE:
            self._linger()
            return
        self._http.start_next_cycle()
        pipelined, _ = self._http.trailing_data
        if pipelined:
            self._transport.pause_reading()
            self._expect_request()
            self._loop.call_soon(self._advance)  # the others come first
        else:
            self._idle = True
            self._arm(self._server.keep_alive, self.abort)
            self._transport.resume_reading()

    def _linger(self) -> None:
        # To close a socket on unread bytes resets it, and the client may lose the answer: wait for it to close first.
        self._lingering = True
        self._arm(LINGER_SECONDS, self.abort)
        with suppress(OSError):  # the client is gone already
            self._transport.write_eof()
        self._transport.resume_reading()


def accepts_gzip(accept_encoding: str) -> bool:
    """Tell whether an Accept-Encoding header allows gzip; naming gzip outweighs naming `*`."""
    weights = {}
    for item in accept_encoding.lower().split(","):
        coding, _, parameter = item.partition(";")
        name, _, value = parameter.partition("=")
        try:
            weights[coding.strip()] = float(value) if name.strip() == "q" else 1.0
        except ValueError:
            weights[coding.strip()] = 0.0
    return weights.get("gzip", weights.get("*", 0.0)) > 0


def _request(event: h11.Request) -> Request:
    target = event.target.decode("ascii")
    if not target.startswith("/"):  # http://host/path, as sent to a proxy
        target = "/" + target.partition("://")[2].partition("/")[2]
    path, _, query = target.partition("?")
    headers: dict[str, str] = {}
    for raw_name, raw_value in event.headers:
        name, value = raw_name.decode("ascii"), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return Request(event.method.decode("ascii"), path, query, headers)


def _has_body(request: Request) -> bool:
    return "transfer-encoding" in request.headers or request.headers.get("content-length", "0").strip("0") != ""


def _text(status: int, text: str) -> Response:
    return Response(status, f"{text}\n".encode("utf-8", "backslashreplace"))


def _head(response: Response, *, close: bool) -> h11.Response:
    headers = {
        **ALWAYS,
        "content-type": response.content_type,
        "content-length": str(len(response.body)),
        "date": time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime()),
        **response.headers,
    }
    if response.status == HTTPStatus.NOT_MODIFIED:  # what it would have is not known here, and must not seem empty
        del headers["content-type"], headers["content-length"]
    if close:
        headers["connection"] = "close"
    reason = HTTPStatus(response.status).phrase
    return h11.Response(status_code=response.status, headers=list(headers.items()), reason=reason)
