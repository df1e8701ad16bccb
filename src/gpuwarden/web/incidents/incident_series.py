"""Series of an incident for charts: each quantity of a GPU over the recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuwarden.formatting import format_bytes, format_ratio
from gpuwarden.web.incidents.host_incident import HostIncident

Point = tuple[float, "float | None"]  # Unix time and value, None if unknown


@dataclass(frozen=True, slots=True)
class Quantity:
    """Quantity with a chart; `key` is its column in the series of a GPU."""

    key: str
    title: str
    format: Callable[[float], str]


QUANTITIES = (
    Quantity("memory_used_bytes", "memory used", format_bytes),
    Quantity("temperature_celsius", "temperature", lambda value: f"{value:.0f} °C"),
    Quantity("power_watts", "power", lambda value: f"{value:.0f} W"),
    Quantity("utilization_ratio", "utilization", format_ratio),
    Quantity("sm_clock_hertz", "SM clock", lambda value: f"{value / 1e6:.0f} MHz"),
)
TERMINAL_QUANTITIES = QUANTITIES[:3]


def gpu_points(incident: HostIncident, uuid: str, key: str) -> list[Point]:
    """Return a quantity of a GPU over time; used memory also at the fast rate."""
    series = incident.incident.part("series")
    points = _points(incident, series.numbers("timestamp_seconds"), series.part("gpus").part(uuid).numbers(key))
    if key == "memory_used_bytes":
        samples = series.part("memory_samples").part(uuid)
        points += _points(incident, samples.numbers("timestamp_seconds"), samples.numbers("used_bytes"))
    return sorted(points, key=lambda point: point[0])


def run_points(incident: HostIncident, run_id: str, key: str) -> list[Point]:
    """Return a quantity of a run over time."""
    series = incident.incident.part("series")
    return _points(incident, series.numbers("timestamp_seconds"), series.part("runs").part(run_id).numbers(key))


def _points(incident: HostIncident, times: Sequence[float | None], values: Sequence[float | None]) -> list[Point]:
    ahead = incident.ahead_seconds
    return [(at - ahead, value) for at, value in zip(times, values, strict=False) if at is not None]


def time_range(points: Sequence[Sequence[Point]]) -> tuple[float, float] | None:
    """Return the first and the last time of several series, None without a point."""
    times = [at for each in points for at, _value in each]
    return (min(times), max(times)) if times else None
