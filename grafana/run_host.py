"""What a run uses of its host: CPUs, memory, storage."""

from __future__ import annotations

from classic import Panel, Query, override_matching
from looks import DASHED, LIMIT, NO_GROWTH, NO_RUN
from panels import timeseries
from run_memory import NAME
from series import rate, series, with_run

from gpuwarden.runs.metrics import RunReadings


def on_host() -> list[Panel]:
    """Return the panels."""
    memory, used, limit = (
        with_run(series(row))
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
            "Memory resident in each run's processes, and where its container or job has a limit what that holds.",
            Query(memory, NAME),
            Query(used, f"{NAME} with its container or job"),
            Query(limit, f"{NAME} limit"),
            width=8,
            unit="bytes",
            empty=NO_RUN,
            overrides=[override_matching("limit$", **LIMIT), override_matching("container or job$", **DASHED)],
        ),
        timeseries(
            82,
            "Growth of host memory a minute",
            "Bytes that the host memory of a run's processes grows by for good, a minute.",
            Query(f"60 * {with_run(series(RunReadings.host_memory_growth_bytes_per_second))}", NAME),
            width=8,
            unit="bytes",
            empty=f"{NO_GROWTH}, or none reports",
        ),
        timeseries(
            83,
            "Time to out of host memory",
            "Seconds until a run's processes meet the limit of their container or job, or all the host has left, and "
            "the least and most they may be.",
            Query(with_run(series(RunReadings.seconds_to_host_oom)), NAME),
            Query(with_run(series(RunReadings.seconds_to_host_oom_lower)), f"{NAME} at least"),
            Query(with_run(series(RunReadings.seconds_to_host_oom_upper)), f"{NAME} at most"),
            width=8,
            unit="s",
            empty=f"{NO_GROWTH}, or none reports",
            overrides=[override_matching("at (least|most)$", **DASHED)],
        ),
        timeseries(
            84,
            "CPUs",
            "CPUs that each run keeps busy with its data loader workers, and how many it may use.",
            Query(with_run(rate(RunReadings.cpu_seconds_total)), NAME),
            Query(with_run(series(RunReadings.cpus)), f"{NAME} may use"),
            width=8,
            unit="short",
            empty=NO_RUN,
            overrides=[override_matching("may use$", **DASHED)],
        ),
        timeseries(
            85,
            "Storage I/O",
            "Bytes a second that each run has fetched from storage and sent there, past the page cache.",
            Query(with_run(rate(RunReadings.read_bytes_total)), f"{NAME} reads"),
            Query(with_run(rate(RunReadings.written_bytes_total)), f"{NAME} writes"),
            width=8,
            unit="Bps",
            empty=f"{NO_RUN}; for other users' runs see docs/understand/how-it-works.md",
            overrides=[override_matching("writes$", **DASHED)],
        ),
        timeseries(
            86,
            "Input buffer",
            "Batches ready at the end of the input pipeline, and how many it holds at most: empty, it is late.",
            Query(with_run(series(RunReadings.input_buffered_batches)), NAME),
            Query(with_run(series(RunReadings.input_buffer_size_batches)), f"{NAME} at most"),
            width=8,
            unit="short",
            empty=f"only tf.data tells; {NO_RUN}",
            overrides=[override_matching("at most$", **DASHED)],
        ),
    ]
