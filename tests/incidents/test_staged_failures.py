"""Findings of staged failures, through a whole daemon."""

from __future__ import annotations

from pathlib import Path

import pytest
from failure_stages import STAGED, Staged, differences, run_staged

from gpuwarden.incidents.incident import INCIDENT_KINDS

MIN_STAGED = 20


@pytest.mark.parametrize("staged", STAGED, ids=lambda staged: staged.name)
def test_finding_is_as_expected(tmp_path: Path, staged: Staged) -> None:
    """The incident is complete, and has the root and the followers that were written down beforehand."""
    incidents = run_staged(staged, tmp_path)
    assert not differences(staged, incidents)
    assert all("ended_timestamp_seconds" in incident for incident in incidents)
    assert all("secret" not in incident["finding"]["text"] for incident in incidents)


def test_each_kind_of_incident_is_staged() -> None:
    """No kind of incident lacks a failure."""
    assert len(STAGED) >= MIN_STAGED
    assert {expected.kind for staged in STAGED for expected in staged.expected} == set(INCIDENT_KINDS)
