"""Panels of the host: CPUs, memory and storage, and what each run uses of them."""

from __future__ import annotations

from classic import BAD, GOOD, PLAIN, WARN, Panel, Query, override, override_matching
from looks import LIMIT, NO_RUN, SIZE
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
            44,
            "Host memory",
            "Memory that processes can still allocate without swapping, swap in use, and shared memory (/dev/shm), in "
            "which data loaders pass batches.",
            Query(series(HostReadings.memory_available_bytes), "available"),
            Query(series(HostReadings.swap_used_bytes), "swap used"),
            Query(series(HostReadings.shm_used_bytes), "shared memory used"),
            Query(series(HostReadings.shm_size_bytes), "shared memory size"),
            Query(series(HostReadings.memory_size_bytes), "total"),
            width=8,
            unit="bytes",
            empty="no host metrics",
            overrides=[override_matching("(total|size)$", **SIZE)],
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
    ]
