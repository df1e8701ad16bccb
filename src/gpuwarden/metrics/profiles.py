"""Profiles of the metrics page, which limit the number of its series."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpuwarden.metrics.model import Labels, Metric, Reading, Readings, TableReadings


def select_profile(tables: Iterable[TableReadings], profile: str) -> Iterable[TableReadings]:
    """Return the tables with the readings that the profile exports; standard and full export all that is read."""
    if profile != "minimal":
        return tables
    return ((table, [(key, _minimal_readings(each)) for key, each in subjects]) for table, subjects in tables)


def is_minimal(row: Metric[Any], labels: Labels) -> bool:
    """Return whether the profile minimal exports the row's sample with these labels."""
    return row.profile == "minimal" and any(labels[: len(first)] == first for first in row.minimal_labels)


def _minimal_readings(readings: Readings) -> Readings:
    return {row: _minimal_part(row, reading) for row, reading in readings.items() if row.profile == "minimal"}


def _minimal_part(row: Metric[Any], reading: Reading) -> Reading:
    if not isinstance(reading, Mapping):
        return reading
    return {labels: value for labels, value in reading.items() if is_minimal(row, labels)}
