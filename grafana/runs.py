"""Each training run over time."""

from __future__ import annotations

from classic import GOOD, NONE, PLAIN, WARN, Panel, Query, good_from, override_matching, states, timeline, timeseries
from looks import DASHED, LIMIT, NO_RUN
from series import headroom_ratio, rate, series, with_gpu, with_run

from gpuwarden import thresholds
from gpuwarden.protocol import PHASES
from gpuwarden.runs.table import RunReadings

RUN, ON_GPU = "{{run_name}}", "{{run_name}} on GPU {{gpu}}"
_PHASE_COLORS = {"train": GOOD, "test": PLAIN, "predict": "purple", "idle": WARN}


def runs() -> list[Panel]:
    """Return the panels of a box's runs: how fast, how close to out of memory, how far."""
    return [*_speed(), _phase(), *_memory(), _epoch()]


def _speed() -> list[Panel]:
    steps = f"sum by (job, instance, run_id, le) ({rate(RunReadings.step_duration_seconds)})"
    return [
        timeseries(
            31,
            "Step time",
            "Median and 95th percentile of the training step, without compiling and validation (logarithmic scale).",
            Query(_quantile(0.5, steps), f"{RUN} p50"),
            Query(_quantile(0.95, steps), f"{RUN} p95"),
            width=12,
            unit="s",
            empty=NO_RUN,
            logarithmic=True,
            overrides=[override_matching("p95$", **DASHED)],
        ),
        timeseries(
            32,
            "Steps per second",
            "Speed of training; a fall with steady step time is waiting between steps.",
            Query(with_run(rate(RunReadings.steps_total)), RUN),
            width=12,
            unit="ops",
            empty=NO_RUN,
        ),
    ]


def _quantile(quantile: float, steps: str) -> str:
    """Return a quantile of the step time; without a step in the interval it is NaN, which `>= 0` leaves out."""
    return with_run(f"histogram_quantile({quantile}, {steps}) >= 0")


def _memory() -> list[Panel]:
    in_use, peak, limit, headroom = (
        with_run(with_gpu(expression))
        for expression in (
            series(RunReadings.allocator_memory_bytes),
            series(RunReadings.allocator_memory_peak_bytes),
            series(RunReadings.allocator_memory_limit_bytes),
            headroom_ratio(),
        )
    )
    return [
        timeseries(
            34,
            "Headroom of runs",
            "Of what a run uses and can still allocate, the part that is left; in the red an alert fires.",
            Query(headroom, ON_GPU),
            width=12,
            unit="percentunit",
            empty=NO_RUN,
            thresholds=good_from(thresholds.NEAR_OUT_OF_MEMORY, NONE),
            max=1,
        ),
        timeseries(
            35,
            "Allocator",
            "Memory the framework has handed out, its peak, and the allocator's own limit where it has one.",
            Query(in_use, ON_GPU),
            Query(peak, f"{ON_GPU} peak"),
            Query(limit, f"{ON_GPU} limit"),
            width=12,
            unit="bytes",
            empty=NO_RUN,
            overrides=[
                override_matching("peak$", **DASHED),
                override_matching("limit$", **LIMIT),
            ],
        ),
    ]


def _phase() -> Panel:
    return timeline(
        33,
        "Phase",
        "What each run does: training, validation, prediction, or nothing.",
        Query(f"max by (run_name, run_id) ({with_run(_phase_numbers())})", RUN),
        width=12,
        mappings=states({n: (phase, _PHASE_COLORS[phase]) for n, phase in enumerate(PHASES, 1)}),
        empty=NO_RUN,
    )


def _phase_numbers() -> str:
    """Return the phase as one number, from 1: a timeline draws one series as one line."""
    return " or ".join(
        f"{series(RunReadings.phase, phase=phase)} * {number} > 0" for number, phase in enumerate(PHASES, 1)
    )


def _epoch() -> Panel:
    return timeseries(
        36,
        "Epoch",
        "The epoch each run is in, from 0; a line that starts again at 0 is a new run.",
        Query(with_run(series(RunReadings.epoch)), RUN),
        width=12,
        unit="short",
        empty=NO_RUN,
        decimals=0,
    )
