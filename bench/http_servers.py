"""Measure gpuwarden's HTTP server beside those it could have been: `python bench/http_servers.py`.

Every candidate serves the same page of about 155 KB from a process of its own; prometheus_client renders it for each
request, as it always does. CPU time is the server process's own, so a busy machine moves it little. A candidate that
is not installed is named and left out. Takes about two minutes.
"""

import asyncio
import resource
import socket
import subprocess  # noqa: TID251 - a benchmark starts the servers that it measures
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FAMILIES, GPUS = 33, 40
PAGE = b"".join(
    b'gpuwarden_gpu_family%d{uuid="GPU-%032d",link="%d",direction="received",unit="bytes"} %d.5\n' % (f, g, f, f * g)
    for f in range(FAMILIES)
    for g in range(GPUS)
)
REQUESTS = 400
SLOW_REQUESTS = 100
SLOW_CLIENTS = 200
FLOOD = 1200  # more than the 1024 open files that systemd and most shells allow a process
OPEN_FILES = 1024
ATTEMPT_SECONDS = 2.0
ATTACH_SECONDS = 15.0
HOST = "127.0.0.1"


def announce(port: int) -> None:
    """Tell the measuring process where this server listens."""
    print(port, flush=True)


def serve_gpuwarden() -> None:
    """Run the project's own server."""
    web = import_module("gpuwarden.web")

    async def main() -> None:
        server = web.WebServer({"/metrics": lambda _: web.Response(200, PAGE)})
        await server.start(HOST, 0)
        announce(server.address[1])
        await asyncio.Event().wait()

    asyncio.run(main())


def serve_asyncio_streams() -> None:
    """Run the least that answers: asyncio streams, no parser, no deadline, no limit."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % len(PAGE)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while b"\r\n\r\n" in (request := await reader.readuntil(b"\r\n\r\n")):
                writer.write(head + PAGE)
                await writer.drain()
                if b"Connection: close" in request:
                    break
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(answer, HOST, 0)
        announce(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


def serve_http_server() -> None:
    """Run the standard library's server, a thread for each connection."""
    http_server: Any = import_module("http.server")

    class Handler(http_server.BaseHTTPRequestHandler):  # type: ignore[misc] # imported by the one process that needs it
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:  # noqa: N802 - the name that http.server looks up
            self.send_response(200)
            self.send_header("Content-Length", str(len(PAGE)))
            self.end_headers()
            self.wfile.write(PAGE)

        def log_message(self, *_: object) -> None:
            pass

    server = http_server.ThreadingHTTPServer((HOST, 0), Handler)
    announce(server.server_address[1])
    server.serve_forever()


def serve_prometheus_client() -> None:
    """Run prometheus_client's start_http_server over as many gauge samples, about the same number of bytes."""
    client: Any = import_module("prometheus_client")
    registry = client.CollectorRegistry()
    for family in range(FAMILIES):
        gauge = client.Gauge(
            f"gpuwarden_gpu_family{family}", "x", ["uuid", "link", "direction", "unit"], registry=registry
        )
        for gpu in range(GPUS):
            gauge.labels(f"GPU-{gpu:032d}", family, "received", "bytes").set(family * gpu + 0.5)
    server, thread = client.start_http_server(0, HOST, registry)
    announce(server.server_port)
    thread.join()


def serve_uvicorn() -> None:
    """Run uvicorn with h11 and a bare ASGI function."""
    uvicorn: Any = import_module("uvicorn")
    headers = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(PAGE))]

    async def app(_scope: object, _receive: object, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": PAGE})

    listener = socket.create_server((HOST, 0))
    announce(listener.getsockname()[1])
    config = uvicorn.Config(app, http="h11", loop="asyncio", lifespan="off", log_level="warning", access_log=False)
    asyncio.run(uvicorn.Server(config).serve([listener]))


def serve_aiohttp() -> None:
    """Run aiohttp."""
    web: Any = import_module("aiohttp.web")

    async def metrics(_: object) -> Any:
        return web.Response(body=PAGE, content_type="text/plain")

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics)])
    listener = socket.create_server((HOST, 0))
    announce(listener.getsockname()[1])
    web.run_app(app, sock=listener, print=None, access_log=None)


def serve_waitress() -> None:
    """Run waitress with its four threads."""
    headers = [("Content-Type", "text/plain"), ("Content-Length", str(len(PAGE)))]

    def app(_environ: object, start_response: Callable[[str, list[tuple[str, str]]], object]) -> list[bytes]:
        start_response("200 OK", headers)
        return [PAGE]

    server = import_module("waitress").create_server(app, host=HOST, port=0)
    announce(server.effective_port)
    server.run()


CANDIDATES: dict[str, tuple[str, Callable[[], None]]] = {
    "gpuwarden.web (asyncio, h11)": ("gpuwarden", serve_gpuwarden),
    "asyncio streams, unguarded": ("asyncio", serve_asyncio_streams),
    "uvicorn (h11, plain ASGI)": ("uvicorn", serve_uvicorn),
    "aiohttp": ("aiohttp", serve_aiohttp),
    "waitress": ("waitress", serve_waitress),
    "http.server threading": ("http", serve_http_server),
    "prometheus_client (renders)": ("prometheus_client", serve_prometheus_client),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """What requests cost in ms: CPU of the server (median of a request), latency; how many got no answer in time."""

    cpu: float
    p50: float
    p99: float
    failed: int


@dataclass(frozen=True, slots=True)
class Figures:
    """What one candidate measured; memory in MiB."""

    memory: float
    fresh: Cost
    kept: Cost
    crowded: Cost
    flooded: Cost
    attached: int
    flooded_memory: float
    threads: int


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, ended threads included, to the nanosecond (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


def status(pid: int, key: str) -> int:
    """Return a number from /proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))


def connect(port: int, receive_buffer: int = 0) -> socket.socket:
    """Open a connection that gives up after ATTEMPT_SECONDS; the kernel chooses its buffer unless told."""
    client = socket.socket()
    client.settimeout(ATTEMPT_SECONDS)
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect((HOST, port))
    return client


def get(client: socket.socket, *, close: bool) -> None:
    """Ask for the page and read all of it."""
    connection = b"Connection: close\r\n" if close else b""
    client.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n" + connection + b"\r\n")
    received = b""
    while b"\r\n\r\n" not in received:
        received += read(client)
    head, _, body = received.partition(b"\r\n\r\n")
    sizes = [int(line.partition(b":")[2]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
    missing = (sizes[0] if sizes else sys.maxsize) - len(body)
    while missing > 0 and (piece := client.recv(1 << 18)):
        missing -= len(piece)


def read(client: socket.socket) -> bytes:
    """Return what has arrived, at least a byte."""
    piece = client.recv(1 << 18)
    if not piece:
        raise ConnectionError("closed before the answer")
    return piece


def measure(pid: int, requests: int, request: Callable[[], None]) -> Cost:
    """Time requests one after the other; give up when three got no answer."""
    with suppress(OSError):
        request()  # pays for what is done once
    times: list[float] = []
    cpu: list[float] = []
    failed = 0
    while len(times) < requests and failed < 3:
        start, spent = time.perf_counter(), cpu_seconds(pid)
        try:
            request()
        except OSError:
            failed += 1
        else:
            times.append((time.perf_counter() - start) * 1e3)
            cpu.append((cpu_seconds(pid) - spent) * 1e3)
    return Cost(percentile(cpu, 50), percentile(times, 50), percentile(times, 99), failed)


def percentile(values: list[float], percent: int) -> float:
    """Return a percentile, 0 of no values (a Cost that has failures is not printed)."""
    return sorted(values)[len(values) * percent // 100] if values else 0.0


def measure_fresh(pid: int, port: int, requests: int) -> Cost:
    """Measure requests on a connection each."""

    def request() -> None:
        with connect(port) as client:
            get(client, close=True)

    return measure(pid, requests, request)


def measure_kept(pid: int, port: int) -> Cost:
    """Measure requests on one connection; none is answered if the server closes it after each."""
    with connect(port) as client:
        return measure(pid, REQUESTS, lambda: get(client, close=False))


@contextmanager
def slow_clients(port: int, count: int) -> Iterator[int]:
    """Keep clients attached and yield how many got in: half stop amid their request, half do not read the page."""
    clients: list[socket.socket] = []
    failures = 0
    end_of_attaching = time.monotonic() + ATTACH_SECONDS  # a full queue holds each client up for a second
    try:
        while len(clients) < count and failures < 3 and time.monotonic() < end_of_attaching:
            try:
                clients.append(connect(port, receive_buffer=4096))
                end = b"\r\n" if len(clients) % 2 else b""
                clients[-1].sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n" + end)
            except OSError:
                failures += 1
        yield len(clients)
    finally:
        for client in clients:
            client.close()


@contextmanager
def running(name: str) -> Iterator[tuple[int, int]]:
    """Start a candidate and yield its pid and port."""
    command = [sys.executable, __file__, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as server:
        try:
            assert server.stdout
            yield server.pid, int(server.stdout.readline())
        finally:
            server.kill()


def measure_candidate(name: str) -> Figures:
    """Take all figures of one candidate."""
    with running(name) as (pid, port):
        fresh = measure_fresh(pid, port, REQUESTS)
        kept = measure_kept(pid, port)
        memory = status(pid, "VmRSS") / 1024
        with slow_clients(port, SLOW_CLIENTS):
            crowded = measure_fresh(pid, port, SLOW_REQUESTS)
        with slow_clients(port, FLOOD) as attached:
            flooded = measure_fresh(pid, port, SLOW_REQUESTS)
            flooded_memory, threads = status(pid, "VmRSS") / 1024, status(pid, "Threads")
    return Figures(memory, fresh, kept, crowded, flooded, attached, flooded_memory, threads)


def compared(figure: float, ours: float) -> str:
    """Write a figure with its ratio to ours."""
    return f"{figure:.2f} ({figure / ours:.1f})"


def latency(cost: Cost) -> str:
    """Write median and 99th percentile, or that requests went unanswered."""
    return "**no answer**" if cost.failed else f"{cost.p50:.2f} / {cost.p99:.2f}"


def row(name: str, it: Figures, ours: Figures) -> str:
    """Write one line of the table."""
    cells = (
        name,
        compared(it.memory, ours.memory),
        compared(it.fresh.cpu, ours.fresh.cpu),
        latency(it.fresh),
        "-" if it.kept.failed else compared(it.kept.cpu, ours.kept.cpu),
        "-" if it.kept.failed else latency(it.kept),
        latency(it.crowded),
        f"{latency(it.flooded)} ({it.attached})",
        f"{it.flooded_memory:.0f}",
        str(it.threads),
    )
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Measure what is installed and print a Markdown table; ratios are to the first row."""
    allowed = max(FLOOD + 100, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))
    print(f"A page of {len(PAGE) / 1000:.0f} KB. CPU in ms a request, latency as p50 / p99 ms, memory in MiB.")
    print("In brackets: the ratio to gpuwarden.web, or how many clients got in. -: keeps no connection.\n")
    print("| server | RSS | CPU, new connection | latency | CPU, kept connection | latency ", end="")
    print(f"| latency beside {SLOW_CLIENTS} slow clients | beside {FLOOD} | RSS then | threads then |")
    print("|" + " --- |" * 10)
    absent = [name for name, (module, _) in CANDIDATES.items() if not find_spec(module)]
    ours: Figures | None = None
    for name in CANDIDATES:
        if name not in absent:
            figures = measure_candidate(name)
            ours = ours or figures
            print(row(name, figures, ours), flush=True)
    if absent:
        print("\nNot installed, left out: " + ", ".join(absent))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
        CANDIDATES[sys.argv[1]][1]()
    else:
        main()
