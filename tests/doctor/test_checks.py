"""The table of checks, and their execution: each costs itself only."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuwarden.doctor.model import CheckResult, CheckRow, Context
from gpuwarden.doctor.runner import checks
from gpuwarden.doctor.runner.checks import CHECKS, run_checks


def context(tmp_path: Path) -> Context:
    """Return the context of a machine without a file."""
    return Context(python=Path("/usr/bin/python3"), environ={}, root=tmp_path)


def good(_context: Context) -> Iterator[CheckResult]:
    """Find nothing wrong."""
    yield CheckResult("test.good", "pass", "all is well")


def failing(_context: Context) -> Iterator[CheckResult]:
    """Fail in the middle of its results."""
    yield CheckResult("test.first", "pass", "the first is well")
    raise RuntimeError("no such luck")


def test_names_are_unique_and_have_a_subject() -> None:
    """`--json` and `explain` find a result by its name."""
    names = [name for row in CHECKS for name in row.names]
    assert len(names) == len(set(names))
    assert all(name.count(".") == 1 for name in names)


def test_each_result_has_a_name_of_its_row(tmp_path: Path) -> None:
    """Also on a machine that has nothing; a warning or failure says why it matters and what to do."""
    results = run_checks(context(tmp_path))
    assert {each.name for each in results} <= {name for row in CHECKS for name in row.names}
    assert all(each.why and each.fix for each in results if each.status in ("warn", "fail"))
    assert all(each.found for each in results)


def test_a_check_that_raises_costs_itself_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its names without a result are warnings; the others have their results."""
    rows = (CheckRow(failing, {"test.first": "", "test.second": ""}), CheckRow(good, {"test.good": ""}))
    monkeypatch.setattr(checks, "CHECKS", rows)
    results = run_checks(context(tmp_path))
    assert [(each.name, each.status) for each in results] == [
        ("test.first", "pass"),
        ("test.second", "warn"),
        ("test.good", "pass"),
    ]
    assert "RuntimeError: no such luck" in results[1].found


def test_a_check_that_hangs_costs_itself_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a warning once the time for all checks is over."""
    hold = threading.Event()

    def hanging(_context: Context) -> Iterator[CheckResult]:
        hold.wait()
        return iter(())

    rows = (CheckRow(hanging, {"test.hung": ""}), CheckRow(good, {"test.good": ""}))
    monkeypatch.setattr(checks, "CHECKS", rows)
    monkeypatch.setattr(checks, "MAX_SECONDS", 0.2)
    try:
        results = run_checks(context(tmp_path))
    finally:
        hold.set()
    assert [(each.name, each.status) for each in results] == [("test.hung", "warn"), ("test.good", "pass")]
    assert "took more than" in results[0].found


def test_only_the_named_checks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`explain` takes the checks of its causes, and no others run."""
    rows = (CheckRow(failing, {"test.first": "", "test.second": ""}), CheckRow(good, {"test.good": ""}))
    monkeypatch.setattr(checks, "CHECKS", rows)
    assert [each.name for each in run_checks(context(tmp_path), {"test.good"})] == ["test.good"]
    assert [each.name for each in run_checks(context(tmp_path), {"test.second"})] == ["test.second"]
