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
    build_mock,
    compute_driver_seconds,
    make_environment,
    make_realistic_settings,
    start_sleepers,
)
from programs import GPUWARDEN, describe_conditions, read_cpu_seconds, read_memory, run_program
from scraping import (
    HOST,
    PROMETHEUS,
    compute_percentiles,
    connect,
    count_samples,
    fetch,
    free_port,
    parse_samples,
    read_page,
    wait_for,
)

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
def run_daemon(pids: list[int], **settings: str | int) -> Iterator[Daemon]:
    """Run the daemon until all GPUs have been read."""
    with tempfile.TemporaryDirectory(prefix="gpuwarden-bench-") as name:
        folder, port = Path(name), free_port()
        log = folder / "log"
        env = make_environment(folder, pids=",".join(map(str, pids)), **settings)
        config = folder / "config.yaml"  # all runs are of one user, and their processes hold no memory
        config.write_text("runs: {max_per_user: 512, new_per_minute: 60000, trust_reports: true}\n")
        arguments = ["serve", f"--config={config}", f"--listen={HOST}:{port}", f"--socket={folder}/run.sock"]
        with run_program([*GPUWARDEN, *arguments], env, log) as pid:
            wait_for(port, lambda text: sum(parse_samples(text, "gpuwarden_gpu_up")) == settings["gpus"], log)
            yield Daemon(pid, port, folder)


def measure_cpu(pid: int, seconds: float) -> float:
    """Return the CPU time of a process per minute, from some seconds."""
    cpu, began = read_cpu_seconds(pid), time.perf_counter()
    time.sleep(seconds)
    return (read_cpu_seconds(pid) - cpu) / (time.perf_counter() - began) * 60


def scrape_every_second(port: int, count: int) -> tuple[list[float], list[float]]:
    """Scrape after each poll, like Prometheus; return the times of scrapes and of polls."""
    kept, latency, durations = connect(port), [], []
    fetch(kept, PROMETHEUS)
    for _ in range(count):
        time.sleep(1)
        start = time.perf_counter()
        fetch(kept, PROMETHEUS)
        latency.append(time.perf_counter() - start)
        durations += parse_samples(read_page(port), POLL)
    kept.close()
    return latency, durations


@dataclass(frozen=True, slots=True)
class Size:
    """Cost of one size: CPU seconds a minute, and the other cells of its row."""

    devices: int  # GPUs, and instances of them
    minute: float
    cells: tuple[str, ...]


def measure_size(settings: Mapping[str, int], effort: Effort) -> Size:
    """Measure one size."""
    gpus = settings["gpus"]
    with start_sleepers(min(gpus * PROCESSES_PER_GPU, MAX_PROCESSES)) as pids, run_daemon(pids, **settings) as daemon:
        time.sleep(effort.settle)
        minute = measure_cpu(daemon.pid, effort.quiet)
        latency, durations = scrape_every_second(daemon.port, effort.scraped)
        text, held = read_page(daemon.port), read_memory(daemon.pid)
    p50, p99 = compute_percentiles(latency)
    cells = (
        f"{mean(durations) * 1e3:.2f} / {max(durations) * 1e3:.2f}",
        f"{count_samples(text)}",
        f"{len(text) / 1000:.0f}",
        f"{p50:.2f} / {p99:.2f}",
        f"{held['Rss'] / 1024:.1f}",
    )
    return Size(gpus * (1 + settings.get("mig", 0)), minute, cells)


def compute_cost_per_device(size: Size, least: Size) -> str:
    """Return the cost of each further device: the same at every size if the cost is linear."""
    if size.devices == least.devices:
        return ""
    return f"{(size.minute - least.minute) / 60 * 1e3 / (size.devices - least.devices):.3f}"


def print_sizes(effort: Effort) -> Iterator[str]:
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
        size = measure_size(settings, effort)
        least = least or size
        yield f"| {' | '.join([name, f'{size.minute:.3f}', compute_cost_per_device(size, least), *size.cells])} |"


def count_calls(folder: Path, count: int) -> Iterator[dict[str, int]]:
    """Yield the calls of each of the next `count` seconds."""
    counted = build_mock(folder)
    before, due = counted.calls(), time.monotonic()
    for _ in range(count):
        due += 1
        time.sleep(max(0.0, due - time.monotonic()))
        now = counted.calls()
        yield {name: number - before.get(name, 0) for name, number in now.items()}
        before = now


def measure_driver(effort: Effort) -> Iterator[str]:
    """Measure how long the driver is busy for the daemon; return the rows."""
    busy: list[float] = []
    durations: list[float] = []
    with (
        start_sleepers(DRIVER_GPUS * PROCESSES_PER_GPU) as pids,
        run_daemon(pids, gpus=DRIVER_GPUS, **make_realistic_settings()) as daemon,
    ):
        time.sleep(effort.settle)
        began = parse_samples(read_page(daemon.port), "gpuwarden_poll_timestamp_seconds")[0]
        time.sleep((began + 0.6 - time.time()) % 1)  # so that each of our seconds holds one whole poll
        for calls in count_calls(daemon.folder, effort.driver):
            busy.append(compute_driver_seconds(calls))
            durations += parse_samples(read_page(daemon.port), POLL)
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
    print(f"The mock driver, {PROCESSES_PER_GPU} processes a GPU, a poll a second; {describe_conditions()}.\n")
    for row in print_sizes(effort):
        print(row, flush=True)
    print(f"\n{DRIVER_GPUS} GPUs with the delays of a driver, one call at a time.\n")
    print("| the driver is busy for | mean ms | worst ms | at most | met |\n| --- | ---: | ---: | ---: | --- |")
    for row in measure_driver(effort):
        print(row, flush=True)


if __name__ == "__main__":
    main()
