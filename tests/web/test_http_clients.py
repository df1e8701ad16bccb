"""Limits and deadlines of the HTTP server: no client keeps others from their response."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import resource
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
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
    fetch,
    parse_status,
    read_all,
    run_server,
    wait_until_closed,
)

from gpuwarden.web import http_connection, http_server
from gpuwarden.web.http_messages import HttpRequest, HttpResponse
from gpuwarden.web.http_server import WebServer


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


@pytest.mark.parametrize("first", [b"", GET.replace(b"/metrics", b"/-/healthy")])
@pytest.mark.parametrize("sent", [b"", b"GET /metr", ENTRY + b"X-Drip: "])
def test_request_has_a_deadline(loop: Loop, server: WebServer, first: bytes, sent: bytes) -> None:
    """A client that does not complete a request in time is disconnected, even if it sends single bytes."""
    with connect(server, first) as client:
        if first:
            loop.wait_until(lambda: server.router.requests["/-/healthy", 200] == 1)
            while not client.recv(1 << 16).endswith(b"OK"):
                pass
        client.sendall(sent)
        loop.wait_until(lambda: bool(server.pool.connections))
        (connection,) = server.pool.connections
        loop.wait_until(lambda: not sent or (connection._http.trailing_data[0] == sent and not connection._idle))
        loop.advance(server.pool.timeout * 0.9)
        if sent:
            client.sendall(b"x")
            loop.wait_until(lambda: connection._http.trailing_data[0] == sent + b"x")
        loop.advance(server.pool.timeout * 0.2)
        if first and not sent:  # idle within its limit
            assert server.pool.connections
            loop.advance(server.pool.keep_alive)
        assert read_all(client) == b""
        assert server.pool.timed_out == (0 if first and not sent else 1)


def test_rest_of_a_read_starts_the_next_deadline(loop: Loop, server: WebServer) -> None:
    """The rest of a read starts the deadline of the next request, not the longer idle timeout."""
    with connect(server, GET.replace(b"/metrics", b"/-/healthy") + b"GET") as client:
        loop.wait_until(lambda: server.router.requests["/-/healthy", 200] == 1)
        loop.advance(server.pool.timeout * 1.1)
        assert parse_status(read_all(client)) == 200
        assert server.pool.timed_out == 1


def test_client_that_does_not_read_is_disconnected(loop: Loop, server: WebServer) -> None:
    """Its other requests stay in the kernel, and all such clients share the bytes of one page."""
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(server, GET_HUGE * 1000, receive_buffer=4096)) for _ in range(5)]
        loop.wait_until(lambda: [each.responding for each in server.pool.connections] == [True] * 5)
        assert all(
            len(each._http.trailing_data[0]) <= 2 * http_connection.MAX_HEAD_BYTES for each in server.pool.connections
        )
        loop.advance(server.pool.timeout * 1.1)
        loop.wait_until(lambda: not server.pool.connections)
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
        loop.wait_until(lambda: server.router.requests["other", 400] == 1)
        for _ in range(100):
            client.sendall(bytes(10_000))
        assert parse_status(read_all(client)) == 400
        loop.advance(http_connection.CLOSE_SECONDS * 1.1)
        loop.wait_until(lambda: not server.pool.connections)
        assert server.pool.timed_out == 0


def test_full_server_closes_the_least_recently_active_client(loop: Loop) -> None:
    """A client that is being served is kept."""
    with run_server(loop, max_connections=2) as server, ExitStack() as stack:
        first = stack.enter_context(connect(server, receive_buffer=4096))
        loop.wait_until(lambda: len(server.pool.connections) == 1)
        second = stack.enter_context(connect(server))
        loop.wait_until(lambda: len(server.pool.connections) == 2)
        first.sendall(LAST_GET.replace(b"/metrics", b"/huge"))
        loop.wait_until(lambda: server.router.requests["/huge", 200] == 1)
        assert fetch(server).status == 200
        wait_until_closed(second)
        assert server.pool.evicted == 1
        assert read_all(first).endswith(HUGE)


def test_evicted_client_whose_handler_goes_on(loop: Loop) -> None:
    """A handler that loses its cancellation ends with its client; the loop has no unhandled error."""

    async def stubborn(_: HttpRequest) -> HttpResponse:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(MAX_WAIT_SECONDS)
        return HttpResponse(200, b"late")

    with run_server(loop, routes={**ROUTES, "/stubborn": stubborn}, max_connections=1) as server:
        with connect(server, GET.replace(b"/metrics", b"/stubborn")) as client:
            loop.wait_until(lambda: len(server.pool.connections) == 1)
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
    with run_server(loop, routes=routes) as server, ExitStack() as stack:
        for asked in range(1, 41):
            stack.enter_context(connect(server, GET.replace(b"/metrics", b"/runs/"), receive_buffer=4096))
            loop.wait_until(lambda asked=asked: server.router.requests["/runs/", 200] == asked)  # type: ignore[misc]
            loop.wait_until(lambda: CountedBytes.held <= 17 * size)
        assert len(fetch(server, "/runs/").body) == size
        assert fetch(server, "/huge").body == HUGE
        assert fetch(server).body == PAGE


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
        loop.wait_until(lambda: len(server.pool.connections) <= 256)
        assert server.pool.evicted >= 1000 - 256
        assert threading.active_count() == threads


def test_connection_reset_is_handled(loop: Loop, server: WebServer) -> None:
    """A connection reset during a response is dropped."""
    client = connect(server, GET_HUGE, receive_buffer=4096)
    loop.wait_until(lambda: any(connection.responding for connection in server.pool.connections))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    loop.wait_until(lambda: not server.pool.connections)
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
            client.settimeout(MAX_WAIT_SECONDS)
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
        loop.wait_until(lambda: len(server.pool.connections) == 1)
        with no_free_descriptor():
            scrape.settimeout(MAX_WAIT_SECONDS)
            scrape.connect(server.address)
            scrape.sendall(LAST_GET)
            assert read_all(scrape).endswith(PAGE)
        wait_until_closed(idle)


def test_without_descriptors_and_clients_the_server_waits(
    loop: Loop, server: WebServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a connection to close, accepting is retried at intervals, logged once, until it works or is stopped."""
    with socket.socket() as scrape:
        scrape.settimeout(MAX_WAIT_SECONDS)
        with no_free_descriptor():
            scrape.connect(server.address)
            for count in (1, 2):
                loop.wait_until(lambda: server.accept_errors == count)  # noqa: B023 - called within the turn
                loop.advance(http_server.NO_DESCRIPTOR_PAUSE_SECONDS)
            scrape.sendall(LAST_GET)
        loop.advance(http_server.NO_DESCRIPTOR_PAUSE_SECONDS)
        assert read_all(scrape).endswith(PAGE)
    assert ["cannot accept" in record.message for record in caplog.records] == [True]
    loop.wait_until(lambda: not server.pool.connections)  # else its descriptor is freed below
    with socket.socket() as client, no_free_descriptor():
        before = server.accept_errors
        client.connect(server.address)
        loop.wait_until(lambda: server.accept_errors > before)
        loop.run(server.stop())
