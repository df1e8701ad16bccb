"""Robustness against fuzzed messages and requests; `fuzzing.py messages|requests TARGET COUNT SEED` is one client.

Messages and requests are valid ones that a seeded generator mutates. The client of messages prints how many it sent,
and the client of requests how many answers of each status it got.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from services import Daemon, Process, ending
from stage import CountedRun, Figure, Scraper, count_by_reason, equal, resident, serving, soundness, workplace

from mocked import ROOT

CONFIG = "runs: {max_per_user: 512, new_per_minute: 60000}\npoll: {interval: 200ms}\n"
CLIENTS = 4
CONNECTIONS = 8  # of one client, as the daemon reads 800 messages a second of each
BATCH = 16  # requests that are pipelined
VALUES: tuple[object, ...] = (None, True, -1, 0, 1e308, 2**63, "", "x" * 3000, "\0", "\ud800", [], {}, [[]], {"": {}})
TOKENS = (b"\0", b"\xff", b"\r\n", b"\n", b'"', b"{", b"[" * 600, b"9" * 400, b": ", b"%00", b"..", b"\xe2\x80\xae")
PATHS = ("/metrics", "/api/v1/state", "/api/v1/runs?limit=1", "/", "/-/healthy", "/-/ready", "/run/1-2", "/incidents")


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes with up to four of them changed, removed, doubled or replaced."""
    mutated = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(mutated) + 1)
        match chance.randrange(4):
            case 0:
                mutated[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del mutated[at : at + chance.randint(1, 40)]
            case 2:
                mutated[at:at] = mutated[at : at + chance.randint(1, 40)]
            case _:
                mutated[at:at] = chance.choice(TOKENS)
    return bytes(mutated)


def mutate_fields(message: dict[str, object], chance: random.Random) -> bytes:
    """Return the message with one or two fields of other values, in JSON."""
    mutated = dict(message)
    for _ in range(chance.randint(1, 2)):
        name = chance.choice([*mutated, "unknown"])
        others = [*VALUES, chance.getrandbits(70), chance.random() * 1e6, *mutated.values()]
        mutated[name] = chance.choice(others)
    return json.dumps(mutated).encode()


def fuzz_messages(path: str, count: int, chance: random.Random) -> int:
    """Send that many messages; return how many were sent, with the hellos."""
    lines = (ROOT / "tests/protocol/recorded_messages.jsonl").read_text(encoding="utf-8").splitlines()
    seeds = [(line.encode(), json.loads(line)) for line in lines]
    hello = seeds[0][0]
    connections: list[socket.socket | None] = [None] * CONNECTIONS
    sent = 0
    for number in range(count):
        raw, message = chance.choice(seeds)
        data = mutate_bytes(raw, chance) if chance.random() < 0.5 else mutate_fields(message, chance)
        place = number % CONNECTIONS
        connection = connections[place]
        try:
            if connection is None:
                connection = connections[place] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                connection.connect(path)
                sent += bool(connection.send(hello))
            sent += bool(connection.send(data or b" "))  # an empty one would be the end of the connection
        except OSError:
            connections[place] = None
    return sent


def make_request(chance: random.Random) -> bytes:
    """Return a request that HTTP allows, which the daemon must answer."""
    path = chance.choice(PATHS)
    if chance.random() < 0.5:
        junk = "".join(chance.choice("abc/%.?&=;:@+~-_'0123456789") for _ in range(chance.randint(1, 60)))
        path += chance.choice("/?") + junk
    method = "HEAD" if chance.random() < 0.9 else chance.choice(["GET", "OPTIONS", "DELETE", "BREW"])
    value = "".join(chr(chance.randint(33, 126)) for _ in range(chance.randint(1, 200)))
    name = chance.choice(["Accept", "Accept-Encoding", "Cookie", "Authorization", "Range", "If-None-Match", "X-Other"])
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{name}: {value}\r\n\r\n".encode()


def fuzz_requests(address: tuple[str, int], count: int, chance: random.Random) -> tuple[Counter[str], int]:
    """Send that many requests, the last of each batch mutated byte by byte; return the answers and those missing."""
    answers: Counter[str] = Counter()
    missing = 0
    for _ in range(count // BATCH):
        requests = [make_request(chance) for _ in range(BATCH)]
        requests[-1] = mutate_bytes(requests[-1], chance)
        with socket.create_connection(address, timeout=60) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # frees the port
            connection.sendall(b"".join(requests))
            connection.shutdown(socket.SHUT_WR)
            received = bytearray()
            try:
                while data := connection.recv(1 << 16):
                    received += data
            except ConnectionError:
                pass
        found = re.findall(rb"HTTP/1\.1 (\d{3}) ", received)
        answers.update(code.decode() for code in found)
        missing += max(0, BATCH - 1 - len(found))
    return answers, missing


def run_clients(what: str, target: str, count: int, folder: Path, *, daemon: Daemon, run: CountedRun) -> list[float]:
    """Run the clients while the run makes steps; return the daemon's memory over the time."""
    held = []
    commands = [
        [sys.executable, __file__, what, target, str(count // CLIENTS), str(seed)] for seed in range(1, CLIENTS + 1)
    ]
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    clients = [Process(each, folder / f"{what}-{number}.log", path) for number, each in enumerate(commands)]
    with ending(*clients):
        while any(each.popen.poll() is None for each in clients):
            run.make_steps(7)
            held.append(resident(daemon))
            time.sleep(0.2)
    return held


def read_counts(folder: Path, what: str) -> Iterator[dict[str, int]]:
    """Return what the clients printed."""
    for number in range(CLIENTS):
        yield json.loads((folder / f"{what}-{number}.log").read_text().splitlines()[-1])


@dataclass(frozen=True)
class FuzzedDaemon:
    """Daemon after the clients have ended, with a normal run and a scraper at the same time; `held` is its memory."""

    daemon: Daemon
    run: CountedRun
    scraper: Scraper
    folder: Path
    seconds: float
    held: list[float]

    def figures(self) -> Iterator[Figure]:
        """Return what the run, the scraper and the daemon's log and memory show."""
        yield self.run.figure(self.daemon)
        yield from self.scraper.figures()
        yield from soundness(self.daemon, self.held)


@contextmanager
def fuzzing(what: str, count: int) -> Iterator[FuzzedDaemon]:
    """Start a daemon, let the clients send `count` messages or requests to it, and end it with the context."""
    with ExitStack() as stack:
        folder = stack.enter_context(workplace())
        daemon = stack.enter_context(serving(folder, CONFIG))
        run = stack.enter_context(CountedRun(daemon, folder, "normal"))
        target = str({"messages": daemon.socket, "requests": daemon.port}[what])
        with Scraper(daemon) as scraper:
            began = time.monotonic()
            held = run_clients(what, target, count, folder, daemon=daemon, run=run)
            seconds = time.monotonic() - began
        yield FuzzedDaemon(daemon, run, scraper, folder, seconds, held)


def measure_messages(count: int) -> Iterator[Figure]:
    """Fuzz the socket of runs."""
    with fuzzing("messages", count) as fuzzed:
        sent = sum(each["sent"] for each in read_counts(fuzzed.folder, "messages"))
        yield Figure("messages sent", f"{sent} in {fuzzed.seconds:.0f} s")
        page = fuzzed.daemon.samples()
        accepted = page.value("gpuwarden_reports_received_total") or 0
        rejected = count_by_reason(page, "gpuwarden_reports_rejected_total")
        yield Figure("accepted", f"{accepted:.0f}")
        yield Figure("rejected", ", ".join(f"{reason} {n:.0f}" for reason, n in sorted(rejected.items())))
        yield equal("rejected for a fault of the daemon", rejected.get("internal", 0), 0)
        counted = accepted + sum(rejected.values())
        yield Figure("messages counted", f"{counted:.0f}", f"{sent} or more, with those of the run", counted >= sent)
        yield from fuzzed.figures()


def measure_requests(count: int) -> Iterator[Figure]:
    """Fuzz the HTTP server."""
    with fuzzing("requests", count) as fuzzed:
        counts: Counter[str] = Counter()
        for each in read_counts(fuzzed.folder, "requests"):
            counts.update(each)
        missing = counts.pop("missing", 0)
        sent = count // CLIENTS // BATCH * BATCH * CLIENTS
        yield Figure("requests sent, 16 pipelined", f"{sent} in {fuzzed.seconds:.0f} s")
        yield Figure("answers", ", ".join(f"{code}: {n}" for code, n in sorted(counts.items())))
        yield equal("answers missing to requests before the broken one", missing, 0)
        yield equal("answers of a fault of the daemon (500)", counts["500"], 0)
        yield from fuzzed.figures()


def main() -> None:
    """Run one client."""
    what, target, count, seed = sys.argv[1:]
    chance = random.Random(int(seed))  # noqa: S311 - to be repeated
    if what == "messages":
        counts: dict[str, int] = {"sent": fuzz_messages(target, int(count), chance)}
    else:
        answers, missing = fuzz_requests(("127.0.0.1", int(target)), int(count), chance)
        counts = {**answers, "missing": missing}
    sys.stdout.write(json.dumps(counts) + "\n")


if __name__ == "__main__":
    main()
