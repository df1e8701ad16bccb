"""Each GPU over time."""

from __future__ import annotations

from classic import NONE, WARN, Panel, Query, override, override_matching, states, table, timeline, timeseries
from looks import DASHED, LIMIT, NO_RUN, SIZE
from series import rate, series, with_gpu

from gpuwarden.gpu.table import GpuReadings
from gpuwarden.runs.table import RunReadings
from gpuwarden.tables import GpuHealth, OwnerReadings

GPU = "GPU {{gpu}}"


def gpus() -> list[Panel]:
    """Return the panels of a box's GPUs: what is used beside what is needed, what limits them, what they do."""
    return [*_memory(), *_limits(), *_work(), _owners(), *_faster(), _xids()]


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
    held = OwnerReadings.owner_gpu_memory_used_bytes
    users, further = (
        f"sum by (job, instance, owner_kind, owner) ({chosen})"
        # Runs have panels of their own.
        for chosen in (series(held, owner_kind="user"), series(held, but={"owner_kind": "user|run"}))
    )
    return timeseries(
        19,
        "Memory by owner",
        "Device memory by user; and by container, pod, Slurm job or systemd unit, where a process is in one.",
        Query(users, "{{owner}}"),
        Query(further, "{{owner_kind}} {{owner}}"),
        width=8,
        unit="bytes",
        empty="no process is on a GPU",
        overrides=[override_matching("^(container|pod|slurm_job|systemd_unit) ", **DASHED)],
    )


def _faster() -> list[Panel]:
    nvlink, pcie, mean = (
        f"sum by (job, instance, uuid) ({each})"
        for each in (
            rate(GpuReadings.nvlink_bytes_total),
            rate(GpuReadings.pcie_bytes_total),
            series(GpuReadings.pcie_mean_throughput_bytes_per_second),  # where the counter is too narrow
        )
    )
    return [
        timeseries(
            20,
            "SMs busy",
            "Share of the streaming multiprocessors that work, which tells how much of a GPU its kernels fill.",
            Query(with_gpu(series(GpuReadings.sm_active_ratio)), GPU),
            width=8,
            unit="percentunit",
            max=1,
            empty="only Hopper and newer tell: docs/operations.md",
        ),
        timeseries(
            21,
            "NVLink and PCIe",
            "Bytes a second in both directions, over all links.",
            Query(with_gpu(nvlink), f"{GPU} NVLink"),
            Query(with_gpu(f"{pcie} or {mean}"), f"{GPU} PCIe"),
            width=8,
            unit="Bps",
            overrides=[override_matching("PCIe$", **DASHED)],
            empty="no GPU tells",
        ),
    ]


def _xids() -> Panel:
    last = with_gpu(series(GpuHealth.xid_last_event_timestamp_seconds))
    return table(
        22,
        "XIDs",
        "Faults that the driver told of, and when last; docs/xid.md says what each means and what to do.",
        Query(f"max by (job, instance, uuid, gpu, xid) (time() - ({last}))", "ago", now=True),
        columns={"GPU": "gpu", "XID": "xid", "Last one ago": "ago"},
        width=8,
        height=8,
        empty="no XID is known",
        sort="GPU",
        overrides=[
            override("Last one ago", unit="s", decimals=0),
            *(override(name, custom__width=70) for name in ("GPU", "XID")),
        ],
    )
