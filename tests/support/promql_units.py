"""Unit of a PromQL expression, from the units in the metric tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import promql_parser as promql

from gpuwarden.alerts.prometheus_rules import RECORDED, Choices
from gpuwarden.daemon.metrics_page import TABLES
from gpuwarden.health.model import fill_places
from gpuwarden.metrics.model import Metric, Unit

Dimensions = Mapping[
    str, int
]  # exponents by unit, without those that are 0: bytes a second are {bytes: 1, seconds: -1}

_OF_UNIT: dict[Unit, dict[str, int]] = {
    "": {},
    "ratio": {},
    "bytes": {"bytes": 1},
    "seconds": {"seconds": 1},
    "bytes_per_second": {"bytes": 1, "seconds": -1},
    "celsius": {"celsius": 1},
    "hertz": {"seconds": -1},
    "joules": {"joules": 1},
    "watts": {"joules": 1, "seconds": -1},
}


def _unit_of_metric(row: Metric[Any]) -> dict[str, int]:
    return _OF_UNIT["seconds" if "_seconds_to_" in row.name else row.unit]


_ROWS = [row for table in TABLES for row in table.rows]
_OF_METRIC = {f"{row.name}_bucket" if row.kind == "histogram" else row.name: _unit_of_metric(row) for row in _ROWS}
_OF_METRIC["ALERTS_FOR_STATE"] = {"seconds": 1}
_BY_TIME = {"rate", "deriv"}


def unit(expression: str) -> dict[str, int]:
    """Return the dimensions of an expression's result; those of a comparison are those of its operands.

    Raises ValueError where it joins numbers of different ones: all that it adds, compares or takes side by side.
    """
    return _unit(promql.parse(expression))


def _unit(part: Any) -> dict[str, int]:  # noqa: PLR0911 - one for each kind of expression
    match part:
        case promql.NumberLiteral() | promql.StringLiteral():
            return {}
        case promql.VectorSelector():
            if expr := RECORDED.get(part.name or ""):
                return unit(fill_places(expr, Choices().values()))
            return dict(_OF_METRIC.get(part.name or "", {}))
        case promql.MatrixSelector():
            return _unit(part.vector_selector)
        case promql.Call():
            return _unit_of_call(part)
        case promql.BinaryExpr():
            return _unit_of_operation(str(part.op), part)
        case promql.AggregateExpr() if str(part.op) in {"count", "group"}:
            return {}
    return _unit(part.expr)


def _unit_of_call(part: promql.Call) -> dict[str, int]:
    name = part.func.name
    if name == "time":
        return {"seconds": 1}
    if name in {"vector", "count_over_time"}:
        return {}
    if name == "histogram_quantile":  # of the buckets, however they were counted
        found: list[Any] = []
        promql.walk(part.args[1], found.append)
        (buckets,) = (each for each in found if isinstance(each, promql.VectorSelector))
        return _unit(buckets)
    return _multiply(_unit(part.args[0]), {"seconds": -1} if name in _BY_TIME else {})


def _unit_of_operation(op: str, part: promql.BinaryExpr) -> dict[str, int]:
    left = _unit(part.lhs)
    if op in {"and", "unless"}:
        return left
    right = _unit(part.rhs)
    numbers = [side.val for side in (part.lhs, part.rhs) if isinstance(side, promql.NumberLiteral)]
    if op in {"*", "/"}:
        sign = 1 if op == "*" else -1
        return {} if 0 in numbers else _multiply(left, {name: sign * power for name, power in right.items()})
    if left != right and not numbers:
        raise ValueError(f"{left} {op} {right}: {part}")
    if part.modifier and part.modifier.return_bool:
        return {}
    return left or right


def _multiply(left: Mapping[str, int], right: Mapping[str, int]) -> dict[str, int]:
    powers = Counter(left)
    powers.update(right)
    return {name: power for name, power in powers.items() if power}
