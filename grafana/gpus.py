"""Panels of each GPU over time."""

from __future__ import annotations

from classic import DARK_GRAY, NONE, WARN, Panel, Query, override, override_matching, states
from looks import DASHED, LIMIT, NO_READING, NO_RUN, SIZE, UNLISTED, name_reasons, rename_legends
from panels import timeline, timeseries
from processes import processes
from series import BOX, DEVICE, join_device, join_gpu, rate, series

from gpuwarden.alerts.recording_rules import AVOIDABLE_SLOWDOWNS
from gpuwarden.gpu.metrics import GpuReadings, MigReadings
from gpuwarden.owners.kinds import WORKLOADS
from gpuwarden.owners.metrics import OwnerReadings
from gpuwarden.runs.metrics import RunReadings

GPU = "GPU {{gpu}}"
_WORKLOADS = {kind.name: kind.name.replace("_", " ") for kind in WORKLOADS}
_NO_GPM = "needs GPM, on Hopper and newer (docs/start/install.md)"


def gpus() -> list[Panel]:
    """Return the panels of a host's GPUs: memory, processes, heat, clocks, transfers, utilization."""
    return [*_memory(), *processes(), *_heat(), *_clocks(), *_moved(), *_work()]


def _memory() -> list[Panel]:
    size = f"max by ({BOX}) ({series(GpuReadings.memory_size_bytes)})"
    # Without a run these panels must be empty, so that they show how to add one.
    with_runs = f"{size} and on ({BOX}) {series(RunReadings.allocator_memory_bytes)}"
    used = f"{series(GpuReadings.memory_used_bytes)} or {series(MigReadings.memory_used_bytes)}"
    in_use = f"sum by ({DEVICE}) ({series(RunReadings.allocator_memory_bytes)})"
    headroom = f"min by ({DEVICE}) ({series(RunReadings.memory_headroom_bytes)})"
    held = OwnerReadings.owner_gpu_memory_used_bytes
    users, further = (
        f"sum by ({BOX}, owner_kind, owner) ({chosen})"
        # Runs have their own panels.
        for chosen in (series(held, owner_kind="user"), series(held, but={"owner_kind": "user|run"}))
    )
    return [
        _memory_panel(
            11,
            "Memory used",
            "Device memory allocated by all processes, including framework pools; 0/7/0 is a MIG instance of GPU 0.",
            used,
            size,
            empty="no GPU answers",
        ),
        _memory_panel(
            12,
            "Memory in use by allocators",
            "Memory that the frameworks of reporting runs have handed out: the part of the memory used that is needed.",
            in_use,
            with_runs,
            empty=NO_RUN,
        ),
        _memory_panel(
            13,
            "Headroom",
            "Memory that reporting runs can still allocate; for the run with the least.",
            headroom,
            with_runs,
            empty=NO_RUN,
        ),
        rename_legends(
            timeseries(
                19,
                "Memory by owner",
                "Device memory by user, and by container, pod, Slurm job or systemd unit if a process is in one.",
                Query(users, "{{owner}}"),
                Query(further, "{{owner_kind}} {{owner}}"),
                width=6,
                unit="bytes",
                empty="no process uses a GPU",
                overrides=[override_matching(f"^({'|'.join(_WORKLOADS.values())}) ", **DASHED)],
            ),
            {f"^{name} ": f"{words} " for name, words in _WORKLOADS.items()},
        ),
    ]


def _memory_panel(number: int, title: str, description: str, used: str, size: str, *, empty: str) -> Panel:
    """Return a panel of memory, under the size of the device's."""
    queries = Query(join_device(used), GPU), Query(size, "device memory")
    room = [override("device memory", **SIZE)]
    return timeseries(number, title, description, *queries, width=6, unit="bytes", empty=empty, overrides=room)


def _heat() -> list[Panel]:
    slowdown = join_gpu(series(GpuReadings.temperature_threshold_celsius, threshold="slowdown"), "name")
    limit = join_gpu(series(GpuReadings.power_limit_watts, limit="enforced"), "name")
    at_limit = override_matching("^(throttle point|limit)", **LIMIT)
    return [
        timeseries(
            14,
            "Temperature",
            "Core temperature, and the temperature at which this model throttles.",
            Query(join_gpu(series(GpuReadings.temperature_celsius, sensor="core")), GPU),
            Query(f"min by (name) ({slowdown})", "throttle point of {{name}}"),
            width=8,
            unit="celsius",
            empty=NO_READING,
            overrides=[at_limit],
        ),
        timeseries(
            15,
            "Power",
            "Power draw, and the lowest enforced limit of this model.",
            Query(join_gpu(series(GpuReadings.power_usage_watts)), GPU),
            Query(f"min by (name) ({limit})", "limit of {{name}}"),
            width=8,
            unit="watt",
            empty=NO_READING,
            overrides=[at_limit],
        ),
    ]


def _clocks() -> list[Panel]:
    slowdowns = series(GpuReadings.clock_event_active, like={"reason": AVOIDABLE_SLOWDOWNS})
    active = series(GpuReadings.clock_event_active, but={"reason": "gpu_idle"})
    reasons = f"({slowdowns} * 2 or {active})"
    return [
        timeseries(
            17,
            "SM clock",
            "Clock of the streaming multiprocessors; if it drops under load, the next panel has the reason.",
            Query(join_gpu(series(GpuReadings.clock_hertz, clock="sm")), GPU),
            width=8,
            unit="hertz",
            empty=NO_READING,
        ),
        name_reasons(
            timeline(
                18,
                "Clock event reasons",
                "Reasons that limited the clocks in this time range, except idle; gray is the power limit, usual under "
                "full load.",
                Query(
                    join_gpu(f"{reasons} and max_over_time({active}[$__range] @ end()) > 0"),
                    "GPU {{gpu}} {{reason}}",
                ),
                width=16,
                mappings=states({0: (" ", NONE), 1: ("active", DARK_GRAY), 2: ("active", WARN)}),
                empty="no throttling",
            )
        ),
    ]


def _work() -> list[Panel]:
    return [
        _share(
            16,
            "Utilization",
            "Share of time with a kernel running, no matter how much of the GPU it fills.",
            series(GpuReadings.utilization_ratio),
            NO_READING,
        ),
        _share(
            20,
            "SMs busy",
            "Share of the streaming multiprocessors that are busy: how much of the GPU its kernels fill.",
            series(GpuReadings.sm_active_ratio),
            _NO_GPM,
        ),
        _share(
            26,
            "Tensor cores busy",
            "Share of time with the tensor pipe active; low with busy SMs means that training uses full precision.",
            series(GpuReadings.pipe_active_ratio, pipe="tensor"),
            _NO_GPM,
        ),
        _share(
            27,
            "Memory bandwidth",
            "Share of the device memory's bandwidth in use; near 100 % the kernels wait for memory.",
            series(GpuReadings.dram_active_ratio),
            _NO_GPM,
        ),
    ]


def _share(number: int, title: str, description: str, of: str, empty: str) -> Panel:
    """Return a panel of a share of the GPU's time or of a part of it."""
    query = Query(join_gpu(of), GPU)
    return timeseries(number, title, description, query, width=6, unit="percentunit", max=1, empty=empty)


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
            "Throughput over all links, both directions together: NVLink of each GPU, PCIe in gray.",
            Query(join_gpu(nvlink), GPU),
            Query(join_gpu(f"{pcie} or {mean}"), f"{GPU} PCIe"),
            width=8,
            unit="Bps",
            overrides=[override_matching("PCIe$", **UNLISTED)],
            empty=NO_READING,
        ),
    ]
