"""Names in a PromQL expression, checked against the metric tables."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import promql_parser as promql

from gpuwarden.alerts.prometheus_rules import RECORDED, Choices
from gpuwarden.daemon.metrics_page import TABLES
from gpuwarden.health.model import fill_places

TARGET = frozenset({"job", "instance"})  # labels Prometheus adds to every sample of a scrape
SITE = frozenset({"cluster"})  # and one that a site may have it add


def _samples() -> Iterator[tuple[str, frozenset[str]]]:
    for table in TABLES:
        for row in table.rows:
            labels = TARGET | SITE | set(table.key) | set(row.labels)
            if row.kind == "histogram":
                yield f"{row.name}_bucket", labels | {"le"}
                yield f"{row.name}_count", labels
                yield f"{row.name}_sum", labels
            else:
                yield row.name, labels


@functools.cache
def _parts(expression: str) -> tuple[promql.Expr, ...]:
    parts: list[promql.Expr] = []
    promql.walk(promql.parse(expression), parts.append)
    return tuple(parts)


def parse_selectors(expression: str) -> list[tuple[str, frozenset[str]]]:
    """Return the series an expression selects: each one's name and the labels it matches on."""
    return [
        (part.name or "", frozenset(matcher.name for matcher in part.matchers.matchers))
        for part in _parts(expression)
        if isinstance(part, promql.VectorSelector)
    ]


def parse_matchers(expression: str) -> list[tuple[str, dict[str, tuple[str, str]]]]:
    """Return the series an expression selects: each one's name and by label how it is matched and with what."""
    return [
        (part.name or "", {each.name: (str(each.op), each.value) for each in part.matchers.matchers})
        for part in _parts(expression)
        if isinstance(part, promql.VectorSelector)
    ]


def parse_numbers(expression: str) -> list[float]:
    """Return the number literals of an expression and the seconds of its ranges and offsets, in their order."""
    found: list[float] = []
    for part in _parts(expression):
        if isinstance(part, promql.NumberLiteral):
            found.append(part.val)
        elif isinstance(part, promql.MatrixSelector):
            found.append(part.range.total_seconds())
        elif isinstance(part, promql.VectorSelector) and part.offset:
            found.append(part.offset.total_seconds())
    return found


def parse_grouping(expression: str) -> set[str]:
    """Return the labels an expression groups by, matches on, or takes over by group_left."""
    found: set[str] = set()
    for part in _parts(expression):
        if isinstance(part, promql.AggregateExpr) and part.modifier:
            found |= set(part.modifier.labels)
        elif isinstance(part, promql.BinaryExpr) and part.modifier:
            matching = part.modifier.matching
            found |= set(matching.labels if matching else ()) | set(part.modifier.group_labels or ())
    return found


def parse_created_labels(expression: str) -> set[str]:
    """Return the labels an expression makes by label_replace."""
    calls = [part for part in _parts(expression) if isinstance(part, promql.Call)]
    return {call.args[1].val for call in calls if call.func.name == "label_replace"}


def _recorded(expression: str, known: Mapping[str, frozenset[str]]) -> frozenset[str]:
    """Return the labels of a recorded series: those of the aggregation that makes it, or all of those it is made of."""
    whole = promql.parse(expression)
    if isinstance(whole, promql.AggregateExpr) and whole.modifier:
        return frozenset(whole.modifier.labels)
    return frozenset().union(*(known[name] for name, _labels in parse_selectors(expression)))


# Samples by name with the labels they have: the daemon's own, and those Prometheus makes.
SAMPLES = {
    **dict(_samples()),
    "up": TARGET | SITE,
    "ALERTS": TARGET
    | SITE
    | {"alertname", "alertstate", "severity", "uuid", "gpu", "run_id", "run_name", "outcome", "owner"},
}
SAMPLES["ALERTS_FOR_STATE"] = SAMPLES["ALERTS"] - {"alertstate"}
for _name, _expr in RECORDED.items():  # each may be made of those before it
    SAMPLES[_name] = _recorded(fill_places(_expr, Choices().values()), SAMPLES)


def find_unknown_names(expression: str) -> set[str]:
    """Return the names in an expression that no sample has: metrics, and labels that its metrics do not have."""
    chosen = parse_selectors(expression)
    bad = {name for name, _labels in chosen if name not in SAMPLES}
    bad |= {f"{name}{{{label}}}" for name, labels in chosen for label in labels - SAMPLES.get(name, labels)}
    carried = frozenset().union(*(SAMPLES.get(name, frozenset()) for name, _labels in chosen))
    return bad | (parse_grouping(expression) - carried - parse_created_labels(expression))
