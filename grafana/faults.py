"""What is broken or about to be: faults that the driver told of, and memory errors."""

from __future__ import annotations

from classic import BAD, NONE, Panel, Query, override, states
from looks import COLORED
from panels import table, timeline, timeseries
from series import DEVICE, risen, series, with_gpu

from gpuwarden.gpu.health_metrics import GpuHealth
from gpuwarden.gpu.metrics import GpuReadings

_STEPS = 480  # a box has hundreds of counters of links: an hour is read by scrapes still, a week not
_SOUND = states({0: ("no", NONE), 1: ("yes", BAD)})


def faults() -> list[Panel]:
    """Return the panels of a box's faults."""
    return [_lost(), _xids(), _memory_errors(), _repairs(), _links()]


def _lost() -> Panel:
    return timeline(
        56,
        "GPUs that answer",
        "Whether each GPU answers the driver.",
        Query(with_gpu(series(GpuHealth.up)), "GPU {{gpu}}"),
        width=8,
        mappings=states({0: ("lost", BAD), 1: ("answers", "dark-green")}),
        empty="no GPU is read; paused?",
    )


def _xids() -> Panel:
    last = with_gpu(series(GpuHealth.xid_last_event_timestamp_seconds))
    count = with_gpu(series(GpuHealth.xid_events_total))
    each = f"max by ({DEVICE}, gpu, xid)"
    return table(
        22,
        "XIDs",
        "Faults that the driver told of, and when last; docs/reference/xids.md says what each means and what to do.",
        Query(f"{each} (time() - ({last}))", "ago", now=True),
        Query(f"{each} ({count})", "count", now=True),
        columns={"GPU": "gpu", "XID": "xid", "How often": "count", "Last one ago": "ago"},
        width=8,
        height=8,
        empty="no XID is known",
        sort="Last one ago",
        overrides=[
            override("Last one ago", unit="s", decimals=0),
            *(override(name, custom__width=90) for name in ("GPU", "XID", "How often")),
        ],
    )


def _memory_errors() -> Panel:
    found = risen(GpuReadings.ecc_errors_total, lifetime="volatile")
    errors = f"sum by ({DEVICE}, type, location) ({found})"
    return timeseries(
        57,
        "Memory errors",
        "Errors that ECC found in device memory and on the chip, by type; uncorrected ones end what runs there.",
        Query(with_gpu(errors), "GPU {{gpu}} {{type}} {{location}}"),
        width=8,
        unit="short",
        empty="no error of memory is known",
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
        "Repairs of memory",
        "Rows of device memory that a spare one stands in for, and whether a reset or a new board is due.",
        Query(f"max by ({DEVICE}, gpu) ({series(GpuHealth.info)})", "identity", now=True),
        Query(f"{each} ({rows})", "rows", now=True),
        *(Query(f"{each} ({query})", name, now=True) for name, query in wanted.items()),
        columns={
            "GPU": "gpu",
            "Reset wanted": "reset",
            "Remapped rows": "rows",
            "Repair waits for reset": "waiting",
            "Repair failed": "failed",
        },
        width=12,
        height=8,
        empty="no GPU tells of repairs",
        sort="GPU",
        overrides=[
            override("GPU", custom__width=60),
            *(
                override(name, mappings=_SOUND, custom__align="left", **COLORED)
                for name in ("Reset wanted", "Repair waits for reset", "Repair failed")
            ),
        ],
    )


def _links() -> Panel:
    nvlink = f"sum by ({DEVICE}, type) ({risen(GpuReadings.nvlink_errors_total)})"
    pcie = f"sum by ({DEVICE}, type) ({risen(GpuReadings.pcie_errors_total)})"
    replays = f"sum by ({DEVICE}) ({risen(GpuReadings.pcie_replays_total)})"
    return timeseries(
        59,
        "Errors of links",
        "Errors of NVLink and PCIe by type, and PCIe packets that were sent again.",
        Query(with_gpu(nvlink), "GPU {{gpu}} NVLink {{type}}"),
        Query(with_gpu(pcie), "GPU {{gpu}} PCIe {{type}}"),
        Query(with_gpu(replays), "GPU {{gpu}} PCIe replays"),
        width=12,
        unit="short",
        empty="no error of a link is known",
        points=_STEPS,
    )
