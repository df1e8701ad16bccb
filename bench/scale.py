"""Cost of the daemon by the number of GPUs, and the time that it keeps a driver busy: `python bench/scale.py`.

First on 1 to 256 GPUs of a mock driver that answers at once, then on 8 GPUs whose driver takes as long as on hardware
and answers one call at a time. Takes about five minutes and needs a C compiler.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from mocked import (
    MAX_PROCESSES,
    PROCESSES_PER_GPU,
    driver_seconds,
    environment,
    mock,
    realistic,
    sleepers,
)
from programs import GPUWARDEN, conditions, cpu_seconds, memory, program
from scraping import HOST, PROMETHEUS, connect, fetch, free_port, page, percentiles, samples, series, wait_for

SIZES: Mapping[str, Mapping[str, int]] = {
    "1": {"gpus": 1},
    "8": {"gpus": 8},
    "64": {"gpus": 64},
    "256": {"gpus": 256},
    "16 x 7 MIG": {"gpus": 16, "mig": 7},
}
DRIVER_BAR = 0.100  # seconds that a poll of 8 GPUs may keep the driver busy
DRIVER_GPUS = 8
POLL = "gpuwarden_collector_duration_seconds"


@dataclass(frozen=True, slots=True)
class Effort:
    """Time to measure, in seconds; whole slow intervals (15 s), so that the slow tier is even."""

    settle: float
    quiet: float
    scraped: int
    driver: int  # two slow intervals at least


FULL = Effort(settle=5, quiet=30, scraped=30, driver=30)
QUICK = Effort(settle=0.5, quiet=1, scraped=2, driver=2)


@dataclass(frozen=True, slots=True)
class Daemon:
    """Daemon on a mock driver whose calls are counted."""

    pid: int
    port: int
    folder: Path


@contextmanager
def daemon(pids: list[int], **settings: str | int) -> Iterator[Daemon]:
    """Run the daemon until all GPUs have been read."""
    with tempfile.TemporaryDirectory(prefix="gpuwarden-bench-") as name:
        folder, port = Path(name), free_port()
        log = folder / "log"
        env = environment(folder, pids=",".join(map(str, pids)), **settings)
        config = folder / "config.yaml"  # all runs are of one user, and their processes hold no memory
        config.write_text("runs: {max_per_user: 512, new_per_minute: 60000, trust_reports: true}\n")
        arguments = ["serve", f"--config={config}", f"--listen={HOST}:{port}", f"--socket={folder}/run.sock"]
        with program([*GPUWARDEN, *arguments], env, log) as pid:
            wait_for(port, lambda text: sum(samples(text, "gpuwarden_gpu_up")) == settings["gpus"], log)
            yield Daemon(pid, port, folder)


def cpu_of_minute(pid: int, seconds: float) -> float:
    """Return the CPU time of a process per minute, from some seconds."""
    cpu, began = cpu_seconds(pid), time.perf_counter()
    time.sleep(seconds)
    return (cpu_seconds(pid) - cpu) / (time.perf_counter() - began) * 60


def scrape_every_second(port: int, count: int) -> tuple[list[float], list[float]]:
    """Scrape after each poll, like Prometheus; return the times of scrapes and of polls."""
    kept, latency, durations = connect(port), [], []
    fetch(kept, PROMETHEUS)
    for _ in range(count):
        time.sleep(1)
        start = time.perf_counter()
        fetch(kept, PROMETHEUS)
        latency.append(time.perf_counter() - start)
        durations += samples(page(port), POLL)
    kept.close()
    return latency, durations


@dataclass(frozen=True, slots=True)
class Size:
    """Cost of one size: CPU seconds a minute, and the other cells of its row."""

    devices: int  # GPUs, and instances of them
    minute: float
    cells: tuple[str, ...]


def measured(settings: Mapping[str, int], effort: Effort) -> Size:
    """Measure one size."""
    gpus = settings["gpus"]
    with sleepers(min(gpus * PROCESSES_PER_GPU, MAX_PROCESSES)) as pids, daemon(pids, **settings) as it:
        time.sleep(effort.settle)
        minute = cpu_of_minute(it.pid, effort.quiet)
        latency, durations = scrape_every_second(it.port, effort.scraped)
        text, held = page(it.port), memory(it.pid)
    p50, p99 = percentiles(latency)
    cells = (
        f"{mean(durations) * 1e3:.2f} / {max(durations) * 1e3:.2f}",
        f"{series(text)}",
        f"{len(text) / 1000:.0f}",
        f"{p50:.2f} / {p99:.2f}",
        f"{held['Rss'] / 1024:.1f}",
    )
    return Size(gpus * (1 + settings.get("mig", 0)), minute, cells)


def cost_of_further(size: Size, least: Size) -> str:
    """Return the cost of each further device: the same at every size if the cost is linear."""
    if size.devices == least.devices:
        return ""
    return f"{(size.minute - least.minute) / 60 * 1e3 / (size.devices - least.devices):.3f}"


def sizes(effort: Effort) -> Iterator[str]:
    """Print the table by size."""
    heads = [
        "GPUs",
        "CPU of the polls, s/min",
        "CPU of each further device, ms/s",
        "a poll takes, mean / worst ms",
        "series",
    ]
    heads += ["page, KB", "scrape p50 / p99 ms", "resident MiB"]
    yield f"| {' | '.join(heads)} |"
    yield f"| --- |{' ---: |' * (len(heads) - 1)}"
    least: Size | None = None
    for name, settings in SIZES.items():
        size = measured(settings, effort)
        least = least or size
        yield f"| {' | '.join([name, f'{size.minute:.3f}', cost_of_further(size, least), *size.cells])} |"


def calls_by_second(folder: Path, count: int) -> Iterator[dict[str, int]]:
    """Yield the calls of each of the next `count` seconds."""
    counted = mock(folder)
    before, due = counted.calls(), time.monotonic()
    for _ in range(count):
        due += 1
        time.sleep(max(0.0, due - time.monotonic()))
        now = counted.calls()
        yield {name: number - before.get(name, 0) for name, number in now.items()}
        before = now


def driver_of_daemon(effort: Effort) -> Iterator[str]:
    """Measure how long the driver is busy for the daemon; return the rows."""
    busy: list[float] = []
    durations: list[float] = []
    with sleepers(DRIVER_GPUS * PROCESSES_PER_GPU) as pids, daemon(pids, gpus=DRIVER_GPUS, **realistic()) as it:
        time.sleep(effort.settle)
        began = samples(page(it.port), "gpuwarden_poll_timestamp_seconds")[0]
        time.sleep((began + 0.6 - time.time()) % 1)  # so that each of our seconds holds one whole poll
        for calls in calls_by_second(it.folder, effort.driver):
            busy.append(driver_seconds(calls))
            durations += samples(page(it.port), POLL)
    rows = {"gpuwarden, a poll by its own clock": durations, "gpuwarden, all calls of a second, by their delays": busy}
    for name, found in rows.items():
        met = "yes" if max(found) <= DRIVER_BAR else "**no**"
        yield f"| {name} | {mean(found) * 1e3:.1f} | {max(found) * 1e3:.1f} | {DRIVER_BAR * 1e3:.0f} | {met} |"


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description="Measure gpuwarden by the number of GPUs on the mock driver.")
    parser.add_argument("--quick", action="store_true", help="a smoke run of some seconds; its figures mean nothing")
    chosen = parser.parse_args()
    effort = QUICK if chosen.quick else FULL
    print(f"The mock driver, {PROCESSES_PER_GPU} processes a GPU, a poll a second; {conditions()}.\n")
    for row in sizes(effort):
        print(row, flush=True)
    print(f"\n{DRIVER_GPUS} GPUs with the delays of a driver, one call at a time.\n")
    print("| the driver is busy for | mean ms | worst ms | at most | met |\n| --- | ---: | ---: | ---: | --- |")
    for row in driver_of_daemon(effort):
        print(row, flush=True)


if __name__ == "__main__":
    main()
