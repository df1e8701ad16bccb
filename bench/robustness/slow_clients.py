"""Scrapes next to idle connections and slow readers; `slow_clients.py PORT IDLE SLOW` holds them until killed."""

from __future__ import annotations

import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from services import Daemon, Process, ending, until
from stage import Figure, Scraper, count_by_reason, prefix, serving, soundness, workplace

IDLE, SLOW = 1000, 50
BAR_MILLISECONDS = 50.0
READ_BYTES = 256  # ten times a second of a slow reader
RECONNECT_SECONDS = 5.0
IDLE_REQUEST = b"HEAD /-/healthy HTTP/1.1\r\nHost: localhost\r\n\r\n"  # then idle
SLOW_REQUEST = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


def connect(port: int, request: bytes) -> socket.socket:
    """Open a connection with small buffers and send the request."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(request)
    client.setblocking(False)  # noqa: FBT003 - the standard library's signature
    return client


def hold(port: int, idle: int, slow: int) -> None:
    """Hold the connections, and open each that the daemon closes again after some seconds; never returns."""
    requests = [IDLE_REQUEST] * idle + [SLOW_REQUEST * 100] * slow
    clients: list[socket.socket | None] = [connect(port, request) for request in requests]
    reconnects: deque[tuple[float, int]] = deque()
    served = select.poll()
    served.register(clients[-1] or 0, select.POLLIN)
    served.poll()  # the last one in the queue
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        time.sleep(0.1)
        for number, client in enumerate(clients):
            if client and is_closed(client):
                client.close()
                clients[number] = None
                reconnects.append((time.monotonic() + RECONNECT_SECONDS, number))
        while reconnects and reconnects[0][0] <= time.monotonic():
            number = reconnects.popleft()[1]
            clients[number] = connect(port, requests[number])


def is_closed(client: socket.socket) -> bool:
    """Read a little; return whether the daemon has closed the connection."""
    try:
        return not client.recv(READ_BYTES)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def measure_scrapes(seconds: float) -> Iterator[Figure]:
    """Scrape next to one such client, with all of them served, and with more of them than connections are allowed."""
    for name, idle, slow, config in (
        ("one other client", 1, 0, ""),
        ("all held", IDLE, SLOW, "web: {max_connections: 2000}\n"),
        ("at the default limit of 256 connections", IDLE, SLOW, ""),
    ):
        with workplace() as folder, serving(folder, config) as daemon:
            yield from prefix(name, scrape_next_to(daemon, folder, idle, slow, seconds))


def scrape_next_to(daemon: Daemon, folder: Path, idle: int, slow: int, seconds: float) -> Iterator[Figure]:
    """Scrape for some seconds next to the clients."""
    command = [sys.executable, __file__, str(daemon.port), str(idle), str(slow)]
    clients = Process(command, folder / "clients.log", {"PYTHONPATH": os.pathsep.join(sys.path)})
    with ending(clients):
        until(lambda: "ready" in clients.output(), "the clients are connected")
        with Scraper(daemon, pause=0.05) as scraper:
            time.sleep(seconds)
    page = daemon.samples()
    lost = count_by_reason(page, "gpuwarden_http_connections_lost_total")
    if slow:
        yield Figure("connections closed", ", ".join(f"{reason} {n:.0f}" for reason, n in lost.items()) or "0")
    yield from scraper.figures(BAR_MILLISECONDS)
    yield from soundness(daemon)


if __name__ == "__main__":
    hold(*map(int, sys.argv[1:]))
