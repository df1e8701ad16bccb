"""Which alerts fire on pages that the real daemon made, of a simulated box or a capture: promtool evaluates the rules.

A test polls the daemon over simulated time (`scrape_simulation`, `scrape_polls`), and `evaluate_rules` returns what
fired when.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import history
import yaml
from faulty_simulation import FaultySimulation

from gpuwarden.capture.capture_file import load_capture
from gpuwarden.capture.replay import CapturedNvml
from gpuwarden.config.schema import Config
from gpuwarden.daemon.daemon import Daemon
from gpuwarden.daemon.metrics_page import read_tables
from gpuwarden.daemon.sources import Source
from gpuwarden.metrics.exposition import Exposition
from gpuwarden.state import State
from system_parts import needs

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules" / "gpuwarden.yml"
STEP = 5.0  # seconds between scrapes, and between evaluations of the rules
TARGET = 'job="gpuwarden",instance="box"'
_ABSENT, _STALE = "_", "stale"
_LABEL = r'(\w+)="((?:[^"\\]|\\.)*)"'
_SAMPLE = re.compile(rf"\{{((?:{_LABEL}(?:, )?)+)\}}")

Act = Callable[[FaultySimulation, float], None]
Change = Callable[[State, float], State]


@dataclass(slots=True)
class Scrapes:
    """Samples of a host in a Prometheus: each series with its value at each scrape, as promtool writes them.

    Times are seconds since the first scrape, and so are the values of series that are times.
    """

    taken: int = 0
    _values: dict[str, list[str]] = field(default_factory=dict)

    def add(self, page: str | None) -> None:
        """Add one scrape; None is a daemon that does not answer. A series that is no longer there is stale at once."""
        lines = [] if page is None else [line for line in page.splitlines() if not line.startswith("#")]
        found = {f"up{{{TARGET}}}": str(int(page is not None)), **dict(map(_sample, lines))}
        for series, value in found.items():
            self._values.setdefault(series, [_ABSENT] * self.taken).append(value)
        self.taken += 1
        for values in self._values.values():
            if len(values) < self.taken:
                values.append(_ABSENT if values[-1] in (_ABSENT, _STALE) else _STALE)

    @property
    def seconds(self) -> float:
        """From the first scrape to the last one."""
        return (self.taken - 1) * STEP

    def series(self, name: str, **labels: str) -> dict[str, Sequence[str]]:
        """Return the values of the series of that name that have these labels among others, by their text."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        return {
            series: values
            for series, values in self._values.items()
            if series.partition("{")[0] == name and all(each in series for each in wanted)
        }

    def input_series(self, names: set[str]) -> list[dict[str, str]]:
        """Write the series of these names for a unit test of promtool."""
        return [
            {"series": series, "values": _format_values(values)}
            for series, values in self._values.items()
            if series.partition("{")[0] in names
        ]


@dataclass(frozen=True, slots=True)
class Episode:
    """One period in which an alert fired, in seconds since the first scrape; `end` is the last evaluation."""

    alert: str
    labels: Mapping[str, str]
    begin: float
    end: float

    def __str__(self) -> str:
        about = ", ".join(f"{name}={value}" for name, value in self.labels.items() if name not in {"job", "instance"})
        return f"{self.begin:g} to {self.end:g} s: {self.alert} ({about})"


def scrape_simulation(
    seconds: float,
    act: Act = lambda _simulation, _now: None,
    change: Change = lambda state, _now: state,
    *,
    gpus: int = 8,
    config: Config | None = None,
) -> Scrapes:
    """Poll a simulated box for that long, in simulated time.

    `act` is called before each poll, with the seconds since the first one, to break things; `change` may change what
    the daemon has found, for what a simulation cannot do.
    """
    clock = history.Clock()
    simulation = FaultySimulation(gpus, clock.monotonic)
    source = history.simulated(simulation, clock)
    return scrape_polls(source, clock, seconds, lambda now: act(simulation, now), change, config=config)


def scrape_capture(file: Path, seconds: float, config: Config | None = None) -> Scrapes:
    """Poll a box from a capture, whose frames come one after the other and then again."""
    replayed, clock = CapturedNvml(load_capture(file)), history.Clock()
    return scrape_polls(
        Source("capture", replayed.nvml, replayed.host_memory, clock.monotonic), clock, seconds, config=config
    )


def scrape_polls(
    source: Source,
    clock: history.Clock,
    seconds: float,
    act: Callable[[float], None] = lambda _now: None,
    change: Change = lambda state, _now: state,
    *,
    config: Config | None = None,
) -> Scrapes:
    """Make a daemon poll a source whose time is the clock's, and return the page of each poll."""
    scrapes, exposition = Scrapes(), Exposition()

    async def poll() -> None:
        daemon = Daemon(config or Config(), source)
        while clock.now <= seconds:
            act(clock.now)
            state = change(await daemon.poll(), clock.now)
            scrapes.add(exposition.render(read_tables(state)).text.decode())
            clock.now += STEP

    with clock.running():
        asyncio.run(poll())
    return scrapes


def evaluate_rules(scrapes: Scrapes, folder: Path, *, every: float = STEP, rules: Path = RULES) -> list[Episode]:
    """Return the alerts that fired, by start, at this evaluation interval; needs promtool."""
    times = [number * every for number in range(int(scrapes.seconds / every) + 1)]
    seen = dict(zip(times, _firing(scrapes, folder, times, rules), strict=True))
    found = []
    for labels in {each for firing in seen.values() for each in firing}:
        for fires, run in groupby(times, lambda time, labels=labels: labels in seen[time]):  # type: ignore[misc] # bound
            if fires:
                span = list(run)
                own = dict(labels)
                found.append(Episode(own.pop("alertname"), own, span[0], span[-1]))
    return sorted(found, key=lambda each: (each.begin, each.alert, str(each)))


def _firing(
    scrapes: Scrapes, folder: Path, times: Sequence[float], rules: Path
) -> list[set[tuple[tuple[str, str], ...]]]:
    """Return the labels of the alerts that fire at each of the times, by promtool.

    It only reports alerts if it expected others: so it is given an alert that does not exist.
    """
    named = {"up", *re.findall(r"gpuwarden_\w+", rules.read_text())}
    check = {
        # GpuwardenWatchdog, which always fires, has no job.
        "expr": 'ALERTS{alertstate="firing",job!=""} or on () vector(0)',
        "exp_samples": [{"labels": '{alertname="none"}', "value": 1}],
    }
    test = {
        "interval": f"{STEP:g}s",
        "input_series": scrapes.input_series(named),
        "promql_expr_test": [{**check, "eval_time": f"{round(time * 1000)}ms"} for time in times],
    }
    written = folder / "pages.yml"
    written.write_text(
        yaml.dump(
            {"rule_files": [str(rules.absolute())], "evaluation_interval": f"{STEP:g}s", "tests": [test]},
            Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper),
            width=10**9,
        )
    )
    command = [needs("promtool", "prometheus"), "test", "rules", str(written)]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    answers = (said.stdout + said.stderr).split("got:")[1:]
    assert len(answers) == len(times), said.stdout[-2000:] + said.stderr[-2000:]
    return [{_labels(found[1]) for found in _SAMPLE.finditer(answer.partition("expr:")[0])} for answer in answers]


def _labels(text: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, value in re.findall(_LABEL, text) if name not in {"__name__", "alertstate"})


def _sample(line: str) -> tuple[str, str]:
    series, _, value = line.rpartition(" ")
    name, _, labels = series.rstrip("}").partition("{")
    if name.endswith("_timestamp_seconds"):
        value = repr(float(value) - history.BEGIN)
    return f"{name}{{{labels}{',' if labels else ''}{TARGET}}}", value


def _format_values(values: Sequence[str]) -> str:
    """Write values one after the other, and equal ones together."""
    runs = ((value, len(list(group))) for value, group in groupby(values))
    return " ".join(
        " ".join([value] * count) if value == _STALE else f"{value}x{count if value == _ABSENT else count - 1}"
        for value, count in runs
    )
