"""docs/metrics.md, written from the metric tables, and docs/xid.md, written from the table of XIDs."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import cleandoc

from gpuwarden.exposition import TABLES
from gpuwarden.gpu.xid import XIDS, Action, Xid, explain


def metrics_markdown() -> str:
    """Return the reference of all metrics, table by table."""
    return "\n".join(_metric_lines()) + "\n"


def _metric_lines() -> Iterator[str]:
    yield "# Metrics"
    yield ""
    yield "Written by `gpuwarden reference metrics` from the metric tables; `make docs` brings it up to date."
    yield "Values are in base units. A reading that a device or run does not have yields no sample."
    yield ""
    yield "The tier is how often a reading is taken: poll, in every poll (`poll.interval`); memory, of looks that are"
    yield "more frequent (`poll.memory_interval`); slow, every `poll.slow_interval`; static, at the driver's start."
    yield "A source of NVML that is called a field is one of nvmlDeviceGetFieldValues, by its number in nvml.h."
    for table in TABLES:
        yield ""
        yield f"## {table.prefix}…"
        yield ""
        yield cleandoc(table.__doc__ or "")
        yield ""
        yield "| metric | kind | labels | tier | meaning | source |"
        yield "| --- | --- | --- | --- | --- | --- |"
        for row in table.rows:
            labels = ", ".join(f"`{label}`" for label in table.key + row.labels)
            only = f" Only with `{row.opt_in}`." if row.opt_in else ""
            yield f"| `{row.name}` | {row.kind} | {labels} | {row.tier} | {row.help}{only} | {row.source} |"


def xid_markdown() -> str:
    """Return the reference of all XIDs the project knows."""
    return "\n".join(_xid_lines()) + "\n"


def _xid_lines() -> Iterator[str]:
    yield "# XIDs"
    yield ""
    yield "Written by `gpuwarden reference xid` from src/gpuwarden/gpu/xid.py; `make docs` brings it up to date."
    yield ""
    yield "An XID is a fault that NVIDIA's driver reports of a GPU. `gpuwarden_gpu_xid_events_total` counts them, and"
    yield "`gpuwarden_gpu_xid_last_event_timestamp_seconds` says when each code came last. The severity *page* raises"
    yield "the alert GpuXidCritical, *warn* GpuXidWarning, and *info*, mostly a program's own fault, none. The actions"
    yield "follow [NVIDIA's catalogue](https://docs.nvidia.com/deploy/xid-errors/), which says more about most of them."
    yield ""
    yield "## Actions"
    yield ""
    yield "| action | what to do |"
    yield "| --- | --- |"
    for action in Action:
        yield f"| {action.slug} | {action.value} |"
    yield ""
    yield "## Codes"
    yield ""
    yield "| XID | meaning | action | severity |"
    yield "| --- | --- | --- | --- |"
    for xid in XIDS.values():
        yield _xid_row(str(xid.code), xid)
    yield _xid_row("other", explain(0))


def _xid_row(code: str, xid: Xid) -> str:
    return f"| {code} | {xid.meaning} | {xid.action.slug} | {xid.severity} |"
