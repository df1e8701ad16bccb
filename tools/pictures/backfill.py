"""Scrapes of the daemon as blocks of a Prometheus, and the alerts that the rules raise; needs Prometheus and promtool.

A history of hours or days takes seconds: Prometheus evaluates each rule's expression over all of it, and `for` and
`keep_firing_for` are applied here like in Prometheus.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import subprocess
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules" / "gpuwarden.yml"
MAX_POINTS = 10_000  # of a series, that a query may ask for; Prometheus' limit is 11,000


@dataclass(frozen=True, slots=True)
class Episode:
    """Time in which an alert fired: its rule's name, all other labels, and start and end in Unix time."""

    alert: str
    labels: Mapping[str, str]
    begin: float
    end: float


def flags(step: float) -> list[str]:
    """Return the flags of a Prometheus that serves such a history, whose samples are `step` seconds apart."""
    # Imported series have no mark at their end: with the usual five minutes, what is gone would linger.
    return ["--storage.tsdb.retention.time=100y", f"--query.lookback-delta={step * 1500:.0f}ms"]


def samples(page: str | None, time: float, target: str, names: frozenset[str] | None = None) -> Iterator[str]:
    """Yield a scrape's samples as Prometheus stores them: with its target's labels and with `up`.

    `page` is None if there was no answer. `names` selects series: those that rules read.
    """
    yield f"up{{{target}}} {int(page is not None)} {time}\n"
    for line in (page or "").splitlines():
        if not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            name, _, labels = series.rstrip("}").partition("{")
            if names is None or name in names:
                yield f"{name}{{{labels}{',' if labels else ''}{target}}} {value} {time}\n"


def add(directory: Path, lines: Iterable[str]) -> None:
    """Make blocks of samples, best of a day at once: promtool reads all of them again for each block."""
    with tempfile.NamedTemporaryFile("w", suffix=".om") as file:
        file.writelines(lines)
        file.write("# EOF\n")
        file.flush()
        command = ["promtool", "tsdb", "create-blocks-from", "--max-block-duration=24h", "openmetrics"]
        subprocess.run([*command, file.name, str(directory)], check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def serving(directory: Path, step: float, *more: str) -> Iterator[str]:
    """Serve a data directory with a Prometheus on a free port of 127.0.0.1, with `more` flags; yield its URL."""
    empty = directory / "prometheus.yml"
    empty.write_text("scrape_configs: []\n")
    command = ["prometheus", f"--config.file={empty}", f"--storage.tsdb.path={directory}"]
    command += [*flags(step), *more, "--web.listen-address=127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as prometheus:
        try:
            yield _url(prometheus)
        finally:
            prometheus.terminate()


def _url(prometheus: subprocess.Popen[str]) -> str:
    """Return the URL that its log names, once it is ready."""
    address, ready = "", False
    log: list[str] = []
    for line in prometheus.stderr or ():
        log.append(line)
        if listening := re.search(r'msg="Listening on".* address=(\S+)', line):
            address = listening[1]
        ready = ready or "Server is ready" in line
        if address and ready:  # the log has them in either order
            return f"http://{address}"
    raise RuntimeError(f"Prometheus ended:\n{''.join(log)}")


def ask(url: str, path: str, **parameters: object) -> Any:
    """Ask Prometheus' API. Raises urllib.error.HTTPError for a query it does not accept."""
    data = urllib.parse.urlencode(parameters).encode()
    with urllib.request.urlopen(f"{url}/api/v1/{path}", data, timeout=120) as answer:
        return json.load(answer)["data"]


def rules(step: float = 5.0) -> list[dict[str, Any]]:
    """Return the rules without recorded series: each is replaced by its expression, evaluated every `step`.

    Each has the seconds of its group's interval. Left out are the objectives, of days, which no dashboard shows.
    """
    recorded: dict[str, str] = {}
    found = []
    groups = [each for each in yaml.safe_load(RULES.read_text())["groups"] if each["name"] != "gpuwarden-objectives"]
    for group, rule in ((each, rule) for each in groups for rule in each["rules"]):
        rule["interval"] = _seconds(group["interval"])
        for name, expr in recorded.items():
            rule["expr"] = _replace_recorded(name, expr, rule["expr"], step)
        if "record" in rule:
            recorded[rule["record"]] = rule["expr"]
        found.append(rule)
    return found


def _replace_recorded(name: str, made_from: str, expr: str, step: float) -> str:
    """Replace a recorded series in an expression by its own; a range of the series becomes a subquery."""

    def replaced(match: re.Match[str]) -> str:
        return f"({made_from})" + (f"[{match[1]}:{step:g}s]" if match[1] else "")

    return re.sub(rf"(?<![\w:]){name}(?![\w:])(?:\[(\w+)\])?", replaced, expr)


def names() -> frozenset[str]:
    """Return the names of the series that rules are made from."""
    found: list[promql_parser.Expr] = []
    for rule in rules(1.0):
        promql_parser.walk(promql_parser.parse(rule["expr"]), found.append)
    return frozenset(part.name or "" for part in found if isinstance(part, promql_parser.VectorSelector))


def alerts() -> list[dict[str, Any]]:
    """Return the alert rules as they are: for a history that has the recorded series too."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"] if "alert" in rule]


def recorded(url: str, begin: float, end: float, step: float) -> Iterator[str]:
    """Yield the samples that the recording rules would have written, evaluated every `step` seconds.

    Those of a group with a longer interval are evaluated at its multiples.
    """
    for rule in rules(step):
        if "record" in rule:
            every = max(step, rule["interval"])
            first = math.ceil(begin / every) * every if every > step else begin
            for labels, points in values(url, rule["expr"], first, end, every):
                series = sample_of(rule["record"], labels)
                yield from (f"{series} {value} {time}\n" for time, value in points)


def sample_of(name: str, labels: Mapping[str, str]) -> str:
    """Return the name of a series and its labels."""
    text = ",".join(f"{label}={json.dumps(value)}" for label, value in labels.items() if label != "__name__")
    return f"{name}{{{text}}}"


def values(url: str, expr: str, begin: float, end: float, step: float) -> Iterator[tuple[dict[str, str], list[Any]]]:
    """Evaluate an expression over all the time; yield the labels and the values, as [time, text], of each series."""
    found: dict[str, tuple[dict[str, str], list[Any]]] = {}
    while begin <= end:
        until = min(end, begin + (MAX_POINTS - 1) * step)
        for series in ask(url, "query_range", query=expr, start=begin, end=until, step=step)["result"]:
            key = json.dumps(series["metric"], sort_keys=True)
            found.setdefault(key, (series["metric"], []))[1].extend(series["values"])
        begin = until + step
    yield from found.values()


def episodes(url: str, rule: Mapping[str, Any], begin: float, end: float, step: float) -> Iterator[Episode]:
    """Yield when an alert would have fired, evaluated every `step` seconds."""
    hold, keep = (_seconds(rule.get(key)) for key in ("for", "keep_firing_for"))
    for metric, points in values(url, rule["expr"], begin, end, step):
        labels = {name: value for name, value in metric.items() if name != "__name__"} | rule["labels"]
        for since, until in firing([float(time) for time, _value in points], hold, keep, step):
            yield Episode(rule["alert"], labels, since, min(until, end))


def firing(active: Iterable[float], hold: float, keep: float, step: float) -> list[tuple[float, float]]:
    """Return the times in which an alert fires whose expression holds at these times, `step` seconds apart.

    It fires once that has held without a gap for `hold` seconds, and for `keep` seconds afterwards; if it holds again
    meanwhile, it keeps firing.
    """
    spells: list[tuple[float, float]] = []
    for time in active:
        if spells and time - spells[-1][1] <= step * 1.01:  # floats
            spells[-1] = spells[-1][0], time
        else:
            spells.append((time, time))
    found: list[tuple[float, float]] = []
    for since, until in spells:
        if found and keep and since <= found[-1][1]:
            found[-1] = found[-1][0], until + keep
        elif until - since >= hold:
            found.append((since + -(-hold // step) * step, until + keep))
    return found


def _seconds(duration: str | None) -> float:
    return float(promql_parser.parse_duration(duration).total_seconds()) if duration else 0.0
