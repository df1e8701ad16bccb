"""What 500 training runs cost the daemon that report four times a second: `python bench/many_runs.py`.

Each run is a process of its own, as identity is the process's, and says what the Keras callback says. The daemon polls
the mock driver once a second as ever, and is scraped every 15 s, by Prometheus's usual interval, or not at all.
`--quick` is a smoke run with few of them.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import select
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from subprocess import PIPE, Popen  # noqa: TID251 - starts what it measures

from scale import cpu_of_minute, daemon

from gpuwarden.client.connection import Connection as Reporting
from gpuwarden.client.durations import Durations
from gpuwarden.protocol import DeviceMemory, Hello, Report
from mocked import PROCESSES_PER_GPU, sleepers
from programs import conditions, memory
from scraping import PROMETHEUS, connect, fetch, page, samples, wait_for

GPUS = 8
REPORTS_A_SECOND = 4
MOST_SHARE = 0.10  # of one core


@dataclass(frozen=True, slots=True)
class Effort:
    """How many runs there are, and how long is measured how often, in seconds."""

    runs: int
    window: float
    windows: int
    scrape_interval: float


FULL = Effort(runs=500, window=30.0, windows=3, scrape_interval=15.0)
QUICK = Effort(runs=20, window=1.0, windows=1, scrape_interval=0.5)


def crowd(count: int, socket: str, uuids: list[str]) -> None:
    """Fork the runs, each with a GPU; they end with standard input."""
    for number in range(count):
        if os.fork() == 0:
            report(socket, number, uuids[number % len(uuids)])
            os._exit(0)
    sys.stdin.read()


def report(socket: str, number: int, uuid: str) -> None:
    """Report as a run until standard input ends."""
    hello = Hello(
        f"train_{number}.py", "tensorflow 2.21.0 keras 3.15.1", {"GPU:0": uuid}, visible_devices="0", hears=True
    )
    daemon = Reporting(socket, hello)
    durations = Durations()
    end = select.poll()
    end.register(sys.stdin, select.POLLHUP)
    time.sleep(random.random() / REPORTS_A_SECOND)  # noqa: S311 - only so that they do not come all at once
    steps = 0
    while not end.poll(1000 / REPORTS_A_SECOND):
        steps += 25
        durations.add(0.25, 25)
        usual, slow = durations.percentiles(0.5, 0.95)
        used = (1 << 20) * (100 + steps % 50)
        daemon.send(
            Report(
                phase="train",
                steps=steps,
                step_seconds=durations.total,
                step_buckets=tuple(durations.buckets),
                memory={"GPU:0": DeviceMemory(used, 150 << 20)},
                epoch=steps // 1000,
                batch=steps % 1000,
                stepping=True,
                examples=64 * steps,
                step_median=usual,
                step_p95=slow,
            )
        )


@contextmanager
def reporting(count: int, socket: Path, uuids: list[str]) -> Iterator[None]:
    """Have the runs report."""
    with Popen([sys.executable, __file__, "--crowd", str(count), str(socket), *uuids], stdin=PIPE) as started:
        try:
            yield
        finally:
            assert started.stdin is not None
            started.stdin.close()
            started.wait(60)


def share(pid: int, effort: Effort) -> float:
    """Measure the CPU time of a process as a share of one core: the median of some windows."""
    return median(cpu_of_minute(pid, effort.window) / 60 for _ in range(effort.windows))


@contextmanager
def scraped(port: int, interval: float) -> Iterator[None]:
    """Have the page scraped as Prometheus does, by another thread."""
    ended = threading.Event()

    def scrape() -> None:
        kept = connect(port)
        while not ended.wait(interval):
            fetch(kept, PROMETHEUS)

    scraper = threading.Thread(target=scrape)
    scraper.start()
    try:
        yield
    finally:
        ended.set()
        scraper.join()


def measure(effort: Effort) -> int:
    """Measure and print."""
    print(f"{GPUS} GPUs of the mock driver, a poll a second; {conditions()}.\n", flush=True)
    with sleepers(GPUS * PROCESSES_PER_GPU) as pids, daemon(pids, gpus=GPUS) as it:
        time.sleep(effort.window / 4)
        alone, empty = share(it.pid, effort), memory(it.pid)["Rss"]
        with reporting(effort.runs, it.folder / "run.sock", gpus_of(it.port)):
            wait_for(
                it.port, lambda text: len(samples(text, "gpuwarden_run_steps_total")) == effort.runs, it.folder / "log"
            )
            time.sleep(effort.window / 4)
            before, began = received(it.port), time.monotonic()
            full = share(it.pid, effort)
            rate = (received(it.port) - before) / (time.monotonic() - began)
            with scraped(it.port, effort.scrape_interval):
                seen = share(it.pid, effort)
            held = memory(it.pid)["Rss"]
    print("| runs | reports a second | a scrape every | CPU, share of a core | at most | met | resident MiB |")
    print("| ---: | ---: | ---: | ---: | ---: | --- | ---: |")
    print(f"| 0 | 0 | none | {alone:.1%} | | | {empty / 1024:.1f} |")
    for shown, scrapes in ((full, "none"), (seen, f"{effort.scrape_interval:g} s")):
        met = "yes" if shown <= MOST_SHARE else "**no**"
        print(
            f"| {effort.runs} | {rate:.0f} | {scrapes} | {shown:.1%} | {MOST_SHARE:.0%} | {met} | {held / 1024:.1f} |"
        )
    print(f"\nA report costs the daemon {(full - alone) / rate * 1e6:.0f} µs, its part in the polls included.")
    return 0


def received(port: int) -> float:
    """Return how many messages the daemon has taken."""
    return sum(samples(page(port), "gpuwarden_reports_received_total"))


def gpus_of(port: int) -> list[str]:
    """Return the UUIDs of the daemon's GPUs."""
    return re.findall(r'^gpuwarden_gpu_up\{uuid="([^"]+)"', page(port).decode(), re.MULTILINE)


def main() -> int:
    """Measure, or be the crowd of runs."""
    parser = argparse.ArgumentParser(description="Measure what many runs cost.")
    parser.add_argument("--quick", action="store_true", help="a smoke run: its figures mean little")
    parser.add_argument("--crowd", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.crowd:
        count, socket, *uuids = given.crowd
        crowd(int(count), socket, uuids)
        return 0
    return measure(QUICK if given.quick else FULL)


if __name__ == "__main__":
    sys.exit(main())
