"""An hour of a simulated box in Prometheus, made in seconds: `python grafana/history.py DIRECTORY [--minutes N]`.

The real daemon polls the simulation while the clock runs fast; its pages become a Prometheus' blocks, over which
Prometheus itself evaluates the alert rules. It ends where a leaking run is nearly out of memory. Needs Prometheus and
promtool.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import re
import subprocess
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import promql_parser
import yaml

from gpuwarden import thresholds
from gpuwarden.config import Config
from gpuwarden.daemon import Daemon
from gpuwarden.exposition import Exposition, entries
from gpuwarden.gpu.snapshot import XidCount
from gpuwarden.host import Host, Space
from gpuwarden.runs.cgroup import CgroupMemory
from gpuwarden.runs.process_tree import Present, Usage
from gpuwarden.runs.registry import RunRegistry
from gpuwarden.sources import Source
from gpuwarden.sources.simulation import Simulation
from gpuwarden.sources.workloads import USERS
from gpuwarden.state import State

BEGIN = 1_763_600_000.0  # Unix time; any will do, a constant one makes the same history every time
STEP = 5.0  # seconds between polls, and between evaluations of the rules
LIMIT = 3 * 3600.0  # seconds until a run must have come near out of memory
FLAGS = (
    "--storage.tsdb.retention.time=100y",
    # Imported series have no mark at their end: with the usual five minutes, what is gone would linger.
    f"--query.lookback-delta={STEP * 1500:.0f}ms",
)
TARGET = 'job="gpuwarden",instance="gpu-box-1:9846"'
# Faults, so that the panels of errors have something to show: from and to, as parts of the history.
LOST_GPU, GPU_LOST, DRIVER_LOST = 5, (0.5, 0.55), (0.7, 0.705)
PROGRAM_GPU, PROGRAM_FAULT, OLD_CLIENT = 6, 0.3, (0.2, 0.4)
_GIB, _CPUS = 2**30, 128
RULES = Path(__file__).parents[1] / "deploy" / "prometheus" / "rules" / "gpuwarden.yml"
Labels: TypeAlias = "tuple[tuple[str, str], ...]"


@dataclass(slots=True)
class _Clock:
    """Seconds since the beginning."""

    now: float = 0.0

    def time(self) -> float:
        """Return the Unix time, as `time.time` does."""
        return BEGIN + self.now

    def monotonic(self) -> float:
        """Return the seconds, as `time.monotonic` does."""
        return self.now

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let the daemon's own clocks run as fast, the one that its registry was given as a default too."""
        with (
            mock.patch("time.time", self.time),
            mock.patch("time.monotonic", self.monotonic),
            mock.patch.dict(RunRegistry.__init__.__kwdefaults__, wall=self.time),
        ):
            yield


def record(directory: Path, seconds: float) -> tuple[float, float]:
    """Write a Prometheus' data directory; return the Unix times of its first and its last sample."""
    directory.mkdir(parents=True, exist_ok=True)
    end = asyncio.run(_record(directory, seconds))
    with serving(directory) as url:
        alerts = [line for rule in _rules() for line in _alerts(url, rule, end)]
    _import(directory, alerts)
    return BEGIN, end


async def _record(directory: Path, seconds: float) -> float:
    clock = _Clock()
    simulation = Simulation(clock=clock.monotonic)
    source = Source(
        "simulated",
        simulation.nvml,
        reports=simulation.reports,
        identify=simulation.identify,
        user_name=USERS.__getitem__,
        clock=clock.monotonic,
    )
    page = Exposition()
    lines: list[str] = []
    with clock.running():
        daemon = Daemon(Config(), source)
        while True:
            _break(simulation, clock.now / seconds)
            state = _refusing(_faulty(_hosted(await daemon.poll(), clock.now), clock.now, seconds), clock.now / seconds)
            lines += _samples(page.render(entries(state)).text.decode(), clock.time())
            if clock.now >= seconds and _least_headroom(state) < thresholds.NEAR_OUT_OF_MEMORY / 2:
                break
            if clock.now > seconds + LIMIT:
                raise RuntimeError(f"no simulated run came near out of memory in {clock.now:g} s")
            clock.now += STEP
    _import(directory, lines)
    return clock.time()


def _hosted(state: State, now: float) -> State:
    """Put a made-up host around the simulated GPUs: this machine's own clock does not run fast, nor has it the runs."""
    busy, iowait = 0.4 * now, 0.02 * (now + 300 * (1 - math.cos(now / 300)))  # which comes and goes
    host = Host(
        memory_size=_GIB * 1024,
        memory_available=_GIB * (600 + int(40 * math.sin(now / 500))),
        swap=Space(_GIB * 8, 0),
        shm=Space(_GIB * 512, _GIB * (20 + int(10 * math.sin(now / 200)))),
        cpus=_CPUS,
        cpu_seconds={
            ("busy",): _CPUS * busy,
            ("iowait",): _CPUS * iowait,
            ("idle",): _CPUS * (now - busy - iowait),
            ("steal",): 0.0,
        },
        oom_kills=0,
        stalled_seconds={("io", "some"): 0.05 * now},
    )
    names = sorted({run.hello.name for run in state.runs})
    runs = tuple(
        replace(run, peer=replace(run.peer, since=run.began), usage=_usage(1 + names.index(run.hello.name), now))
        if run.up
        else replace(run, peer=replace(run.peer, since=run.began))
        for run in state.runs
    )
    return replace(state, host=host, runs=runs)


def _faulty(state: State, now: float, seconds: float) -> State:
    """Add the XIDs that a driver tells of: why the GPU was lost, and a fault of a program on another one."""
    told = ((LOST_GPU, 79, GPU_LOST[0] * seconds), (PROGRAM_GPU, 31, PROGRAM_FAULT * seconds))
    gpus = tuple(
        replace(gpu, xids={code: XidCount(1, BEGIN + at) for index, code, at in told if index == n and at <= now})
        for n, gpu in enumerate(state.snapshot.gpus)
    )
    return replace(state, snapshot=replace(state.snapshot, gpus=gpus))


def _refusing(state: State, progress: float) -> State:
    """Count the reports of an old client, which came for a while."""
    begin, end = OLD_CLIENT
    refused = round(100 * (min(max(progress, begin), end) - begin))
    rejected = {**state.counts.reports_rejected, "unknown_version": refused}
    return replace(state, counts=replace(state.counts, reports_rejected=rejected))


def _usage(number: int, now: float) -> Usage:
    """Make up what the run of that number uses, each its own."""
    present = Present(
        memory=_GIB * (8 + 3 * number),
        processes=1 + 2 * number,
        state="sleeping",
        cpus=16.0,
        cgroup_memory=CgroupMemory(_GIB * 64, _GIB * (10 + 3 * number)),
    )
    return Usage((1 + number) * now, int(2e7 * number * now), int(1e6 * number * now), present)


def _break(simulation: Simulation, progress: float) -> None:
    for faults, (begin, end) in ((simulation.gpu(LOST_GPU), GPU_LOST), (simulation.driver, DRIVER_LOST)):
        if begin <= progress < end:
            faults.lose()
        else:
            faults.restore()


def _least_headroom(state: State) -> float:
    return min(
        (left / (left + run.memory[uuid].current) for run in state.runs for uuid, left in run.headroom.items()),
        default=1.0,
    )


def _samples(page: str, time: float) -> Iterator[str]:
    """Write a page's samples as Prometheus stores them: with its target's labels, and `up` beside them."""
    yield f"up{{{TARGET}}} 1 {time}\n"
    for line in page.splitlines():
        if not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name, _, labels = series.rstrip("}").partition("{")
            yield f"{name}{{{labels}{',' if labels else ''}{TARGET}}} {value} {time}\n"


def _import(directory: Path, lines: list[str]) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".om") as file:
        file.writelines([*lines, "# EOF\n"])
        file.flush()
        command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", file.name, str(directory)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[str]:
    """Serve a data directory by a Prometheus on a free port of 127.0.0.1; yield its URL."""
    empty = directory / "prometheus.yml"
    empty.write_text("scrape_configs: []\n")
    command = ["prometheus", f"--config.file={empty}", f"--storage.tsdb.path={directory}"]
    command += [*FLAGS, "--web.listen-address=127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as prometheus:
        try:
            yield _url(prometheus)
        finally:
            prometheus.terminate()


def _url(prometheus: subprocess.Popen[str]) -> str:
    """Read from its log where it listens, and that it is ready."""
    address, ready = "", False
    log: list[str] = []
    for line in prometheus.stderr or ():
        log.append(line)
        if listening := re.search(r'msg="Listening on".* address=(\S+)', line):
            address = listening[1]
        ready = ready or "Server is ready" in line
        if address and ready:  # the two are told in either order
            return f"http://{address}"
    raise RuntimeError(f"Prometheus ended:\n{''.join(log)}")


def ask(url: str, path: str, **parameters: object) -> Any:
    """Ask Prometheus' API. Raises urllib.error.HTTPError for a query it does not accept."""
    data = urllib.parse.urlencode(parameters).encode()
    with urllib.request.urlopen(f"{url}/api/v1/{path}", data, timeout=30) as answer:
        return json.load(answer)["data"]


def _rules() -> Iterator[dict[str, Any]]:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from group["rules"]


def _alerts(url: str, rule: dict[str, Any], end: float) -> Iterator[str]:
    """Write the samples of ALERTS that evaluating the rule would have left."""
    wait = promql_parser.parse_duration(rule["for"]).total_seconds() if "for" in rule else 0
    found = ask(url, "query_range", query=rule["expr"], start=BEGIN, end=end, step=STEP)["result"]
    for series in found:
        labels = {**series["metric"], **rule["labels"], "alertname": rule["alert"], "alertstate": "firing"}
        labels.pop("__name__", None)
        text = ",".join(f"{name}={json.dumps(value)}" for name, value in labels.items())
        for time in _firing([float(time) for time, _value in series["values"]], wait):
            yield f"ALERTS{{{text}}} 1 {time}\n"


def _firing(active: list[float], wait: float) -> Iterator[float]:
    """Return those of the times at which an expression held without a gap for `wait` seconds."""
    since = last = -LIMIT
    for time in active:
        since = since if time - last <= STEP else time
        last = time
        if time - since >= wait:
            yield time


def main() -> None:
    """Write a history and say how to look at it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    options = parser.parse_args()
    begin, end = record(options.directory, options.minutes * 60)
    print(f"from={begin:.0f} to={end:.0f}: samples from {begin:.0f} to {end:.0f}, Unix time; look at them with")
    print(
        f"  prometheus --config.file={options.directory}/prometheus.yml --storage.tsdb.path={options.directory}", *FLAGS
    )


if __name__ == "__main__":
    main()
