"""Incident of one host as a report reads it: what happened in order of time, and which GPUs are concerned."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gpuwarden.records.record_json import MAX_TIME
from gpuwarden.severity import SEVERITY_RANK
from gpuwarden.web.api.api_object import ApiObject

MAX_FINDING = 4000  # characters
SAME_SECONDS = 1.5  # between an event and its part of the finding
ROOT, OTHER_ROOT, FOLLOWED, BEFORE, ALSO, EVENT = "first cause", "first here", "then", "before", "also", ""

# Parts of a finding by the kind of their event, where the two differ.
_PARTS = {"gpu": "gpu_lost", "throttled": "thermal_slowdown"}


@dataclass(frozen=True, slots=True)
class Moment:
    """Event in words. `at` is Unix time; `role` is its role in the finding, empty for an event outside of it."""

    at: float
    role: str
    text: str
    host: str

    @property
    def line(self) -> str:
        """Text after its role, if it has one: then: run vit crashed."""
        if not self.role:
            return self.text
        is_word = self.text[1:2].islower()  # a sentence may begin with an acronym
        return f"{self.role}: {self.text[:1].lower() if is_word else self.text[:1]}{self.text[1:]}"


class HostIncident:
    """Incident, read from JSON that may be of another version. Its texts are safe to print.

    `ahead_seconds` is how far the host's clock is ahead of that of the first host of a report; times are corrected.
    """

    def __init__(self, document: Mapping[str, Any], ahead_seconds: float = 0.0) -> None:
        self.document = document
        self.incident = ApiObject(document)
        self.ahead_seconds = ahead_seconds

    def moved(self, ahead_seconds: float) -> HostIncident:
        """Return the incident with another correction of its times."""
        return HostIncident(self.document, ahead_seconds)

    @cached_property
    def id(self) -> str:
        """Id of the incident."""
        return self.incident.text("id")

    @cached_property
    def host(self) -> str:
        """Name of the host."""
        return self.incident.text("host") or "unknown host"

    @property
    def boot_id(self) -> str:
        """Boot ID of the host."""
        return self.incident.part("box").text("boot_id")

    @property
    def jobs(self) -> frozenset[str]:
        """Jobs that are concerned."""
        return frozenset(self.incident.texts("jobs"))

    @property
    def finding(self) -> str:
        """Finding in plain words."""
        return self.incident.part("finding").text("text", MAX_FINDING)

    @property
    def severity(self) -> str:
        """Severity; info if it is none that this version knows."""
        severity = self.incident.text("severity")
        return severity if severity in SEVERITY_RANK else "info"

    @property
    def progress(self) -> str:
        """State of a recording that is not complete, in words; empty for a complete one."""
        if self.incident.is_true("interrupted"):
            return "cut short, as the daemon was killed"
        return "" if self.incident.number("ended_timestamp_seconds") is not None else "still being recorded"

    @property
    def began(self) -> float:
        """Time of the root."""
        return self.time_of(self.incident, "began_timestamp_seconds") or 0.0

    def time_of(self, of: ApiObject, key: str = "timestamp_seconds") -> float | None:
        """Return a time of this host in Unix time of the report, None if it is unknown or no time."""
        value = of.number(key)
        return value - self.ahead_seconds if value is not None and 0 <= value < MAX_TIME else None

    @cached_property
    def gpu_names(self) -> Mapping[str, str]:
        """Names of GPUs such as GPU 3, and of their MIG instances, by UUID."""
        names = {}
        for gpu in self.incident.parts("gpus"):
            index = gpu.number("index")
            name = f"GPU {'?' if index is None else f'{index:.0f}'}"
            names[gpu.text("uuid")] = name
            names |= {uuid: f"{name} MIG {uuid[:12]}" for uuid in gpu.texts("mig")}
        return names

    def concerned_gpus(self) -> list[str]:
        """Return the UUIDs of the GPUs that the finding names, else those of runs, else all; in order of importance."""
        parts = [part for _role, part in self._parts()]
        named = [self.incident.part("subject").text("uuid"), *(part.text("uuid") for part in parts)]
        series = self.incident.part("series").part("gpus").names()
        found = [uuid for uuid in dict.fromkeys(named) if uuid in series]
        used = [each.text("uuid") for each in self.incident.parts("processes")]
        return found or [uuid for uuid in dict.fromkeys(used) if uuid in series] or series

    def _parts(self) -> Iterator[tuple[str, ApiObject]]:
        finding = self.incident.part("finding")
        yield ROOT, finding.part("root")
        for role, key in ((FOLLOWED, "followers"), (BEFORE, "before"), (ALSO, "others")):
            for part in finding.parts(key):
                yield role, part

    def moments(self) -> list[Moment]:
        """Return the parts of the finding, and the events that are not among them, in order of time."""
        found = []
        known: set[tuple[str, str]] = set()
        for role, part in self._parts():
            if (at := self.time_of(part)) is not None:
                found.append(Moment(at, role, part.text("text"), self.host))
                known |= {(part.text("kind"), part.text("uuid")), (part.text("kind"), part.text("run_id"))}
        times = [moment.at for moment in found]
        for event in self.incident.parts("events"):
            at, kind = self.time_of(event), _PARTS.get(event.text("kind"), event.text("kind"))
            is_known = (kind, event.text("run_id") or event.text("uuid")) in known
            if at is None or (is_known and any(abs(at - each) < SAME_SECONDS for each in times)):
                continue
            found.append(Moment(at, EVENT, event.text("text"), self.host))
        return sorted(found, key=lambda moment: moment.at)  # stable: root before its followers


def format_clock(at: float | None, pattern: str = "%H:%M:%S") -> str:
    """Format a Unix time in the local time zone."""
    return "?" if at is None else time.strftime(pattern, time.localtime(at))


def format_moment(at: float | None) -> str:
    """Format a Unix time with its date and time zone."""
    return format_clock(at, "%Y-%m-%d %H:%M:%S %Z")


def format_offset(seconds: float) -> str:
    """Format the time from the first cause: -25s, +1m05s, 0s."""
    whole = round(seconds)
    minutes, rest = divmod(abs(whole), 60)
    size = f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
    return f"{'+' if whole > 0 else '-' if whole < 0 else ''}{size}"
