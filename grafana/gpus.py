"""Each GPU over time."""

from __future__ import annotations

from classic import NONE, WARN, Panel, Query, override, override_matching, states, timeline, timeseries
from looks import LIMIT, NO_RUN, SIZE
from series import series, with_gpu

from gpuwarden.gpu.table import GpuReadings
from gpuwarden.runs.table import RunReadings
from gpuwarden.tables import OwnerReadings

GPU = "GPU {{gpu}}"


def gpus() -> list[Panel]:
    """Return the panels of a box's GPUs: what is used beside what is needed, what limits them, what they do."""
    return [*_memory(), *_limits(), *_work(), _owners()]


def _memory() -> list[Panel]:
    size = f"max by (instance) ({series(GpuReadings.memory_size_bytes)})"
    # Without a run these panels have to be empty, so that they say what to do.
    with_runs = f"{size} and on (instance) {series(RunReadings.allocator_memory_bytes)}"
    room = override("device memory", **SIZE)
    in_use = f"sum by (job, instance, uuid) ({series(RunReadings.allocator_memory_bytes)})"
    headroom = f"min by (job, instance, uuid) ({series(RunReadings.memory_headroom_bytes)})"
    return [
        timeseries(
            11,
            "Memory used",
            "Device memory all processes hold, what frameworks reserve included.",
            Query(with_gpu(series(GpuReadings.memory_used_bytes)), GPU),
            Query(size, "device memory"),
            width=8,
            unit="bytes",
            overrides=[room],
        ),
        timeseries(
            12,
            "Memory in use by allocators",
            "What the frameworks of reporting runs have handed out: the part of the memory used that is really needed.",
            Query(with_gpu(in_use), GPU),
            Query(with_runs, "device memory"),
            width=8,
            unit="bytes",
            empty=NO_RUN,
            overrides=[room],
        ),
        timeseries(
            13,
            "Headroom",
            "What reporting runs can still allocate, by the run that has the least.",
            Query(with_gpu(headroom), GPU),
            Query(with_runs, "device memory"),
            width=8,
            unit="bytes",
            empty=NO_RUN,
            overrides=[room],
        ),
    ]


def _limits() -> list[Panel]:
    slowdown = with_gpu(series(GpuReadings.temperature_threshold_celsius, threshold="slowdown"), "name")
    limit = with_gpu(series(GpuReadings.power_limit_watts, limit="enforced"), "name")
    at_limit = override_matching("^(slowdown|limit)", **LIMIT)
    return [
        timeseries(
            14,
            "Temperature",
            "Core temperature, and where devices of this model slow themselves down.",
            Query(with_gpu(series(GpuReadings.temperature_celsius, sensor="core")), GPU),
            Query(f"min by (name) ({slowdown})", "slowdown of {{name}}"),
            width=8,
            unit="celsius",
            overrides=[at_limit],
        ),
        timeseries(
            15,
            "Power",
            "Power drawn, and the lowest limit enforced on a device of this model.",
            Query(with_gpu(series(GpuReadings.power_usage_watts)), GPU),
            Query(f"min by (name) ({limit})", "limit of {{name}}"),
            width=8,
            unit="watt",
            overrides=[at_limit],
        ),
    ]


def _work() -> list[Panel]:
    reasons = series(GpuReadings.clock_event_active, but={"reason": "gpu_idle"})
    return [
        timeseries(
            16,
            "Utilization",
            "Share of time with a kernel running, which says nothing of how much of the GPU it fills.",
            Query(with_gpu(series(GpuReadings.utilization_ratio)), GPU),
            width=8,
            unit="percentunit",
            max=1,
        ),
        timeseries(
            17,
            "SM clock",
            "Clock of the streaming multiprocessors; when it falls under load, the panel beside says why.",
            Query(with_gpu(series(GpuReadings.clock_hertz, clock="sm")), GPU),
            width=8,
            unit="hertz",
        ),
        timeline(
            18,
            "Clock event reasons",
            "What holds clocks down: reasons that were active in this time range, without being idle.",
            Query(
                with_gpu(f"{reasons} and max_over_time({reasons}[$__range] @ end()) > 0"),
                "GPU {{gpu}} {{reason}}",
            ),
            width=8,
            mappings=states({0: (" ", NONE), 1: ("active", WARN)}),
            empty="nothing held the clocks down",
        ),
    ]


def _owners() -> Panel:
    owned = series(OwnerReadings.owner_gpu_memory_used_bytes, but={"owner_kind": "user"})
    users = series(OwnerReadings.owner_gpu_memory_used_bytes, owner_kind="user")
    return timeseries(
        19,
        "Memory by owner",
        "Device memory by user; and by container, pod, Slurm job, systemd unit or run, where a process is in one.",
        Query(with_gpu(users), "{{owner}} on GPU {{gpu}}"),
        Query(with_gpu(owned), "{{owner_kind}} {{owner}} on GPU {{gpu}}"),
        width=8,
        unit="bytes",
        empty="no process is on a GPU",
    )
