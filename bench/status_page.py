"""Measure what viewers of the status page cost the daemon, and the scrape: `python bench/status_page.py`.

The real daemon polls the mock driver (8 GPUs) with 5 runs that report; viewers open the page and then ask as it does,
over connections that stay, compressed. Scrapes come meanwhile, without viewers and with, in turns. Needs a C compiler.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from daemons import SERVE
from gpuwarden.page.files import FOLDER
from mocked import environment
from programs import conditions, cpu_seconds, program
from scraping import PROMETHEUS, Connection, connect, fetch, free_port, percentiles, wait_for

GPUS, RUNS, VIEWERS = 8, 5, 20
ASK_SECONDS = 3.0  # live.js
GZIP = {"Accept-Encoding": "gzip"}
FILES = [f"/page/{path.relative_to(FOLDER)}" for path in FOLDER.rglob("*.*") if path.suffix in (".js", ".css", ".svg")]
SCRAPE_PAUSE = 0.02
MOST_CPU, MOST_TIMES = 1.0, 2.0  # ms a second for a viewer, and the p99 with all by that without


class Viewer:
    """One browser with the page open: asks from a thread of its own until it is left."""

    def __init__(self, port: int, begin: float) -> None:
        self.answers = 0
        self._left = threading.Event()
        self._connection = connect(port)
        self._begin = begin
        for path in ("/", *FILES, "/api/v1/history"):
            fetch(self._connection, GZIP, path)
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        due = self._begin
        while not self._left.wait(max(due - time.monotonic(), 0)):
            fetch(self._connection, GZIP, "/api/v1/state")
            self.answers += 1
            due += ASK_SECONDS

    def leave(self) -> None:
        """Close the page."""
        self._left.set()
        self._thread.join()
        self._connection.close()


@contextmanager
def watched(port: int, viewers: int) -> Iterator[list[Viewer]]:
    """Have so many viewers, who did not all come at the same moment."""
    begin = time.monotonic() + 0.2
    present = [Viewer(port, begin + ASK_SECONDS * number / max(viewers, 1)) for number in range(viewers)]
    try:
        yield present
    finally:
        for each in present:
            each.leave()


# A process each, as the kernel says who reports.
_RUN = """
import socket, sys, time
from gpuwarden.protocol import STEP_BUCKETS, DeviceMemory, Hello, Report, encode
path, name, uuid = sys.argv[1:]
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as run:
    run.connect(path)
    run.send(encode(Hello(name, "none", {"GPU:0": uuid})))
    for steps in range(1, 1 << 30):
        memory = {"GPU:0": DeviceMemory(1 << 30, 1 << 30)}
        run.send(encode(Report("train", steps, 1.0, (0,) * (len(STEP_BUCKETS) + 1), memory)))
        time.sleep(1)
"""


@contextmanager
def training(path: Path, uuids: Sequence[str]) -> Iterator[None]:
    """Have a run that reports for each of these GPUs."""
    with ExitStack() as stack:
        for number, uuid in enumerate(uuids):
            command = [sys.executable, "-c", _RUN, str(path), f"run {number}", uuid]
            stack.enter_context(program(command, {**os.environ}, path.with_name(f"run-{number}.log")))
        yield


def scrapes(connection: Connection, seconds: float) -> list[float]:
    """Scrape for so long, and return how long each took, in seconds."""
    found = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        fetch(connection, PROMETHEUS)
        found.append(time.perf_counter() - began)
        time.sleep(SCRAPE_PAUSE)
    return found


def cpu(pid: int, port: int, viewers: int, seconds: float) -> float:
    """Return the daemon's CPU time a second, in ms, with so many viewers and no scrapes."""
    with watched(port, viewers):
        time.sleep(1)
        began, spent = time.monotonic(), cpu_seconds(pid)
        time.sleep(seconds)
        return (cpu_seconds(pid) - spent) / (time.monotonic() - began) * 1e3


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run of some seconds")
    quick = parser.parse_args().quick
    rounds, seconds = (1, 2.0) if quick else (5, 20.0)
    print(conditions())
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, port = Path(name), free_port()
        path, log = folder / "run.sock", folder / "log"
        command = [*SERVE[:-1], f"--listen=127.0.0.1:{port}", f"--socket={path}"]
        pid = stack.enter_context(program(command, environment(folder, gpus=GPUS), log))
        wait_for(port, lambda page: page.count(b"gpuwarden_gpu_up{") == GPUS, log)
        uuids = [each["uuid"] for each in json.loads(fetch(connect(port), path="/api/v1/state"))["gpus"][:RUNS]]
        stack.enter_context(training(path, uuids))
        wait_for(port, lambda page: page.count(b"gpuwarden_run_info{") == RUNS, log)
        size = len(fetch(connect(port), path="/api/v1/state"))
        print(f"{GPUS} GPUs, {RUNS} runs, an answer of {size} bytes each {ASK_SECONDS:g} s a viewer\n")
        print_cpu(pid, port, rounds, seconds)
        print_scrapes(port, rounds, seconds)


def print_cpu(pid: int, port: int, rounds: int, seconds: float) -> None:
    """Print what viewers cost."""
    print("| viewers | CPU of the daemon, ms a second | more than without, a viewer | at most | met |")
    print("| ---: | ---: | ---: | ---: | --- |")
    spent: dict[int, list[float]] = {0: [], 1: [], VIEWERS: []}
    for _ in range(rounds):
        for viewers, each in spent.items():
            each.append(cpu(pid, port, viewers, seconds))
    alone = min(spent[0])
    for viewers, found in spent.items():
        of_one = (min(found) - alone) / viewers if viewers else 0.0
        judged = f"{of_one:.2f} | {MOST_CPU:g} | {_met(of_one <= MOST_CPU)}" if viewers else " | | "
        print(f"| {viewers} | {min(found):.1f} | {judged} |")


def print_scrapes(port: int, rounds: int, seconds: float) -> None:
    """Print how long scrapes take."""
    print("\n| viewers | scrapes | p50, ms | p99, ms | by that without | at most | met |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | --- |")
    took: dict[int, list[float]] = {0: [], VIEWERS: []}
    connection = connect(port)
    for _ in range(rounds):
        for viewers, found in took.items():
            with watched(port, viewers):
                found.extend(scrapes(connection, seconds))
    _, alone = percentiles(took[0])
    for viewers, each in took.items():
        middle, p99 = percentiles(each)
        judged = f"{p99 / alone:.2f} | {MOST_TIMES:g} | {_met(p99 <= MOST_TIMES * alone)}" if viewers else " | | "
        print(f"| {viewers} | {len(each)} | {middle:.2f} | {p99:.2f} | {judged} |")


def _met(holds: bool) -> str:  # noqa: FBT001 - a statement to be written out
    return "yes" if holds else "**no**"


if __name__ == "__main__":
    main()
