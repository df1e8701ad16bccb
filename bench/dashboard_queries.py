"""How long a Prometheus takes over the dashboards' queries, of a fleet's week: `python bench/dashboard_queries.py`.

A real Prometheus holds 100 boxes of eight GPUs (fleet_week.py), and is asked each query that Grafana would, one after
the other, five times each: over the hour that a dashboard shows at first, and over the whole week. With `--keep FOLDER`
the data stay there, and are not made again the next time: that takes half an hour of CPU time.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import fleet_week  # before what it finds
from box_week import STEP
from fleet_week import BOXES, DAYS, of_box
from grafana_queries import Asked, queries

import backfill  # isort: skip
from history import BEGIN  # isort: skip

from programs import conditions

TIMES, MOST = 5, 1.0  # seconds
HOUR, WEEK = 3600.0, DAYS * 86400.0
END = BEGIN + WEEK
SHOWN = 25  # rows of a table
_SELECTOR = re.compile(r"[\w:]+\{[^}]*\}")
_NAME = b'"__name__"'


@dataclass(frozen=True, slots=True)
class Took:
    """Medians of the seconds a query took, by the clock and of CPU time; what it read and told, and what went wrong.

    It read `samples` of `touched` series, and told `told` ones.
    """

    asked: Asked
    seconds: float
    cpu: float
    touched: int
    samples: int
    told: int
    wrong: str = ""


def took(url: str, asked: Asked, span: float) -> Took:
    """Ask a query, until the last byte of its answer is there."""
    path, parameters = _request(asked, span)
    whole = f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    seconds, cpu, body, wrong = [], [], b"", ""
    for _ in range(TIMES):
        used, began = _cpu_seconds(url), time.perf_counter()
        try:
            with urllib.request.urlopen(whole, timeout=300) as answer:
                body = answer.read()
        except urllib.error.HTTPError as error:
            wrong = json.loads(error.read())["error"]
        seconds.append(time.perf_counter() - began)
        cpu.append(_cpu_seconds(url) - used)
        if seconds[-1] > 10 * MOST:
            break
    medians = statistics.median(seconds), statistics.median(cpu)
    if wrong or asked.label:
        return Took(asked, *medians, 0, 0, body.count(b","), wrong)
    told = backfill.ask(url, path, **parameters, stats="all")
    samples = told["stats"]["samples"]["totalQueryableSamples"]
    return Took(asked, *medians, touched(url, asked, span), samples, len(told["result"]))


def _cpu_seconds(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as page:
        (told,) = re.findall(rb"^process_cpu_seconds_total (.*)$", page.read(), re.MULTILINE)
        return float(told)


def touched(url: str, asked: Asked, span: float) -> int:
    """Return how many series the query's selectors find; what is asked of the end alone looks no further back."""
    back = span if asked.step or "[" in asked.expression else STEP
    return sum(_found(url, selector, END - back) for selector in set(_SELECTOR.findall(asked.expression)))


@cache
def _found(url: str, selector: str, begin: float) -> int:
    parameters = urllib.parse.urlencode({"match[]": selector, "start": begin, "end": END})
    count, rest = 0, b""
    with urllib.request.urlopen(f"{url}/api/v1/series?{parameters}", timeout=300) as answer:
        while piece := answer.read(1 << 20):  # it may be hundreds of megabytes
            count += (rest + piece).count(_NAME)
            rest = piece[1 - len(_NAME) :]
    return count


def _request(asked: Asked, span: float) -> tuple[str, dict[str, object]]:
    if asked.label:
        return f"label/{asked.label}/values", {"match[]": asked.expression, "start": END - span, "end": END}
    if asked.step is None:
        return "query", {"query": asked.expression, "time": END}
    # Grafana has the ends at whole steps.
    begin, end = ((at // asked.step) * asked.step for at in (END - span, END))
    return "query_range", {"query": asked.expression, "start": begin, "end": end, "step": asked.step}


def measured(url: str, span: float, box: str, only: str = "") -> list[Took]:
    """Ask all that the dashboards ask, the same thing once; the slowest first."""
    wanted: dict[tuple[str, float | None, str | None], Asked] = {}
    for each in queries(span, box, lambda query: _only(url, query)):
        if only in f"{each.dashboard} {each.panel}":
            wanted.setdefault((each.expression, each.step, each.label), each)
    return sorted((took(url, each, span) for each in wanted.values()), key=lambda found: -found.seconds)


def _only(url: str, query: str) -> dict[str, str]:
    """Return the labels of a query's only result."""
    (labels,) = (each["metric"] for each in backfill.ask(url, "query", query=query, time=END)["result"])
    return dict(labels)


def table(found: Sequence[Took], most: int) -> Iterator[str]:
    """Write a line for each of the slowest queries."""
    yield "| dashboard | panel, query | asked for | median, s | CPU, s | series | samples | rows | at most, s | met |"
    yield "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |"
    for each in found[:most]:
        asked = each.asked
        kind = f"values of {asked.label}" if asked.label else f"every {asked.step:g} s" if asked.step else "the end"
        met = "yes" if each.seconds <= MOST and not each.wrong else f"**no**{': ' if each.wrong else ''}{each.wrong}"
        figures = f"{each.seconds:.3f} | {each.cpu:.2f} | {each.touched} | {each.samples} | {each.told} | {MOST:g}"
        yield f"| {asked.dashboard} | {asked.panel} | {kind} | {figures} | {met} |"


def summary(found: Iterable[Took]) -> str:
    """Say how many there are, and how many take too long."""
    seconds = [each.seconds for each in found]
    slow = sum(each.seconds > MOST or bool(each.wrong) for each in found)
    return f"{len(seconds)} queries, {slow} of them above {MOST:g} s, {sum(seconds):.1f} s in all"


def main() -> int:
    """Make what is not there yet, ask and print; tell by the exit status whether the bar is met at first sight."""
    parser = argparse.ArgumentParser(description="Ask a fleet's week what the dashboards ask.")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="for the data, to be used again; 10 GB at most")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="queries whose dashboard and panel have this in them"
    )
    parser.add_argument("--rows", type=int, default=SHOWN, metavar="N", help="of each table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = fleet_week.make(options.keep or Path(folder))
        told = conditions()
        with backfill.serving(data, STEP, *fleet_week.COMPACTING_NOTHING) as url:
            found = {span: measured(url, span, of_box(50, 0, "busy"), options.only) for span in (HOUR, WEEK)}
    print(f"{BOXES} boxes of 8 GPUs, a week; {told}.")
    for span, what in ((HOUR, "An hour, which dashboards show at first"), (WEEK, "The whole week")):
        print(f"\n{what}: {summary(found[span])}.\n")
        print("\n".join(table(found[span], options.rows)))
    return int(any(each.seconds > MOST or each.wrong for each in found[HOUR]))


if __name__ == "__main__":
    sys.exit(main())
