"""CPU and memory of the daemon by the number of runs that report four times a second: `python bench/many_runs.py`.

Each run is a process, because identity is the process's, and sends what the Keras callback sends. The daemon polls the
mock driver once a second and is scraped every 15 s. `--quick` is a smoke run with few runs.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE, Popen  # noqa: TID251 - starts what it measures

from scale import run_daemon

from gpuwarden.client.connection import DaemonConnection
from gpuwarden.protocol.messages import DeviceMemory, Hello, Report
from gpuwarden.protocol.step_histogram import StepHistogram
from mocked import PROCESSES_PER_GPU, start_sleepers
from programs import describe_conditions, read_cpu_seconds, read_memory
from scraping import parse_samples, read_page, wait_for

GPUS = 8
REPORTS_A_SECOND = 4
SCRAPE_SECONDS = 15
COUNTS = (0, 64, 512)
MAX_SHARE = {64: 0.05}  # of one core; more runs are to be served correctly, at whatever they cost


def run_reporters(count: int, socket: str, uuids: list[str]) -> None:
    """Fork the runs, each with a GPU; they end with standard input."""
    for number in range(count):
        if os.fork() == 0:
            report(socket, number, uuids[number % len(uuids)])
            os._exit(0)
    sys.stdin.read()


def report(socket: str, number: int, uuid: str) -> None:
    """Report as a run until standard input ends."""
    hello = Hello(f"train_{number}.py", "tensorflow 2.21.0 keras 3.15.1", {"GPU:0": uuid}, hears=True)
    connection = DaemonConnection(socket, hello)
    durations = StepHistogram()
    end = select.poll()
    end.register(sys.stdin, select.POLLHUP)
    time.sleep(random.random() / REPORTS_A_SECOND)  # noqa: S311 - only so that they do not come all at once
    steps = 0
    while not end.poll(1000 / REPORTS_A_SECOND):
        steps += 25
        durations.add(0.25, 25)
        median, p95 = durations.percentiles(0.5, 0.95)
        connection.send(
            Report(
                phase="train",
                steps=steps,
                step_seconds=durations.total,
                step_buckets=tuple(durations.buckets),
                memory={"GPU:0": DeviceMemory((1 << 20) * (100 + steps % 50), 150 << 20)},
                epoch=steps // 1000,
                batch=steps % 1000,
                stepping=True,
                examples=64 * steps,
                step_median=median,
                step_p95=p95,
            )
        )


@contextmanager
def start_reporters(count: int, socket: Path, uuids: list[str]) -> Iterator[None]:
    """Start the runs."""
    with Popen([sys.executable, __file__, "--crowd", str(count), str(socket), *uuids], stdin=PIPE) as started:
        try:
            yield
        finally:
            assert started.stdin is not None
            started.stdin.close()
            started.wait(60)


def measure_row(count: int, seconds: float) -> str:
    """Measure the daemon with `count` runs; return the table's row."""
    with start_sleepers(GPUS * PROCESSES_PER_GPU) as pids, run_daemon(pids, gpus=GPUS) as daemon:
        uuids = re.findall(r'^gpuwarden_gpu_up\{uuid="([^"]+)"', read_page(daemon.port).decode(), re.MULTILINE)
        with start_reporters(count, daemon.folder / "run.sock", uuids):
            series = "gpuwarden_run_steps_total"
            wait_for(daemon.port, lambda text: len(parse_samples(text, series)) == count, daemon.folder / "log")
            time.sleep(seconds / 4)
            before, cpu, begin = read_page(daemon.port), read_cpu_seconds(daemon.pid), time.monotonic()
            while (left := begin + seconds - time.monotonic()) > 0:
                time.sleep(min(left, SCRAPE_SECONDS))
                after = read_page(daemon.port)
            elapsed, share = time.monotonic() - begin, (read_cpu_seconds(daemon.pid) - cpu) / (time.monotonic() - begin)
        received, steps = (
            sum(parse_samples(after, name)) - sum(parse_samples(before, name))
            for name in ("gpuwarden_reports_received_total", series)
        )
        resident = read_memory(daemon.pid)["Rss"] / 1024
        dropped = sum(parse_samples(after, "gpuwarden_run_reports_dropped_total"))
    at_most = MAX_SHARE.get(count)
    met = "" if at_most is None else "yes" if share <= at_most else "**no**"
    bar = "" if at_most is None else f"{at_most:.0%}"
    return (
        f"| {count} | {received / elapsed:.0f} | {steps / 25 / elapsed:.0f} | {dropped:.0f} | {share:.1%} | {bar} "
        f"| {met} | {resident:.1f} |"
    )


def main() -> int:
    """Measure, or run as the crowd of runs."""
    parser = argparse.ArgumentParser(description="Measure what many runs cost.")
    parser.add_argument("--quick", action="store_true", help="a smoke run: its figures mean little")
    parser.add_argument("--crowd", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.crowd:
        count, socket, *uuids = given.crowd
        run_reporters(int(count), socket, uuids)
        return 0
    print(
        f"{GPUS} GPUs of the mock driver, a poll a second, a scrape every {SCRAPE_SECONDS} s; "
        f"{describe_conditions()}.\n"
    )
    print(
        "| runs | messages a second | steps, in reports a second | dropped | CPU of a core | at most | met | RSS, MiB |"
    )
    print("| ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: |")
    for count in (0, 20) if given.quick else COUNTS:
        print(measure_row(count, 1 if given.quick else 60), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
