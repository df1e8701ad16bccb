"""HTTP server over real sockets: its responses, their headers and compression, and requests that it rejects."""

from __future__ import annotations

import gzip
import http.client
import socket
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served_pages import (
    ENTRY,
    GET,
    GET_HUGE,
    HUGE,
    LAST_GET,
    MAX_WAIT_SECONDS,
    PAGE,
    ROUTES,
    Loop,
    connect,
    exchange,
    fetch,
    healthy,
    parse_status,
    read_all,
    run_server,
)

from gpuwarden.web import http_connection, http_messages
from gpuwarden.web.http_messages import HttpRequest, HttpResponse, accepts_gzip
from gpuwarden.web.http_server import WebServer


def test_response_is_delivered_unchanged(loop: Loop, server: WebServer) -> None:
    """Bytes, type and length are right with keep-alive, HTTP/1.0, single bytes, half-closed connections and HEAD."""
    connection = http.client.HTTPConnection(*server.address, timeout=MAX_WAIT_SECONDS)
    for _ in range(2):
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        assert answer.read() == PAGE
        assert (answer.headers["content-type"], answer.headers["content-length"]) == (
            "text/plain; version=0.0.4",
            str(len(PAGE)),
        )
        loop.wait_until(lambda: len(server.pool.connections) == 1)
    connection.close()
    loop.wait_until(lambda: not server.pool.connections)
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

    with run_server(loop, routes={"/look": record}) as server:
        lines = b"Host: h\r\nAccept: a\r\nACCEPT: b\r\nConnection: close\r\n\r\n"
        exchange(server, b"GET http://h:9846/look?x=1&y=?2 HTTP/1.1\r\n" + lines)
    headers = {"host": "h", "accept": "a, b", "connection": "close"}
    assert received == [HttpRequest("GET", "/look", "x=1&y=?2", headers, address="127.0.0.1")]


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
    found = {sent: parse_status(exchange(server, sent)) for sent in refused}
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

        loop.wait_until(done)
        reader.join(MAX_WAIT_SECONDS)
    assert answers[0].count(b"HTTP/1.1 200 OK") == 2001
    assert answers[0].endswith(b"\r\n\r\n" + PAGE)
    assert 0 < max(held) <= 2 * http_connection.MAX_HEAD_BYTES


def test_large_response_is_compressed_on_a_thread(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop goes on meanwhile; a page of usual size takes less time than a thread would."""
    threads: list[threading.Thread] = []

    def compressed(body: bytes) -> bytes:
        threads.append(threading.current_thread())
        return body

    monkeypatch.setattr(http_messages, "_gzip", compressed)
    with run_server(loop) as server:
        fetch(server, "/metrics", accept_encoding="gzip")
        fetch(server, "/huge", accept_encoding="gzip")
    assert [each is loop._thread for each in threads] == [True, False]


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
