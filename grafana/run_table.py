"""Table of runs with their results, one row per run, to find one or compare several."""

from __future__ import annotations

from collections.abc import Callable

from classic import BAD, DARK_BLUE, DARK_GRAY, DARK_PURPLE, MILD, NONE, WARN, Json, Panel, Query, override, states
from looks import COLORED, HIDDEN, NO_RUN, SHARE
from panels import table
from run_speed import POWER_LIMIT
from series import RUN, last, placed
from ways import BOX, IN_CLUSTER, link, run_links

from gpuwarden.health.conditions import severity_of
from gpuwarden.health.run_conditions import END_CONDITIONS
from gpuwarden.protocol.messages import PHASES
from gpuwarden.runs.metrics import RunReadings
from gpuwarden.runs.outcome import OUTCOMES
from gpuwarden.usage.metrics import RunUsageReadings

_PHASES = {
    "train": ("train", DARK_GRAY),
    "test": ("test", DARK_BLUE),
    "predict": ("predict", DARK_PURPLE),
    "idle": ("idle", MILD),
}
_RUNNING, _STALLED, _FIRST_END = len(PHASES) + 1, len(PHASES) + 2, len(PHASES) + 3
_CALM = {"finished": NONE, "unknown": MILD}  # ends without a condition
_SEVERITIES = {"critical": BAD, "warning": WARN, "info": MILD}
_EACH = f"({RUN})"


def run_table(number: int, *, height: int) -> Panel:
    """Return the table; `number` is the panel's id."""
    share = {**SHARE, "custom__width": 86}
    return table(
        number,
        "Runs in this time range",
        "State and totals of each run, over its whole life as in its run record; `gpuwarden runs show RUN_ID` has the "
        "details (docs/use/runs.md).",
        *_queries(),
        columns={
            "Run": "run_name",
            "PID": "pid",
            "State": "state",
            "Cluster": "cluster",
            "Host": "instance",
            "Last seen": "reported",
            "Duration": "lasted",
            "Step p50": "median",
            "Peak memory": "peak",
            "Input wait": "wait",
            "Throttled": "throttled",
            "GPU idle": "idle",
            "Energy": "energy",
            "Errors": "errors",
            "OOM cause": "cause",
            "Run id": "run_id",
            IN_CLUSTER: "place",
        },
        width=24,
        height=height,
        empty=NO_RUN,
        sort="Last seen",
        descending=True,
        needs="Run",
        overrides=[
            override("Run", links=run_links("Only this run")),
            override("PID", custom__width=78),
            override("State", mappings=run_states(), custom__width=118, custom__align="left", **COLORED),
            override("Cluster", custom__width=65),
            override("Host", links=[link(BOX, "This host", instance="Host")], custom__width=146),
            override("Last seen", unit="dateTimeAsIsoNoDateIfToday", custom__width=162),
            override("Duration", unit="s", decimals=1, custom__width=84),
            override("Step p50", unit="s", decimals=0, custom__width=80),
            override("Peak memory", unit="bytes", decimals=1, custom__width=112),
            *(override(name, **share) for name in ("Input wait", "Throttled", "GPU idle")),
            override("Energy", unit="kwatth", decimals=1, custom__width=83),
            override("Errors", custom__width=65),
            override("OOM cause", custom__width=140),
            *(override(name, **HIDDEN) for name in ("Run id", IN_CLUSTER)),
        ],
    )


def _queries() -> list[Query]:
    """Return the queries; totals are those of the run's whole life, as of its last report in the time range."""
    ended, reported = last(RunReadings.ended_timestamp_seconds), last(RunReadings.last_report_timestamp_seconds)
    start = last(RunReadings.start_timestamp_seconds)
    gpu_seconds, idle = last(RunUsageReadings.gpu_seconds_total), last(RunUsageReadings.gpu_idle_seconds_total)
    wait, observed = last(RunReadings.input_wait_seconds_total), last(RunReadings.input_observed_seconds_total)
    throttled = f"max by ({RUN}, uuid) ({last(RunUsageReadings.throttled_step_seconds_total, POWER_LIMIT)})"
    steps = f"sum by ({RUN}, le) ({last(RunReadings.step_duration_seconds)})"
    wanted = {
        "state": run_state(last, with_phase=False),
        "reported": f"1000 * ({ended} or {reported})",
        "lasted": f"({ended} or {reported}) - {start}",
        "median": f"histogram_quantile(0.5, {steps}) >= 0",
        "peak": last(RunReadings.allocator_memory_peak_bytes),
        "wait": f"{wait} / ({observed} > 0)",
        "throttled": f"sum by {_EACH} ({throttled}) / sum by {_EACH} ({gpu_seconds} > 0)",
        "idle": f"sum by {_EACH} ({idle}) / sum by {_EACH} ({gpu_seconds} > 0)",
        "energy": f"sum by {_EACH} ({last(RunUsageReadings.energy_joules_total)}) / 3.6e6",
        "errors": f"sum by {_EACH} ({last(RunReadings.errors_total)})",
    }
    return [
        Query(f"max by ({RUN}, run_name, pid, place) ({placed(last(RunReadings.info))})", "identity", now=True),
        Query(f"max by ({RUN}, cause) ({last(RunReadings.oom_diagnosis_info)})", "why", now=True),
        *(Query(f"max by {_EACH} ({query})", name, now=True) for name, query in wanted.items()),
    ]


def run_state(read: Callable[..., str], *, with_phase: bool) -> str:
    """Return a run's state as a number, because a timeline needs one series per row; the largest that applies counts.

    With `with_phase`, a running run shows its phase.
    """
    each = f"max by ({RUN})"
    phases = {read(RunReadings.phase, phase=phase): n for n, phase in enumerate(PHASES, 1)} if with_phase else {}
    ends = {read(RunReadings.outcome, outcome=outcome): n for n, outcome in enumerate(OUTCOMES, _FIRST_END)}
    # The last reported phase does not apply once the run has ended or is stalled.
    first, then = (
        " or ".join(f"{each} ({selected} * {number} > 0)" for selected, number in numbers.items())
        for numbers in ({**ends, read(RunReadings.stalled): _STALLED}, {**phases, read(RunReadings.up): _RUNNING})
    )
    return f"{first} or {then}"


def run_states() -> list[Json]:
    """Return text and color for the numbers of `run_state`; what is OK has none, or a calm one."""
    phases: dict[float, tuple[str, str]] = {n: _PHASES[phase] for n, phase in enumerate(PHASES, 1)}
    ends: dict[float, tuple[str, str]] = {
        n: (end.replace("_", " "), _CALM.get(end) or _SEVERITIES[severity_of(END_CONDITIONS.get(end))])
        for n, end in enumerate(OUTCOMES, _FIRST_END)
    }
    return states({**phases, _RUNNING: ("running", NONE), _STALLED: ("stalled", WARN), **ends})
