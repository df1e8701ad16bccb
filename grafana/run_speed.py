"""Panels of the speed of runs, and of what slows them down."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from classic import MILD, NONE, Panel, Query, bad_from, override_matching
from looks import NO_RUN, UNLISTED, name_reasons
from panels import timeseries
from run_memory import NAME
from series import RUN, join_run, rate, series

from gpuwarden.config import thresholds
from gpuwarden.runs.metrics import RunReadings
from gpuwarden.usage.metrics import RunUsageReadings

POWER_LIMIT = {"reason": "sw_power_cap"}  # it throttles every GPU under full load


def step_time(width: int) -> Panel:
    """Return the panel that compares the step times of runs."""
    steps = f"sum by ({RUN}, le) ({rate(RunReadings.step_duration_seconds)})"
    return timeseries(
        31,
        "Step time",
        "Median and 95th percentile (gray) of the training step, excluding compilation and validation "
        "(logarithmic scale).",
        Query(_quantile(0.5, steps), NAME),
        Query(_quantile(0.95, steps), f"{NAME} p95"),
        width=width,
        unit="s",
        empty=NO_RUN,
        logarithmic=True,
        overrides=[override_matching("p95$", **UNLISTED)],
    )


def _quantile(quantile: float, steps: str) -> str:
    """Return a quantile of the step time; `>= 0` drops the NaN of an interval without steps."""
    return join_run(f"histogram_quantile({quantile}, {steps}) >= 0")


def loss(width: int) -> Panel:
    """Return the panel that compares the loss of runs."""
    return timeseries(
        76,
        "Loss",
        "Mean loss of the current epoch, if it is reported (logarithmic scale).",
        Query(join_run(series(RunReadings.loss)), NAME),
        width=width,
        unit="short",
        empty="no run reports its loss; use GpuWarden(loss=True)",
        logarithmic=True,
    )


def throughput(width: int) -> Panel:
    """Return the panel that compares the throughput of runs."""
    return timeseries(
        62,
        "Examples per second",
        "Training throughput, where the batch size is known (logarithmic scale).",
        Query(join_run(f"{rate(RunReadings.examples_total)} > 0"), NAME),
        width=width,
        unit="short",
        empty=NO_RUN,
        logarithmic=True,
    )


def input_wait() -> str:
    """Return the share of step time spent waiting for input."""
    wait, observed = rate(RunReadings.input_wait_seconds_total), rate(RunReadings.input_observed_seconds_total)
    return f"{wait} / ({observed} > 0)"


def throttled(but: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return the share of time in which a run's GPUs were throttled during steps, by reason."""
    slowed = f"sum by ({RUN}, reason) ({rate(RunUsageReadings.throttled_step_seconds_total, but)} > 0)"
    return f"{slowed} / on ({RUN}) group_left () {_held()}"


def _held() -> str:
    return f"sum by ({RUN}) ({rate(RunUsageReadings.gpu_seconds_total)} > 0)"


def lost() -> list[Panel]:
    """Return the panels of lost time, as shares of the run's time (docs/use/slow-training.md)."""
    idle = f"sum by ({RUN}) ({rate(RunUsageReadings.gpu_idle_seconds_total)})"
    return [
        timeseries(
            63,
            "Input wait",
            "Share of step time spent waiting for the next batch, where known (docs/use/slow-training.md).",
            Query(join_run(input_wait()), NAME),
            width=8,
            unit="percentunit",
            empty=NO_RUN,
            thresholds=bad_from(thresholds.INPUT_BOUND, NONE, MILD),
            max=1,
        ),
        name_reasons(
            timeseries(
                64,
                "Steps throttled",
                "Share of time in which the run's GPUs were throttled during its steps, by clock event reason.",
                Query(join_run(throttled()), f"{NAME} {{{{reason}}}}"),
                width=8,
                unit="percentunit",
                empty=f"no throttling, or {NO_RUN}",
                max=1,
            )
        ),
        timeseries(
            65,
            "GPU allocated and idle",
            "Share of time in which the run had memory on its GPUs and no kernel of any program ran there.",
            Query(join_run(f"{idle} / {_held()}"), NAME),
            width=8,
            unit="percentunit",
            empty=NO_RUN,
            max=1,
        ),
    ]
