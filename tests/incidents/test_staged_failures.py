"""Findings of staged failures, through a whole daemon."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from failure_stages import STAGED, Staged, differences, run_staged

from gpuwarden.cli.incidents.host_incident import HostIncident
from gpuwarden.cli.incidents.incident_report import render_report
from gpuwarden.cli.runs.memory_chart import BLOCKS
from gpuwarden.cli.runs.memory_report import TerminalFormat
from gpuwarden.incidents.incident import INCIDENT_KINDS

MIN_STAGED = 20


@pytest.mark.parametrize("staged", STAGED, ids=lambda staged: staged.name)
def test_finding_is_as_expected(tmp_path: Path, staged: Staged) -> None:
    """The incident is complete, has the root and the followers that were written down beforehand, and can be shown."""
    incidents = run_staged(staged, tmp_path)
    assert not differences(staged, incidents)
    assert all("ended_timestamp_seconds" in incident for incident in incidents)
    assert all("secret" not in incident["finding"]["text"] for incident in incidents)
    for width in (40, 80, 200):
        lines = list(render_report(HostIncident(incidents[0]), TerminalFormat(width, BLOCKS)))
        assert "first cause: " in " ".join(" ".join(lines).split())
        assert not [line for line in lines if count_cells(line) > max(width, 45)]  # a moment has 20 columns at least


def count_cells(line: str) -> int:
    """Return the columns that a line takes."""
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in line)


def test_each_kind_of_incident_is_staged() -> None:
    """No kind of incident lacks a failure."""
    assert len(STAGED) >= MIN_STAGED
    assert {expected.kind for staged in STAGED for expected in staged.expected} == set(INCIDENT_KINDS)
