"""How readings look, wherever they are shown: thresholds, dashes, gauges and the words for what is not there."""

from __future__ import annotations

from classic import BAD, GOOD, NONE, PLAIN, WARN, Json, steps

from gpuwarden.config import thresholds

NO_RUN = "no run reports yet: add the callback GpuWarden() to model.fit, or watch() to a loop"
NO_PRESSURE = "no pressure in this time range: all GPUs are cool, and all runs that report have room"
NO_GROWTH = "no run's memory grows for good"


def headroom(good: str = GOOD) -> Json:
    """Color headroom as pressure on memory begins, and as it becomes critical and an alert fires."""
    return steps((BAD, None), (WARN, thresholds.NEAR_OUT_OF_MEMORY), (good, thresholds.LITTLE_MEMORY))


def margin(good: str = GOOD) -> Json:
    """Color degrees to slowdown: an alert fires where they warn."""
    # The driver tells whole degrees, and Grafana colors from a value on: 5 is the last that warns, 6 is good.
    return steps((BAD, None), (WARN, thresholds.SLOWDOWN + 1), (good, thresholds.NEAR_SLOWDOWN + 1))


def nothing(text: str = "-") -> list[Json]:
    """Show a cell without a value as that text, in no color."""
    return [{"type": "special", "options": {"match": "null", "result": {"text": text, "color": NONE}}}]


def ahead(good: str = GOOD) -> Json:
    """Color seconds until out of memory."""
    soon, early = thresholds.OUT_OF_MEMORY_SOON_SECONDS, thresholds.OUT_OF_MEMORY_AHEAD_SECONDS
    return steps((BAD, None), (WARN, soon), (good, early))


DASHED: Json = {"custom__lineStyle": {"fill": "dash", "dash": [8, 6]}}
LIMIT: Json = {"color": {"mode": "fixed", "fixedColor": BAD}, **DASHED}
SIZE: Json = {"color": {"mode": "fixed", "fixedColor": "gray"}, **DASHED}
GAUGE: Json = {"custom__cellOptions": {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"}}
COLORED: Json = {"custom__cellOptions": {"type": "color-background", "mode": "basic"}}
SHARE: Json = {"unit": "percentunit", "decimals": 0, "min": 0, "max": 1}
PLAIN_GAUGE: Json = {**SHARE, **GAUGE, "color": {"mode": "fixed", "fixedColor": PLAIN}}  # neither good nor bad
# Hidden, and there for links: Grafana from 12.4 on reads the second, older ones the first.
HIDDEN: Json = {"custom__hidden": True, "custom__hideFrom": {"viz": True, "legend": False, "tooltip": False}}
LEVELS: dict[float, tuple[str, str]] = {0: ("none", NONE), 1: ("warning", WARN), 2: ("critical", BAD)}  # of pressure
