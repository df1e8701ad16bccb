"""Panels of faults: XIDs, errors of memory, links and the driver, rejected reports."""

from __future__ import annotations

from classic import BAD, NONE, Panel, Query, override, states
from looks import COLORED, NOW
from panels import table, timeseries
from series import DEVICE, join_gpu, risen, series

from gpuwarden.daemon.metrics import DaemonReadings
from gpuwarden.gpu.health_metrics import GpuHealth
from gpuwarden.gpu.metrics import GpuReadings

_STEPS = 480  # a host has hundreds of link counters: the points of an hour are its scrapes, those of a week are not
_SOUND = states({0: ("no", NONE), 1: ("yes", BAD)})


def faults() -> list[Panel]:
    """Return the panels of a host's faults."""
    return [_xids(), _repairs(), _memory_errors(), _links(), _daemon_errors()]


def _xids() -> Panel:
    last = join_gpu(series(GpuHealth.xid_last_event_timestamp_seconds))
    count = join_gpu(series(GpuHealth.xid_events_total))
    each = f"max by ({DEVICE}, gpu, xid)"
    return table(
        22,
        "XIDs",
        "Faults that the driver reported, and the age of the last one; docs/reference/xids.md explains each code.",
        Query(f"{each} (time() - ({last}))", "ago", now=True),
        Query(f"{each} ({count})", "count", now=True),
        columns={"GPU": "gpu", "XID": "xid", "Count": "count", "Age": "ago"},
        width=8,
        height=8,
        empty="no XIDs",
        sort="Age",
        overrides=[
            override("Age", unit="s", decimals=0, mappings=NOW),
            *(override(name, custom__width=90) for name in ("GPU", "XID", "Count")),
        ],
    )


def _memory_errors() -> Panel:
    found = risen(GpuReadings.ecc_errors_total, lifetime="volatile")
    errors = f"sum by ({DEVICE}, type, location) ({found})"
    return timeseries(
        57,
        "Memory errors",
        "ECC errors in device memory and on the chip, by type; an uncorrected error ends the programs that it hits.",
        Query(join_gpu(errors), "GPU {{gpu}} {{type}} {{location}}"),
        width=8,
        unit="short",
        empty="no memory errors",
    )


def _repairs() -> Panel:
    wanted = {
        "reset": series(GpuReadings.reset_required),
        # Newer GPUs remap rows, older ones retire pages.
        "waiting": f"{series(GpuReadings.row_remap_pending)} or {series(GpuReadings.retired_pages_pending)}",
        "failed": series(GpuReadings.row_remap_failed),
    }
    rows = f"sum by ({DEVICE}) ({series(GpuReadings.remapped_rows)})"
    each = f"max by ({DEVICE})"
    return table(
        58,
        "Memory repairs",
        "Remapped rows of device memory, and whether a reset or a new board is needed.",
        Query(f"max by ({DEVICE}, gpu) ({series(GpuHealth.info)})", "identity", now=True),
        Query(f"{each} ({rows})", "rows", now=True),
        *(Query(f"{each} ({query})", name, now=True) for name, query in wanted.items()),
        columns={
            "GPU": "gpu",
            "Reset required": "reset",
            "Remapped rows": "rows",
            "Repair pending": "waiting",
            "Repair failed": "failed",
        },
        width=16,
        height=8,
        empty="no repairs reported",
        sort="GPU",
        overrides=[
            override("GPU", custom__width=60),
            *(
                override(name, mappings=_SOUND, custom__align="left", **COLORED)
                for name in ("Reset required", "Repair pending", "Repair failed")
            ),
        ],
    )


def _links() -> Panel:
    nvlink = f"sum by ({DEVICE}, type) ({risen(GpuReadings.nvlink_errors_total)})"
    pcie = f"sum by ({DEVICE}, type) ({risen(GpuReadings.pcie_errors_total)})"
    replays = f"sum by ({DEVICE}) ({risen(GpuReadings.pcie_replays_total)})"
    return timeseries(
        59,
        "Link errors",
        "NVLink and PCIe errors by type, and PCIe retransmissions (replays).",
        Query(join_gpu(nvlink), "GPU {{gpu}} NVLink {{type}}"),
        Query(join_gpu(pcie), "GPU {{gpu}} PCIe {{type}}"),
        Query(join_gpu(replays), "GPU {{gpu}} PCIe replays"),
        width=8,
        unit="short",
        empty="no link errors",
        points=_STEPS,
    )


def _daemon_errors() -> Panel:
    return timeseries(
        52,
        "Driver errors and rejected reports",
        "Failed reads by NVML error, of single GPUs and of the driver as a whole, and rejected messages of runs: "
        "usually their client is too old.",
        Query(join_gpu(risen(GpuHealth.errors_total)), "GPU {{gpu}} {{error}}"),
        Query(risen(DaemonReadings.collector_errors_total), "driver {{error}}"),
        Query(risen(DaemonReadings.reports_rejected_total), "report: {{reason}}"),
        width=8,
        unit="short",
        empty="no errors",
    )
