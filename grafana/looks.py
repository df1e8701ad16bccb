"""Looks that panels share: thresholds, dashes, gauges, and texts for missing values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from classic import BAD, NONE, PLAIN, TEXT, WARN, Json, Panel, steps

from gpuwarden.config import thresholds
from gpuwarden.gpu.clock_reasons import CLOCK_REASONS

NO_RUN = "no runs yet; add the callback GpuWarden() to model.fit, or watch() to a loop"
NO_PRESSURE = "no pressure in this time range"
NO_GROWTH = "no leak detected"
NO_READING = "not reported by these GPUs"
NOT_POLLED = "no GPU is polled; is gpuwarden paused?"


def headroom(good: str = TEXT) -> Json:
    """Color headroom at the levels of memory pressure; critical is where the alert fires."""
    return steps((BAD, None), (WARN, thresholds.NEAR_OUT_OF_MEMORY), (good, thresholds.LITTLE_MEMORY))


def margin(good: str = TEXT) -> Json:
    """Color the temperature margin: a warning is where the alert fires."""
    # The driver reports whole degrees, and a step colors from its value on: 5 is the last that warns, 6 is good.
    return steps((BAD, None), (WARN, thresholds.SLOWDOWN + 1), (good, thresholds.NEAR_SLOWDOWN + 1))


def nothing() -> list[Json]:
    """Show a cell without a value as a dash, uncolored."""
    return [{"type": "special", "options": {"match": "null", "result": {"text": "-", "color": NONE}}}]


def rename_legends(panel: Panel, words: Mapping[str, str]) -> Panel:
    """Replace what the patterns match in a panel's legends; its overrides match the new names."""
    renamed: list[Json] = [
        {"id": "renameByRegex", "options": {"regex": f"/{pattern}/", "renamePattern": new}}
        for pattern, new in words.items()
    ]
    return replace(panel, transformations=renamed)


def name_reasons(panel: Panel) -> Panel:
    """Show the clock event reasons at the end of a panel's legends in words."""
    return rename_legends(panel, {f" {reason}$": f" {words}" for reason, words in CLOCK_REASONS.items()})


def ahead(good: str = TEXT) -> Json:
    """Color the seconds until out of memory."""
    soon, early = thresholds.OUT_OF_MEMORY_SOON_SECONDS, thresholds.OUT_OF_MEMORY_AHEAD_SECONDS
    return steps((BAD, None), (WARN, soon), (good, early))


# Zero seconds, of a forecast or an age.
NOW: list[Json] = [{"type": "range", "options": {"from": 0, "to": 0.5, "result": {"text": "now"}}}]

DASHED: Json = {"custom__lineStyle": {"fill": "dash", "dash": [8, 6]}}
LIMIT: Json = {"color": {"mode": "fixed", "fixedColor": BAD}, **DASHED}
SIZE: Json = {"color": {"mode": "fixed", "fixedColor": "gray"}, **DASHED}
# Bounds and percentiles of lines that the legend has: with them it would be too long to be read. In gray, as the next
# colors of the palette would be those of other lines.
UNLISTED: Json = {**SIZE, "custom__hideFrom": {"legend": True, "tooltip": False, "viz": False}}
GAUGE: Json = {"custom__cellOptions": {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"}}
COLORED: Json = {"custom__cellOptions": {"type": "color-background", "mode": "basic"}}
SHARE: Json = {"unit": "percentunit", "decimals": 0, "min": 0, "max": 1}
PLAIN_GAUGE: Json = {**SHARE, **GAUGE, "color": {"mode": "fixed", "fixedColor": PLAIN}}  # neither good nor bad
# Hidden columns for links: Grafana 12.4 and later read the second, older ones the first.
HIDDEN: Json = {"custom__hidden": True, "custom__hideFrom": {"viz": True, "legend": False, "tooltip": False}}
LEVELS: dict[float, tuple[str, str]] = {0: ("none", NONE), 1: ("warning", WARN), 2: ("critical", BAD)}  # of pressure
