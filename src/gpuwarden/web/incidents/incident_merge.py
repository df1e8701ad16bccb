"""Merge of incidents of several hosts: grouped by job, aligned in time, the first cause first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from gpuwarden.formatting import format_elapsed
from gpuwarden.web.incidents.host_incident import OTHER_ROOT, ROOT, HostIncident, Moment
from gpuwarden.web.incidents.incident_series import Point, run_points

NEAR_SECONDS = 3600.0  # between incidents of a job that belong together: a job may fail again another day
CAUSE_SECONDS = 120.0  # in which a strong cause on one host precedes weak ones, even if it was noticed later
MIN_STEPS = 5  # in common, to compare clocks
MIN_AHEAD_SECONDS = 3.0  # smaller differences may come from the polls
MAX_SPREAD_RATIO = 0.25  # of the difference itself, by which it may vary between steps

# Roots of these kinds are usually the effect of another rank's trouble; so are communication errors.
_WEAK_KINDS = ("stall", "error", "requested")


@dataclass(frozen=True, slots=True)
class IncidentGroup:
    """Incidents of one job, the most likely first cause first. `notes` has what is known about the hosts' clocks."""

    incidents: tuple[HostIncident, ...]
    notes: tuple[str, ...] = ()

    @property
    def jobs(self) -> list[str]:
        """Jobs that all of them share."""
        return sorted(frozenset.intersection(*(each.jobs for each in self.incidents)))

    @property
    def hosts(self) -> list[str]:
        """Names of the hosts, each once."""
        return list(dict.fromkeys(each.host for each in self.incidents))

    def moments(self) -> list[Moment]:
        """Return what happened on all hosts, in order of time; only the first incident has the first cause."""
        first, *others = self.incidents
        found = first.moments()
        for moment in (each for one in others for each in one.moments()):
            found.append(replace(moment, role=OTHER_ROOT) if moment.role == ROOT else moment)
        return sorted(found, key=lambda moment: moment.at)


def group_incidents(incidents: Sequence[HostIncident]) -> list[IncidentGroup]:
    """Return the incidents in groups of one job; the oldest group first."""
    groups: list[list[HostIncident]] = []
    for incident in sorted(incidents, key=lambda each: each.began):
        near = [each for each in groups if any(_belongs(incident, other) for other in each)]
        groups = [each for each in groups if each not in near]
        groups.append([*(one for each in near for one in each), incident])
    return [_aligned(each) for each in groups]


def _belongs(one: HostIncident, other: HostIncident) -> bool:
    return bool(one.jobs & other.jobs) and abs(one.began - other.began) <= NEAR_SECONDS


def _aligned(incidents: list[HostIncident]) -> IncidentGroup:
    first, aligned, notes = incidents[0], [incidents[0]], list(_clock_steps(incidents))
    for incident in incidents[1:]:
        ahead = None if _is_same_host(first, incident) else clock_difference(first, incident)
        if _is_same_host(first, incident):
            aligned.append(incident)
        elif ahead is None:
            aligned.append(incident)
            notes.append(
                f"The clocks of {first.host} and {incident.host} cannot be compared: no steps in common. "
                f"Times are those of each host."
            )
        elif abs(ahead) < MIN_AHEAD_SECONDS:
            aligned.append(incident)
            notes.append(f"The clocks of {first.host} and {incident.host} agree, by the steps of their runs.")
        else:
            aligned.append(incident.moved(ahead))
            far = f"{format_elapsed(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'}"
            notes.append(
                f"The clock of {incident.host} is {far} that of {first.host}, by the steps of their runs; its times "
                "are corrected here, except in its finding."
            )
    return IncidentGroup(tuple(_first_cause_first(aligned)), tuple(dict.fromkeys(notes)))


def _first_cause_first(incidents: Sequence[HostIncident]) -> list[HostIncident]:
    """Return the incidents by time, but the first strong cause before weak ones of shortly before."""
    ordered = sorted(incidents, key=lambda each: each.began)
    strong = next((each for each in ordered if not _is_weak(each)), None)
    if strong is not None and strong.began - ordered[0].began <= CAUSE_SECONDS:
        ordered.remove(strong)
        ordered.insert(0, strong)
    return ordered


def _is_weak(incident: HostIncident) -> bool:
    root = incident.incident.part("finding").part("root")
    return root.text("kind") in _WEAK_KINDS or "NCCL error" in incident.finding.partition(";")[0]


def _is_same_host(one: HostIncident, other: HostIncident) -> bool:
    return one.boot_id == other.boot_id if one.boot_id and other.boot_id else one.host == other.host


def clock_difference(one: HostIncident, other: HostIncident) -> float | None:
    """Return how far the clock of another host is ahead, in seconds; None if that is unknown.

    The ranks of a job take each step together, so the same step has two times, one by each clock.
    """
    differences: list[float] = []
    for job in one.jobs & other.jobs:
        for ours in _step_times(one, job):
            for theirs in _step_times(other, job):
                differences += _differences(ours, theirs)
    if len(differences) < MIN_STEPS:
        return None
    differences.sort()
    middle = median(differences)
    tenth = len(differences) // 10
    spread = differences[-1 - tenth] - differences[tenth]
    return middle if spread <= max(MIN_AHEAD_SECONDS, MAX_SPREAD_RATIO * abs(middle)) else None


def _step_times(incident: HostIncident, job: str) -> Iterator[list[tuple[float, float]]]:
    """Yield, of each run of a job, its steps with the time at which each count was first seen."""
    for run in incident.incident.parts("runs"):
        if run.text("job") == job:
            yield _increases(run_points(incident, run.text("run_id"), "steps"))


def _increases(points: Sequence[Point]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for at, steps in points:
        if steps is not None and (not found or steps > found[-1][0]):
            found.append((steps, at))
    return found[1:]  # the first count may be old


def _differences(ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]]) -> list[float]:
    found = []
    for steps, at in ours:
        for (low, early), (high, late) in pairwise(theirs):
            if low <= steps <= high:
                found.append(early + (late - early) * (steps - low) / (high - low) - at)
                break
    return found


def _clock_steps(incidents: Sequence[HostIncident]) -> Iterator[str]:
    """Yield a note for each host whose clock was set while its runs ran.

    The time of the boot, a run's start by the clock less its start since the boot, is the same for each run otherwise.
    """
    boots: dict[tuple[str, str], list[float]] = {}
    for incident in incidents:
        for run in incident.incident.parts("runs"):
            began, uptime = run.number("began_timestamp_seconds"), run.number("began_uptime_seconds")
            if began is not None and uptime is not None and run.text("boot_id") == incident.boot_id:
                boots.setdefault((incident.host, incident.boot_id), []).append(began - uptime)
    for (host, _boot_id), times in boots.items():
        if (change := max(times) - min(times)) >= MIN_AHEAD_SECONDS:
            yield f"The clock of {host} was changed by {format_elapsed(change)} between the starts of its runs."
