"""Incident of one host as a report reads it: what happened in order of time, and which GPUs are concerned."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpuwarden.records.record_json import MAX_TIME
from gpuwarden.web.api.api_object import ApiObject

MAX_FINDING = 4000  # characters
SAME_SECONDS = 1.5  # between an event and its part of the finding
ROOT, FOLLOWED, BEFORE, ALSO, EVENT = "first cause", "then", "before", "also", ""

Point = tuple[float, "float | None"]  # Unix time and value, None if unknown


@dataclass(frozen=True, slots=True)
class Moment:
    """Event in words. `at` is Unix time; `role` is its role in the finding, empty for an event outside of it."""

    at: float
    role: str
    text: str

    @property
    def line(self) -> str:
        """Text after its role, if it has one: then: run vit crashed."""
        if not self.role:
            return self.text
        is_word = self.text[1:2].islower()  # a sentence may begin with an acronym
        return f"{self.role}: {self.text[:1].lower() if is_word else self.text[:1]}{self.text[1:]}"


class HostIncident:
    """Incident, read from JSON that may be of another version. Its texts are safe to print.

    `finding` is in plain words, `progress` the state of a recording that is not complete, else empty. `began` is the
    time of the root. `gpu_names` are names of GPUs such as GPU 3, and of their MIG instances, by UUID.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.incident = incident = ApiObject(document)
        self.id = incident.text("id")
        self.host = incident.text("host") or "unknown host"
        self.finding = incident.part("finding").text("text", MAX_FINDING)
        self.progress = ""
        if incident.is_true("interrupted"):
            self.progress = "cut short, as the daemon was killed"
        elif incident.number("ended_timestamp_seconds") is None:
            self.progress = "still being recorded"
        self.began = time_of(incident, "began_timestamp_seconds") or 0.0
        self.gpu_names: dict[str, str] = {}
        for gpu in incident.parts("gpus"):
            index = gpu.number("index")
            name = f"GPU {'?' if index is None else f'{index:.0f}'}"
            self.gpu_names[gpu.text("uuid")] = name
            self.gpu_names |= {uuid: f"{name} MIG {uuid[:12]}" for uuid in gpu.texts("mig")}

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
        subjects: list[tuple[float, str, str]] = []
        for role, part in self._parts():
            if (at := time_of(part)) is not None:
                found.append(Moment(at, role, part.text("text")))
                subjects += [(at, "run_id", part.text("run_id")), (at, "uuid", part.text("uuid"))]
        for event in self.incident.parts("events"):
            key = "run_id" if event.text("run_id") else "uuid"
            times = [at for at, kind, name in subjects if (kind, name) == (key, event.text(key))]
            at = time_of(event)
            if at is not None and all(abs(at - each) >= SAME_SECONDS for each in times):
                found.append(Moment(at, EVENT, event.text("text")))
        return sorted(found, key=lambda moment: moment.at)  # stable: root before its followers

    def gpu_points(self, uuid: str, key: str) -> list[Point]:
        """Return a column of a GPU's series over time; used memory also at the fast rate."""
        series = self.incident.part("series")
        points = _points(series.numbers("timestamp_seconds"), series.part("gpus").part(uuid).numbers(key))
        if key == "memory_used_bytes":
            samples = series.part("memory_samples").part(uuid)
            points += _points(samples.numbers("timestamp_seconds"), samples.numbers("used_bytes"))
        return sorted(points, key=lambda point: point[0])


def time_of(of: ApiObject, key: str = "timestamp_seconds") -> float | None:
    """Return a Unix time, None if it is unknown or no time."""
    value = of.number(key)
    return value if value is not None and 0 <= value < MAX_TIME else None


def _points(times: Sequence[float | None], values: Sequence[float | None]) -> list[Point]:
    return [(at, value) for at, value in zip(times, values, strict=False) if at is not None]


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
