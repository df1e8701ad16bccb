"""Rows of metric tables are checked where they are declared."""

import re
import types

import pytest
from offenders import check_all

from gpuwarden.daemon.metrics_page import TABLES
from gpuwarden.metrics.model import Metric, Table

ROWS = [row for table in TABLES for row in table.rows]


@check_all({row.name: row for row in ROWS})
def test_row_follows_the_naming_rules(row: Metric[object]) -> None:
    """Every row has the project's prefix or that of a process, valid characters, and one sentence of help."""
    assert re.fullmatch(r"(gpuwarden|process)_[a-z][a-z0-9_]*", row.name)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in row.labels)
    assert row.help[0].isupper()
    assert row.help.count(". ") == 0
    assert '"' not in row.help


def test_names_are_unique() -> None:
    """No two rows share a name."""
    names = [row.name for row in ROWS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("name", "kind", "unit", "text", "complaint"),
    [
        ("gpuwarden_gpu_memory", "gauge", "bytes", "Memory.", "named gpuwarden_…_bytes"),
        ("gpuwarden_gpu_memory_bytes", "counter", "bytes", "Memory.", "named gpuwarden_…_bytes_total"),
        ("gpu_memory_bytes", "gauge", "bytes", "Memory.", "named gpuwarden_"),
        ("gpuwarden_gpu_total", "gauge", "", "Total.", "only counters"),
        ("gpuwarden_gpu", "info", "", "Info.", "_info"),
        ("gpuwarden_gpu_up", "gauge", "", "Up", "full stop"),
    ],
)
def test_wrong_row_stops_the_import(name: str, kind: str, unit: str, text: str, complaint: str) -> None:
    """A name that does not match its kind and unit raises where the row is declared."""
    with pytest.raises(ValueError, match=re.escape(complaint)):
        Metric(name, kind, unit, text, lambda _subject: 1.0)  # type: ignore[arg-type] # wrong on purpose


def test_attribute_must_bear_the_metrics_name() -> None:
    """A row under an attribute that is not its name stops the import."""
    row = Metric[object]("gpuwarden_gpu_free", "gauge", "", "Free.", lambda _subject: 1.0)
    with pytest.raises(ValueError, match=r"Wrong\.used is called gpuwarden_gpu_free"):
        types.new_class("Wrong", (Table,), {"prefix": "gpuwarden_gpu_"}, lambda body: body.update(used=row))


def test_misspelt_reading_does_not_exist() -> None:
    """An undeclared reading is an AttributeError, and an error of the type checker."""
    from gpuwarden.gpu.metrics import GpuReadings  # noqa: PLC0415 - the subject of this test alone

    with pytest.raises(AttributeError):
        _ = GpuReadings.memory_usd_bytes  # type: ignore[attr-defined] # the type checker's error is the point
