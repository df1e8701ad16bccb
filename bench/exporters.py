"""Comparison of the daemon with nvitop-exporter on the same mock driver: `python bench/exporters.py`.

Both run at the same time as programs, see 8 GPUs with 24 real processes and poll once a second. CPU time is that of
each process, so a busy machine changes it little; latency is measured in turns. Takes about six minutes and needs a C
compiler. docs/engineering/performance.md explains the figures, and what the mock hides.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from mocked import PROCESSES_PER_GPU, make_environment, start_sleepers
from programs import GPUWARDEN, describe_conditions, read_cpu_seconds, read_memory, run_program
from scraping import (
    HOST,
    PAUSE_SECONDS,
    PROMETHEUS,
    Connection,
    compute_percentiles,
    connect,
    count_samples,
    fetch,
    free_port,
    parse_samples,
    read_page,
    wait_for,
)

GPUS = 8
PROCESSES = GPUS * PROCESSES_PER_GPU
OURS, PEER = "gpuwarden", "nvitop-exporter"


@dataclass(frozen=True, slots=True)
class Effort:
    """Number of rounds and seconds of each."""

    starts: int
    settle: float  # until what is done once is done
    rounds: int
    quiet: float  # a window without scrapes
    scraped: float  # and those with them
    scrapes: int  # in a row, in all rounds together


FULL = Effort(starts=5, settle=3, rounds=3, quiet=30, scraped=30, scrapes=300)
QUICK = Effort(starts=1, settle=0.5, rounds=1, quiet=1, scraped=3, scrapes=10)

UNSCRAPED, SELDOM, OFTEN = "no scrapes", "a scrape every 15 s", "a scrape every second"
INTERVALS: Mapping[str, float] = {UNSCRAPED: float("inf"), SELDOM: 15, OFTEN: 1}
FRESH, NEW = "first after a poll", "new connection"


@dataclass(slots=True)
class Exporter:
    """A running exporter and what has been measured of it; seconds and bytes."""

    pid: int
    port: int
    first_page: float
    kept: Connection
    polling: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in INTERVALS})  # CPU a minute
    fresh: list[float] = field(
        default_factory=list
    )  # CPU of each scrape that is the first after a poll, polls taken off
    latency: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in (FRESH, NEW)})


def shows_all(text: bytes, pids: Sequence[int]) -> bool:
    """Return whether every process is in a scrape: ours counts them, the peer names each."""
    counted = sum(parse_samples(text, "gpuwarden_gpu_processes", 'type="compute"'))
    return counted == len(pids) or all(f'pid="{pid}"'.encode() in text for pid in pids)


def make_command(name: str, port: int, folder: Path) -> list[str]:
    """Return the command that starts the exporter."""
    if name == PEER:
        return [sys.executable, "-m", "nvitop_exporter", f"--bind-address={HOST}", f"--port={port}", "--interval=1"]
    config = folder / "config.yaml"
    config.write_text("", encoding="utf-8")  # the defaults, whatever the machine has
    settings = [f"--config={config}", f"--listen={HOST}:{port}", f"--socket={folder}/run.sock"]
    return [*GPUWARDEN, "serve", *settings]


@contextmanager
def run_exporter(name: str, env: dict[str, str], pids: Sequence[int]) -> Iterator[Exporter]:
    """Run an exporter, from its first scrape with every process on."""
    with tempfile.TemporaryDirectory(prefix="gpuwarden-bench-") as folder:
        log, port = Path(folder, "log"), free_port()
        arguments = make_command(name, port, Path(folder))
        began = time.perf_counter()
        with run_program(arguments, env, log) as pid:
            wait_for(port, lambda text: shows_all(text, pids), log)
            yield Exporter(pid, port, time.perf_counter() - began, connect(port))


def measure_polling(exporters: Sequence[Exporter], kind: str, seconds: float) -> None:
    """Let all of them poll and be scraped, like by Prometheus, in windows of that kind."""
    interval = INTERVALS[kind]
    before = [read_cpu_seconds(each.pid) for each in exporters]
    began = time.perf_counter()
    due = interval / 2
    while due < seconds:
        time.sleep(max(0.0, began + due - time.perf_counter()))
        due += interval
        for each in exporters:
            start = time.perf_counter()
            fetch(each.kept, PROMETHEUS)
            each.latency[FRESH].append(time.perf_counter() - start)
    time.sleep(max(0.0, began + seconds - time.perf_counter()))
    passed = time.perf_counter() - began
    for each, cpu in zip(exporters, before, strict=True):
        spent = read_cpu_seconds(each.pid) - cpu
        each.polling[kind].append(spent / passed * 60)
        if kind == OFTEN:
            each.fresh.append((spent - median(each.polling[UNSCRAPED]) / 60 * passed) / int(seconds / interval))


def measure_scrapes(exporter: Exporter, count: int) -> None:
    """Scrape one exporter, one scrape after the other, each on a new connection."""
    fetch(connect(exporter.port))  # pays for what is done once
    for _ in range(count):
        time.sleep(PAUSE_SECONDS)
        start = time.perf_counter()
        fetch(connect(exporter.port))
        exporter.latency[NEW].append(time.perf_counter() - start)


def collect_figures(exporter: Exporter, starts: Sequence[float]) -> dict[str, float]:
    """Return the measurements, by the names of the table's rows."""
    text, held = read_page(exporter.port), read_memory(exporter.pid)
    found = {kind: compute_percentiles(times) for kind, times in exporter.latency.items()}
    return {
        **{f"CPU of the polls, {kind}, s/min": median(spent) for kind, spent in exporter.polling.items()},
        **{f"scrape p50, {kind}, ms": p50 for kind, (p50, _p99) in found.items()},
        **{f"scrape p99, {kind}, ms": p99 for kind, (_p50, p99) in found.items()},
        "CPU of a scrape, first after a poll, ms": median(exporter.fresh) * 1e3,
        "memory, resident, MiB": held["Rss"] / 1024,
        "memory, proportional, MiB": held["Pss"] / 1024,
        "start to first full page, s": median(starts),
        "series": count_samples(text),
    }


# The most of the peer's figure that ours may be. Other rows have no bar.
MAX_RATIO_TO_PEER = {
    f"CPU of the polls, {UNSCRAPED}, s/min": 0.30,
    f"CPU of the polls, {SELDOM}, s/min": 0.30,
    f"scrape p50, {FRESH}, ms": 0.35,
    f"scrape p50, {NEW}, ms": 0.35,
    "memory, resident, MiB": 1.0,
}


def render_table(ours: dict[str, float], peer: dict[str, float]) -> Iterator[str]:
    """Render the figures as a Markdown table; a bar is compared with the exact ratio, not with the rounded one."""
    yield f"| figure | {OURS} | {PEER} | ratio | at most | met |"
    yield "| --- | ---: | ---: | ---: | ---: | --- |"
    for name, figure in ours.items():
        ratio, bar = figure / peer[name], MAX_RATIO_TO_PEER.get(name)
        met = ["", ""] if bar is None else [f"{bar:.2f}", "yes" if ratio <= bar else "**no**"]
        yield f"| {' | '.join([name, f'{figure:.3g}', f'{peer[name]:.3g}', f'{ratio:.2f}', *met])} |"


def measure(effort: Effort) -> tuple[dict[str, float], dict[str, float]]:
    """Measure all figures of ours and of the peer."""
    names = (OURS, PEER)
    with ExitStack() as stack:
        pids = stack.enter_context(start_sleepers(PROCESSES))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpuwarden-bench-")))
        env = make_environment(folder, gpus=GPUS, pids=",".join(map(str, pids)))
        starts: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(effort.starts):
            for name in names:
                with run_exporter(name, env, pids) as started:
                    starts[name].append(started.first_page)
        running = {name: stack.enter_context(run_exporter(name, env, pids)) for name in names}
        both = list(running.values())
        time.sleep(effort.settle)
        for _ in range(effort.rounds):
            measure_polling(both, UNSCRAPED, effort.quiet)
            measure_polling(both, SELDOM, effort.scraped)
            measure_polling(both, OFTEN, effort.scraped)
            for each in both:
                measure_scrapes(each, effort.scrapes // effort.rounds)
        return collect_figures(running[OURS], starts[OURS]), collect_figures(running[PEER], starts[PEER])


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="Compare gpuwarden with nvitop-exporter on the mock driver.")
    parser.add_argument("--quick", action="store_true", help="a smoke run of some seconds; its figures mean nothing")
    chosen = parser.parse_args()
    print(f"{GPUS} GPUs of the mock driver, {PROCESSES} processes, a poll a second; {describe_conditions()}.\n")
    print("\n".join(render_table(*measure(QUICK if chosen.quick else FULL))))


if __name__ == "__main__":
    main()
