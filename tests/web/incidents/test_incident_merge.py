"""Merge of incidents of several hosts: by job, aligned in time, the first cause first."""

from __future__ import annotations

from typing import Any

import pytest
from staged_incidents import move_clock, ranks_of_two_hosts, staged_incident

from gpuwarden.web.incidents.host_incident import HostIncident
from gpuwarden.web.incidents.incident_merge import IncidentGroup, clock_difference, group_incidents


def group(*incidents: dict[str, Any]) -> list[IncidentGroup]:
    """Return the groups of incidents."""
    return group_incidents([HostIncident(each) for each in incidents])


@pytest.mark.parametrize("ahead", [-40.0, 0.0, 7.0, 900.0])
def test_clocks_are_compared_by_the_steps_of_the_ranks(ahead: float) -> None:
    """The difference of two clocks is found, said, and taken out of the times."""
    lost, other = ranks_of_two_hosts(ahead)
    found = clock_difference(HostIncident(lost), HostIncident(other))
    assert found == pytest.approx(ahead, abs=1.0)
    (merged,) = group(other, lost)
    assert merged.incidents[0].host == "a"  # a lost GPU comes before an NCCL error, even if that was noticed earlier
    assert merged.jobs == ["llama-7"]
    began = {each.host: each.began for each in merged.incidents}
    assert began["b"] - began["a"] == pytest.approx(-1.0, abs=1.0)
    (note,) = merged.notes
    assert ("agree" in note) == (ahead == 0)
    assert ("ahead of" in note or "behind" in note) == (ahead != 0)


def test_moments_of_all_hosts_are_in_order_of_time() -> None:
    """Corrected times decide the order."""
    lost, other = ranks_of_two_hosts(900.0)
    (merged,) = group(lost, other)
    moments = merged.moments()
    assert [each.at for each in moments] == sorted(each.at for each in moments)
    assert moments[-1].at - moments[0].at < 60.0
    assert {each.host for each in moments} == {"a", "b"}
    assert [each.host for each in moments if each.role == "first cause"] == ["a"]


def test_clocks_that_cannot_be_compared_are_said_to_be_so() -> None:
    """Without steps in common no time is changed."""
    lost, other = ranks_of_two_hosts(7.0)
    other["series"]["runs"] = {}
    (merged,) = group(lost, other)
    assert "cannot be compared" in merged.notes[0]
    assert all(each.ahead_seconds == 0 for each in merged.incidents)


def test_uneven_steps_give_no_difference() -> None:
    """Ranks that do not take their steps together say nothing about the clocks."""
    lost, other = ranks_of_two_hosts(0.0)
    for steps in other["series"]["runs"].values():
        steps["steps"] = [each * 4 for each in steps["steps"]]
    assert clock_difference(HostIncident(lost), HostIncident(other)) is None


def test_one_host_has_one_clock() -> None:
    """Two incidents of a job on one host are merged without a note on clocks."""
    lost = staged_incident("lost_gpu_of_a_job")
    (merged,) = group(lost, {**lost, "id": "second"})
    assert [each.ahead_seconds for each in merged.incidents] == [0.0, 0.0]
    assert merged.notes == ()


def test_clock_that_was_set_is_noticed() -> None:
    """Runs of one boot whose starts since the boot disagree with their times show that the clock was changed."""
    lost = staged_incident("lost_gpu_of_a_job")
    for number, run in enumerate(lost["runs"]):
        run["began_uptime_seconds"] = run["began_timestamp_seconds"] - 1_000_000 - (30.0 if number == 2 else 0.0)
    (merged,) = group(lost)
    assert merged.notes == (f"The clock of {lost['host']} was changed by 30s between the starts of its runs.",)


def test_other_jobs_and_other_days_stay_apart() -> None:
    """Only incidents of one job within an hour belong together."""
    lost = staged_incident("lost_gpu_of_a_job")
    assert len(group(lost, staged_incident("killed"), {**move_clock(lost, 86400.0), "id": "tomorrow"})) == 3
