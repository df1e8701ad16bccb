"""Panels of a run's use of its host: CPUs, memory, storage."""

from __future__ import annotations

from classic import Panel, Query, override_matching
from looks import DASHED, LIMIT, NO_GROWTH, NO_RUN, NOW, UNLISTED
from panels import timeseries
from run_memory import NAME
from series import join_run, rate, series

from gpuwarden.runs.metrics import RunReadings


def host_use() -> list[Panel]:
    """Return the panels."""
    memory, used, limit = (
        join_run(series(row))
        for row in (
            RunReadings.host_memory_bytes,
            RunReadings.cgroup_memory_used_bytes,
            RunReadings.cgroup_memory_limit_bytes,
        )
    )
    return [
        timeseries(
            81,
            "Host memory",
            "Resident memory of each run, and the memory and limit of its container or job (cgroup).",
            Query(memory, NAME),
            Query(used, f"{NAME} cgroup"),
            Query(limit, f"{NAME} limit"),
            width=6,
            unit="bytes",
            empty=NO_RUN,
            overrides=[override_matching("limit$", **LIMIT), override_matching("cgroup$", **DASHED)],
        ),
        timeseries(
            83,
            "Time to host out-of-memory",
            "OOM forecast for host memory, or for the limit of the run's container or job, with its bounds.",
            Query(join_run(series(RunReadings.seconds_to_host_oom)), NAME),
            Query(join_run(series(RunReadings.seconds_to_host_oom_lower)), f"{NAME} lower bound"),
            Query(join_run(series(RunReadings.seconds_to_host_oom_upper)), f"{NAME} upper bound"),
            width=6,
            unit="s",
            empty=f"{NO_GROWTH}, or {NO_RUN}",
            mappings=NOW,
            overrides=[override_matching("(lower|upper) bound$", **UNLISTED)],
        ),
        timeseries(
            84,
            "CPUs",
            "CPUs that each run uses, including data loader workers, and its limit.",
            Query(join_run(rate(RunReadings.cpu_seconds_total)), NAME),
            Query(join_run(series(RunReadings.cpus)), f"{NAME} limit"),
            width=6,
            unit="short",
            empty=NO_RUN,
            overrides=[override_matching("limit$", **DASHED)],
        ),
        timeseries(
            85,
            "Storage I/O",
            "Throughput of each run from and to storage, without the page cache.",
            Query(join_run(rate(RunReadings.read_bytes_total)), f"{NAME} reads"),
            Query(join_run(rate(RunReadings.written_bytes_total)), f"{NAME} writes"),
            width=6,
            unit="Bps",
            empty=f"{NO_RUN}; for other users' runs see docs/understand/how-it-works.md",
            overrides=[override_matching("writes$", **DASHED)],
        ),
    ]
