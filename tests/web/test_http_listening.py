"""Addresses that the HTTP server listens on, and how it stops."""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from served_pages import (
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
    read_all,
    run_server,
    wait_until_closed,
)

from gpuwarden.web import http_server
from gpuwarden.web.http_server import WebServer


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
        with (
            run_server(loop, host=host) as server,
            socket.create_connection(("127.0.0.1", server.address[1])) as client,
        ):
            assert {listener.getsockname()[1] for listener in server._listeners} == {server.address[1]}
            client.settimeout(MAX_WAIT_SECONDS)
            client.sendall(LAST_GET)
            assert read_all(client).endswith(PAGE)
    if has_ipv6():
        with run_server(loop, host="::1") as server:
            assert fetch(server).body == PAGE


def test_stop_with_clients_in_every_state(loop: Loop, server: WebServer) -> None:
    """Stopping does not wait for slow clients, leaves no socket open, and the port is free at once."""
    with ExitStack() as stack:
        for sent in (b"", b"GET /metr", GET, GET_HUGE, b"garbage\r\n\r\n"):
            stack.enter_context(connect(server, sent, receive_buffer=4096))
        loop.wait_until(lambda: len(server.pool.connections) == 5)
        late = stack.enter_context(socket.socket())  # accepted at the last moment, if at all
        late.settimeout(MAX_WAIT_SECONDS)
        late.connect(server.address)
        address, connections = server.address, list(server.pool.connections)
        loop.run(server.stop())
        assert {connection.client.fileno() for connection in connections} == {-1}
        wait_until_closed(late)
        again = WebServer(ROUTES)
        loop.run(again.start(*address))
        assert fetch(again).body == PAGE
        loop.run(again.stop())


def test_stop_lets_a_response_finish(loop: Loop, server: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape in progress during shutdown gets its whole page."""
    monkeypatch.setattr(http_server, "STOP_SECONDS", MAX_WAIT_SECONDS)
    with connect(server, GET_HUGE, receive_buffer=4096) as client:
        loop.wait_until(lambda: any(connection.responding for connection in server.pool.connections))
        stopping = asyncio.run_coroutine_threadsafe(server.stop(), loop.loop)
        loop.wait_until(lambda: server.pool.stopping)
        assert read_all(client).endswith(b"\r\n\r\n" + HUGE)
        client.close()
        stopping.result(MAX_WAIT_SECONDS)
