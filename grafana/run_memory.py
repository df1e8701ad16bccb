"""A run's device memory: what it uses, what it may, and when that meets."""

from __future__ import annotations

from classic import NONE, Panel, Query, override_matching
from looks import DASHED, LIMIT, NO_GROWTH, NO_RUN, headroom
from panels import timeseries
from series import RUN, headroom_ratio, rate, series, with_device, with_run

from gpuwarden.metrics.model import Metric
from gpuwarden.runs.metrics import RunReadings
from gpuwarden.runs.run_snapshot import RunSnapshot

NAME = "{{run_name}} {{pid}}"
ON_GPU = f"{NAME} GPU {{{{gpu}}}}"


def in_use(width: int) -> Panel:
    """Return the panel that compares what runs use."""
    most = with_run(f"max by ({RUN}) ({series(RunReadings.allocator_memory_bytes)})")
    return timeseries(
        35,
        "Memory in use",
        "Device memory that each run's framework has handed out, on the GPU where it is most.",
        Query(most, NAME),
        width=width,
        unit="bytes",
        empty=NO_RUN,
    )


def _named(row: Metric[RunSnapshot]) -> str:
    return with_run(with_device(series(row)))


def limits() -> list[Panel]:
    """Return the panels of what limits the memory of runs."""
    peak, at_peak = RunReadings.allocator_memory_peak_bytes, RunReadings.memory_headroom_at_peak_bytes
    present = with_run(series(RunReadings.batch_size))
    return [
        timeseries(
            34,
            "Headroom of runs",
            "Of what a run uses and can still allocate, the part that is left; where the ground is red an alert fires.",
            Query(with_run(with_device(headroom_ratio())), ON_GPU),
            width=8,
            unit="percentunit",
            empty=NO_RUN,
            thresholds=headroom(NONE),
            max=1,
        ),
        timeseries(
            71,
            "Allocator",
            "Most memory the framework ever had handed out, its own limit where it has one, and what would be left at "
            "that peak: a staircase is a leak.",
            Query(_named(peak), f"{ON_GPU} peak"),
            Query(_named(at_peak), f"{ON_GPU} left at peak"),
            Query(_named(RunReadings.allocator_memory_limit_bytes), f"{ON_GPU} limit"),
            width=8,
            unit="bytes",
            empty=NO_RUN,
            overrides=[override_matching("left at peak$", **DASHED), override_matching("limit$", **LIMIT)],
        ),
        timeseries(
            72,
            "Batch size",
            "Examples per step, and the most that should fit (docs/use/batch-size.md; logarithmic scale).",
            Query(present, NAME),
            Query(with_run(series(RunReadings.batch_size_advised)), f"{NAME} advised"),
            width=8,
            unit="short",
            empty=f"no run tells the size of its batches; {NO_RUN}",
            logarithmic=True,
            overrides=[override_matching("advised$", **DASHED)],
        ),
    ]


def ahead() -> list[Panel]:
    """Return the panels of what comes."""
    growth = series(RunReadings.memory_growth_bytes_per_second)
    # Epochs a second, over all the time range: they are far apart.
    epochs = f"max by ({RUN}) (deriv({series(RunReadings.epoch)}[$__range]) > 0)"
    an_epoch = f"{growth} / on ({RUN}) group_left () {epochs}"
    steps = f"{growth} / on ({RUN}) group_left () ({rate(RunReadings.steps_total)} > 0)"
    return [
        timeseries(
            73,
            "Time to out of memory",
            "Seconds until a run is out of device memory if it goes on to grow as it does, and the least and most they "
            "may be (docs/understand/leaks.md).",
            Query(_named(RunReadings.seconds_to_oom), ON_GPU),
            Query(_named(RunReadings.seconds_to_oom_lower), f"{ON_GPU} at least"),
            Query(_named(RunReadings.seconds_to_oom_upper), f"{ON_GPU} at most"),
            width=8,
            unit="s",
            empty=f"{NO_GROWTH}, or none reports",
            overrides=[override_matching("at (least|most)$", **DASHED)],
        ),
        timeseries(
            74,
            "Growth a minute",
            "Bytes that what the framework has handed out grows by for good, a minute.",
            Query(f"60 * {_named(RunReadings.memory_growth_bytes_per_second)}", ON_GPU),
            width=8,
            unit="bytes",
            empty=f"{NO_GROWTH}, or none reports",
        ),
        timeseries(
            75,
            "Growth an epoch and a step",
            "The same growth in each epoch, as fast as epochs went in the time range, and in each step (logarithmic "
            "scale).",
            Query(with_run(with_device(an_epoch)), f"{ON_GPU} an epoch"),
            Query(with_run(with_device(steps)), f"{ON_GPU} a step"),
            width=8,
            unit="bytes",
            empty=f"{NO_GROWTH}, or none reports",
            logarithmic=True,
            overrides=[override_matching("a step$", **DASHED)],
        ),
    ]
