"""Fleet dashboard: hosts in trouble, and cost by owner."""

from __future__ import annotations

import summary
from alerts_table import alerts_table
from choices import choices, where_recorded
from classic import BAD, PLAIN, WARN, Json, Panel, Query, Row, dashboard, override
from gpu_table import gpu_table
from looks import NO_GROWTH, NO_READING, NO_RUN, NOT_POLLED, NOW, headroom, margin
from owners import owners
from panels import timeseries
from run_table import run_table
from series import BOX, UNLESS_RECORDED, firing, least_headroom_ratio, recorded, series
from ways import FLEET, marks, ways

from gpuwarden.gpu.health_metrics import GpuHealth
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.runs.metrics import RunReadings

_NAME = "{{instance}} {{cluster}}"  # few sites have clusters
_STEPS = 120  # for each, Prometheus reads all GPUs of all hosts


def fleet() -> Json:
    """Return the dashboard."""
    return dashboard(
        FLEET,
        "gpuwarden: fleet",
        "All GPU hosts and their users: problems, the worst first, and cost by owner.",
        [
            summary.boxes_up(1, 3),
            summary.gpus_up(2, 3),
            summary.alerts_by_severity(3, 4),
            summary.least_headroom(5, 5),
            summary.next_out_of_memory(6, 5),
            summary.least_margin(7, 4),
            alerts_table(4, height=7),
            gpu_table(8, height=14),
            Row(10, "Cost", owners(11)),
            Row(20, "Hosts over time", _boxes()),
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
            "Firing alerts, by severity.",
            Query(f"count by (severity) ({firing()})", "{{severity}}"),
            width=6,
            unit="short",
            empty="no alerts",
            decimals=0,
            overrides=[
                override(name, color={"mode": "fixed", "fixedColor": color}) for name, color in severities.items()
            ],
        ),
        timeseries(
            22,
            "Lowest headroom by host",
            "Headroom of the run with the least on each host, as a share of used memory plus headroom.",
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
            "Lowest temperature margin by host",
            "Degrees left before throttling, for the hottest GPU of each host.",
            Query(
                f"min {each} ({series(GpuReadings.temperature_margin_celsius, UNLESS_RECORDED)}) or "
                f"{recorded('gpuwarden:box:temperature_margin_celsius:min')}",
                _NAME,
            ),
            width=6,
            worst="lowest",
            points=_STEPS,
            unit="celsius",
            empty=NO_READING,
            thresholds=margin("transparent"),
        ),
        timeseries(
            24,
            "Utilization by host",
            "Share of time with a kernel running, averaged over the GPUs of each host.",
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
            "Power by host",
            "Power draw of all GPUs of each host.",
            Query(
                f"sum {each} ({series(GpuReadings.power_usage_watts, UNLESS_RECORDED)}) or "
                f"{recorded('gpuwarden:box:power_usage_watts:sum')}",
                _NAME,
            ),
            width=8,
            worst="highest",
            points=_STEPS,
            unit="watt",
            empty=NO_READING,
        ),
        timeseries(
            26,
            "OOM forecast by host",
            "Time until the first run of each host is out of memory, at its current growth rate.",
            Query(f"min {each} ({series(RunReadings.seconds_to_oom)})", _NAME),
            width=8,
            worst="lowest",
            points=_STEPS,
            unit="s",
            empty=NO_GROWTH,
            mappings=NOW,
        ),
        timeseries(
            27,
            "Lost GPUs by host",
            "GPUs of each host that do not answer the driver.",
            Query(
                f"sum {each} (1 - {series(GpuHealth.up, UNLESS_RECORDED)}) or "
                f"{recorded('gpuwarden:box:gpus_lost:sum')}",
                _NAME,
            ),
            width=8,
            worst="highest",
            points=_STEPS,
            unit="short",
            empty=NOT_POLLED,
            decimals=0,
        ),
    ]
