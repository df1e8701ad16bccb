"""A fleet in Prometheus and in VictoriaMetrics, side by side: `python bench/fleets.py`.

One process plays the hosts: each has the page of a real daemon on simulated GPUs, with labels of its own and values
that move as between two pages of that daemon. Both engines have the files of docs/use/fleets.md.
Prints series, samples a second, CPU, memory and the time of all queries of the dashboards, and how many of these return
the same series. Takes about twelve minutes; needs the packages prometheus and victoria-metrics.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests" / "support"))

from committed_dashboards import PANELS, expressions  # noqa: E402 - found only now
from fleet_page import write_fleet  # noqa: E402 - likewise
from stand_in_server import TEXT, serve_answers  # noqa: E402 - likewise

from programs import GPUWARDEN, conditions, cpu_seconds, memory, program  # noqa: E402 - likewise
from scraping import HOST, free_port, page, samples, wait_for  # noqa: E402 - likewise

APART_SECONDS = 15.0  # between the two pages that show how values move
TOLERANCE = 0.05  # by which values may differ: the engines scrape at different moments
_ID = re.compile(r'((?:uuid|run_id|gpu_uuid|owner)="(?:GPU-|MIG-)?)([0-9][^"]*|[0-9a-f]{8}-[^"]*)"')
_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A line of a page: the series, its value, and how the value moves in a second or at random."""

    series: str
    value: float
    rate: float = 0.0
    spread: float = 0.0


def real_pages() -> tuple[str, str]:
    """Return two pages of a daemon on eight simulated GPUs with their runs."""
    with tempfile.TemporaryDirectory(prefix="gpuwarden-bench-") as name:
        port, log = free_port(), Path(name) / "log"
        asked = ["serve", "--source=simulated", f"--listen={HOST}:{port}", f"--socket={name}/run.sock"]
        with program([*GPUWARDEN, *asked], dict(os.environ), log):
            wait_for(port, lambda text: len(samples(text, "gpuwarden_run_up")) >= 5, log)
            time.sleep(APART_SECONDS)
            first = page(port).decode()
            time.sleep(APART_SECONDS)
            return first, page(port).decode()


def moving(first: str, second: str) -> list[Sample]:
    """Return the samples of the first page, with the movement to the second."""
    later = dict(line.rsplit(" ", 1) for line in second.splitlines() if not line.startswith("#"))
    found = []
    for line in first.splitlines():
        if not line.startswith("#"):
            series, text = line.rsplit(" ", 1)
            value, change = float(text), float(later.get(series, text)) - float(text)
            is_rising = re.match(r"\w+(_total|_bucket|_sum|_count|_timestamp_seconds)\b", series)
            rate, spread = (change / APART_SECONDS, 0.0) if is_rising else (0.0, change)
            found.append(Sample(series, value, rate, spread))
    return found


class Fleet:
    """All hosts in one HTTP server at `port`: host 7 has the path /7."""

    def __init__(self, template: Sequence[Sample], hosts: int) -> None:
        self.port = 0
        self._template = template
        self._names = [self._renamed(host) for host in range(hosts)]
        self._began = time.monotonic()

    @contextlib.contextmanager
    def served(self) -> Iterator[None]:
        """Answer scrapes until the context ends."""
        with serve_answers(lambda path: (200, TEXT, self.page(int(path.strip("/"))))) as self.port:
            yield

    def _renamed(self, host: int) -> list[str]:
        return [_ID.sub(rf'\g<1>{host:04d}-\g<2>"', sample.series) for sample in self._template]

    def page(self, host: int) -> bytes:
        """Return a host's page now."""
        passed, by = time.monotonic() - self._began, random.random()  # noqa: S311 - no secret
        lines = (
            f"{name} {sample.value + sample.rate * passed + sample.spread * by:.12g}\n"
            for name, sample in zip(self._names[host], self._template, strict=True)
        )
        return "".join(lines).encode()

    def targets(self) -> str:
        """Return the hosts for file_sd."""
        hosts = range(len(self._names))
        return json.dumps(
            [
                {
                    "targets": [f"{HOST}:{self.port}"],
                    "labels": {"__metrics_path__": f"/{n}", "instance": f"box{n}:9846"},
                }
                for n in hosts
            ]
        )


@dataclass(slots=True)
class Engine:
    """A running engine: its URL and processes, by name."""

    name: str
    url: str
    pids: dict[str, int]
    began: float

    def ask(self, expression: str, at: float) -> dict[tuple[tuple[str, str], ...], float]:
        """Return the value of each series that a query returns; raises OSError with the reason if it is refused."""
        data = urllib.parse.urlencode({"query": expression, "time": at, "nocache": 1}).encode()
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query", data, timeout=_TIMEOUT_SECONDS) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        except urllib.error.HTTPError as refusal:
            raise OSError(f"{self.name}: {refusal.read().decode()}\n{expression}") from refusal
        return {tuple(sorted(each["metric"].items())): float(each["value"][1]) for each in found}

    def series(self) -> float:
        """Return the number of series of the last hour, by its own metrics."""
        text = page(int(self.url.rpartition(":")[2]))
        head = samples(text, "prometheus_tsdb_head_series")
        return (head or samples(text, "vm_cache_entries", 'type="storage/hour_metric_ids"'))[0]

    def cpu(self) -> float:
        """Return the CPU time of its processes in seconds."""
        return sum(map(cpu_seconds, self.pids.values()))

    def resident(self) -> dict[str, float]:
        """Return the resident memory of its processes, in MiB."""
        return {name: memory(pid)["Rss"] / 1024 for name, pid in self.pids.items()}


@contextlib.contextmanager
def prometheus(folder: Path, fleet: Fleet) -> Iterator[Engine]:
    """Run Prometheus with the files of docs/use/fleets.md."""
    port = _init(folder, fleet, "prometheus")
    command = [_installed("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with program([*command, f"--web.listen-address={HOST}:{port}"], dict(os.environ), folder / "log") as pid:
        yield Engine("Prometheus", f"http://{HOST}:{port}", {"prometheus": pid}, time.monotonic())


@contextlib.contextmanager
def victoriametrics(folder: Path, fleet: Fleet) -> Iterator[Engine]:
    """Run VictoriaMetrics and vmalert with the files of docs/use/fleets.md."""
    port = _init(folder, fleet, "victoriametrics")
    url, env = f"http://{HOST}:{port}", dict(os.environ)
    command = [_installed("victoria-metrics"), f"-promscrape.config={folder}/scrape.yml", "-search.latencyOffset=0"]
    command += [f"-storageDataPath={folder}/data", f"-httpListenAddr={HOST}:{port}"]
    command += ["-search.maxConcurrentRequests=16"]  # vmalert alone fills the default, twice the number of cores
    flags = [f"-{name}.url={url}" for name in ("datasource", "remoteWrite", "remoteRead", "notifier")]
    alerting = [_installed("vmalert"), f"-rule={folder}/rules/*.yml", "-disableAlertgroupLabel", *flags]
    alerting += [f"-httpListenAddr={HOST}:{free_port()}"]
    with program(command, env, folder / "log") as store, program(alerting, env, folder / "log.vmalert") as rules:
        pids = {"victoria-metrics": store, "vmalert": rules}
        yield Engine("VictoriaMetrics", url, pids, time.monotonic())


def _init(folder: Path, fleet: Fleet, engine: str) -> int:
    write_fleet(folder, HOST, engine)
    (folder / "targets" / "gpuwarden.json").write_text(fleet.targets(), encoding="utf-8")
    return free_port()


def _installed(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        sys.exit(f"{name} is not installed: sudo apt-get install prometheus victoria-metrics")
    return found


def queries() -> list[str]:
    """Return the queries of all dashboards for all hosts, each once."""
    return list(dict.fromkeys(expression for panel in PANELS.values() for expression in expressions(panel)))


def compare(engines: Sequence[Engine], asked: Sequence[str]) -> tuple[list[list[float]], int, int, list[str]]:
    """Ask each engine each query; return the seconds by engine, and how many return the same series and values."""
    seconds: list[list[float]] = [[] for _ in engines]
    same, equal, others = 0, 0, []
    for expression in asked:
        at, answers = time.time() - 20, []  # so that both have all scrapes
        try:
            for engine, spent in zip(engines, seconds, strict=True):
                begin = time.perf_counter()
                answers.append(engine.ask(expression, at))
                spent.append(time.perf_counter() - begin)
        except OSError as refusal:
            others.append(f"refused: {refusal}")
            continue
        first, second = answers
        if first.keys() == second.keys():
            same += 1
            equal += all(abs(first[key] - second[key]) <= TOLERANCE * abs(first[key]) for key in first)
        else:
            missing = f"{len(first.keys() - second.keys())} and {len(second.keys() - first.keys())} of {len(first)}"
            others.append(f"{missing} series only in the first and second: {expression}")
    return seconds, same, equal, others


def measure(template: Sequence[Sample], hosts: int, seconds: float) -> Iterator[str]:
    """Run both engines with a fleet of that size; yield the rows, and a line on the answers."""
    fleet = Fleet(template, hosts)
    with tempfile.TemporaryDirectory(prefix="gpuwarden-bench-") as name:
        first, second = Path(name, "prometheus"), Path(name, "victoriametrics")
        with fleet.served(), prometheus(first, fleet) as one, victoriametrics(second, fleet) as other:
            engines = (one, other)
            time.sleep(seconds / 2)  # the first scrapes index each series
            before = [engine.cpu() for engine in engines]
            time.sleep(seconds / 2)
            cpu = [(engine.cpu() - former) / seconds * 2 for engine, former in zip(engines, before, strict=True)]
            resident = [engine.resident() for engine in engines]
            scraped = [sum(engine.ask("sum(scrape_samples_scraped)", time.time()).values()) / 15 for engine in engines]
            every = [engine.series() for engine in engines]
            asked = queries()
            spent, same, equal, others = compare(engines, asked)
            for number, engine in enumerate(engines):
                cells = [
                    f"{hosts}",
                    engine.name,
                    f"{every[number]:.0f}",
                    f"{scraped[number]:.0f}",
                    f"{cpu[number]:.2f}",
                    " + ".join(f"{size:.0f}" for size in resident[number].values()),
                    f"{sum(spent[number]):.1f}",
                    f"{median(spent[number]) * 1e3:.0f} / {max(spent[number]) * 1e3:.0f}",
                ]
                yield f"| {' | '.join(cells)} |"
            yield f"{hosts} hosts: {same} of {len(asked)} queries return the same series, {equal} the same values too."
            yield from others


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="Measure Prometheus and VictoriaMetrics with a fleet of hosts.")
    parser.add_argument("--quick", action="store_true", help="a smoke run of a minute; its figures mean nothing")
    parser.add_argument("--hosts", type=int, nargs="+", default=[50, 200], help="numbers of hosts (default 50 200)")
    parser.add_argument("--seconds", type=float, default=300, help="time of each (default 300)")
    chosen = parser.parse_args()
    sizes, seconds = ([3], 45.0) if chosen.quick else (chosen.hosts, chosen.seconds)
    template = moving(*real_pages())
    print(f"Scrapes and rules every 15 s, {len(template)} series a host with 8 GPUs; {conditions()}.\n")
    print("| hosts | engine | series | samples/s | CPU, cores | resident, MiB | all queries, s | one, p50 / max, ms |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |", flush=True)
    notes = []
    for hosts in sizes:
        for row in measure(template, hosts, seconds):
            if row.startswith("|"):
                print(row, flush=True)
            else:
                notes.append(row)
    print("\n" + "\n".join(notes))


if __name__ == "__main__":
    main()
