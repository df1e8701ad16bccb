"""The dashboard of a fleet: which box is in trouble, and who pays."""

from __future__ import annotations

import summary
from alerts_table import alerts_table
from choices import choices, where_recorded
from classic import BAD, PLAIN, WARN, Json, Panel, Query, Row, dashboard, override
from gpu_table import gpu_table
from looks import NO_GROWTH, NO_RUN, headroom, margin
from owners import owners
from panels import timeseries
from run_table import run_table
from series import BOX, UNLESS_RECORDED, firing, least_headroom_ratio, recorded, series
from ways import FLEET, marks, ways

from gpuwarden.gpu.health_metrics import GpuHealth
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.runs.metrics import RunReadings

_NAME = "{{instance}} {{cluster}}"  # few sites have clusters
_STEPS = 120  # for each, Prometheus looks at all GPUs of all boxes


def fleet() -> Json:
    """Return the dashboard."""
    return dashboard(
        FLEET,
        "gpuwarden: fleet",
        "All GPU boxes and who is on them: what is in trouble, the worst first, and what it costs.",
        [
            summary.boxes_up(1, 4),
            summary.gpus_up(2, 4),
            summary.alerts_by_severity(3, 5),
            alerts_table(4, width=11, height=8),
            summary.least_headroom(5, 5),
            summary.next_out_of_memory(6, 4),
            summary.least_margin(7, 4),
            gpu_table(8, height=14),
            Row(10, "Cost", owners(11)),
            Row(20, "Boxes over time", _boxes()),
            Row(30, "Runs", [run_table(31, height=9)]),
        ],
        variables=[*choices(), where_recorded()],
        links=ways(FLEET),
        annotations=marks(),
    )


def _boxes() -> list[Panel]:
    each = f"by ({BOX})"
    severities = {"critical": BAD, "warning": WARN, "info": PLAIN}
    return [
        timeseries(
            21,
            "Alerts over time",
            "How many alerts fire, by severity.",
            Query(f"count by (severity) ({firing()})", "{{severity}}"),
            width=6,
            unit="short",
            empty="no alert fired",
            decimals=0,
            overrides=[
                override(name, color={"mode": "fixed", "fixedColor": color}) for name, color in severities.items()
            ],
        ),
        timeseries(
            22,
            "Least headroom by box",
            "Of what a run uses and can still allocate, the part left, by the run of each box that has the least.",
            Query(
                f"{least_headroom_ratio(BOX, UNLESS_RECORDED)} or {recorded('gpuwarden:box:headroom_ratio:min')}",
                _NAME,
            ),
            width=6,
            worst="lowest",
            points=_STEPS,
            unit="percentunit",
            empty=NO_RUN,
            thresholds=headroom("transparent"),
            max=1,
        ),
        timeseries(
            23,
            "Least temperature margin by box",
            "Degrees until the GPU of each box that is closest to it slows itself down.",
            Query(
                f"min {each} ({series(GpuReadings.temperature_margin_celsius, UNLESS_RECORDED)}) or "
                f"{recorded('gpuwarden:box:temperature_margin_celsius:min')}",
                _NAME,
            ),
            width=6,
            worst="lowest",
            points=_STEPS,
            unit="celsius",
            empty="no GPU tells",
            thresholds=margin("transparent"),
        ),
        timeseries(
            24,
            "Utilization by box",
            "Share of the time in which kernels run, mean over the GPUs of each box.",
            Query(
                f"avg {each} ({series(GpuReadings.utilization_ratio, UNLESS_RECORDED)}) or "
                f"{recorded('gpuwarden:box:utilization_ratio:avg')}",
                _NAME,
            ),
            width=6,
            worst="lowest",
            points=_STEPS,
            unit="percentunit",
            empty="no GPU answers",
            max=1,
        ),
        timeseries(
            25,
            "Power by box",
            "Power that the GPUs of each box draw together.",
            Query(
                f"sum {each} ({series(GpuReadings.power_usage_watts, UNLESS_RECORDED)}) or "
                f"{recorded('gpuwarden:box:power_usage_watts:sum')}",
                _NAME,
            ),
            width=8,
            worst="highest",
            points=_STEPS,
            unit="watt",
            empty="no GPU tells",
        ),
        timeseries(
            26,
            "Out of memory ahead by box",
            "Seconds until the first run of each box is out of memory if it goes on to grow as it does.",
            Query(f"min {each} ({series(RunReadings.seconds_to_oom)})", _NAME),
            width=8,
            worst="lowest",
            points=_STEPS,
            unit="s",
            empty=NO_GROWTH,
        ),
        timeseries(
            27,
            "GPUs lost by box",
            "How many GPUs of each box do not answer the driver.",
            Query(
                f"sum {each} (1 - {series(GpuHealth.up, UNLESS_RECORDED)}) or "
                f"{recorded('gpuwarden:box:gpus_lost:sum')}",
                _NAME,
            ),
            width=8,
            worst="highest",
            points=_STEPS,
            unit="short",
            empty="no GPU is read; paused?",
            decimals=0,
        ),
    ]
