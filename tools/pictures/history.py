"""An hour of two simulated hosts in Prometheus: `python tools/pictures/history.py DIRECTORY [--minutes N]`.

The real daemon polls the simulation in fast time; its scrapes become a Prometheus' blocks, over which Prometheus
evaluates the alert rules. It ends when a leaking run is nearly out of memory. Needs Prometheus and promtool.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from backfill import Episode, add, episodes, flags, rules, samples, serving, values
from divided import divided

from gpuwarden.capture.simulation import USERS
from gpuwarden.config import thresholds
from gpuwarden.config.schema import Config, ProcessesConfig
from gpuwarden.daemon.daemon import Daemon
from gpuwarden.daemon.metrics_page import read_tables
from gpuwarden.daemon.sources import Source
from gpuwarden.gpu.poller import Poller
from gpuwarden.metrics.exposition import Exposition
from gpuwarden.runs.registry import RunRegistry
from gpuwarden.state import State

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))

from faulty_simulation import FaultySimulation
from made_up import MadeUp, fail, off

BEGIN = 1_763_600_000.0  # Unix time; any will do, a constant one makes the same history every time
LEAKING_GPU = 1  # of the recording
STEP = 5.0  # seconds between polls, and between evaluations of the rules
LIMIT = 3 * 3600.0  # seconds until a run must have come near out of memory
_UUIDS = "GPU-51300000-"  # of the simulation begin so, on each box
_PIDS = re.compile(r'(?<=")(\d{1,2})1943')  # and pids, in labels
_LINES = 2_000_000  # samples that are kept in memory


@dataclass(frozen=True, slots=True)
class Box:
    """Simulated host: `target` has the labels that Prometheus adds; a `faulty` one fails, a `divided` one has MIG.

    `start` is where in the recording its history begins.
    """

    target: str
    gpus: int
    start: float
    uuids: str
    pids: str
    faulty: bool = False
    divided: bool = False


BOXES = (
    # A site's own labels, on one of the two: dashboards must work with and without them.
    Box(
        'job="gpuwarden",instance="gpu-box-1:9846",cluster="lab",rack="a1"',
        8,
        637.0,
        "GPU-51300000-",
        "1943",
        faulty=True,
    ),
    Box('job="gpuwarden",instance="gpu-box-2:9846"', 4, 333.0, "GPU-51300001-", "1944"),
    # Of the name of the first, elsewhere: its one GPU is divided, and it is off for a while.
    Box('job="gpuwarden",instance="gpu-box-1:9846",cluster="west"', 1, 517.0, "GPU-51300002-", "1945", divided=True),
)


@dataclass(slots=True)
class Clock:
    """Seconds since the start, which advance on request."""

    now: float = 0.0

    def time(self) -> float:
        """Return the Unix time, as `time.time` does."""
        return BEGIN + self.now

    def monotonic(self) -> float:
        """Return the seconds, as `time.monotonic` does."""
        return self.now

    def uptime(self, _clock: int) -> float:
        """Return the seconds since the host booted, which is the start, as `time.clock_gettime` does."""
        return self.now

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let the daemon's clocks run fast, even those that its parts have as defaults."""
        with (
            mock.patch("time.time", self.time),
            mock.patch("time.monotonic", self.monotonic),
            mock.patch("time.clock_gettime", self.uptime),
            mock.patch.dict(Poller.__init__.__kwdefaults__, wall=self.time),
            mock.patch.dict(RunRegistry.__init__.__kwdefaults__, wall=self.time),
        ):
            yield


def simulated(simulation: FaultySimulation, clock: Clock) -> Source:
    """Return the source of a simulation whose time is the clock's."""
    return Source(
        "simulated",
        simulation.nvml,
        reports=simulation.reports,
        identify=simulation.identify,
        user_name=USERS.__getitem__,
        clock=clock.monotonic,
    )


def record(directory: Path, seconds: float, step: float = STEP) -> tuple[float, float]:
    """Write a Prometheus' data directory; return the Unix times of its first and its last sample."""
    directory.mkdir(parents=True, exist_ok=True)
    end = seconds
    for box in BOXES:
        # The first says when it is over.
        end = asyncio.run(record_box(directory, box, seconds, end, step))
    evaluate(directory, end, step)
    return BEGIN, BEGIN + end


def evaluate(directory: Path, end: float, step: float = STEP) -> None:
    """Add the samples of the recording rules, and the alerts, of so many seconds."""
    with serving(directory, step) as url:
        alerts = [line for rule in rules(step) for line in _evaluated(url, rule, BEGIN + end, step)]
    add(directory, alerts)


async def record_box(
    directory: Path, box: Box, seconds: float, end: float, step: float, *, leaks: bool = True
) -> float:
    """Write a host's scrapes; return the seconds after which its history ends."""
    clock = Clock()
    simulation = FaultySimulation(box.gpus, clock.monotonic, start=box.start)
    if not leaks:
        simulation.set_idle(LEAKING_GPU)
    source = simulated(simulation, clock)
    page, made_up = Exposition(), MadeUp(BEGIN)
    lines: list[str] = []
    with clock.running():
        daemon = Daemon(Config(processes=ProcessesConfig(series=True)), source)
        while True:
            if box.faulty:
                fail(simulation, clock.now, seconds)
            state = made_up.add(await daemon.poll(), clock.now, seconds, faulty=box.faulty)
            state = divided(state) if box.divided else state
            text = page.render(read_tables(state)).text.decode().replace(_UUIDS, box.uuids)
            text = _PIDS.sub(rf"\g<1>{box.pids}", text)
            lines += samples(None if box.divided and off(clock.now, seconds) else text, clock.time(), box.target)
            if len(lines) > _LINES:
                add(directory, lines)
                lines.clear()
            if clock.now >= end and (not box.faulty or _least_headroom(state) < thresholds.NEAR_OUT_OF_MEMORY / 2):
                break
            if clock.now > seconds + LIMIT:
                raise RuntimeError(f"no simulated run came near out of memory in {clock.now:g} s")
            clock.now += step
    add(directory, lines)
    return clock.now


def _least_headroom(state: State) -> float:
    return min(
        (left / (left + run.memory[uuid].current) for run in state.runs for uuid, left in run.headroom.items()),
        default=1.0,
    )


def _evaluated(url: str, rule: dict[str, Any], end: float, step: float) -> Iterator[str]:
    """Yield the samples that evaluating the rule would have written: of the series it records, or of ALERTS."""
    if "record" in rule:
        for labels, samples in values(url, rule["expr"], BEGIN, end, step):
            told_by = {name: value for name, value in labels.items() if name != "__name__"}
            yield from (_sample(rule["record"], told_by, value, time) for time, value in samples)
        return
    for each in episodes(url, rule, BEGIN, end, step):
        yield from alerting(each, step)


def alerting(episode: Episode, step: float) -> Iterator[str]:
    """Yield the samples of ALERTS and ALERTS_FOR_STATE that a firing alert leaves."""
    active = {**episode.labels, "alertname": episode.alert}
    firing = {**active, "alertstate": "firing"}
    for number in range(round((episode.end - episode.begin) / step) + 1):
        time = episode.begin + number * step
        yield _sample("ALERTS", firing, "1", time)
        yield _sample("ALERTS_FOR_STATE", active, f"{episode.begin:.0f}", time)


def _sample(name: str, labels: Mapping[str, str], value: str, time: float) -> str:
    text = ",".join(f"{label}={json.dumps(value)}" for label, value in labels.items())
    return f"{name}{{{text}}} {value} {time}\n"


def main() -> None:
    """Write a history and print how to look at it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--step", type=float, default=STEP, metavar="SECONDS", help="between polls")
    options = parser.parse_args()
    begin, end = record(options.directory, options.minutes * 60, options.step)
    print(f"from={begin:.0f} to={end:.0f}: samples from {begin:.0f} to {end:.0f}, Unix time; look at them with")
    print(
        f"  prometheus --config.file={options.directory}/prometheus.yml --storage.tsdb.path={options.directory}",
        *flags(options.step),
    )


if __name__ == "__main__":
    main()
