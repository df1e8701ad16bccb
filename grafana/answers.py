"""The answers at the top: is all well, what is closest to trouble, and each GPU at a glance."""

from __future__ import annotations

from classic import (
    BAD,
    NONE,
    PLAIN,
    WARN,
    Json,
    Panel,
    Query,
    bad_from,
    good_from,
    override,
    override_matching,
    stat,
    states,
    table,
)
from looks import COLORED, GAUGE, HEADROOM, MARGIN, SHARE
from series import headroom_ratio, series, with_gpu, with_run

from gpuwarden.gpu.table import GpuReadings
from gpuwarden.tables import GpuHealth


def answers(uid: str) -> list[Panel]:
    """Return the panels above all rows; `uid` is the dashboard's, for links to itself."""
    least_headroom = f"bottomk(1, {with_run(with_gpu(headroom_ratio()))})"
    least_margin = f"bottomk(1, {with_gpu(series(GpuReadings.temperature_margin_celsius))})"
    up = series(GpuHealth.up)
    return [
        stat(
            1,
            "GPUs",
            "How many GPUs answer the driver, and how many do not.",
            Query(f"sum({up})", "up", now=True),
            Query(f"sum(1 - {up})", "down", now=True),
            width=4,
            thresholds=bad_from(1),
            empty="no GPU is read; paused?",
            names=True,
            overrides=[override("up", color={"mode": "fixed", "fixedColor": NONE})],
        ),
        stat(
            2,
            "Least headroom of a run",
            "The run that is closest to out of memory: of what it uses and can still allocate, the part that is left.",
            Query(least_headroom, "{{run_name}} on GPU {{gpu}}", now=True),
            unit="percentunit",
            width=5,
            thresholds=HEADROOM,
            empty="no run reports",
            names=True,
            overrides=[override_matching(".*", decimals=1)],
        ),
        stat(
            3,
            "Least temperature margin",
            "The GPU that is closest to slowing itself down, by its own threshold.",
            Query(least_margin, "GPU {{gpu}}", now=True),
            unit="celsius",
            width=5,
            thresholds=good_from(MARGIN),
            empty="no GPU tells",
            names=True,
        ),
        _firing(),
        _overview(uid),
    ]


def _firing() -> Panel:
    labels = ("alertname", "severity", "gpu", "run_name", "instance")
    firing = f'max by ({", ".join(labels)}) (ALERTS{{alertstate="firing",job="gpuwarden",instance=~"($instance)|"}})'
    severities = {"critical": {"color": BAD, "index": 0}, "warning": {"color": WARN, "index": 1}}
    return table(
        4,
        "Alerts firing",
        "What fires now; docs/alerts.md says what each alert means and what to do.",
        Query(firing, "firing", now=True),
        columns={"Severity": "severity", "Alert": "alertname", "GPU": "gpu", "Run": "run_name", "Box": "instance"},
        width=10,
        height=5,
        empty="no alert fires",
        sort="Severity",
        overrides=[
            override("Severity", mappings=[{"type": "value", "options": severities}], custom__width=80, **COLORED),
            override("Alert", custom__width=200),
            override("GPU", custom__width=50, noValue="-"),
            override("Run", noValue="-"),
            override("Box", noValue="-"),
        ],
    )


def _overview(uid: str) -> Panel:
    return table(
        5,
        "GPUs now",
        "Each GPU's state; memory a framework reserves counts as used, so judge a run by its headroom.",
        *_columns(),
        columns={
            "GPU": "gpu",
            "Model": "name",
            "Answers": "up",
            "Utilization": "utilization",
            "Memory used": "used",
            "Run headroom": "headroom",
            "Temperature": "temperature",
            "Margin": "margin",
            "Power of limit": "power",
            "Box": "instance",
            "UUID": "uuid",
        },
        width=24,
        height=10,
        empty="-",
        sort="GPU",
        overrides=_column_looks(uid),
    )


def _columns() -> list[Query]:
    # A query with other labels than the rest would keep its rows apart: `merge` joins by the labels all have.
    used = f"{series(GpuReadings.memory_used_bytes)} / {series(GpuReadings.memory_size_bytes)}"
    limit = f"ignoring (limit) {series(GpuReadings.power_limit_watts, limit='enforced')}"
    wanted = {
        "up": series(GpuHealth.up),
        "utilization": series(GpuReadings.utilization_ratio),
        "used": used,
        "temperature": series(GpuReadings.temperature_celsius, sensor="core"),
        "margin": series(GpuReadings.temperature_margin_celsius),
        "power": f"{series(GpuReadings.power_usage_watts)} / {limit}",
    }
    return [
        Query(f"max by (job, instance, uuid, gpu, name) ({series(GpuHealth.info)})", "identity", now=True),
        Query(f"min by (job, instance, uuid) ({headroom_ratio()})", "headroom", now=True),
        *(Query(f"max by (job, instance, uuid) ({query})", name, now=True) for name, query in wanted.items()),
    ]


def _column_looks(uid: str) -> list[Json]:
    """Gauges are blue where a value is neither good nor bad; a colored cell is one to look at."""
    link = {"title": "Only this GPU", "url": f"/d/{uid}?var-gpu=${{__data.fields.UUID}}&${{__url_time_range}}"}
    gauge: Json = {**SHARE, **GAUGE, "color": {"mode": "fixed", "fixedColor": PLAIN}}
    no_run = {"type": "special", "options": {"match": "null", "result": {"text": "no run", "color": NONE}}}
    answers = states({0: ("no", BAD), 1: ("yes", NONE)})
    return [
        override("GPU", links=[link], custom__width=60),
        override("Model", custom__width=300),
        override("Answers", mappings=answers, custom__width=80, custom__align="center", **COLORED),
        override("Utilization", **gauge),
        override("Memory used", **gauge),
        override("Run headroom", **SHARE, **GAUGE, thresholds=HEADROOM, mappings=[no_run]),
        override("Temperature", unit="celsius", custom__width=110),
        override("Margin", unit="celsius", thresholds=good_from(MARGIN, NONE), custom__width=80, **COLORED),
        override("Power of limit", **gauge),
        override("Box", custom__width=130),
        override("UUID", custom__width=290),
    ]
