"""The machine around the GPUs: whether it keeps them fed, and what each run takes of it."""

from __future__ import annotations

from classic import BAD, GOOD, PLAIN, WARN, Panel, Query, override, override_matching
from looks import DASHED, LIMIT, NO_RUN, SIZE
from panels import timeseries
from series import BOX, rate, series, with_run

from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.host.metrics import HostReadings
from gpuwarden.runs.metrics import RunReadings

RUN = "{{run_name}}"
_COLORS = {
    "GPU utilization, mean": GOOD,
    "CPUs busy": PLAIN,
    "CPUs in iowait": WARN,
    "some process stalled on I/O": BAD,
}


def _by_name(expression: str, add: str = "sum") -> str:
    """Take runs of one name together: ranks of a job, and one run after the other."""
    return f"{add} by ({BOX}, run_name) ({with_run(expression)})"


def host() -> list[Panel]:
    """Return the panels of a box's host: what starves GPUs first, then what ends runs."""
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
            "GPUs beside CPUs",
            "GPUs that idle while CPUs are busy or wait for I/O starve for data (docs/understand/how-it-works.md).",
            Query(f"avg by ({BOX}) ({series(GpuReadings.utilization_ratio)})", "GPU utilization, mean"),
            Query(busy, "CPUs busy"),
            Query(iowait, "CPUs in iowait"),
            Query(stalled, "some process stalled on I/O"),
            width=8,
            unit="percentunit",
            empty="no host is read: docs/understand/how-it-works.md",
            max=1,
            overrides=[override(name, color={"mode": "fixed", "fixedColor": color}) for name, color in _COLORS.items()],
        ),
        timeseries(
            42,
            "CPUs of runs",
            "CPUs that each run keeps busy with its data loader workers, and how many it may use.",
            Query(_by_name(rate(RunReadings.cpu_seconds_total)), RUN),
            Query(_by_name(series(RunReadings.cpus), "max"), f"{RUN} may use"),
            width=8,
            unit="short",
            empty=NO_RUN,
            overrides=[override_matching("may use$", **DASHED)],
        ),
        timeseries(
            43,
            "Storage I/O of runs",
            "Bytes a second that each run has fetched from storage and sent there, past the page cache.",
            Query(_by_name(rate(RunReadings.read_bytes_total)), f"{RUN} reads"),
            Query(_by_name(rate(RunReadings.written_bytes_total)), f"{RUN} writes"),
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
            "Memory that processes can still get without swapping, and swap in use.",
            Query(series(HostReadings.memory_available_bytes), "available"),
            Query(series(HostReadings.swap_used_bytes), "swap used"),
            Query(series(HostReadings.memory_size_bytes), "memory"),
            width=8,
            unit="bytes",
            empty="no host is read: docs/understand/how-it-works.md",
            overrides=[override("memory", **SIZE)],
        ),
        timeseries(
            45,
            "Host memory of runs",
            "Memory resident in each run's processes, and where its container or job has a limit what that holds.",
            Query(_by_name(series(RunReadings.host_memory_bytes)), RUN),
            Query(_by_name(series(RunReadings.cgroup_memory_used_bytes), "max"), f"{RUN} with its container or job"),
            Query(_by_name(series(RunReadings.cgroup_memory_limit_bytes), "max"), f"{RUN} limit"),
            width=8,
            unit="bytes",
            empty=NO_RUN,
            overrides=[override_matching("limit$", **LIMIT)],
        ),
        timeseries(
            46,
            "Shared memory",
            "What is in use of /dev/shm, through which data loaders hand over batches.",
            Query(series(HostReadings.shm_used_bytes), "used"),
            Query(series(HostReadings.shm_size_bytes), "size"),
            width=8,
            unit="bytes",
            empty="no host is read: docs/understand/how-it-works.md",
            overrides=[override("size", **SIZE)],
        ),
    ]
