"""Single answers, as large as they deserve: does all answer, what is closest to trouble, what fires."""

from __future__ import annotations

from classic import BAD, MILD, NONE, WARN, Panel, Query, bad_from, override, override_matching, steps
from looks import NO_GROWTH, ahead, headroom, margin
from panels import stat
from run_speed import input_wait, throttled
from series import boxes, firing, headroom_ratio, series, with_device, with_gpu, with_run

from gpuwarden.config import thresholds
from gpuwarden.gpu.health_metrics import GpuHealth
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.runs.metrics import RunReadings


def _of(severity: str) -> str:
    return f'severity="{severity}"'


def boxes_up(number: int, width: int) -> Panel:
    """Count boxes whose daemon answers, and those whose does not."""
    return stat(
        number,
        "Boxes",
        "How many boxes' daemons answer Prometheus, and how many do not.",
        Query(f"sum({boxes()})", "up", now=True),
        Query(f"sum(1 - {boxes()})", "down", now=True),
        width=width,
        thresholds=bad_from(1),
        empty="Prometheus scrapes no box under the job gpuwarden",
        overrides=[override("up", color={"mode": "fixed", "fixedColor": NONE})],
    )


def gpus_up(number: int, width: int) -> Panel:
    """Count GPUs that answer, and those that do not."""
    up = series(GpuHealth.up)
    return stat(
        number,
        "GPUs",
        "How many GPUs answer the driver, and how many do not.",
        Query(f"sum({up})", "up", now=True),
        Query(f"sum(1 - {up})", "lost", now=True),
        width=width,
        thresholds=bad_from(1),
        empty="no GPU is read; paused?",
        overrides=[override("up", color={"mode": "fixed", "fixedColor": NONE})],
    )


def alerts_by_severity(number: int, width: int) -> Panel:
    """Count what fires."""
    severities = {"critical": BAD, "warning": WARN}
    return stat(
        number,
        "Alerts",
        "How many alerts fire now, by severity; the table says which.",
        *(Query(f"count({firing(_of(name))}) or vector(0)", name, now=True) for name in severities),
        width=width,
        thresholds=bad_from(1),
        empty="no alert fires",
        overrides=[override(name, thresholds=steps((NONE, None), (color, 1))) for name, color in severities.items()],
    )


def least_headroom(number: int, width: int) -> Panel:
    """Show the run that is closest to out of memory."""
    least = f"bottomk(1, {with_run(with_device(headroom_ratio()))})"
    return stat(
        number,
        "Least headroom of a run",
        "The run that is closest to out of memory: of what it uses and can still allocate, the part that is left.",
        Query(least, "{{run_name}} · GPU {{gpu}} · {{instance}}", now=True),
        unit="percentunit",
        width=width,
        thresholds=headroom(),
        empty="no run reports",
        overrides=[override_matching(".*", decimals=1)],
    )


def next_out_of_memory(number: int, width: int) -> Panel:
    """Show the run that will be out of memory first."""
    first = f"bottomk(1, {with_run(with_device(series(RunReadings.seconds_to_oom)))})"
    return stat(
        number,
        "Next out of memory",
        "The run that will run out of memory first at its current growth, and when (docs/understand/leaks.md).",
        Query(first, "{{run_name}} · GPU {{gpu}} · {{instance}}", now=True),
        unit="s",
        width=width,
        thresholds=ahead(),
        empty=NO_GROWTH,
        overrides=[override_matching(".*", decimals=0)],
    )


def least_margin(number: int, width: int) -> Panel:
    """Show the GPU that is closest to slowing itself down."""
    least = f"bottomk(1, {with_gpu(series(GpuReadings.temperature_margin_celsius))})"
    return stat(
        number,
        "Least temperature margin",
        "The GPU that is closest to slowing itself down, by its own threshold.",
        Query(least, "GPU {{gpu}} · {{instance}}", now=True),
        unit="celsius",
        width=width,
        thresholds=margin(),
        empty="no GPU tells",
    )


def longest_input_wait(number: int, width: int) -> Panel:
    """Show the run that waits most for its input."""
    return stat(
        number,
        "Longest input wait",
        "Of the runs the one whose steps wait most for their next batch: the part of their time in which they do.",
        Query(f"topk(1, {with_run(input_wait())})", "{{run_name}} · {{instance}}", now=True),
        unit="percentunit",
        width=width,
        thresholds=bad_from(thresholds.INPUT_BOUND, bad=MILD),
        empty="no run tells how long it waits for input",
        overrides=[override_matching(".*", decimals=0)],
    )


def most_throttled(number: int, width: int) -> Panel:
    """Show the run that is slowed down most."""
    # The power limit holds every GPU that works hard.
    most = f"topk(1, {with_run(throttled({'reason': 'sw_power_cap'}))})"
    return stat(
        number,
        "Most throttled",
        "Of the runs the one whose GPUs heat or the hardware slow down for the largest part of the time.",
        Query(most, "{{run_name}} · {{reason}}", now=True),
        unit="percentunit",
        width=width,
        thresholds=bad_from(thresholds.SLOWED, bad=WARN),
        empty="no step is slowed down but by the power limit",
        overrides=[override_matching(".*", decimals=0)],
    )
