"""HTTP server on one event loop, without threads: a client that is slow, silent or hostile holds up no other.

h11 parses the protocol. Each connection is one task under one deadline. At the limit of connections, or out of file
descriptors, the connection that has asked for nothing for longest is cut for the new one: to refuse the new one would
let idle clients lock out scrapes and liveness probes.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from http import HTTPStatus

import h11

from gpuwarden.web.listener import listen

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 16 * 1024  # room for the cookies that browsers send to every port of localhost
MIN_GZIP_BYTES = 1024
CLOSE_SECONDS = 2.0
STOP_SECONDS = 0.5
NO_DESCRIPTOR_PAUSE_SECONDS = 0.5
LOG_INTERVAL_SECONDS = 60.0

OTHER = "other"  # counts requests for unknown paths, so that clients cannot make label values

DEFAULT_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """HTTP request; header names are in lower case, `path` is as sent (not percent-decoded)."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """HTTP response; header names are in lower case and override the server's own."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)


Handler = Callable[[HttpRequest], HttpResponse | Awaitable[HttpResponse]]


@dataclass(slots=True)
class HttpCounts:
    """Requests and lost connections since the server was made."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)  # by route (or OTHER) and status code
    evicted: int = 0  # connections cut to make room for a newer one
    timed_out: int = 0  # connections cut because a request or the reading of a response took too long
    accept_errors: int = 0


class WebServer:
    """HTTP server for `routes` (path to handler); belongs to the event loop that starts it.

    A path that ends in a slash, other than the root, stands for every name below it. A handler runs on the loop and
    must not block; if it raises, its client gets status 500. `timeout` bounds the arrival of a request and,
    separately, the reading of a response; `keep_alive` bounds the silence between requests (all in seconds). Keep
    `max_connections` well below the limit of open files.
    """

    def __init__(
        self,
        routes: Mapping[str, Handler],
        *,
        max_connections: int = 256,
        timeout: float = 10.0,
        keep_alive: float = 180.0,
    ) -> None:
        self.counts = HttpCounts()
        self.timeout = timeout
        self.keep_alive = keep_alive
        self.connections: dict[HttpConnection, None] = {}  # in the order of their last requests
        self.stopping = False
        self._routes = dict(routes)
        self._max_connections = max_connections
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._logged: dict[str, float] = {}  # by subject: when it was logged last

    async def start(self, host: str, port: int) -> None:
        """Listen on every address of `host` (an IPv6 address has no brackets; empty for all interfaces).

        Blocks while a host name is looked up. Raises OSError that says what to do.
        """
        self._listeners = listen(host, port)
        self._accepting = [asyncio.create_task(self._accept(listener)) for listener in self._listeners]

    @property
    def address(self) -> tuple[str, int]:
        """The first address listened on, with the port that the kernel chose if 0 was asked for."""
        host, port = self._listeners[0].getsockname()[:2]
        return host, port

    async def stop(self) -> None:
        """Stop listening, let responses in progress finish for half a second, cut the rest."""
        self.stopping = True
        for accepting in self._accepting:
            accepting.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        tasks = [connection.task for connection in self.connections]
        for connection in self.connections:
            if not connection.responding:
                connection.task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_SECONDS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            await _until_readable(listener)  # out of descriptors, accept fails even where no client waits
            try:
                client, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                continue
            except OSError as error:  # out of file descriptors
                self.counts.accept_errors += 1
                if self._may_log("accept"):
                    log.warning("cannot accept a connection error=%r connections=%d", error, len(self.connections))
                if not await self._evict():
                    await asyncio.sleep(NO_DESCRIPTOR_PAUSE_SECONDS)
                continue
            client.settimeout(0)
            self.connections[HttpConnection(self, client)] = None
            if len(self.connections) > self._max_connections:
                await self._evict()

    async def _evict(self) -> bool:
        """Cut the connection whose last request is the oldest; return whether there was one."""
        oldest = next(iter(self.connections), None)
        if oldest is None:
            return False
        self.counts.evicted += 1
        del self.connections[oldest]
        oldest.task.cancel()
        await asyncio.wait([oldest.task])
        return True

    async def respond(self, request: HttpRequest) -> HttpResponse:
        """Return the response to a request, complete with the headers that describe it."""
        route = self._route(request.path)
        response = _encode(request, await self._handle(request, route))
        self.counts.requests[route, response.status] += 1
        return response

    def reject(self, status: int, text: str) -> HttpResponse:
        """Return the response to bytes that are no request."""
        self.counts.requests[OTHER, status] += 1
        return _text(status, text)

    def _route(self, path: str) -> str:
        """Return the route that a path belongs to; OTHER for none."""
        if path in self._routes:
            return path
        folder = path[: path.rfind("/") + 1]
        return folder if folder != "/" and folder in self._routes else OTHER

    async def _handle(self, request: HttpRequest, route: str) -> HttpResponse:
        handler = self._routes.get(route)
        if handler is None:
            return _text(HTTPStatus.NOT_FOUND, "no such page; there are: " + " ".join(sorted(self._routes)))
        if request.method not in ("GET", "HEAD"):
            refusal = _text(HTTPStatus.METHOD_NOT_ALLOWED, "this page only answers GET and HEAD")
            return replace(refusal, headers={"allow": "GET, HEAD"})
        if _has_body(request):
            return _text(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "a request here has no body; send it without one")
        try:
            response = handler(request)
            return response if isinstance(response, HttpResponse) else await response
        except Exception:  # a fault of one handler must not end the server
            if self._may_log(route):
                log.exception("handler failed path=%s", request.path)
            return _text(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; the log of the daemon says more")

    def _may_log(self, subject: str) -> bool:
        now = time.monotonic()
        if now - self._logged.get(subject, -LOG_INTERVAL_SECONDS) < LOG_INTERVAL_SECONDS:
            return False
        self._logged[subject] = now
        return True


class HttpConnection:
    """One client, served by one task, which ends at the deadline.

    Nothing is read while a response is sent, and a response is sent from the handler's own bytes: neither a client
    that pipelines nor one that reads slowly costs memory.
    """

    def __init__(self, server: WebServer, client: socket.socket) -> None:
        self.responding = False
        self._server = server
        self._client = client
        self._http = h11.Connection(h11.SERVER, MAX_HEAD_BYTES)
        self._loop = asyncio.get_running_loop()
        self._idle = False  # silent by right: between two requests, or after the last response
        self._deadline = self._loop.call_later(server.timeout, self._expire)
        self.task = self._loop.create_task(self._serve())
        self.task.add_done_callback(self._close)

    def _expire(self) -> None:
        self._server.counts.timed_out += not self._idle
        self.task.cancel()

    def _set_deadline(self, seconds: float, *, idle: bool = False) -> None:
        self._idle = idle
        self._deadline.cancel()
        self._deadline = self._loop.call_later(seconds, self._expire)

    def _close(self, _task: asyncio.Task[None]) -> None:
        self._deadline.cancel()
        self._client.close()
        self._server.connections.pop(self, None)

    async def _serve(self) -> None:
        try:
            self._client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # head and body are two writes
            while await self._exchange():
                pass
            # To close a socket with unread bytes resets it, and the client may lose the response.
            self._set_deadline(CLOSE_SECONDS, idle=True)
            self._client.shutdown(socket.SHUT_WR)
            while await self._read():
                pass
        except OSError:  # the client is gone
            pass

    async def _exchange(self) -> bool:
        """Answer one request; return whether the client may send another."""
        is_last, has_body = self._server.stopping, True
        try:
            event = await self._receive()
            if not isinstance(event, h11.Request):
                return False
            request = _request(event)
            has_body = request.method != "HEAD"
            if _has_body(request):
                is_last = True
            else:
                self._http.next_event()  # EndOfMessage
            response = await self._server.respond(request)
        except h11.RemoteProtocolError as error:
            is_last = True
            text = f"not understood as plain HTTP/1.1 (nor is https, here): {error}"
            response = self._server.reject(error.error_status_hint, text)
        self._server.connections[self] = self._server.connections.pop(self)  # the last one to be evicted
        self._set_deadline(self._server.timeout)
        self.responding = True
        await self._send(response, has_body=has_body, is_last=is_last)
        self.responding = False
        if self._http.our_state is not h11.DONE or self._server.stopping:
            return False
        self._http.start_next_cycle()
        if self._http.trailing_data[0]:
            self._set_deadline(self._server.timeout)
        else:
            self._set_deadline(self._server.keep_alive, idle=True)
        return True

    async def _receive(self) -> object:
        """Return the next event of the client; an object that is no request where it ends."""
        while (event := self._http.next_event()) is h11.NEED_DATA:
            data = await self._read()
            if self._idle:
                self._set_deadline(self._server.timeout)
            self._http.receive_data(data)
        return event

    async def _read(self) -> bytes:
        await asyncio.sleep(0)  # a client that sends without end takes turns with the others
        return await self._loop.sock_recv(self._client, MAX_HEAD_BYTES)

    async def _send(self, response: HttpResponse, *, has_body: bool, is_last: bool) -> None:
        head = self._http.send(_head(response, close=is_last))
        if has_body:
            self._http.send_with_data_passthrough(h11.Data(data=response.body))
        self._http.send(h11.EndOfMessage())
        await self._loop.sock_sendall(self._client, head or b"")
        if has_body:
            await self._loop.sock_sendall(self._client, response.body)


async def _until_readable(listener: socket.socket) -> None:
    ready = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(listener, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(listener)


def accepts_gzip(accept_encoding: str) -> bool:
    """Return whether an Accept-Encoding header allows gzip; naming gzip outweighs naming `*`."""
    weights = {}
    for item in accept_encoding.lower().split(","):
        coding, _, parameter = item.partition(";")
        name, _, value = parameter.partition("=")
        try:
            weights[coding.strip()] = float(value) if name.strip() == "q" else 1.0
        except ValueError:
            weights[coding.strip()] = 0.0
    return weights.get("gzip", weights.get("*", 0.0)) > 0


@lru_cache(maxsize=4)  # the pages of one poll, each compressed once for all clients
def _gzip(body: bytes) -> bytes:
    packer = zlib.compressobj(level=1, wbits=31)  # higher levels cost 3 to 9 times as much to save a quarter
    return packer.compress(body) + packer.flush()


def _encode(request: HttpRequest, response: HttpResponse) -> HttpResponse:
    """Compress a response for a client that accepts it."""
    if response.status != HTTPStatus.OK or len(response.body) < MIN_GZIP_BYTES:
        return response
    vary = ", ".join(filter(None, (response.headers.get("vary", ""), "accept-encoding")))
    response = replace(response, headers={**response.headers, "vary": vary})
    if not accepts_gzip(request.headers.get("accept-encoding", "")):
        return response
    headers = {**response.headers, "content-encoding": "gzip"}
    return replace(response, body=_gzip(response.body), headers=headers)


def _request(event: h11.Request) -> HttpRequest:
    target = event.target.decode("ascii")
    if not target.startswith("/"):  # http://host/path, as sent to a proxy
        target = "/" + target.partition("://")[2].partition("/")[2]
    path, _, query = target.partition("?")
    headers: dict[str, str] = {}
    for raw_name, raw_value in event.headers:
        name, value = raw_name.decode("ascii"), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return HttpRequest(event.method.decode("ascii"), path, query, headers)


def _has_body(request: HttpRequest) -> bool:
    return "transfer-encoding" in request.headers or request.headers.get("content-length", "0").strip("0") != ""


def _text(status: int, text: str) -> HttpResponse:
    return HttpResponse(status, f"{text}\n".encode("utf-8", "backslashreplace"))


def _head(response: HttpResponse, *, close: bool) -> h11.Response:
    headers = {
        **DEFAULT_HEADERS,
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
