"""Each GPU over time."""

from __future__ import annotations

from classic import NONE, WARN, Panel, Query, override, override_matching, states
from looks import DASHED, LEVELS, LIMIT, NO_PRESSURE, NO_RUN, SIZE, margin
from panels import timeline, timeseries
from processes import processes
from series import BOX, DEVICE, pressure, rate, series, with_device, with_gpu

from gpuwarden.gpu.metrics import GpuReadings, MigReadings
from gpuwarden.owners.kinds import WORKLOADS
from gpuwarden.owners.metrics import OwnerReadings
from gpuwarden.runs.metrics import RunReadings

GPU = "GPU {{gpu}}"
_NO_GPM = "only Hopper and newer tell: docs/start/install.md"


def gpus() -> list[Panel]:
    """Return the panels of a box's GPUs: what is used beside what is needed, what limits them, what they do."""
    return [*_memory(), *processes(), *_heat(), *_clocks(), *_work(), *_moved()]


def _memory() -> list[Panel]:
    size = f"max by ({BOX}) ({series(GpuReadings.memory_size_bytes)})"
    # Without a run these panels have to be empty, so that they say what to do.
    with_runs = f"{size} and on ({BOX}) {series(RunReadings.allocator_memory_bytes)}"
    used = f"{series(GpuReadings.memory_used_bytes)} or {series(MigReadings.memory_used_bytes)}"
    room = override("device memory", **SIZE)
    in_use = f"sum by ({DEVICE}) ({series(RunReadings.allocator_memory_bytes)})"
    headroom = f"min by ({DEVICE}) ({series(RunReadings.memory_headroom_bytes)})"
    peaks = series(GpuReadings.memory_used_peak_bytes)
    held = OwnerReadings.owner_gpu_memory_used_bytes
    users, further = (
        f"sum by ({BOX}, owner_kind, owner) ({chosen})"
        # Runs have panels of their own.
        for chosen in (series(held, owner_kind="user"), series(held, but={"owner_kind": "user|run"}))
    )
    return [
        timeseries(
            11,
            "Memory used",
            "Device memory all processes hold, what frameworks reserve included; 0/7/0 is a MIG instance of GPU 0.",
            Query(with_device(used), GPU),
            Query(size, "device memory"),
            width=8,
            unit="bytes",
            empty="no GPU answers",
            overrides=[room],
        ),
        timeseries(
            12,
            "Memory in use by allocators",
            "What the frameworks of reporting runs have handed out: the part of the memory used that is really needed.",
            Query(with_device(in_use), GPU),
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
            Query(with_device(headroom), GPU),
            Query(with_runs, "device memory"),
            width=8,
            unit="bytes",
            empty=NO_RUN,
            overrides=[room],
        ),
        timeseries(
            23,
            "Peaks of memory used",
            "Most device memory in use at any look in the longest window before, which a value of each poll can miss.",
            Query(with_gpu(f"max by ({DEVICE}) ({peaks})"), GPU),
            Query(size, "device memory"),
            width=8,
            unit="bytes",
            empty="no GPU answers",
            overrides=[room],
        ),
        timeseries(
            19,
            "Memory by owner",
            "Device memory by user; and by container, pod, Slurm job or systemd unit, where a process is in one.",
            Query(users, "{{owner}}"),
            Query(further, "{{owner_kind}} {{owner}}"),
            width=8,
            unit="bytes",
            empty="no process is on a GPU",
            overrides=[override_matching(f"^({'|'.join(kind.name for kind in WORKLOADS)}) ", **DASHED)],
        ),
        timeline(
            24,
            "Pressure",
            "How close the runs on each GPU are to the end of its memory, and the GPU to slowing itself down "
            "(docs/understand/pressure.md).",
            Query(with_device(pressure()), f"{GPU} {{{{resource}}}}"),
            width=8,
            mappings=states(LEVELS),
            empty=NO_PRESSURE,
        ),
    ]


def _heat() -> list[Panel]:
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
            empty="no GPU tells",
            overrides=[at_limit],
        ),
        timeseries(
            25,
            "Temperature margin",
            "Degrees until each device slows itself down, by its own threshold; where the ground is colored an alert "
            "fires.",
            Query(with_gpu(series(GpuReadings.temperature_margin_celsius)), GPU),
            width=8,
            unit="celsius",
            empty="no GPU tells",
            thresholds=margin(NONE),
        ),
        timeseries(
            15,
            "Power",
            "Power drawn, and the lowest limit enforced on a device of this model.",
            Query(with_gpu(series(GpuReadings.power_usage_watts)), GPU),
            Query(f"min by (name) ({limit})", "limit of {{name}}"),
            width=8,
            unit="watt",
            empty="no GPU tells",
            overrides=[at_limit],
        ),
    ]


def _clocks() -> list[Panel]:
    reasons = series(GpuReadings.clock_event_active, but={"reason": "gpu_idle"})
    return [
        timeseries(
            17,
            "SM clock",
            "Clock of the streaming multiprocessors; when it falls under load, the panel beside says why.",
            Query(with_gpu(series(GpuReadings.clock_hertz, clock="sm")), GPU),
            width=8,
            unit="hertz",
            empty="no GPU tells",
        ),
        timeline(
            18,
            "Clock event reasons",
            "What holds clocks down: reasons that were active in this time range, without being idle.",
            Query(
                with_gpu(f"{reasons} and max_over_time({reasons}[$__range] @ end()) > 0"),
                "GPU {{gpu}} {{reason}}",
            ),
            width=16,
            mappings=states({0: (" ", NONE), 1: ("active", WARN)}),
            empty="nothing held the clocks down",
        ),
    ]


def _work() -> list[Panel]:
    tensor = series(GpuReadings.pipe_active_ratio, pipe="tensor")
    return [
        timeseries(
            16,
            "Utilization",
            "Share of time with a kernel running, which says nothing of how much of the GPU it fills.",
            Query(with_gpu(series(GpuReadings.utilization_ratio)), GPU),
            width=8,
            unit="percentunit",
            empty="no GPU tells",
            max=1,
        ),
        timeseries(
            20,
            "SMs busy",
            "Share of the streaming multiprocessors that work, which tells how much of a GPU its kernels fill.",
            Query(with_gpu(series(GpuReadings.sm_active_ratio)), GPU),
            width=8,
            unit="percentunit",
            max=1,
            empty=_NO_GPM,
        ),
        timeseries(
            26,
            "Tensor cores busy",
            "Share of the time in which the tensor pipe was active: low beside busy SMs, full precision is used.",
            Query(with_gpu(tensor), GPU),
            width=8,
            unit="percentunit",
            max=1,
            empty=_NO_GPM,
        ),
    ]


def _moved() -> list[Panel]:
    nvlink, pcie, mean = (
        f"sum by ({DEVICE}) ({each})"
        for each in (
            rate(GpuReadings.nvlink_bytes_total),
            rate(GpuReadings.pcie_bytes_total),
            series(GpuReadings.pcie_mean_throughput_bytes_per_second),  # where the counter is too narrow
        )
    )
    return [
        timeseries(
            21,
            "NVLink and PCIe",
            "Bytes a second in both directions, over all links.",
            Query(with_gpu(nvlink), f"{GPU} NVLink"),
            Query(with_gpu(f"{pcie} or {mean}"), f"{GPU} PCIe"),
            width=12,
            unit="Bps",
            overrides=[override_matching("PCIe$", **DASHED)],
            empty="no GPU tells",
        ),
        timeseries(
            27,
            "Device memory's bandwidth",
            "Device memory's bandwidth in use over its most: near 1 the kernels wait for memory.",
            Query(with_gpu(series(GpuReadings.dram_active_ratio)), GPU),
            width=12,
            unit="percentunit",
            max=1,
            empty=_NO_GPM,
        ),
    ]
