"""PromQL over the metric tables: a misspelt metric or label fails when a dashboard is written, not when it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gpuwarden.exposition import TABLES
from gpuwarden.metric import Metric
from gpuwarden.runs.table import RunReadings
from gpuwarden.tables import GpuHealth

_LABELS = {row: table.key + row.labels for table in TABLES for row in table.rows}
_VARIABLES = {"instance": "$instance", "uuid": "$gpu", "run_id": "$run"}


def series(row: Metric[Any], but: Mapping[str, str] = MappingProxyType({}), **only: str) -> str:
    """Select a metric's series among the chosen boxes, GPUs and runs; `only` fixes further labels, `but` leaves out.

    What `but` names is a pattern. Raises ValueError for a label that the metric does not have.
    """
    labels = ("instance", *_LABELS[row])
    if wrong := (but.keys() | only.keys()) - set(labels):
        raise ValueError(f"{row.name} has no label {', '.join(sorted(wrong))}")
    matchers = [f'{label}=~"{_VARIABLES[label]}"' for label in labels if label in _VARIABLES]
    matchers += [f'{label}="{value}"' for label, value in only.items()]
    matchers += [f'{label}!~"{value}"' for label, value in but.items()]
    name = f"{row.name}_bucket" if row.kind == "histogram" else row.name
    return f"{name}{{{','.join(matchers)}}}"


def rate(row: Metric[Any], **only: str) -> str:
    """Return a counter's increase a second; `only` as in `series`."""
    return f"rate({series(row, {}, **only)}[$__rate_interval])"


def last(row: Metric[Any], **only: str) -> str:
    """Return what was read last in the time range, of what is gone too; `only` as in `series`."""
    return f"last_over_time({series(row, {}, **only)}[$__range])"


def risen(row: Metric[Any]) -> str:
    """Return a counter's increase, of the series alone that are not 0: legends of zeros say nothing.

    Not of those that rose: one that begins at 1 has never risen to Prometheus' eyes.
    """
    counter = series(row)
    return f"increase({counter}[$__rate_interval]) and max_over_time({counter}[$__range] @ end()) > 0"


def with_gpu(expression: str, *more: str) -> str:
    """Add the label `gpu`, the GPU's index, and more of its identity."""
    labels = ", ".join(("gpu", *more))
    return f"({expression}) * on (job, instance, uuid) group_left ({labels}) {series(GpuHealth.info)}"


def with_run(expression: str) -> str:
    """Add the label `run_name`."""
    return f"({expression}) * on (job, instance, run_id) group_left (run_name) {series(RunReadings.info)}"


def headroom_ratio() -> str:
    """Of the memory a run uses and can still allocate on a GPU, the part it can still allocate."""
    headroom, in_use = series(RunReadings.memory_headroom_bytes), series(RunReadings.allocator_memory_bytes)
    return f"{headroom} / ({headroom} + {in_use})"
