"""Measure the daemon beside nvitop-exporter on the same mock driver: `python bench/exporters.py`.

Both run at the same time as programs of their own, see 8 GPUs with 24 real processes and poll once a second. CPU time
is each process's own, so a busy machine moves it little; latency is taken in turns. Takes about two minutes and needs
a C compiler. What a figure means, and what the mock hides, is in docs/performance.md.
"""

import argparse
import http.client
import os
import re
import socket
import subprocess  # noqa: TID251 - a benchmark starts the programs that it measures
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).parents[1]
HOST = "127.0.0.1"
GPUS, PROCESSES = 8, 24
PATIENCE_SECONDS = 30.0
PAUSE_SECONDS = 0.01  # between scrapes, so that they do not all fall between the same two polls


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure; `quiet` is the length in seconds of a window without scrapes."""

    starts: int
    rounds: int
    quiet: float
    scrapes: int  # of each kind, in all rounds together


FULL = Effort(starts=5, rounds=3, quiet=20, scrapes=300)
QUICK = Effort(starts=1, rounds=1, quiet=1, scrapes=10)


def fetch(connection: http.client.HTTPConnection, encoding: str = "identity") -> bytes:
    """Scrape once, with nothing of the body left to read."""
    connection.request("GET", "/metrics", headers={"Accept-Encoding": encoding})
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != http.client.OK:
        raise ConnectionError(f"status {answer.status} instead of a page")
    return body


def scrape_anew(port: int, _kept: http.client.HTTPConnection) -> None:
    """Scrape on a connection of its own."""
    fetch(http.client.HTTPConnection(HOST, port, timeout=PATIENCE_SECONDS))


def scrape_kept(_port: int, kept: http.client.HTTPConnection) -> None:
    """Scrape on a connection that stays, or is made anew where the server closes it."""
    fetch(kept)


def scrape_gzip(_port: int, kept: http.client.HTTPConnection) -> None:
    """Scrape as Prometheus does: on a connection that stays, compressed."""
    fetch(kept, "gzip")


SCRAPES: Mapping[str, Callable[[int, http.client.HTTPConnection], None]] = {
    "new connection": scrape_anew,
    "kept connection": scrape_kept,
    "kept connection, gzip": scrape_gzip,
}


@dataclass(slots=True)
class Exporter:
    """A running exporter and what has been measured of it; seconds and bytes."""

    pid: int
    port: int
    first_page: float
    polling: list[float] = field(default_factory=list)  # CPU seconds in each minute without scrapes
    scraping: list[float] = field(default_factory=list)  # CPU seconds of each scrape, polls taken off
    latency: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in SCRAPES})


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, all its threads, to the nanosecond (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


def memory(pid: int) -> dict[str, int]:
    """Return the process's memory in KiB by the kernel's names: Rss, Pss, Anonymous and more."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    return {name: int(size) for name, size in re.findall(r"^(\w+): +(\d+) kB$", text, re.MULTILINE)}


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def program(command: Sequence[str], env: dict[str, str], log: Path) -> Iterator[int]:
    """Start a program, yield its pid and end it."""
    with log.open("wb") as output, subprocess.Popen(command, env=env, stdout=output, stderr=output) as started:
        try:
            yield started.pid
        finally:
            started.kill()


def page(port: int) -> bytes:
    """Return the page; empty while nobody answers."""
    try:
        return fetch(http.client.HTTPConnection(HOST, port, timeout=PATIENCE_SECONDS))
    except OSError:
        return b""


def wait_for_full_page(port: int, pids: Sequence[int], log: Path) -> None:
    """Wait until the page shows every process."""
    wanted = [f'pid="{pid}"'.encode() for pid in pids]
    end = time.monotonic() + PATIENCE_SECONDS
    while not all(each in (shown := page(port)) for each in wanted):
        if time.monotonic() > end:
            missing = sum(each not in shown for each in wanted)
            raise TimeoutError(f"{missing} of {len(pids)} processes are on no page:\n{log.read_text()[-2000:]}")
        time.sleep(0.005)


@contextmanager
def exporter(name: str, env: dict[str, str], pids: Sequence[int]) -> Iterator[Exporter]:
    """Run an exporter, from its first page with every process on."""
    with tempfile.TemporaryDirectory(prefix="gpuwarden-bench-") as folder:
        log, port = Path(folder, "log"), free_port()
        config = Path(folder, "config.yaml")
        config.write_text("processes:\n  series: true\n", encoding="ascii")  # as the peer has them, see pids
        command = {
            "gpuwarden": ["serve", f"--listen={HOST}:{port}", f"--socket={folder}/run.sock", f"--config={config}"],
            "nvitop_exporter": [f"--bind-address={HOST}", f"--port={port}", "--interval=1"],
        }[name]
        begun = time.perf_counter()
        with program([sys.executable, "-m", name, *command], env, log) as pid:
            wait_for_full_page(port, pids, log)
            yield Exporter(pid, port, time.perf_counter() - begun)


def measure_polling(exporters: Sequence[Exporter], seconds: float) -> None:
    """Let all of them poll, and nobody scrape."""
    before = [cpu_seconds(each.pid) for each in exporters]
    begun = time.perf_counter()
    time.sleep(seconds)
    passed = time.perf_counter() - begun
    for each, cpu in zip(exporters, before, strict=True):
        each.polling.append((cpu_seconds(each.pid) - cpu) / passed * 60)


def measure_scrapes(it: Exporter, kind: str, count: int) -> None:
    """Scrape one exporter, one scrape after the other."""
    scrape, kept = SCRAPES[kind], http.client.HTTPConnection(HOST, it.port, timeout=PATIENCE_SECONDS)
    scrape(it.port, kept)  # pays for what is done once
    begun, cpu = time.perf_counter(), cpu_seconds(it.pid)
    for _ in range(count):
        time.sleep(PAUSE_SECONDS)
        start = time.perf_counter()
        scrape(it.port, kept)
        it.latency[kind].append(time.perf_counter() - start)
    spent, passed = cpu_seconds(it.pid) - cpu, time.perf_counter() - begun
    it.scraping.append((spent - median(it.polling) / 60 * passed) / count)
    kept.close()


def figures(it: Exporter, starts: Sequence[float]) -> dict[str, float]:
    """Return what has been measured, by the names of the table's rows."""
    text, held = page(it.port), memory(it.pid)
    percentiles = {kind: quantiles(times, n=100) for kind, times in it.latency.items()}
    return {
        **{f"scrape p50, {kind}, ms": found[49] * 1e3 for kind, found in percentiles.items()},
        **{f"scrape p99, {kind}, ms": found[98] * 1e3 for kind, found in percentiles.items()},
        "CPU of a scrape, ms": median(it.scraping) * 1e3,
        "CPU of the polls, s/min": median(it.polling),
        "memory, resident, MiB": held["Rss"] / 1024,
        "memory, proportional, MiB": held["Pss"] / 1024,
        "memory, anonymous, MiB": held["Anonymous"] / 1024,
        "start to first full page, s": median(starts),
        "series": sum(not line.startswith(b"#") for line in text.splitlines()),
        "page, KB": len(text) / 1000,
    }


# The most that our figure may be of the peer's. Other rows have no bar.
BARS = {"scrape p50, new connection, ms": 1 / 4, "CPU of the polls, s/min": 1 / 3, "memory, resident, MiB": 1.0}


def table(ours: dict[str, float], peer: dict[str, float]) -> Iterator[str]:
    """Write the figures as a Markdown table."""
    yield "| figure | gpuwarden | nvitop-exporter | ratio | bar | met |"
    yield "| --- | ---: | ---: | ---: | ---: | --- |"
    for name, figure in ours.items():
        cells = [name, f"{figure:.3g}", "-", "-", f"{BARS[name]:.2f}" if name in BARS else "", ""]
        if name in peer:
            ratio = figure / peer[name]
            cells[2:4] = f"{peer[name]:.3g}", f"{ratio:.2f}"
            cells[5] = ("yes" if ratio <= BARS[name] else "**no**") if name in BARS else ""
        yield f"| {' | '.join(cells)} |"


def build_mock() -> str:
    """Build the project's mock driver and return its folder."""
    command = [sys.executable, "-m", "mock_nvml", str(ROOT / "build/mock_nvml")]
    built = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT / "tests")}, stdout=-1, check=True)
    return built.stdout.decode().strip()


def measure(names: Sequence[str], effort: Effort) -> list[dict[str, float]]:
    """Take all figures of the exporters named, in their order."""
    with ExitStack() as stack:
        sleepers = [
            stack.enter_context(program(["sleep", "600"], {**os.environ}, Path(os.devnull))) for _ in range(PROCESSES)
        ]
        settings = {"MOCK_NVML_GPUS": str(GPUS), "MOCK_NVML_PIDS": ",".join(map(str, sleepers))}
        env = {**os.environ, **settings, "LD_LIBRARY_PATH": build_mock()}
        starts: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(effort.starts):
            for name in names:
                with exporter(name, env, sleepers) as started:
                    starts[name].append(started.first_page)
        running = [stack.enter_context(exporter(name, env, sleepers)) for name in names]
        for _ in range(effort.rounds):
            measure_polling(running, effort.quiet)
            for kind in SCRAPES:
                for each in running:
                    measure_scrapes(each, kind, effort.scrapes // effort.rounds)
        return [figures(each, starts[name]) for name, each in zip(names, running, strict=True)]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="Measure gpuwarden beside nvitop-exporter on the mock driver.")
    parser.add_argument("--quick", action="store_true", help="a smoke run of some seconds; its figures mean nothing")
    parser.add_argument("--without-peer", action="store_true", help="measure gpuwarden alone")
    chosen = parser.parse_args()
    names = ["gpuwarden"] if chosen.without_peer else ["gpuwarden", "nvitop_exporter"]
    ours, *peer = measure(names, QUICK if chosen.quick else FULL)
    print(f"{GPUS} GPUs of the mock driver, {PROCESSES} processes, a poll a second, Python {sys.version.split()[0]}.\n")
    print("\n".join(table(ours, peer[0] if peer else {})))


if __name__ == "__main__":
    main()
