"""Panels of pressure, advice and errors of runs."""

from __future__ import annotations

from classic import Panel, Query, override, override_matching, states
from looks import DASHED, HIDDEN, LEVELS, NO_PRESSURE, NO_RUN, rename_legends
from panels import table, timeline, timeseries
from run_memory import NAME
from series import DEVICE, RUN, join_device, join_run, last, placed, pressure, risen, series
from ways import IN_CLUSTER, run_links

from gpuwarden.advice.metrics import AdviceReadings
from gpuwarden.errors.kind_guides import ERROR_KIND_WORDS
from gpuwarden.runs.metrics import RunReadings


def advice() -> list[Panel]:
    """Return the panels."""
    held = series(RunReadings.allocator_memory_bytes)
    each = f"max by ({RUN})"
    level = f"{pressure()} and on ({DEVICE}) last_over_time({held}[$__range] @ end())"
    return [
        timeline(
            77,
            "Pressure on the GPUs of runs",
            "How close the GPUs of the runs are to out of memory and to throttling (docs/understand/pressure.md).",
            Query(join_device(level), "GPU {{gpu}} {{resource}} {{instance}} {{cluster}}"),
            width=12,
            mappings=states(LEVELS),
            empty=NO_PRESSURE,
        ),
        rename_legends(
            timeseries(
                66,
                "Errors, advice and actions",
                "Errors raised by training steps, by kind (docs/use/troubleshooting.md), advice sent to runs, and the "
                "actions that they took, as configured by their users.",
                Query(join_run(risen(RunReadings.errors_total)), f"{NAME} {{{{kind}}}}"),
                Query(
                    join_run(f"sum by ({RUN}, kind) ({risen(AdviceReadings.advice_total)})"),
                    f"{NAME} advice: {{{{kind}}}}",
                ),
                Query(
                    join_run(f"sum by ({RUN}, action) ({risen(RunReadings.actions_total)})"),
                    f"{NAME} action: {{{{action}}}}",
                ),
                width=12,
                unit="short",
                empty=f"no errors and no run that listens for advice (docs/understand/pressure.md), or {NO_RUN}",
                decimals=0,
                overrides=[override_matching(" (advice|action): ", **DASHED)],
            ),
            {f" {kind}$": f" {words}" for kind, words in ERROR_KIND_WORDS.items()},
        ),
        table(
            79,
            "Out-of-memory diagnosis",
            "The last out-of-memory of each run: its cause, the failed allocation and the headroom before it "
            "(docs/understand/oom-diagnosis.md).",
            Query(f"max by ({RUN}, run_name, place) ({placed(last(RunReadings.info))})", "identity", now=True),
            Query(f"max by ({RUN}, cause) ({last(RunReadings.oom_diagnosis_info)})", "why", now=True),
            Query(f"{each} ({last(RunReadings.oom_requested_bytes)})", "asked", now=True),
            Query(f"{each} ({last(RunReadings.oom_headroom_bytes)})", "left", now=True),
            Query(f"{each} (1000 * {last(RunReadings.last_error_timestamp_seconds)})", "at", now=True),
            columns={
                "Run": "run_name",
                "Cause": "cause",
                "Requested": "asked",
                "Headroom": "left",
                "Last error": "at",
                "Host": "instance",
                "Run id": "run_id",
                IN_CLUSTER: "place",
            },
            width=24,
            height=8,
            empty=f"no out-of-memory, or {NO_RUN}",
            sort="Last error",
            descending=True,
            needs="Cause",
            overrides=[
                override("Cause", custom__width=150),
                *(override(name, unit="bytes", custom__width=110) for name in ("Requested", "Headroom")),
                override("Last error", unit="dateTimeAsIsoNoDateIfToday", custom__width=165),
                override("Run", links=run_links("Only this run")),
                *(override(name, **HIDDEN) for name in ("Run id", IN_CLUSTER)),
            ],
        ),
    ]
