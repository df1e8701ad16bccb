"""Panels of the host: CPUs, memory and storage, and what each run uses of them."""

from __future__ import annotations

from classic import BAD, GOOD, PLAIN, WARN, Panel, Query, override, override_matching
from looks import DASHED, LIMIT, NO_RUN, SIZE
from panels import timeseries
from series import BOX, join_run, rate, series

from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.host.metrics import HostReadings
from gpuwarden.runs.metrics import RunReadings

RUN = "{{run_name}}"
_COLORS = {
    "GPU utilization": GOOD,
    "CPUs busy": PLAIN,
    "CPUs in I/O wait": WARN,
    "processes stalled on I/O": BAD,
}


def _sum_by_name(expression: str, add: str = "sum") -> str:
    """Aggregate runs of one name: the ranks of a job, and successive runs."""
    return f"{add} by ({BOX}, run_name) ({join_run(expression)})"


def host() -> list[Panel]:
    """Return the panels: first what starves GPUs, then what ends runs."""
    return [*_feeding(), *_memory()]


def _feeding() -> list[Panel]:
    cpus = series(HostReadings.cpus)
    busy, iowait = (
        f"sum by ({BOX}) ({rate(HostReadings.cpu_seconds_total, mode=mode)}) / on ({BOX}) {cpus}"
        for mode in ("busy", "iowait")
    )
    stalled = rate(HostReadings.stalled_seconds_total, resource="io", share="some")
    return [
        timeseries(
            41,
            "GPU and CPU load",
            "Idle GPUs with busy CPUs, or with CPUs in I/O wait, are short of input data (docs/use/slow-training.md).",
            Query(f"avg by ({BOX}) ({series(GpuReadings.utilization_ratio)})", "GPU utilization"),
            Query(busy, "CPUs busy"),
            Query(iowait, "CPUs in I/O wait"),
            Query(stalled, "processes stalled on I/O"),
            width=8,
            unit="percentunit",
            empty="no host metrics",
            max=1,
            overrides=[override(name, color={"mode": "fixed", "fixedColor": color}) for name, color in _COLORS.items()],
        ),
        timeseries(
            42,
            "CPU use of runs",
            "CPUs that each run uses, including data loader workers, and its limit.",
            Query(_sum_by_name(rate(RunReadings.cpu_seconds_total)), RUN),
            Query(_sum_by_name(series(RunReadings.cpus), "max"), f"{RUN} limit"),
            width=8,
            unit="short",
            empty=NO_RUN,
            overrides=[override_matching("limit$", **DASHED)],
        ),
        timeseries(
            43,
            "Storage I/O of runs",
            "Throughput of each run from and to storage, without the page cache.",
            Query(_sum_by_name(rate(RunReadings.read_bytes_total)), f"{RUN} reads"),
            Query(_sum_by_name(rate(RunReadings.written_bytes_total)), f"{RUN} writes"),
            width=8,
            unit="Bps",
            empty=f"{NO_RUN}; for other users' runs see docs/understand/how-it-works.md",
            overrides=[override_matching("writes$", **DASHED)],
        ),
    ]


def _memory() -> list[Panel]:
    return [
        timeseries(
            44,
            "Host memory",
            "Memory that processes can still allocate without swapping, and swap in use.",
            Query(series(HostReadings.memory_available_bytes), "available"),
            Query(series(HostReadings.swap_used_bytes), "swap used"),
            Query(series(HostReadings.memory_size_bytes), "total"),
            width=8,
            unit="bytes",
            empty="no host metrics",
            overrides=[override("total", **SIZE)],
        ),
        timeseries(
            45,
            "Host memory of runs",
            "Resident memory of each run, and the memory and limit of its container or job (cgroup).",
            Query(_sum_by_name(series(RunReadings.host_memory_bytes)), RUN),
            Query(_sum_by_name(series(RunReadings.cgroup_memory_used_bytes), "max"), f"{RUN} cgroup"),
            Query(_sum_by_name(series(RunReadings.cgroup_memory_limit_bytes), "max"), f"{RUN} limit"),
            width=8,
            unit="bytes",
            empty=NO_RUN,
            overrides=[override_matching("limit$", **LIMIT)],
        ),
        timeseries(
            46,
            "Shared memory",
            "Use of /dev/shm, which data loaders use to pass batches.",
            Query(series(HostReadings.shm_used_bytes), "used"),
            Query(series(HostReadings.shm_size_bytes), "size"),
            width=8,
            unit="bytes",
            empty="no host metrics",
            overrides=[override("size", **SIZE)],
        ),
    ]
