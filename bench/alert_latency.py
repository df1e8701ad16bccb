"""Latency of alerts: time until Alertmanager's webhook reports that memory runs out; `python bench/alert_latency.py`.

Real daemons on the mock driver, with the default configuration, each with a training run on all of its GPUs, a real
Alertmanager, and, except for the fast path, a real Prometheus with the shipped rules. At random moments a co-tenant
allocates the free memory of a GPU. The time is measured from just before the driver's values change until the webhook
arrives. Each GPU is used once, so that each alert is new. `--quick` is a smoke run: few crossings, no long intervals.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

from gpuwarden.alerts.prometheus_rules import Choices, render_rule_file
from gpuwarden.config.schema import Config
from mocked import build_mock, start_sleepers
from programs import GPUWARDEN, describe_conditions, run_program
from scraping import free_port

if TYPE_CHECKING:
    from mock_nvml import MockNvml

SIZE_MIB = 81559
HELD_MIB = 20 * 1024  # by the run's process
FREE_MIB = 40_000
FULL_MIB = 300
GPUS = 8
TARGETS = 4
LIMIT_SECONDS = 120.0
BAR_FAST = Config().poll.memory_interval + 0.05
RUN = """
import json, sys, time
from gpuwarden import watch
from gpuwarden.protocol.messages import DeviceMemory
path, devices = sys.argv[1], json.loads(sys.argv[2])
with watch("bench", socket=path, devices=devices) as run:
    held = {name: DeviceMemory(19 << 30, 19 << 30) for name in devices}
    run._loop.run.memory.latest = lambda: held  # stands in for a framework
    while True:
        time.sleep(0.1)
        run.step()
"""


@dataclass(frozen=True, slots=True)
class Route:
    """Path of an alert: seconds between scrapes and evaluations, None without Prometheus."""

    name: str
    bar: float | None  # seconds
    scrape: float | None = None
    evaluate: float = 0.0
    spread_seconds: float = 40.0  # over which crossings are spread


ROUTES = (
    Route("fast path", BAR_FAST),
    Route("Prometheus, scrapes 1 s, rules 1 s", 1.5, 1, 1),
    Route("Prometheus, scrapes 15 s, rules as shipped", 15.0, 15, Choices().interval, 90.0),
    Route("Prometheus, scrapes 15 s, rules set to 15 s", None, 15, 15, 90.0),  # not as shipped
)


@dataclass(slots=True)
class Webhook:
    """Receiver of Alertmanager's notifications; `arrived` has each alert's first time, by its run's pid and GPU."""

    arrived: dict[tuple[str, str], float] = field(default_factory=dict)
    url: str = ""

    @contextmanager
    def serve(self) -> Iterator[Webhook]:
        """Serve until the context ends."""
        arrived = self.arrived

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                now = time.monotonic()
                message = json.loads(self.rfile.read(int(self.headers["content-length"])))
                for alert in message["alerts"]:
                    labels = alert["labels"]
                    if labels["alertname"] == "RunNearOutOfMemory":
                        arrived.setdefault((labels["run_id"].partition("-")[0], labels["uuid"]), now)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_arguments: object) -> None:
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            self.url = f"http://127.0.0.1:{server.server_port}/"
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            try:
                yield self
            finally:
                server.shutdown()


@dataclass(frozen=True, slots=True)
class Target:
    """Daemon on its own mock driver, with a run."""

    driver: MockNvml
    port: int
    pid: int  # of the run
    co_tenant: int

    def set_free(self, gpu: int, mib: int) -> float:
        """Set the free memory of the GPU, in one step; return the time before."""
        held = f"{self.pid}:{HELD_MIB},{self.co_tenant}:{SIZE_MIB - mib - HELD_MIB}"
        before = time.monotonic()
        self.driver.control(f"procs {gpu} {held}", f"set {gpu} free {mib}", f"set {gpu} memused {SIZE_MIB - mib}")
        return before


def uuid(gpu: int) -> str:
    """Return a GPU's UUID."""
    return f"GPU-a0b1c2d{gpu}-4d4f-434b-8000-00000000000{gpu}"


def fetch_text(url: str) -> str:
    """Return a page; empty without an answer."""
    try:
        with urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {LIMIT_SECONDS:g} s: {what}")
        time.sleep(0.1)


@contextmanager
def run_target(folder: Path, alertmanager: str | None) -> Iterator[Target]:
    """Start a daemon, which notifies the Alertmanager if one is named, and a run on all of its GPUs."""
    folder.mkdir()
    driver, port, config = build_mock(folder), free_port(), folder / "config.yaml"
    config.write_text(f"alertmanager: {{url: {alertmanager or 'none'}}}\n")
    env = {**os.environ, **driver.env(gpus=GPUS, frozen=1), "STATE_DIRECTORY": str(folder / "state")}
    command = [*GPUWARDEN, "serve", "--config", str(config), "--listen", f"127.0.0.1:{port}"]
    path = folder / "run.sock"
    devices = json.dumps({f"GPU:{gpu}": uuid(gpu) for gpu in range(GPUS)})
    with ExitStack() as stack:
        stack.enter_context(run_program([*command, "--socket", str(path)], env, folder / "log"))
        wait_for(path.exists, "the daemon's socket")
        run = [sys.executable, "-c", RUN, str(path), devices]
        pid = stack.enter_context(run_program(run, dict(os.environ), folder / "run.log"))
        (co_tenant,) = stack.enter_context(start_sleepers(1))
        started = Target(driver, port, pid, co_tenant)
        for gpu in range(GPUS):
            started.set_free(gpu, FREE_MIB)
        page = f"http://127.0.0.1:{port}/metrics"
        wait_for(lambda: fetch_text(page).count("\ngpuwarden_run_memory_headroom_bytes{") == GPUS, "the run's headroom")
        yield started


@contextmanager
def run_alertmanager(folder: Path, webhook: str) -> Iterator[str]:
    """Start an Alertmanager that sends critical alerts at once, one notification per GPU; yield its URL."""
    config = {
        "route": {
            "receiver": "webhook",
            "group_by": ["alertname", "instance", "run_id", "gpu"],
            "group_wait": "0s",
            "group_interval": "1m",
            "repeat_interval": "4h",
        },
        "receivers": [{"name": "webhook", "webhook_configs": [{"url": webhook}]}],
    }
    address = f"127.0.0.1:{free_port()}"
    (folder / "alertmanager.yml").write_text(json.dumps(config))
    command = ["prometheus-alertmanager", f"--config.file={folder}/alertmanager.yml", "--cluster.listen-address="]
    command += [f"--web.listen-address={address}", f"--storage.path={folder}/alertmanager"]
    with run_program(command, dict(os.environ), folder / "alertmanager.log"):
        wait_for(lambda: bool(fetch_text(f"http://{address}/-/ready")), "Alertmanager")
        yield f"http://{address}"


@contextmanager
def run_prometheus(folder: Path, route: Route, targets: list[Target], receiver: str) -> Iterator[None]:
    """Start a Prometheus, and yield it when it has scraped all runs."""
    rules = folder / "rules.yml"
    rules.write_text(render_rule_file(Choices(interval=route.evaluate)))
    listed = [f"127.0.0.1:{each.port}" for each in targets]
    config = {
        "global": {"scrape_interval": f"{route.scrape:g}s", "evaluation_interval": f"{route.evaluate:g}s"},
        "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "gpuwarden", "static_configs": [{"targets": listed}]}],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [receiver.partition("//")[2]]}]}]},
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    url = f"http://127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/prometheus"]
    command.append(f"--web.listen-address={url.partition('//')[2]}")
    needed = {"gpuwarden:device:info": GPUS * len(targets), "gpuwarden_run_info": len(targets)}

    def has_scraped() -> bool:
        for name, count in needed.items():
            answer: dict[str, Any] = json.loads(fetch_text(f"{url}/api/v1/query?query={name}") or "{}")
            if len(answer.get("data", {}).get("result", ())) < count:
                return False
        return True

    with run_program(command, dict(os.environ), folder / "prometheus.log"):
        wait_for(has_scraped, "all runs in Prometheus")
        yield


def measure_delays(folder: Path, route: Route, number: int) -> list[float]:
    """Return the time until each crossing was notified, in seconds, shortest first."""
    chance = random.Random(1)  # noqa: S311 - moments, not secrets
    with ExitStack() as stack:
        webhook = stack.enter_context(Webhook().serve())
        receiver = stack.enter_context(run_alertmanager(folder, webhook.url))
        named = receiver if route.scrape is None else None
        many = -(-number // GPUS)
        targets = [stack.enter_context(run_target(folder / f"target{index}", named)) for index in range(many)]
        if route.scrape is not None:
            stack.enter_context(run_prometheus(folder, route, targets, receiver))
        places = [(each, gpu) for gpu in range(GPUS) for each in targets][:number]
        spread = route.spread_seconds * number / (TARGETS * GPUS)
        moments = sorted(chance.uniform(0, spread) for _ in places)
        crossed = cross_thresholds(places, moments)
        wait_for(lambda: crossed.keys() <= webhook.arrived.keys(), "all alerts")
        return sorted(webhook.arrived[key] - crossed[key] for key in crossed)


def cross_thresholds(places: list[tuple[Target, int]], moments: list[float]) -> Mapping[tuple[str, str], float]:
    """Cross the threshold on each GPU at its moment, in seconds from now; return when that was."""
    crossed: dict[tuple[str, str], float] = {}
    begin = time.monotonic()
    for (each, gpu), moment in zip(places, moments, strict=True):
        time.sleep(max(begin + moment - time.monotonic(), 0))
        crossed[str(each.pid), uuid(gpu)] = each.set_free(gpu, FULL_MIB)
    return crossed


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run: a few crossings, without the long intervals")
    quick = parser.parse_args().quick
    needed = ("prometheus", "prometheus-alertmanager")
    if missing := [name for name in needed if shutil.which(name) is None]:
        sys.exit(f"not installed: {', '.join(missing)}")
    number = 3 if quick else TARGETS * GPUS
    print(f"Measured {describe_conditions()}; {number} crossings each, group_wait 0 s.\n")
    print("| route | median, s | p95, s | longest, s | at most, s | met |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    for route in ROUTES[:2] if quick else ROUTES:
        with tempfile.TemporaryDirectory() as place:
            took = measure_delays(Path(place), route, number)
        middle, p95 = median(took), quantiles(took, n=20, method="inclusive")[-1]
        bar, met = ("", "") if route.bar is None else (f"{route.bar:g}", "yes" if middle <= route.bar else "**no**")
        print(f"| {route.name} | {middle:.3f} | {p95:.3f} | {took[-1]:.3f} | {bar} | {met} |", flush=True)


if __name__ == "__main__":
    main()
