"""Panels of cost by owner: GPU hours, idle hours, energy."""

from __future__ import annotations

from classic import Panel, Query, override
from looks import PLAIN_GAUGE
from panels import table, timeseries
from series import DEVICE, UNLESS_RECORDED, recorded, series

from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.owners.metrics import OwnerReadings

# For each step Prometheus reads all GPUs of a fleet.
_STEPS = 120
_OVER = "[$__range:$__interval]) * $__interval_ms / 1000"


def owners(first: int) -> list[Panel]:
    """Return the panels; their ids start at `first`."""
    memory = series(OwnerReadings.owner_gpu_memory_used_bytes, UNLESS_RECORDED, owner_kind="user")
    each_held = f"({memory} > bool 0)"
    match = f"* on ({DEVICE}) group_left ()"
    each_idle = f"{each_held} {match} (1 - {series(GpuReadings.utilization_ratio, UNLESS_RECORDED)})"
    each_watts = f"{each_held} {match} {series(GpuReadings.power_usage_watts, UNLESS_RECORDED)}"
    held, idle, watts = (
        f"{each} or {recorded(f'gpuwarden:owner:{name}:sum', 'owner')}"
        for each, name in (
            (each_held, "gpus_held"),
            (each_idle, "gpus_idle"),
            (each_watts, "power_usage_watts"),
        )
    )
    held_seconds, idle_seconds, joules = (
        f"sum by (owner) (sum_over_time(({each}){_OVER})" for each in (held, idle, watts)
    )
    return [
        table(
            first,
            "Cost by owner in this time range",
            "GPU hours of each user (time with memory allocated), the part without any kernel running, and the GPU's "
            "energy in that time, in full for each user of a shared GPU.",
            Query(f"{held_seconds} / 3600", "held", now=True),
            Query(f"{idle_seconds} / 3600", "idle", now=True),
            Query(f"{joules} / 3.6e6", "energy", now=True),
            columns={"Owner": "owner", "GPU hours": "held", "Idle hours": "idle", "Energy": "energy"},
            width=10,
            height=8,
            empty="no process uses a GPU",
            sort="Idle hours",
            descending=True,
            ratios={"Idle": ("Idle hours", "GPU hours")},
            points=_STEPS,
            overrides=[
                override("GPU hours", decimals=1, custom__width=110),
                override("Idle hours", decimals=1, custom__width=110),
                override("Idle", **PLAIN_GAUGE),
                override("Energy", unit="kwatth", decimals=1, custom__width=110),
            ],
        ),
        timeseries(
            first + 1,
            "GPUs by owner",
            "GPUs on which each user has memory allocated.",
            Query(f"sum by (owner) ({held})", "{{owner}}"),
            width=7,
            unit="short",
            empty="no process uses a GPU",
            points=_STEPS,
        ),
        timeseries(
            first + 2,
            "Idle GPUs by owner",
            "Allocated GPUs without a kernel running, in fractions of a GPU; a forgotten notebook shows here.",
            Query(f"sum by (owner) ({idle})", "{{owner}}"),
            width=7,
            unit="short",
            empty="no process uses a GPU",
            points=_STEPS,
        ),
    ]
