"""Panels with a single large value: availability, firing alerts, and what is closest to trouble."""

from __future__ import annotations

from classic import BAD, MILD, TEXT, WARN, Panel, Query, bad_from, override, override_matching, steps
from looks import NO_GROWTH, NO_READING, NOT_POLLED, NOW, ahead, headroom, margin, name_reasons
from panels import stat
from run_speed import POWER_LIMIT, input_wait, throttled
from series import boxes, firing, headroom_ratio, join_device, join_gpu, join_run, series

from gpuwarden.config import thresholds
from gpuwarden.gpu.health_metrics import GpuHealth
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.runs.metrics import RunReadings


def _severity(severity: str) -> str:
    return f'severity="{severity}"'


def boxes_up(number: int, width: int) -> Panel:
    """Count hosts whose daemon answers, and hosts whose daemon does not."""
    return stat(
        number,
        "Hosts",
        "Hosts whose daemon answers Prometheus (up), and hosts whose daemon does not (down).",
        Query(f"sum({boxes()})", "up", now=True),
        Query(f"sum(1 - {boxes()})", "down", now=True),
        width=width,
        thresholds=bad_from(1),
        empty="Prometheus has no target with job=gpuwarden",
        overrides=[override("up", color={"mode": "fixed", "fixedColor": TEXT})],
    )


def gpus_up(number: int, width: int) -> Panel:
    """Count GPUs that answer, and GPUs that do not."""
    up = series(GpuHealth.up)
    return stat(
        number,
        "GPUs",
        "GPUs that answer the driver (up), and GPUs that do not (lost).",
        Query(f"sum({up})", "up", now=True),
        Query(f"sum(1 - {up})", "lost", now=True),
        width=width,
        thresholds=bad_from(1),
        empty=NOT_POLLED,
        overrides=[override("up", color={"mode": "fixed", "fixedColor": TEXT})],
    )


def alerts_by_severity(number: int, width: int) -> Panel:
    """Count firing alerts."""
    severities = {"critical": BAD, "warning": WARN}
    return stat(
        number,
        "Alerts",
        "Firing alerts, by severity; the table lists them.",
        *(Query(f"count({firing(_severity(name))}) or vector(0)", name, now=True) for name in severities),
        width=width,
        thresholds=bad_from(1),
        empty="no alerts",
        overrides=[override(name, thresholds=steps((TEXT, None), (color, 1))) for name, color in severities.items()],
    )


def least_headroom(number: int, width: int) -> Panel:
    """Show the run with the lowest headroom."""
    least = f"bottomk(1, {join_run(join_device(headroom_ratio()))})"
    return stat(
        number,
        "Lowest headroom",
        "The run that is closest to out of memory: its headroom as a share of used memory plus headroom.",
        Query(least, "{{run_name}} · GPU {{gpu}} · {{instance}}", now=True),
        unit="percentunit",
        width=width,
        thresholds=headroom(),
        empty="no runs",
        overrides=[override_matching(".*", decimals=1)],
    )


def next_out_of_memory(number: int, width: int) -> Panel:
    """Show the run with the nearest OOM forecast."""
    first = f"bottomk(1, {join_run(join_device(series(RunReadings.seconds_to_oom)))})"
    return stat(
        number,
        "OOM forecast",
        "The run that is forecast to run out of memory first, at its current growth rate (docs/understand/leaks.md).",
        Query(first, "{{run_name}} · GPU {{gpu}} · {{instance}}", now=True),
        unit="s",
        width=width,
        thresholds=ahead(),
        empty=NO_GROWTH,
        overrides=[override_matching(".*", decimals=0, mappings=NOW)],
    )


def least_margin(number: int, width: int) -> Panel:
    """Show the GPU that is closest to throttling."""
    least = f"bottomk(1, {join_gpu(series(GpuReadings.temperature_margin_celsius))})"
    return stat(
        number,
        "Heat margin",
        "The GPU that is closest to throttling: degrees left to its own threshold.",
        Query(least, "GPU {{gpu}} · {{instance}}", now=True),
        unit="celsius",
        width=width,
        thresholds=margin(),
        empty=NO_READING,
    )


def longest_input_wait(number: int, width: int) -> Panel:
    """Show the run with the highest input wait."""
    return stat(
        number,
        "Worst input wait",
        "The run that waits most for its next batch, as a share of step time.",
        Query(f"topk(1, {join_run(input_wait())})", "{{run_name}} · {{instance}}", now=True),
        unit="percentunit",
        width=width,
        thresholds=bad_from(thresholds.INPUT_BOUND, bad=MILD),
        empty="input wait unknown",
        overrides=[override_matching(".*", decimals=0)],
    )


def most_throttled(number: int, width: int) -> Panel:
    """Show the run that is throttled most."""
    most = f"topk(1, {join_run(throttled(POWER_LIMIT))})"
    return name_reasons(
        stat(
            number,
            "Most throttled",
            "The run whose GPUs are throttled most by heat or hardware, as a share of time.",
            Query(most, "{{run_name}} · {{reason}}", now=True),
            unit="percentunit",
            width=width,
            thresholds=bad_from(thresholds.SLOWED, bad=WARN),
            empty="no throttling",
            overrides=[override_matching(".*", decimals=0)],
        )
    )
