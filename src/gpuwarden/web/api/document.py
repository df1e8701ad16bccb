"""JSON documents of the API: dataclasses whose fields are the keys: figures of runs, or annotated with their meanings.

A field without a default is always present; one with a default is left out if it is None or empty. A field annotated
with a row of a metric table has the reading of that row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from math import isfinite
from typing import Any, get_args

from gpuwarden.metrics.model import Metric, Readings
from gpuwarden.records.figure import list_keys

API_VERSION = 1
VERSION_MEANING = f"Version of this document: {API_VERSION}."
_DIGITS = 6


def render_json(document: Any) -> bytes:
    """Render a document on one line."""
    return f"{json.dumps(document, default=_keys, separators=(',', ':'), allow_nan=False)}\n".encode()


def _keys(document: Any) -> dict[str, Any]:
    found = {}
    for name, required in document_keys(document.__class__):
        value = _plain_value(getattr(document, name))
        if required or not (value is None or (isinstance(value, (list, tuple, dict)) and not value)):
            found[name] = value
    return found


@cache
def document_keys(document: type) -> tuple[tuple[str, bool], ...]:
    """Return each key of a document, and whether it is always present."""
    return tuple((each.name, each.default is MISSING) for each in fields(document))


def _plain_value(value: Any) -> Any:
    if isinstance(value, float):
        return plain_number(value)
    if isinstance(value, Mapping):
        return {key: each for key, inner in value.items() if (each := _plain_value(inner)) is not None}
    return value


def plain_number(value: float) -> float | None:
    """Return a number as an integer if it is whole, otherwise with six decimals; None if it is not finite."""
    if not isfinite(value):
        return None
    return int(value) if value.is_integer() else round(value, _DIGITS)


def collect_readings(document: type, readings: Readings) -> dict[str, Any]:
    """Return the fields of a document that are rows of a metric table, with their readings."""
    return {name: _reading(row, readings.get(row), is_flag=is_flag) for name, (row, is_flag) in _rows(document).items()}


def _reading(row: Metric[Any], reading: Any, *, is_flag: bool) -> Any:
    if row.labels:
        return {labels[0]: value for labels, value in reading.items()} if isinstance(reading, Mapping) else None
    return bool(reading) if is_flag and reading is not None else reading


@cache
def _rows(document: type) -> Mapping[str, tuple[Metric[Any], bool]]:
    return {
        name: (meaning, bool in get_args(kind))
        for name, kind, meaning in list_keys(document)
        if isinstance(meaning, Metric)
    }
