"""Table of GPUs, the worst first, for a fleet or one host."""

from __future__ import annotations

from typing import Any

from classic import BAD, MILD, NONE, PLAIN, WARN, Json, Panel, Query, bad_from, override, states
from looks import COLORED, GAUGE, HIDDEN, NOW, PLAIN_GAUGE, SHARE, ahead, headroom, margin, nothing
from panels import table
from series import (
    BOX,
    DEVICE,
    UNLESS_RECORDED,
    boxes,
    filter_owners,
    headroom_ratio,
    instances,
    join_run,
    last_on_lost,
    placed,
    recorded,
    series,
)
from ways import BOX as ONE_BOX
from ways import IN_CLUSTER, link, run_links

from gpuwarden.alerts.recording_rules import AVOIDABLE_SLOWDOWNS
from gpuwarden.config import thresholds
from gpuwarden.gpu.health_metrics import GpuHealth
from gpuwarden.gpu.metrics import GpuReadings, MigReadings
from gpuwarden.metrics.model import Metric
from gpuwarden.owners.metrics import OwnerReadings
from gpuwarden.pressure.metrics import PressureReadings
from gpuwarden.runs.metrics import RunReadings
from gpuwarden.severity import Severity
from gpuwarden.xid.codes import codes

# All queries need the same labels: `merge` joins rows by the labels that all have.
_EACH = f"max by ({DEVICE})"
_SLOWDOWNS = {"reason": AVOIDABLE_SLOWDOWNS}
_RECENT = f"time() - {thresholds.XID_SECONDS:g}"
_STATES: dict[float, tuple[str, str]] = {
    10: ("down", BAD),
    9: ("lost", BAD),
    8: ("critical", BAD),
    7: ("repair", BAD),
    6: ("XID", BAD),
    5: ("ECC", BAD),
    4: ("repair", WARN),
    3: ("XID", WARN),
    2: ("pressure", WARN),
    1: ("throttled", MILD),
    0: ("OK", NONE),
}


def gpu_table(number: int, *, height: int) -> Panel:
    """Return the table; `number` is the panel's id."""
    return table(
        number,
        "GPUs now, worst first",
        "State, owner and limits of each GPU; judge a run by its headroom: memory used includes framework pools.",
        *_queries(),
        columns={
            "State": "state",
            "Cluster": "cluster",
            "Host": "instance",
            "GPU": "gpu",
            "Model": "name",
            "Owner": "owner",
            "Run": "run_name",
            "Headroom": "headroom",
            "OOM in": "ahead",
            "Memory used": "used",
            "Utilization": "utilization",
            "Temperature": "temperature",
            "Heat margin": "margin",
            "Power": "power",
            "Throttled": "slowed",
            "XID": "xid",
            "UUID": "board",
            "Run id": "run_id",
            IN_CLUSTER: "place",
        },
        width=24,
        height=height,
        empty="no GPUs; check that Prometheus scrapes gpuwarden and that nvidia-smi works",
        sort="State",
        descending=True,
        needs="GPU",
        points=120,
        overrides=_looks(),
    )


def _queries() -> list[Query]:
    tightest = join_run(f"bottomk by ({DEVICE}) (1, {headroom_ratio()})")
    allocated = join_run(series(RunReadings.allocator_memory_bytes))
    held = f"sum by ({DEVICE}, owner) ({series(OwnerReadings.owner_gpu_memory_used_bytes, owner_kind='user')})"
    xid = series(GpuHealth.xid_last_event_timestamp_seconds)
    wanted = {
        "state": _state(),
        "headroom": f"min by ({DEVICE}) ({headroom_ratio()})",
        "ahead": series(RunReadings.seconds_to_oom),
        "used": f"{series(GpuReadings.memory_used_bytes)} / {series(GpuReadings.memory_size_bytes)} or "
        f"{series(MigReadings.memory_used_bytes)} / {series(MigReadings.memory_size_bytes)}",
        "utilization": series(GpuReadings.utilization_ratio),
        "temperature": series(GpuReadings.temperature_celsius, sensor="core"),
        "margin": series(GpuReadings.temperature_margin_celsius),
        "power": series(GpuReadings.power_usage_watts),
        "slowed": _slowed(),
    }
    return [
        Query(f"max by ({DEVICE}, gpu, name, board, place) ({placed(_identities())})", "identity", now=True),
        # The driver says nothing of a lost GPU: its row keeps the owner and the run that it had.
        Query(
            f"max by ({DEVICE}, owner) (topk by ({DEVICE}) (1, {held} or on ({DEVICE}) {last_on_lost(held)}))",
            "owners",
            now=True,
        ),
        Query(
            f"max by ({DEVICE}, run_id, run_name) ({tightest} or on ({DEVICE}) "
            f"topk by ({DEVICE}) (1, {last_on_lost(allocated)}))",
            "runs",
            now=True,
        ),
        Query(
            f"max by ({DEVICE}, xid) (topk by ({DEVICE}) (1, {xid} > {_RECENT}))",
            "xids",
            now=True,
        ),
        *(Query(f"{_EACH} ({query})", name, now=True) for name, query in wanted.items()),
    ]


def _slowed() -> str:
    """Return the share of the time range in which each GPU was throttled, by the reason with the most."""
    # In steps: all samples of a fleet's GPUs would take long to read.
    counted = series(GpuReadings.clock_event_seconds_total, UNLESS_RECORDED, like=_SLOWDOWNS)
    of_gpu, of_box = recorded("gpuwarden:gpu:slowed_ratio:max", "uuid"), recorded("gpuwarden:box:build_info:group")
    # Each sample counts for its share of the time that the host was up, however often rules are evaluated.
    there = f"clamp_max(count_over_time({of_box}[$__range:$__interval]) * $__interval_ms / 1000 / $__range_s, 1)"
    share = f"({there} / count_over_time({of_box}[$__range]))"
    return (
        f"increase({counted}[$__range:$__interval]) / $__range_s or "
        f"sum_over_time({of_gpu}[$__range]) * on ({BOX}) group_left () {share}"
    )


def _identities() -> str:
    """Return the rows of the table: GPUs, MIG instances and hosts that are down, with the GPU for their links."""
    gpus = filter_owners(series(GpuHealth.info))
    shortened = f'label_replace({gpus}, "name", "$1", "name", "(?:NVIDIA )?(.+)")'
    parts = f'label_replace({instances(gpus)}, "name", "MIG $1", "profile", "(.+)")'
    down = f'label_replace(label_replace({_down()}, "gpu", "all", "", ""), "board", "All", "", "")'
    return " or ".join(
        (
            f'label_replace({shortened}, "board", "$1", "uuid", "(.+)")',
            f'label_replace({parts}, "board", "$1", "gpu_uuid", "(.+)")',
            down,
        )
    )


def _down() -> str:
    """Return the hosts that are down, in place of their unknown GPUs; rows are joined by UUID."""
    return f'label_replace({boxes()} == 0, "uuid", "none", "", "")'


def _state() -> str:
    """Return the state of a GPU or host as a number; the largest that applies counts."""
    level = series(PressureReadings.pressure_level)
    uncorrected = series(GpuReadings.ecc_errors_total, type="uncorrected", lifetime="volatile")
    slowed = series(GpuReadings.clock_event_active, like=_SLOWDOWNS)
    holds = {
        10: _down(),
        9: f"{series(GpuHealth.up)} == 0",
        8: f"{level} == 2",
        7: f"{_any(GpuReadings.reset_required, GpuReadings.row_remap_failed, GpuReadings.memory_unrepairable)} or "
        f"{series(GpuReadings.recovery_action, but={'action': 'none|drain.*'})} == 1",
        6: _xid("critical"),
        5: f"increase({uncorrected}[{thresholds.MEMORY_ERRORS_SECONDS:g}s]) > 0",
        4: f"{_any(GpuReadings.row_remap_pending, GpuReadings.retired_pages_pending, GpuReadings.repair_pending)} or "
        f"{series(GpuReadings.recovery_action, like={'action': 'drain.*'})} == 1",
        3: _xid("warning"),
        2: f"{level} == 1",
        1: f"{slowed} == 1",
        0: f"{series(GpuHealth.up)} or {series(MigReadings.info)}",
    }
    return " or ".join(f"{_EACH} ({condition}) * 0 + {number}" for number, condition in holds.items())


def _any(*rows: Metric[Any]) -> str:
    return " or ".join(f"{series(row)} == 1" for row in rows)


def _xid(severity: Severity) -> str:
    """Select recent XIDs that raise an alert of that severity."""
    chosen = {"xid": "|".join(str(code) for code in codes(severity))}
    return f"{series(GpuHealth.xid_last_event_timestamp_seconds, like=chosen)} > {_RECENT}"


def _looks() -> list[Json]:
    """Return widths, units, colors and links of the columns."""
    only = link(ONE_BOX, "Only this GPU", instance="Host", gpu="UUID")
    return [
        override("State", mappings=states(_STATES), custom__width=80, custom__align="left", **COLORED),
        override("Cluster", custom__width=65),
        override("Host", links=[link(ONE_BOX, "This host", instance="Host")], custom__width=146),
        override("GPU", links=[only], custom__width=45),
        override("Model", custom__width=140),
        override("Owner", custom__width=80),
        override("Run", links=run_links("This run")),
        override("Headroom", **SHARE, **GAUGE, thresholds=headroom(PLAIN), mappings=nothing(), custom__width=112),
        override(
            "OOM in",
            unit="s",
            decimals=0,
            thresholds=ahead(NONE),
            mappings=[*nothing(), *NOW],
            custom__width=80,
            **COLORED,
        ),
        override("Memory used", **PLAIN_GAUGE, custom__width=112),
        override("Utilization", **PLAIN_GAUGE, custom__width=112),
        override("Temperature", unit="celsius", custom__width=100),
        override(
            "Heat margin", unit="celsius", thresholds=margin(NONE), mappings=nothing(), custom__width=100, **COLORED
        ),
        override("Power", unit="watt", decimals=0, custom__width=75),
        override("Throttled", **SHARE, thresholds=bad_from(thresholds.SLOWED, NONE, WARN), custom__width=80, **COLORED),
        override("XID", custom__width=55),
        *(override(name, **HIDDEN) for name in ("UUID", "Run id", IN_CLUSTER)),
    ]
