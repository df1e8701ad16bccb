"""The HTTP server over real sockets: what it answers, and that no client can take it from the others."""

import asyncio
import gzip
import http.client
import os
import resource
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuwarden import web
from gpuwarden.web import Handler, Request, Response, WebServer, accepts_gzip

PAGE = b"".join(b'gpuwarden_gpu_up{uuid="GPU-%04d"} 1\n' % number for number in range(4000))
HUGE = bytes(16 << 20)  # more than the kernel takes for a client that does not read
PATIENCE = 30.0  # seconds until a test gives up; nothing is measured by it
SHORT = 0.1  # a deadline that a test wants to see pass
ENTRY = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n"
GET = ENTRY + b"\r\n"
LAST_GET = ENTRY + b"Connection: close\r\n\r\n"

T = TypeVar("T")


class Loop:
    """An event loop on a thread of its own, so that a test can be its blocking client."""

    def __init__(self) -> None:
        self.complaints: list[dict[str, Any]] = []
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda _, context: self.complaints.append(context))
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until a statement about the server holds; it is looked at on the loop, between its rounds."""

        async def wait() -> None:
            while not holds():
                await asyncio.sleep(0.001)

        self.run(asyncio.wait_for(wait(), PATIENCE))

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE)
        self._loop.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    """Yield a running loop; an error that nobody handled fails the test."""
    running = Loop()
    yield running
    running.close()
    assert running.complaints == []


def metrics(_: Request) -> Response:
    """Answer as the metrics page does: with the same bytes until the next poll."""
    return Response(200, PAGE, "text/plain; version=0.0.4")


def healthy(_: Request) -> Response:
    """Answer in two bytes."""
    return Response(200, b"OK")


def broken(_: Request) -> Response:
    """Fail."""
    raise RuntimeError("a fault of the handler")


def huge(_: Request) -> Response:
    """Answer with more than the kernel buffers."""
    return Response(200, HUGE)


ROUTES: Mapping[str, Handler] = {"/metrics": metrics, "/-/healthy": healthy, "/broken": broken, "/huge": huge}


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
    """Connect and send; a receive buffer, if given, is that small."""
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


def wait_until_cut(client: socket.socket) -> None:
    """Return when the server ends the connection, in order or by reset; fail if it never does."""
    with suppress(ConnectionError):
        read_all(client)


def exchange(server: WebServer, sent: bytes) -> bytes:
    """Send bytes and return all that comes back until the server closes the connection."""
    with connect(server, sent) as client:
        return read_all(client)


def status_of(answer: bytes) -> int:
    """Return the status code of a raw answer."""
    return int(answer.split(b" ", 2)[1])


@dataclass(frozen=True, slots=True)
class Answer:
    """What the standard library's client makes of an answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def fetch(server: WebServer, path: str = "/metrics", method: str = "GET", **headers: str) -> Answer:
    """Make one request as the standard library's client does; header names are written with underscores."""
    connection = http.client.HTTPConnection(*server.address, timeout=PATIENCE)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
    finally:
        connection.close()


@contextmanager
def descriptors(limit: int) -> Iterator[None]:
    """Let this process have file descriptors below a limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# What is answered


def test_serves_the_handlers_bytes_as_they_are(server: WebServer) -> None:
    """A page arrives byte for byte, with its type and length."""
    answer = fetch(server)
    assert (answer.status, answer.body) == (200, PAGE)
    assert answer.headers["content-type"] == "text/plain; version=0.0.4"
    assert answer.headers["content-length"] == str(len(PAGE))


def test_head_is_get_without_the_body(server: WebServer) -> None:
    """HEAD answers with the length that GET would send, and sends none of it."""
    answer = exchange(server, LAST_GET.replace(b"GET", b"HEAD"))
    assert b"content-length: %d\r\n" % len(PAGE) in answer
    assert answer.endswith(b"\r\n\r\n")


def test_connection_is_kept_for_a_second_request(loop: Loop, server: WebServer) -> None:
    """Two scrapes of an HTTP/1.1 client share one connection."""
    connection = http.client.HTTPConnection(*server.address, timeout=PATIENCE)
    for _ in range(2):
        connection.request("GET", "/metrics")
        assert connection.getresponse().read() == PAGE
        loop.until(lambda: server.open_connections == 1)
    assert server.counts.requests["/metrics", 200] == 2
    connection.close()
    loop.until(lambda: server.open_connections == 0)


@pytest.mark.parametrize("request_", [b"GET /metrics HTTP/1.0\r\n\r\n", LAST_GET])
def test_connection_ends_when_the_client_wants_no_more(
    server: WebServer, request_: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An HTTP/1.0 client, or one that says `close`, gets the page followed by the end of the connection."""
    monkeypatch.setattr(web, "LINGER_SECONDS", 1000)
    answer = exchange(server, request_)
    assert status_of(answer) == 200
    assert answer.endswith(b"\r\n\r\n" + PAGE)


def test_request_may_come_in_single_bytes(server: WebServer) -> None:
    """Where the network splits a request does not matter."""
    with connect(server) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in LAST_GET:
            client.sendall(bytes([byte]))
        assert read_all(client).endswith(PAGE)


def test_client_that_has_shut_its_side_gets_its_answer(server: WebServer) -> None:
    """A half-closed connection still carries the response."""
    with connect(server, LAST_GET.replace(b"/metrics", b"/huge")) as client:
        client.shutdown(socket.SHUT_WR)
        assert read_all(client).endswith(HUGE)


def test_pipelined_requests_are_answered_in_order(server: WebServer) -> None:
    """Requests sent without waiting each get their answer."""
    answer = exchange(server, GET * 30 + LAST_GET.replace(b"/metrics", b"/-/healthy"))
    assert answer.count(b"HTTP/1.1 200 OK") == 31
    assert answer.endswith(b"\r\n\r\nOK")


def test_pipelining_stops_being_read_while_answers_are_not(loop: Loop) -> None:
    """A client that asks and asks without reading costs the server one read buffer and no more."""
    with serving(loop, timeout=PATIENCE) as server, connect(server, receive_buffer=4096) as client:
        client.setblocking(False)
        request = GET.replace(b"/metrics", b"/huge")
        with suppress(BlockingIOError):
            while True:
                client.send(request * 1000)
        loop.until(lambda: any(connection._blocked for connection in server._connections))
        (connection,) = server._connections
        assert len(connection._http.trailing_data[0]) <= 2 * web.MAX_HEAD_BYTES


def test_pipelined_requests_are_not_read_ahead(loop: Loop, server: WebServer) -> None:
    """Requests come out of the kernel as they are answered, so that a long pipeline fills no memory of ours."""
    held: list[int] = []
    count = 2000
    with connect(server) as client:
        reader = threading.Thread(target=read_all, args=(client,))
        reader.start()
        client.sendall(GET.replace(b"GET /metrics", b"HEAD /-/healthy") * count)

        def done() -> bool:
            held.extend(len(connection._http.trailing_data[0]) for connection in server._connections)
            return server.counts.requests["/-/healthy", 200] == count

        loop.until(done)
        client.shutdown(socket.SHUT_WR)
        reader.join(PATIENCE)
    assert 0 < max(held) <= 2 * web.MAX_HEAD_BYTES


def test_handler_sees_the_request(loop: Loop) -> None:
    """Path, query and lower-case headers reach the handler; a repeated header is one list; a proxy's form is a path."""
    seen: list[Request] = []

    def look(request: Request) -> Response:
        seen.append(request)
        return healthy(request)

    with serving(loop, routes={"/look": look}) as server:
        lines = b"Host: h\r\nAccept: a\r\nACCEPT: b\r\nConnection: close\r\n\r\n"
        exchange(server, b"GET http://h:9846/look?x=1&y=?2 HTTP/1.1\r\n" + lines)
    headers = {"host": "h", "accept": "a, b", "connection": "close"}
    assert seen == [Request("GET", "/look", "x=1&y=?2", headers)]


def test_unknown_page_names_those_there_are(server: WebServer) -> None:
    """A 404 helps who mistyped."""
    answer = fetch(server, "/metric")
    assert answer.status == 404
    assert all(path in answer.body.decode() for path in ROUTES)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "BREW"])
def test_other_methods_are_refused(server: WebServer, method: str) -> None:
    """Nothing can be changed here, and the answer says what can be done."""
    answer = fetch(server, method=method)
    assert answer.status == 405
    assert answer.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("framing", [b"Content-Length: 5\r\n\r\nhello", b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"])
def test_request_body_is_refused(server: WebServer, framing: bytes) -> None:
    """A GET with a body is not read on: 413, and the connection ends."""
    assert status_of(exchange(server, ENTRY + framing)) == 413


def test_client_that_waits_for_leave_to_send_a_body_gets_an_answer(server: WebServer) -> None:
    """`Expect: 100-continue` is answered by the refusal at once."""
    sent = ENTRY.replace(b"GET", b"POST") + b"Content-Length: 999\r\nExpect: 100-continue\r\n\r\n"
    assert status_of(exchange(server, sent)) == 405


@pytest.mark.parametrize(
    "sent",
    [
        b"garbage\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # how TLS begins
        b"GET /metrics HTTP/1.1\r\n\r\n",  # no Host
        b"GET /metrics\r\n\r\n",
        ENTRY + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        ENTRY + b"Broken header\r\n\r\n",
    ],
)
def test_malformed_request_is_answered_with_400(server: WebServer, sent: bytes) -> None:
    """What is not HTTP gets told so and loses its connection."""
    assert status_of(exchange(server, sent)) == 400


def test_oversized_head_is_refused(server: WebServer) -> None:
    """Headers without end are cut off at a fixed size, and the client can read why."""
    assert status_of(exchange(server, ENTRY + b"X-Filler: " + bytes(64 * 1024).replace(b"\0", b"x"))) == 431


def test_fault_of_a_handler_is_answered_and_logged_once_a_minute(
    server: WebServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler that raises costs its client an answer; the server goes on, and its log is not flooded."""
    for _ in range(3):
        assert fetch(server, "/broken").status == 500
    assert fetch(server).status == 200
    (record,) = caplog.records
    assert record.exc_info
    assert "/broken" in record.message


def test_requests_are_counted_by_route(server: WebServer) -> None:
    """Known paths are counted by name, everything else as one."""
    for path in ("/metrics", "/metrics", "/a", "/b"):
        fetch(server, path)
    exchange(server, b"garbage\r\n\r\n")
    assert server.counts.requests == {("/metrics", 200): 2, ("other", 404): 2, ("other", 400): 1}


def test_names_below_a_route(loop: Loop) -> None:
    """A route that ends in a slash stands for each name below it, counts them as one, and for nothing deeper."""

    def named(request: Request) -> Response:
        return Response(200, request.path.encode() * 200)

    routes = {"/": healthy, "/runs": healthy, "/runs/": named}
    with serving(loop, routes=routes) as server:
        for path in ("/runs/1", "/runs/2", "/runs/"):
            assert fetch(server, path, accept_encoding="identity").body == path.encode() * 200
            assert gzip.decompress(fetch(server, path, accept_encoding="gzip").body) == path.encode() * 200
        for path in ("/other", "/runs/1/2", "/deep/runs/1"):
            assert fetch(server, path).status == 404
        assert server.counts.requests == {("/runs/", 200): 6, ("other", 404): 3}
        assert len(server._gzipped) == 1


def test_pages_forbid_what_they_do_not_need(loop: Loop) -> None:
    """A browser runs nothing on our pages unless the handler's own policy allows it."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    routes: dict[str, Handler] = {
        "/plain": healthy,
        "/styled": lambda _: Response(200, b"<p>", "text/html", {"content-security-policy": policy}),
    }
    with serving(loop, routes=routes) as server:
        plain, styled = fetch(server, "/plain").headers, fetch(server, "/styled").headers
    assert plain["x-content-type-options"] == "nosniff"
    assert plain["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
    assert styled["content-security-policy"] == policy


# Compression


def test_page_is_compressed_for_who_accepts_it(server: WebServer) -> None:
    """Prometheus gets gzip; caches are told that the answer depends on it."""
    answer = fetch(server, Accept_Encoding="gzip")
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.headers["vary"] == "accept-encoding"
    assert gzip.decompress(answer.body) == PAGE
    assert fetch(server).headers["vary"] == "accept-encoding"


def test_page_is_compressed_once(loop: Loop) -> None:
    """All scrapes between two polls share one compression, the next page gets its own."""
    pages = [PAGE, PAGE, PAGE[:-1]]
    with serving(loop, routes={"/metrics": lambda _: Response(200, pages.pop(0))}) as server:
        kept = []
        for _ in range(3):
            answer = fetch(server, Accept_Encoding="gzip")
            kept.append(server._gzipped["/metrics"][1])
            assert answer.body == kept[-1]
        server.forget_pages()
        assert not server._gzipped
    assert kept[0] is kept[1]
    assert zlib.decompress(kept[2], wbits=31) == PAGE[:-1]


def test_short_page_is_not_compressed(server: WebServer) -> None:
    """Two bytes would only grow."""
    answer = fetch(server, "/-/healthy", Accept_Encoding="gzip")
    assert answer.body == b"OK"
    assert "content-encoding" not in answer.headers


def test_handlers_vary_is_kept(loop: Loop) -> None:
    """A page that depends on Accept says so beside what compression adds."""
    with serving(loop, routes={"/metrics": lambda _: Response(200, PAGE, headers={"vary": "accept"})}) as server:
        assert fetch(server).headers["vary"] == "accept, accept-encoding"


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ("", False),
        ("gzip", True),
        ("deflate, GZIP;q=0.5", True),
        ("br;q=1.0, gzip; q=0.8, *;q=0.1", True),
        ("*", True),
        ("gzip;q=0", False),
        ("gzip;q=0.000, *", False),
        ("*;q=0", False),
        ("deflate, br", False),
        ("gzip;q=high", False),
        ("gzip;q=nan", False),
        ("identity", False),
        (",;=,", False),
    ],
)
def test_accept_encoding(header: str, accepted: bool) -> None:  # noqa: FBT001 - a row of the table above
    """Gzip is sent to those only that allow it."""
    assert accepts_gzip(header) is accepted


# Slow clients


@pytest.mark.parametrize("sent", [b"", b"GET /metr", ENTRY])
def test_request_has_a_deadline(loop: Loop, sent: bytes) -> None:
    """A client that does not finish its request is told so, or cut without a word if it said nothing."""
    with serving(loop, timeout=SHORT) as server, connect(server, sent) as client:
        answer = read_all(client)
        assert status_of(answer) == 408 if sent else answer == b""
        assert server.counts.timed_out == 1


@pytest.mark.parametrize("first", [b"", GET.replace(b"/metrics", b"/-/healthy")])
def test_dripping_does_not_move_the_deadline(loop: Loop, first: bytes) -> None:
    """A client that sends a byte now and then is cut like one that sends none, in its first request or a later one."""
    with serving(loop, timeout=SHORT, keep_alive=PATIENCE) as server, connect(server, first) as client:
        if first:
            assert status_of(client.recv(1 << 16)) == 200
        client.sendall(ENTRY + b"X-Drip: ")
        client.settimeout(SHORT / 10)
        answer = b""
        for _ in range(1000):
            client.sendall(b"x")
            with suppress(TimeoutError):
                answer = client.recv(1 << 16)
                break
        assert status_of(answer) == 408


def test_pipelined_request_has_a_deadline(loop: Loop) -> None:
    """The bytes left over from one read begin the next request's time."""
    with serving(loop, timeout=SHORT, keep_alive=PATIENCE) as server:
        assert b"408 Request Timeout" in exchange(server, GET + b"GET")


@pytest.mark.parametrize("requests", [1, 2])
def test_client_that_does_not_read_is_cut(loop: Loop, requests: int) -> None:
    """A response has a deadline as well, whatever the client has asked for besides."""
    sent = GET.replace(b"/metrics", b"/huge") * requests
    with serving(loop, timeout=SHORT) as server, connect(server, sent, receive_buffer=4096) as client:
        loop.until(lambda: server.counts.timed_out == 1 and server.open_connections == 0)
        wait_until_cut(client)


def test_slow_reader_in_time_gets_everything(server: WebServer) -> None:
    """A page larger than all buffers arrives whole, however small the pieces are read."""
    with connect(server, LAST_GET.replace(b"/metrics", b"/huge"), receive_buffer=8192) as client:
        assert read_all(client).endswith(b"\r\n\r\n" + HUGE)


def test_slow_readers_share_the_page(loop: Loop) -> None:
    """What waits for a slow reader is a view of the page: many of them cost no more pages than one."""
    with serving(loop, timeout=PATIENCE) as server, ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(connect(server, GET.replace(b"/metrics", b"/huge"), receive_buffer=4096))
        loop.until(lambda: sum(connection._blocked for connection in server._connections) == 5)
        for connection in server._connections:
            assert connection._unsent.obj is HUGE
            assert connection._transport.get_write_buffer_size() <= 2 * web.WRITE_BYTES


def test_idle_connection_ends_without_counting_as_slow(loop: Loop) -> None:
    """A kept connection in silence is closed in the end, which is no fault of its client."""
    with serving(loop, keep_alive=SHORT) as server, connect(server, GET) as client:
        assert read_all(client).endswith(PAGE)
        assert server.counts.timed_out == 0


def test_refused_client_that_keeps_sending_can_read_why(loop: Loop) -> None:
    """An answer is not lost to a reset because the client's bytes were still coming."""
    with serving(loop) as server, connect(server, b"garbage\r\n\r\n") as client:
        loop.until(lambda: server.counts.requests["other", 400] == 1)
        for _ in range(100):
            client.sendall(bytes(10_000))
        assert status_of(read_all(client)) == 400


def test_refused_client_that_never_stops_is_cut(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The patience with a refused client ends."""
    monkeypatch.setattr(web, "LINGER_SECONDS", SHORT)
    with serving(loop) as server, connect(server, b"garbage\r\n\r\n") as client:
        assert status_of(read_all(client)) == 400
        loop.until(lambda: server.open_connections == 0)


def test_full_server_cuts_the_client_without_progress_for_longest(loop: Loop) -> None:
    """A new client takes the slot of the one that has asked nothing for longest, not of one that is being answered."""
    with serving(loop, max_connections=2, timeout=PATIENCE) as server, ExitStack() as stack:
        first = stack.enter_context(connect(server, receive_buffer=4096))
        loop.until(lambda: server.open_connections == 1)
        second = stack.enter_context(connect(server))
        loop.until(lambda: server.open_connections == 2)
        first.sendall(LAST_GET.replace(b"/metrics", b"/huge"))
        loop.until(lambda: server.counts.requests["/huge", 200] == 1)
        assert fetch(server).status == 200
        wait_until_cut(second)
        assert server.counts.evicted == 1
        assert read_all(first).endswith(HUGE)


def test_thousand_slow_clients_cannot_keep_a_scrape_out(loop: Loop) -> None:
    """Scrapes are answered, whole and at once, beside a thousand clients slow in every way."""
    slow = [b"", b"GET /metr", GET, ENTRY] * 10 + [GET.replace(b"/metrics", b"/huge"), GET * 20]
    with descriptors(2000), serving(loop, timeout=PATIENCE) as server, ExitStack() as stack:
        for number in range(1000):
            stack.enter_context(connect(server, slow[number % len(slow)], receive_buffer=4096))
            if number % 100 == 99:
                assert fetch(server).body == PAGE
        assert fetch(server).body == PAGE
        assert server.open_connections <= 256
        assert server.counts.evicted >= 1000 - 256
        assert server.counts.timed_out == 0


def test_starts_no_thread(server: WebServer) -> None:
    """Requests are served on the loop alone."""
    before = threading.active_count()
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(connect(server, GET))
            assert fetch(server).status == 200
        assert threading.active_count() == before


def test_client_that_resets_does_no_harm(loop: Loop, server: WebServer) -> None:
    """A connection torn down amid a response is forgotten."""
    client = connect(server, GET.replace(b"/metrics", b"/huge"), receive_buffer=4096)
    loop.until(lambda: any(connection._blocked for connection in server._connections))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    loop.until(lambda: server.open_connections == 0)
    assert fetch(server).status == 200


@contextmanager
def no_free_descriptor() -> Iterator[None]:
    """Let this process open no further file."""
    lowest_free = os.dup(0)
    os.close(lowest_free)
    with descriptors(lowest_free):
        yield


def test_without_descriptors_an_old_client_makes_room(loop: Loop, server: WebServer) -> None:
    """Out of file descriptors, the server takes one back from an idle client to answer a scrape."""
    with connect(server) as idle, socket.socket() as scrape:
        loop.until(lambda: server.open_connections == 1)
        with no_free_descriptor():
            scrape.settimeout(PATIENCE)
            scrape.connect(server.address)
            scrape.sendall(LAST_GET)
            assert read_all(scrape).endswith(PAGE)
        wait_until_cut(idle)


def test_without_descriptors_and_clients_the_server_waits(
    loop: Loop, server: WebServer, caplog: pytest.LogCaptureFixture
) -> None:
    """With nothing to take back, accepting is tried again at intervals, logged once, until it works."""
    with socket.socket() as scrape:
        scrape.settimeout(PATIENCE)
        with no_free_descriptor():
            scrape.connect(server.address)
            loop.until(lambda: server.counts.accept_errors == 2)
        scrape.sendall(LAST_GET)
        assert read_all(scrape).endswith(PAGE)
    assert ["cannot accept" in record.message for record in caplog.records] == [True]


def test_stops_while_it_waits_for_descriptors(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause in accepting outlives the server without a trace."""
    monkeypatch.setattr(web, "NO_SLOT_PAUSE_SECONDS", SHORT)
    with serving(loop) as server, socket.socket() as client:
        with no_free_descriptor():
            client.connect(server.address)
            loop.until(lambda: server.counts.accept_errors > 0)
            loop.run(server.stop())
        loop.run(asyncio.sleep(2 * SHORT))


def test_no_bytes_kill_the_server(loop: Loop) -> None:
    """Whatever arrives, the connection ends in order when its client has done, and the next client is served."""
    request = st.tuples(
        st.sampled_from([b"GET", b"HEAD", b"POST", b"CONNECT", b"PRI", b"\xff"]),
        st.sampled_from([b"/metrics", b"*", b"http://h/metrics", b"h:1", b"//", b"/\xff", b"/?" + b"x" * 20_000]),
        st.sampled_from([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9"]),
        st.lists(
            st.sampled_from(
                [
                    b"Host: h",
                    b"Connection: close",
                    b"Connection: upgrade",
                    b"Upgrade: websocket",
                    b"Content-Length: 4",
                    b"Transfer-Encoding: chunked",
                    b"Transfer-Encoding: gzip",
                    b"Expect: 100-continue",
                    b"Accept-Encoding: gzip;q=\xff",
                    b" folded",
                ]
            ),
            max_size=4,
        ),
    ).map(lambda it: b" ".join(it[:3]) + b"\r\n" + b"".join(line + b"\r\n" for line in it[3]) + b"\r\n")
    pieces = st.lists(st.one_of(request, st.binary(max_size=200)), max_size=6)

    with serving(loop) as server:

        @settings(max_examples=200, deadline=None, derandomize=True)
        @given(pieces)
        def check(sent: list[bytes]) -> None:
            with connect(server) as client:
                for piece in sent:
                    client.sendall(piece)
                client.shutdown(socket.SHUT_WR)
                read_all(client)
            assert fetch(server, "/-/healthy").status == 200
            assert loop.complaints == []

        check()


# Listening and stopping


def start_error(loop: Loop, host: str, port: int) -> str:
    """Return what the server says when it cannot listen."""
    with pytest.raises(OSError, match="cannot listen on") as caught:
        loop.run(WebServer(ROUTES).start(host, port))
    return str(caught.value)


def test_taken_port_is_named(loop: Loop, server: WebServer) -> None:
    """Who finds the port taken learns how to see by whom."""
    message = start_error(loop, *server.address)
    assert f"127.0.0.1:{server.address[1]}" in message
    assert "ss -ltnp" in message


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("192.0.2.1", 9846, "no interface of this machine has this address"),
        ("not..a.name", 9846, "give an IP address"),
        ("127.0.0.1", 65536, "a port is a number"),
        ("127.0.0.1", -1, "a port is a number"),
    ],
)
def test_impossible_address_is_explained(loop: Loop, host: str, port: int, words: str) -> None:
    """A bad address is refused with what to do about it."""
    assert words in start_error(loop, host, port)


def test_forbidden_port_is_explained(loop: Loop) -> None:
    """A user without the right to low ports learns of it."""
    if int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text(encoding="ascii")) <= 1:
        pytest.skip("this machine lets everyone take any port")
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # for all threads of this process, until restored
    try:
        assert "choose a higher port" in start_error(loop, "127.0.0.1", 1)
    finally:
        os.seteuid(user)


def has_ipv6() -> bool:
    """Tell whether this machine has the address ::1."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_serves_ipv6(loop: Loop) -> None:
    """An IPv6 address is served like any other."""
    with serving(loop, host="::1") as server:
        assert server.address[0] == "::1"
        assert fetch(server).body == PAGE


@pytest.mark.parametrize("host", ["localhost", "", "0.0.0.0"])  # noqa: S104 - a free port, for the length of a test
def test_name_and_wildcard_serve_ipv4(loop: Loop, host: str) -> None:
    """Of a name, and of all interfaces, every address has the same port."""
    with serving(loop, host=host) as server, socket.create_connection(("127.0.0.1", server.address[1])) as client:
        assert {listener.getsockname()[1] for listener in server._listeners} == {server.address[1]}
        client.settimeout(PATIENCE)
        client.sendall(LAST_GET)
        assert read_all(client).endswith(PAGE)


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_ipv6_wildcard_serves_ipv4_too(loop: Loop) -> None:
    """`::` means all interfaces, as it does for Prometheus."""
    with serving(loop, host="::") as server, socket.create_connection(("127.0.0.1", server.address[1])) as client:
        client.settimeout(PATIENCE)
        client.sendall(LAST_GET)
        assert read_all(client).endswith(PAGE)


def test_stops_with_clients_of_every_kind(loop: Loop) -> None:
    """Stopping waits for nobody who is slow, and the port is free at once."""
    with serving(loop, timeout=1000, keep_alive=1000) as server, ExitStack() as stack:
        for sent in (b"", b"GET /metr", GET, GET.replace(b"/metrics", b"/huge"), b"garbage\r\n\r\n"):
            stack.enter_context(connect(server, sent, receive_buffer=4096))
        loop.until(lambda: server.open_connections == 5)
        address = server.address
        transports = [connection._transport for connection in server._connections]

        async def stop() -> list[int]:
            await server.stop()
            return [transport.get_extra_info("socket").fileno() for transport in transports]

        assert loop.run(stop()) == [-1] * 5
        again = WebServer(ROUTES)
        loop.run(again.start(*address))
        assert fetch(again).body == PAGE
        loop.run(again.stop())


def test_stops_while_a_client_joins(loop: Loop, server: WebServer) -> None:
    """A client accepted at the last moment is not left behind."""
    with socket.socket() as client:
        client.settimeout(PATIENCE)

        async def accept_and_stop() -> None:
            client.connect(server.address)  # the kernel completes it alone
            server._accept(server._listeners[0])
            await server.stop()

        loop.run(accept_and_stop())
        wait_until_cut(client)


def test_stop_lets_a_response_finish(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape in progress when the daemon is told to end gets its whole page."""
    monkeypatch.setattr(web, "STOP_SECONDS", PATIENCE)
    with serving(loop) as server, ExitStack() as stack:
        fetch(server)
        loop.until(lambda: server.open_connections == 0)
        sent = GET.replace(b"/metrics", b"/huge")
        client = stack.enter_context(connect(server, sent, receive_buffer=4096))
        loop.until(lambda: any(connection._blocked for connection in server._connections))
        stopping = asyncio.run_coroutine_threadsafe(server.stop(), loop._loop)
        loop.until(lambda: all(connection._last for connection in server._connections))
        assert read_all(client).endswith(b"\r\n\r\n" + HUGE)
        client.close()
        stopping.result(PATIENCE)
