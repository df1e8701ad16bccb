"""Each training run over time."""

from __future__ import annotations

from collections.abc import Callable

from classic import (
    BAD,
    GOOD,
    NONE,
    PLAIN,
    WARN,
    Json,
    Panel,
    Query,
    bad_from,
    good_from,
    override,
    override_matching,
    states,
    table,
    timeline,
    timeseries,
)
from looks import COLORED, DASHED, LIMIT, NO_RUN, SHARE
from series import headroom_ratio, last, rate, risen, series, with_gpu, with_run

from gpuwarden import thresholds
from gpuwarden.protocol import PHASES
from gpuwarden.runs.ending import OUTCOMES
from gpuwarden.runs.table import RunReadings

RUN, ON_GPU = "{{run_name}}", "{{run_name}} on GPU {{gpu}}"
_PHASES = {
    "train": ("train", GOOD),
    "test": ("test", PLAIN),
    "predict": ("predict", "purple"),
    "idle": ("idle", "yellow"),
}
_REPORTS, _STALLED, _FIRST_END = len(PHASES) + 1, len(PHASES) + 2, len(PHASES) + 3
_END_COLORS = {"finished": "dark-green", "unknown": "gray"}  # any other is an alert's


def runs() -> list[Panel]:
    """Return the panels of a box's runs: all of them in words, how fast, what holds them up, how close to trouble."""
    return [_all(), *_speed(), *_lost(), *_memory(), _state(), _errors(), _epoch()]


def _all() -> Panel:
    """Show what came of each run. Totals are of its life, not of the time range, in which only its last word is."""
    each = "(job, instance, run_id)"
    ended, reported = last(RunReadings.ended_timestamp_seconds), last(RunReadings.last_report_timestamp_seconds)
    start = last(RunReadings.start_timestamp_seconds)
    gpu_seconds, idle = last(RunReadings.gpu_seconds_total), last(RunReadings.gpu_idle_seconds_total)
    wait, observed = last(RunReadings.input_wait_seconds_total), last(RunReadings.input_observed_seconds_total)
    throttled = f"max by (job, instance, run_id, uuid) ({last(RunReadings.throttled_step_seconds_total)})"
    wanted = {
        "state": _state_numbers(last),
        "reported": f"1000 * ({ended} or {reported})",
        "lasted": f"({ended} or {reported}) - {start}",
        "steps": last(RunReadings.steps_total),
        "wait": f"{wait} / ({observed} > 0)",
        "throttled": f"sum by {each} ({throttled}) / sum by {each} ({gpu_seconds} > 0)",
        "idle": f"sum by {each} ({idle}) / sum by {each} ({gpu_seconds} > 0)",
        "energy": f"sum by {each} ({last(RunReadings.energy_joules_total)}) / 3.6e6",
        "errors": f"sum by {each} ({last(RunReadings.errors_total)})",
    }
    share = {**SHARE, "custom__width": 130}
    return table(
        61,
        "Runs of this time range",
        "What came of each run, over its whole life; `gpuwarden runs show RUN_ID` tells more (docs/receipts.md).",
        Query(f"max by (job, instance, run_id, run_name) ({last(RunReadings.info)})", "identity", now=True),
        *(Query(f"max by {each} ({query})", name, now=True) for name, query in wanted.items()),
        columns={
            "Run": "run_name",
            "State": "state",
            "Last heard of": "reported",
            "Lasted": "lasted",
            "Steps": "steps",
            "Input wait": "wait",
            "Steps throttled": "throttled",
            "GPU idle": "idle",
            "Energy": "energy",
            "Errors": "errors",
            "Run id": "run_id",
        },
        width=24,
        height=9,
        empty=NO_RUN,
        sort="Last heard of",
        descending=True,
        overrides=[
            override("State", mappings=_states(), custom__width=110, **COLORED),
            override("Last heard of", unit="dateTimeAsIsoNoDateIfToday", custom__width=170),
            override("Lasted", unit="s", decimals=1, custom__width=110, noValue="-"),
            override("Steps", unit="locale", custom__width=100),
            *(override(name, noValue="-", **share) for name in ("Input wait", "Steps throttled", "GPU idle")),
            override("Energy", unit="kwatth", decimals=2, custom__width=110, noValue="-"),
            override("Errors", custom__width=80),
        ],
    )


def _speed() -> list[Panel]:
    steps = f"sum by (job, instance, run_id, le) ({rate(RunReadings.step_duration_seconds)})"
    return [
        timeseries(
            31,
            "Step time",
            "Median and 95th percentile of the training step, without compiling and validation (logarithmic scale).",
            Query(_quantile(0.5, steps), f"{RUN} p50"),
            Query(_quantile(0.95, steps), f"{RUN} p95"),
            width=8,
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
            width=8,
            unit="ops",
            empty=NO_RUN,
        ),
        timeseries(
            62,
            "Examples per second",
            "Examples trained on, where the size of the batches is known (logarithmic scale).",
            Query(with_run(f"{rate(RunReadings.examples_total)} > 0"), RUN),
            width=8,
            unit="short",
            empty=NO_RUN,
            logarithmic=True,
        ),
    ]


def _quantile(quantile: float, steps: str) -> str:
    """Return a quantile of the step time; without a step in the interval it is NaN, which `>= 0` leaves out."""
    return with_run(f"histogram_quantile({quantile}, {steps}) >= 0")


def _lost() -> list[Panel]:
    """Draw what takes a run's time from it, each as a part of that time; docs/slow.md goes through them."""
    wait, observed = rate(RunReadings.input_wait_seconds_total), rate(RunReadings.input_observed_seconds_total)
    held = f"sum by (job, instance, run_id) ({rate(RunReadings.gpu_seconds_total)} > 0)"
    idle = f"sum by (job, instance, run_id) ({rate(RunReadings.gpu_idle_seconds_total)})"
    throttled = f"sum by (job, instance, run_id, reason) ({rate(RunReadings.throttled_step_seconds_total)} > 0)"
    return [
        timeseries(
            63,
            "Input wait",
            "Part of the steps' time in which they waited for their next batch, where it is known (docs/slow.md).",
            Query(with_run(f"{wait} / ({observed} > 0)"), RUN),
            width=8,
            unit="percentunit",
            empty=NO_RUN,
            thresholds=bad_from(thresholds.INPUT_BOUND, NONE),
            max=1,
        ),
        timeseries(
            64,
            "Steps throttled",
            "Part of the time in which a clock event reason slowed the run's GPUs down while it made steps.",
            Query(with_run(f"{throttled} / ignoring (reason) group_left () {held}"), f"{RUN} {{{{reason}}}}"),
            width=8,
            unit="percentunit",
            empty=NO_RUN,
            max=1,
        ),
        timeseries(
            65,
            "GPU held and idle",
            "Part of the time in which the run held memory on its GPUs and no kernel of anybody ran there.",
            Query(with_run(f"{idle} / {held}"), RUN),
            width=8,
            unit="percentunit",
            empty=NO_RUN,
            max=1,
        ),
    ]


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


def _state() -> Panel:
    return timeline(
        33,
        "Phase, stalls and ends",
        "What each run does, where it hangs in a step, and how it ended (docs/runs.md).",
        Query(f"max by (run_name, run_id) ({with_run(_state_numbers(series))})", RUN),
        width=12,
        mappings=_states(),
        empty=NO_RUN,
    )


def _state_numbers(read: Callable[..., str]) -> str:
    """Return a run's state as one number, as a timeline draws one series as one line; the largest that holds counts."""
    each = "max by (job, instance, run_id)"
    phases = {read(RunReadings.phase, phase=phase): number for number, phase in enumerate(PHASES, 1)}
    ends = {read(RunReadings.outcome, outcome=outcome): n for n, outcome in enumerate(OUTCOMES, _FIRST_END)}
    # What a run said last of its phase is no longer so when it has ended, or hangs.
    first, then = (
        " or ".join(f"{each} ({selected} * {number} > 0)" for selected, number in numbers.items())
        for numbers in ({**ends, read(RunReadings.stalled): _STALLED}, {**phases, read(RunReadings.up): _REPORTS})
    )
    return f"{first} or {then}"


def _states() -> list[Json]:
    phases: dict[float, tuple[str, str]] = {n: _PHASES[phase] for n, phase in enumerate(PHASES, 1)}
    ends: dict[float, tuple[str, str]] = {
        n: (end, _END_COLORS.get(end, BAD)) for n, end in enumerate(OUTCOMES, _FIRST_END)
    }
    return states({**phases, _REPORTS: ("reports", NONE), _STALLED: ("stalled", WARN), **ends})


def _errors() -> Panel:
    return timeseries(
        66,
        "Errors of runs",
        "Errors that steps raised, by kind; docs/errors.md says what each means and what to do.",
        Query(with_run(risen(RunReadings.errors_total)), f"{RUN} {{{{kind}}}}"),
        width=6,
        unit="short",
        empty=f"no step raised an error; {NO_RUN}",
        decimals=0,
    )


def _epoch() -> Panel:
    return timeseries(
        36,
        "Epoch",
        "The epoch each run is in, from 0; a line that starts again at 0 is a new run.",
        Query(with_run(series(RunReadings.epoch)), RUN),
        width=6,
        unit="short",
        empty=NO_RUN,
        decimals=0,
    )
