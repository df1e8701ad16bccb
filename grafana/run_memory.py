"""Panels of the device memory of runs: usage, limits, OOM forecast."""

from __future__ import annotations

from classic import NONE, Panel, Query, override_matching
from looks import LIMIT, NO_GROWTH, NO_RUN, NOW, UNLISTED, headroom
from panels import timeseries
from series import RUN, headroom_ratio, join_device, join_run, series

from gpuwarden.metrics.model import Metric
from gpuwarden.runs.metrics import RunReadings
from gpuwarden.runs.run_snapshot import RunSnapshot

NAME = "{{run_name}} {{pid}}"
ON_GPU = f"{NAME} GPU {{{{gpu}}}}"
_HEIGHT = 10  # for the legend of eight runs


def memory_in_use(width: int) -> Panel:
    """Return the panel that compares the memory use of runs."""
    most = join_run(f"max by ({RUN}) ({series(RunReadings.allocator_memory_bytes)})")
    return timeseries(
        35,
        "Memory in use",
        "Device memory that each run's framework has handed out, on the GPU with the most.",
        Query(most, NAME),
        width=width,
        unit="bytes",
        empty=NO_RUN,
    )


def _named(row: Metric[RunSnapshot]) -> str:
    return join_run(join_device(series(row)))


def limits() -> list[Panel]:
    """Return the panels of the OOM forecast, headroom and allocator limits."""
    peak, at_peak = RunReadings.allocator_memory_peak_bytes, RunReadings.memory_headroom_at_peak_bytes
    return [
        timeseries(
            73,
            "Time to out of memory",
            "OOM forecast: time until a run is out of device memory at its current growth rate, with its bounds "
            "(gray; docs/understand/leaks.md).",
            Query(_named(RunReadings.seconds_to_oom), ON_GPU),
            Query(_named(RunReadings.seconds_to_oom_lower), f"{ON_GPU} lower bound"),
            Query(_named(RunReadings.seconds_to_oom_upper), f"{ON_GPU} upper bound"),
            width=8,
            height=_HEIGHT,
            unit="s",
            empty=f"{NO_GROWTH}, or {NO_RUN}",
            mappings=NOW,
            overrides=[override_matching("(lower|upper) bound$", **UNLISTED)],
        ),
        timeseries(
            34,
            "Headroom of runs",
            "Headroom as a share of used memory plus headroom; an alert fires where the background is red.",
            Query(join_run(join_device(headroom_ratio())), ON_GPU),
            width=8,
            height=_HEIGHT,
            unit="percentunit",
            empty=NO_RUN,
            thresholds=headroom(NONE),
            max=1,
        ),
        timeseries(
            71,
            "Allocator",
            "Peak memory of the framework's allocator, the headroom at that peak (gray), and the allocator's limit if "
            "it has one (red); a peak that rises in steps is a leak.",
            Query(_named(peak), ON_GPU),
            Query(_named(at_peak), f"{ON_GPU} headroom at peak"),
            Query(_named(RunReadings.allocator_memory_limit_bytes), f"{ON_GPU} limit"),
            width=8,
            height=_HEIGHT,
            unit="bytes",
            empty=NO_RUN,
            overrides=[override_matching("headroom at peak$", **UNLISTED), override_matching("limit$", **LIMIT)],
        ),
    ]
