"""HTTP server over real sockets: its responses, limits and deadlines, and isolation of clients from each other."""

import asyncio
import errno
import gc
import gzip
import http.client
import os
import resource
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden.web import http_connection, http_messages, http_server
from gpuwarden.web.http_messages import Handler, HttpRequest, HttpResponse, accepts_gzip
from gpuwarden.web.http_server import WebServer

PAGE = b"".join(b'gpuwarden_gpu_up{uuid="GPU-%04d"} 1\n' % number for number in range(4000))
HUGE = bytes(16 << 20)  # more than the kernel buffers for a client that does not read
PATIENCE = 60.0  # seconds until a test gives up; not a measurement
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
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition on the server is true; it is evaluated on the loop."""

        async def wait() -> None:
            while not holds():
                await asyncio.sleep(0.001)

        self.run(asyncio.wait_for(wait(), PATIENCE))

    def advance(self, seconds: float) -> None:
        """Advance the loop's clock."""
        real = self.loop.time
        self.loop.time = lambda: real() + seconds  # type: ignore[method-assign] # the loop's own clock
        self.run(asyncio.sleep(0))

    def close(self) -> None:
        """Stop the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE)
        self.loop.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    """Yield a running loop; an unhandled error fails the test."""
    running = Loop()
    yield running
    running.close()
    assert running.errors == []


def metrics(_: HttpRequest) -> HttpResponse:
    """Respond like the metrics endpoint: with the same bytes until the next poll."""
    return HttpResponse(200, PAGE, "text/plain; version=0.0.4", {"vary": "accept"})


def healthy(_: HttpRequest) -> HttpResponse:
    """Respond with two bytes."""
    return HttpResponse(200, b"OK")


def broken(_: HttpRequest) -> HttpResponse:
    """Raise an error."""
    raise RuntimeError("a fault of the handler")


def named(request: HttpRequest) -> HttpResponse:
    """Respond with the path and a content security policy."""
    return HttpResponse(200, request.path.encode() * 200, headers={"content-security-policy": "default-src 'self'"})


ROUTES: Mapping[str, Handler] = {
    "/": healthy,
    "/metrics": metrics,
    "/-/healthy": healthy,
    "/broken": broken,
    "/huge": lambda _: HttpResponse(200, HUGE),
    "/runs/": named,
}


@contextmanager
def serving(
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


@pytest.fixture
def server(loop: Loop) -> Iterator[WebServer]:
    """Yield a server with its own limits."""
    with serving(loop) as it:
        yield it


def connect(server: WebServer, sent: bytes = b"", receive_buffer: int = 0) -> socket.socket:
    """Connect and send, with a small receive buffer if one is given."""
    client = socket.socket(socket.AF_INET6 if ":" in server.address[0] else socket.AF_INET)
    client.settimeout(PATIENCE)
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


def status_of(answer: bytes) -> int:
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
    connection = http.client.HTTPConnection(*server.address, timeout=PATIENCE)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
    finally:
        connection.close()


@contextmanager
def descriptors(limit: int) -> Iterator[None]:
    """Limit the file descriptors of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def no_free_descriptor() -> Iterator[None]:
    """Use up the file descriptors of this process."""
    lowest_free = os.dup(0)
    os.close(lowest_free)
    with descriptors(lowest_free):
        yield


def test_response_is_delivered_unchanged(loop: Loop, server: WebServer) -> None:
    """Bytes, type and length are right with keep-alive, HTTP/1.0, single bytes, half-closed connections and HEAD."""
    connection = http.client.HTTPConnection(*server.address, timeout=PATIENCE)
    for _ in range(2):
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        assert answer.read() == PAGE
        assert (answer.headers["content-type"], answer.headers["content-length"]) == (
            "text/plain; version=0.0.4",
            str(len(PAGE)),
        )
        loop.until(lambda: len(server.pool.connections) == 1)
    connection.close()
    loop.until(lambda: not server.pool.connections)
    assert exchange(server, b"GET /metrics HTTP/1.0\r\n\r\n").endswith(b"\r\n\r\n" + PAGE)
    with connect(server) as client:
        for byte in LAST_GET:
            client.sendall(bytes([byte]))
        assert read_all(client).endswith(PAGE)
    with connect(server, GET_HUGE) as client:
        client.shutdown(socket.SHUT_WR)
        assert read_all(client).endswith(HUGE)
    head = exchange(server, LAST_GET.replace(b"GET", b"HEAD"))
    assert b"content-length: %d\r\n" % len(PAGE) in head
    assert head.endswith(b"\r\n\r\n")


def test_handler_gets_the_request(loop: Loop) -> None:
    """The handler gets path, query and lower-case headers; repeated headers are joined; absolute URLs work."""
    received: list[HttpRequest] = []

    def record(request: HttpRequest) -> HttpResponse:
        received.append(request)
        return healthy(request)

    with serving(loop, routes={"/look": record}) as server:
        lines = b"Host: h\r\nAccept: a\r\nACCEPT: b\r\nConnection: close\r\n\r\n"
        exchange(server, b"GET http://h:9846/look?x=1&y=?2 HTTP/1.1\r\n" + lines)
    assert received == [HttpRequest("GET", "/look", "x=1&y=?2", {"host": "h", "accept": "a, b", "connection": "close"})]


def test_routes_and_their_counts(server: WebServer) -> None:
    """A folder is one route, without subfolders; unknown paths share one counter, and the 404 lists known paths."""
    for path in ("/runs/1", "/runs/2", "/runs/"):
        assert fetch(server, path).body == path.encode() * 200
    for path in ("/nosuch", "/runs/1/2", "/deep/runs/1"):
        answer = fetch(server, path)
        assert answer.status == 404
        assert all(route in answer.body.decode() for route in ROUTES)
    fetch(server)
    exchange(server, b"garbage\r\n\r\n")
    assert server.router.requests == {("/runs/", 200): 3, ("other", 404): 3, ("/metrics", 200): 1, ("other", 400): 1}


def test_invalid_requests_are_rejected(server: WebServer) -> None:
    """Other methods, bodies, an endless head and invalid HTTP get their status, and the connection is closed."""
    post = ENTRY.replace(b"GET", b"POST")
    refused = {
        ENTRY + b"Content-Length: 5\r\n\r\nhello": 413,
        ENTRY + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n": 413,
        post + b"Content-Length: 999\r\nExpect: 100-continue\r\n\r\n": 405,
        ENTRY + b"X-Filler: " + b"x" * 65536: 431,
        b"garbage\r\n\r\n": 400,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03": 400,  # start of a TLS handshake
        b"GET /metrics HTTP/1.1\r\n\r\n": 400,  # no Host
        b"GET /metrics\r\n\r\n": 400,
        ENTRY + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n": 400,
        ENTRY + b"Broken header\r\n\r\n": 400,
    }
    found = {sent: status_of(exchange(server, sent)) for sent in refused}
    found |= {
        (answer := fetch(server, method=method)).headers["allow"].encode(): answer.status for method in ("PUT", "BREW")
    }
    assert found == refused | {b"GET, HEAD": 405}


def test_handler_error_affects_only_its_client(server: WebServer, caplog: pytest.LogCaptureFixture) -> None:
    """The client gets a 500, the error is logged once a minute, and the server keeps running."""
    assert [fetch(server, "/broken").status for _ in range(3)] == [500] * 3
    assert fetch(server).status == 200
    (record,) = caplog.records
    assert record.exc_info
    assert "/broken" in record.message


def test_default_policy_forbids_scripts(server: WebServer) -> None:
    """The default policy forbids scripts, unless the handler sets its own."""
    assert (
        fetch(server, "/-/healthy").headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
    )
    assert fetch(server, "/-/healthy").headers["x-content-type-options"] == "nosniff"
    assert fetch(server, "/runs/1").headers["content-security-policy"] == "default-src 'self'"


def test_compression(server: WebServer) -> None:
    """A page is compressed once for all clients, with a Vary header; a tiny response is not compressed."""
    http_messages._gzip.cache_clear()
    for _ in range(2):
        answer = fetch(server, Accept_Encoding="gzip")
        assert (answer.headers["content-encoding"], answer.headers["vary"]) == ("gzip", "accept, accept-encoding")
        assert gzip.decompress(answer.body) == PAGE
    assert http_messages._gzip.cache_info().misses == 1
    plain = fetch(server, Accept_Encoding="identity")
    assert (plain.body, plain.headers["vary"]) == (PAGE, "accept, accept-encoding")
    assert fetch(server, "/runs/1", Accept_Encoding="gzip").headers["vary"] == "accept-encoding"
    assert "content-encoding" not in fetch(server, "/-/healthy", Accept_Encoding="gzip").headers
    accepted = ("gzip", "deflate, GZIP;q=0.5", "br;q=1.0, gzip; q=0.8, *;q=0.1", "*")
    refused = (
        "",
        "gzip;q=0",
        "gzip;q=0.000, *",
        "*;q=0",
        "deflate, br",
        "gzip;q=high",
        "gzip;q=nan",
        "identity",
        ",;=,",
    )
    assert [each for each in accepted + refused if accepts_gzip(each)] == list(accepted)


def test_pipelined_requests_are_answered_in_order_and_not_read_ahead(loop: Loop, server: WebServer) -> None:
    """Requests are read from the kernel as they are answered, so a long pipeline takes no memory of the server."""
    held: list[int] = []
    with connect(server) as client:
        answers: list[bytes] = []
        reader = threading.Thread(target=lambda: answers.append(read_all(client)))
        reader.start()
        client.sendall(GET.replace(b"GET /metrics", b"HEAD /-/healthy") * 2000 + LAST_GET)

        def done() -> bool:
            held.extend(len(connection._http.trailing_data[0]) for connection in server.pool.connections)
            return server.router.requests["/metrics", 200] == 1

        loop.until(done)
        reader.join(PATIENCE)
    assert answers[0].count(b"HTTP/1.1 200 OK") == 2001
    assert answers[0].endswith(b"\r\n\r\n" + PAGE)
    assert 0 < max(held) <= 2 * http_connection.MAX_HEAD_BYTES


@pytest.mark.parametrize("first", [b"", GET.replace(b"/metrics", b"/-/healthy")])
@pytest.mark.parametrize("sent", [b"", b"GET /metr", ENTRY + b"X-Drip: "])
def test_request_has_a_deadline(loop: Loop, server: WebServer, first: bytes, sent: bytes) -> None:
    """A client that does not complete a request in time is disconnected, even if it sends single bytes."""
    with connect(server, first) as client:
        if first:
            loop.until(lambda: server.router.requests["/-/healthy", 200] == 1)
            while not client.recv(1 << 16).endswith(b"OK"):
                pass
        client.sendall(sent)
        loop.until(lambda: bool(server.pool.connections))
        (connection,) = server.pool.connections
        loop.until(lambda: not sent or (connection._http.trailing_data[0] == sent and not connection._idle))
        loop.advance(server.pool.timeout * 0.9)
        if sent:
            client.sendall(b"x")
            loop.until(lambda: connection._http.trailing_data[0] == sent + b"x")
        loop.advance(server.pool.timeout * 0.2)
        if first and not sent:  # idle within its limit
            assert server.pool.connections
            loop.advance(server.pool.keep_alive)
        assert read_all(client) == b""
        assert server.pool.timed_out == (0 if first and not sent else 1)


def test_rest_of_a_read_starts_the_next_deadline(loop: Loop, server: WebServer) -> None:
    """The rest of a read starts the deadline of the next request, not the longer idle timeout."""
    with connect(server, GET.replace(b"/metrics", b"/-/healthy") + b"GET") as client:
        loop.until(lambda: server.router.requests["/-/healthy", 200] == 1)
        loop.advance(server.pool.timeout * 1.1)
        assert status_of(read_all(client)) == 200
        assert server.pool.timed_out == 1


def test_client_that_does_not_read_is_disconnected(loop: Loop, server: WebServer) -> None:
    """Its other requests stay in the kernel, and all such clients share the bytes of one page."""
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(server, GET_HUGE * 1000, receive_buffer=4096)) for _ in range(5)]
        loop.until(lambda: [each.responding for each in server.pool.connections] == [True] * 5)
        assert all(
            len(each._http.trailing_data[0]) <= 2 * http_connection.MAX_HEAD_BYTES for each in server.pool.connections
        )
        loop.advance(server.pool.timeout * 1.1)
        loop.until(lambda: not server.pool.connections)
        assert server.pool.timed_out == 5
        for client in clients:
            wait_until_closed(client)


def test_slow_reader_gets_the_whole_page(server: WebServer) -> None:
    """A page larger than all buffers is delivered to a slow reader."""
    with connect(server, LAST_GET.replace(b"/metrics", b"/huge"), receive_buffer=8192) as client:
        assert read_all(client).endswith(b"\r\n\r\n" + HUGE)


def test_rejected_client_that_keeps_sending_gets_the_response(loop: Loop, server: WebServer) -> None:
    """No reset discards the response while the client still sends; the wait for it is limited."""
    with connect(server, b"garbage\r\n\r\n") as client:
        loop.until(lambda: server.router.requests["other", 400] == 1)
        for _ in range(100):
            client.sendall(bytes(10_000))
        assert status_of(read_all(client)) == 400
        loop.advance(http_connection.CLOSE_SECONDS * 1.1)
        loop.until(lambda: not server.pool.connections)
        assert server.pool.timed_out == 0


def test_full_server_closes_the_least_recently_active_client(loop: Loop) -> None:
    """A client that is being served is kept."""
    with serving(loop, max_connections=2) as server, ExitStack() as stack:
        first = stack.enter_context(connect(server, receive_buffer=4096))
        loop.until(lambda: len(server.pool.connections) == 1)
        second = stack.enter_context(connect(server))
        loop.until(lambda: len(server.pool.connections) == 2)
        first.sendall(LAST_GET.replace(b"/metrics", b"/huge"))
        loop.until(lambda: server.router.requests["/huge", 200] == 1)
        assert fetch(server).status == 200
        wait_until_closed(second)
        assert server.pool.evicted == 1
        assert read_all(first).endswith(HUGE)


def test_evicted_client_whose_handler_goes_on(loop: Loop) -> None:
    """A handler that loses its cancellation ends with its client; the loop has no unhandled error."""

    async def stubborn(_: HttpRequest) -> HttpResponse:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(PATIENCE)
        return HttpResponse(200, b"late")

    with serving(loop, routes={**ROUTES, "/stubborn": stubborn}, max_connections=1) as server:
        with connect(server, GET.replace(b"/metrics", b"/stubborn")) as client:
            loop.until(lambda: len(server.pool.connections) == 1)
            loop.run(asyncio.sleep(0.05))  # in the handler
            assert fetch(server).body == PAGE
            wait_until_closed(client)
        loop.run(_collect())


async def _collect() -> None:
    gc.collect()  # a task's error shows when the task is freed


class CountedBytes(bytes):
    """Bytes that count how many of them are in memory."""

    held = 0

    def __init__(self, size: int) -> None:
        CountedBytes.held += size

    def __del__(self) -> None:
        """Count them as freed."""
        CountedBytes.held -= len(self)


def test_responses_to_slow_readers_are_bounded(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses that differ from each other take up to a limit of memory; then the slowest readers lose theirs."""
    size = 1 << 20
    monkeypatch.setattr(http_connection, "MAX_SENDING_BYTES", 16 * size)
    routes = {**ROUTES, "/runs/": lambda _: HttpResponse(200, CountedBytes(size))}
    with serving(loop, routes=routes) as server, ExitStack() as stack:
        for asked in range(1, 41):
            stack.enter_context(connect(server, GET.replace(b"/metrics", b"/runs/"), receive_buffer=4096))
            loop.until(lambda asked=asked: server.router.requests["/runs/", 200] == asked)  # type: ignore[misc]
            loop.until(lambda: CountedBytes.held <= 17 * size)
        assert len(fetch(server, "/runs/").body) == size
        assert fetch(server, "/huge").body == HUGE
        assert fetch(server).body == PAGE


def test_large_response_is_compressed_on_a_thread(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop goes on meanwhile; a page of usual size takes less time than a thread would."""
    threads: list[threading.Thread] = []

    def compressed(body: bytes) -> bytes:
        threads.append(threading.current_thread())
        return body

    monkeypatch.setattr(http_messages, "_gzip", compressed)
    with serving(loop) as server:
        fetch(server, "/metrics", accept_encoding="gzip")
        fetch(server, "/huge", accept_encoding="gzip")
    assert [each is loop._thread for each in threads] == [True, False]


def test_thousand_slow_clients_do_not_block_a_scrape(loop: Loop, server: WebServer) -> None:
    """Scrapes are answered in full next to a thousand clients slow in every way, without a thread."""
    slow = [b"", b"GET /metr", GET, ENTRY] * 10 + [GET_HUGE, GET * 20]
    threads = threading.active_count()
    with descriptors(2000), ExitStack() as stack:
        for number in range(1000):
            stack.enter_context(connect(server, slow[number % len(slow)], receive_buffer=4096))
            if number % 100 == 99:
                assert fetch(server).body == PAGE
        assert fetch(server).body == PAGE
        loop.until(lambda: len(server.pool.connections) <= 256)
        assert server.pool.evicted >= 1000 - 256
        assert threading.active_count() == threads


def test_connection_reset_is_handled(loop: Loop, server: WebServer) -> None:
    """A connection reset during a response is dropped."""
    client = connect(server, GET_HUGE, receive_buffer=4096)
    loop.until(lambda: any(connection.responding for connection in server.pool.connections))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    loop.until(lambda: not server.pool.connections)
    assert fetch(server).status == 200


def test_client_without_credentials_is_closed_and_the_next_one_answered(
    loop: Loop, server: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client on the Unix socket whose user the kernel does not report, as under a strict seccomp filter."""
    path = tmp_path / "api.sock"

    def fail(_: socket.socket) -> tuple[int, int]:
        raise PermissionError(errno.EPERM, "getsockopt")

    async def start() -> None:
        server.start_unix(path)

    def exchange_unix() -> bytes:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(PATIENCE)
            client.connect(str(path))
            client.sendall(LAST_GET)
            return read_all(client)

    loop.run(start())
    with monkeypatch.context() as patch:
        patch.setattr(http_connection, "read_credentials", fail)
        with pytest.raises(ConnectionError):
            exchange_unix()
    assert exchange_unix().endswith(PAGE)


def test_without_descriptors_an_idle_client_is_closed(loop: Loop, server: WebServer) -> None:
    """Without free file descriptors, the server closes an idle connection to answer a scrape."""
    with connect(server) as idle, socket.socket() as scrape:
        loop.until(lambda: len(server.pool.connections) == 1)
        with no_free_descriptor():
            scrape.settimeout(PATIENCE)
            scrape.connect(server.address)
            scrape.sendall(LAST_GET)
            assert read_all(scrape).endswith(PAGE)
        wait_until_closed(idle)


def test_without_descriptors_and_clients_the_server_waits(
    loop: Loop, server: WebServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a connection to close, accepting is retried at intervals, logged once, until it works or is stopped."""
    with socket.socket() as scrape:
        scrape.settimeout(PATIENCE)
        with no_free_descriptor():
            scrape.connect(server.address)
            for count in (1, 2):
                loop.until(lambda: server.accept_errors == count)  # noqa: B023 - called within the turn
                loop.advance(http_server.NO_DESCRIPTOR_PAUSE_SECONDS)
            scrape.sendall(LAST_GET)
        loop.advance(http_server.NO_DESCRIPTOR_PAUSE_SECONDS)
        assert read_all(scrape).endswith(PAGE)
    assert ["cannot accept" in record.message for record in caplog.records] == [True]
    loop.until(lambda: not server.pool.connections)  # else its descriptor is freed below
    with socket.socket() as client, no_free_descriptor():
        before = server.accept_errors
        client.connect(server.address)
        loop.until(lambda: server.accept_errors > before)
        loop.run(server.stop())


def test_arbitrary_bytes_do_not_stop_the_server(loop: Loop, server: WebServer) -> None:
    """Any input ends with an orderly close, and the next client is served."""
    lines = (
        *(b"Host: h", b"Connection: close", b"Connection: upgrade", b"Upgrade: websocket", b"Content-Length: 4"),
        *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip", b"Expect: 100-continue"),
        *(b"Accept-Encoding: gzip;q=\xff", b" folded"),
    )
    paths = (b"/metrics", b"*", b"http://h/metrics", b"h:1", b"//", b"/\xff", b"/?" + b"x" * 20_000)
    request = st.tuples(
        st.sampled_from([b"GET", b"HEAD", b"POST", b"CONNECT", b"PRI", b"\xff"]),
        st.sampled_from(paths),
        st.sampled_from([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9"]),
        st.lists(st.sampled_from(lines), max_size=4),
    ).map(lambda it: b" ".join(it[:3]) + b"\r\n" + b"".join(line + b"\r\n" for line in it[3]) + b"\r\n")

    @settings(max_examples=200, derandomize=True)
    @given(st.lists(st.one_of(request, st.binary(max_size=200)), max_size=6))
    def check(sent: list[bytes]) -> None:
        with connect(server) as client:
            for piece in sent:
                client.sendall(piece)
            client.shutdown(socket.SHUT_WR)
            read_all(client)
        assert fetch(server, "/-/healthy").status == 200
        assert loop.errors == []

    check()


def test_unusable_address_is_explained(loop: Loop, server: WebServer) -> None:
    """Each error message has an action."""
    explained = {
        server.address: "ss -ltnp",
        ("192.0.2.1", 9846): "no interface of this machine has this address",
        ("not..a.name", 9846): "give an IP address",
        ("127.0.0.1", 65536): "a port is a number",
        ("127.0.0.1", -1): "a port is a number",
    }
    for address, words in explained.items():
        with pytest.raises(OSError, match="cannot listen on") as caught:
            loop.run(WebServer(ROUTES).start(*address))
        assert words in str(caught.value)


def test_forbidden_port_is_explained(loop: Loop) -> None:
    """A user without permission for low ports gets an explanation."""
    if int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text(encoding="ascii")) <= 1:
        pytest.skip("this machine lets everyone take any port")
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # for all threads of this process, until restored
    try:
        with pytest.raises(OSError, match="choose a higher port"):
            loop.run(WebServer(ROUTES).start("127.0.0.1", 1))
    finally:
        os.seteuid(user)


def has_ipv6() -> bool:
    """Return whether this machine has the address ::1."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_listens_on_all_addresses_of_a_host(loop: Loop) -> None:
    """Names and wildcards listen on IPv4 at the same port, and `::` does too, as in Prometheus."""
    hosts = ["localhost", "", "0.0.0.0", *(["::"] if has_ipv6() else [])]  # noqa: S104 - a free port, for a moment
    for host in hosts:
        with serving(loop, host=host) as server, socket.create_connection(("127.0.0.1", server.address[1])) as client:
            assert {listener.getsockname()[1] for listener in server._listeners} == {server.address[1]}
            client.settimeout(PATIENCE)
            client.sendall(LAST_GET)
            assert read_all(client).endswith(PAGE)
    if has_ipv6():
        with serving(loop, host="::1") as server:
            assert fetch(server).body == PAGE


def test_stop_with_clients_in_every_state(loop: Loop, server: WebServer) -> None:
    """Stopping does not wait for slow clients, leaves no socket open, and the port is free at once."""
    with ExitStack() as stack:
        for sent in (b"", b"GET /metr", GET, GET_HUGE, b"garbage\r\n\r\n"):
            stack.enter_context(connect(server, sent, receive_buffer=4096))
        loop.until(lambda: len(server.pool.connections) == 5)
        late = stack.enter_context(socket.socket())  # accepted at the last moment, if at all
        late.settimeout(PATIENCE)
        late.connect(server.address)
        address, connections = server.address, list(server.pool.connections)
        loop.run(server.stop())
        assert {connection._client.fileno() for connection in connections} == {-1}
        wait_until_closed(late)
        again = WebServer(ROUTES)
        loop.run(again.start(*address))
        assert fetch(again).body == PAGE
        loop.run(again.stop())


def test_stop_lets_a_response_finish(loop: Loop, server: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape in progress during shutdown gets its whole page."""
    monkeypatch.setattr(http_server, "STOP_SECONDS", PATIENCE)
    with connect(server, GET_HUGE, receive_buffer=4096) as client:
        loop.until(lambda: any(connection.responding for connection in server.pool.connections))
        stopping = asyncio.run_coroutine_threadsafe(server.stop(), loop.loop)
        loop.until(lambda: server.pool.stopping)
        assert read_all(client).endswith(b"\r\n\r\n" + HUGE)
        client.close()
        stopping.result(PATIENCE)
