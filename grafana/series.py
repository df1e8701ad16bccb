"""PromQL from the metric tables: a misspelled metric or label fails when a dashboard is generated."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gpuwarden.alerts.prometheus_rules import RECORDED
from gpuwarden.daemon.metrics_page import TABLES
from gpuwarden.gpu.health_metrics import GpuHealth
from gpuwarden.gpu.metrics import MigReadings
from gpuwarden.metrics.model import Metric
from gpuwarden.owners.metrics import OwnerReadings, ProcessReadings
from gpuwarden.pressure.metrics import PressureReadings
from gpuwarden.runs.metrics import RunReadings
from gpuwarden.usage.metrics import RunUsageReadings

# Labels that identify a host, device or run. Targets may have a cluster and further labels, which an aggregation must
# drop and a match must name.
BOX = "cluster, job, instance"
DEVICE, RUN = f"{BOX}, uuid", f"{BOX}, run_id"

_LABELS = {row: table.key + row.labels for table in TABLES for row in table.rows}
_VARIABLES = {"cluster": "$cluster", "instance": "$instance", "uuid": "$gpu", "run_id": "$run", "owner": "$owner"}
# A MIG instance has a UUID of its own. It is chosen with its GPU: a hidden variable has the instances.
_DEVICES = {**_VARIABLES, "uuid": "$gpu|$mig"}
_OF_DEVICES = {row for table in (MigReadings, PressureReadings, RunReadings, RunUsageReadings) for row in table.rows}
# Also selects processes without a run.
_OF_SOME = {**_VARIABLES, "run_id": "($run)|"}
_OF_PROCESSES = set(ProcessReadings.rows)
_ALERT_MATCHERS = ('job="gpuwarden"', *(f'{label}=~"({variable})|"' for label, variable in _DEVICES.items()))


_ANY: Mapping[str, str] = MappingProxyType({})
# Selects nothing where its recorded series is read instead: a hidden variable then matches all jobs, else none, so that
# one side of an `or` of both costs nothing.
UNLESS_RECORDED: Mapping[str, str] = MappingProxyType({"job": "$recorded"})


def series(row: Metric[Any], but: Mapping[str, str] = _ANY, like: Mapping[str, str] = _ANY, **only: str) -> str:
    """Select a metric's series for the chosen hosts, GPUs, runs and owners.

    `only` fixes further labels, `like` has patterns to match, `but` patterns to exclude. Raises ValueError for a label
    that the metric does not have.
    """
    labels = ("cluster", "job", "instance", *_LABELS[row])
    if wrong := (but.keys() | like.keys() | only.keys()) - set(labels):
        raise ValueError(f"{row.name} has no label {', '.join(sorted(wrong))}")
    chosen = _DEVICES if row in _OF_DEVICES else _OF_SOME if row in _OF_PROCESSES else _VARIABLES
    matchers = [f'{label}=~"{chosen[label]}"' for label in labels if label in chosen]
    matchers += [f'{label}="{value}"' for label, value in only.items()]
    matchers += [f'{label}=~"{value}"' for label, value in like.items()]
    matchers += [f'{label}!~"{value}"' for label, value in but.items()]
    name = f"{row.name}_bucket" if row.kind == "histogram" else row.name
    return f"{name}{{{','.join(matchers)}}}"


def recorded(name: str, *labels: str) -> str:
    """Select a recorded series by host and `labels`, if recorded series are to be read.

    Raises KeyError for a name that no recording rule has.
    """
    if name not in RECORDED:
        raise KeyError(name)
    chosen = {**{label: _VARIABLES[label] for label in ("cluster", "instance", *labels)}, "job": "$recorded"}
    matchers = (f'{label}=~"{value}"' for label, value in chosen.items())
    return f"{name}{{{','.join(matchers)}}}"


def rate(row: Metric[Any], but: Mapping[str, str] = _ANY, **only: str) -> str:
    """Return a counter's increase per second; `but` and `only` as in `series`."""
    return f"rate({series(row, but, _ANY, **only)}[$__rate_interval])"


def last(row: Metric[Any], but: Mapping[str, str] = _ANY, **only: str) -> str:
    """Return the last value in the time range, also of series that have ended; `but` and `only` as in `series`."""
    return f"last_over_time({series(row, but, _ANY, **only)}[$__range])"


def risen(row: Metric[Any], **only: str) -> str:
    """Return a counter's increase, only of series that are not 0, to keep zeros out of the legend.

    Not only of those that increased: Prometheus sees no increase in a counter that starts at 1.
    """
    counter = series(row, _ANY, _ANY, **only)
    return f"increase({counter}[$__rate_interval]) and max_over_time({counter}[$__range] @ end()) > 0"


def join_gpu(expression: str, *more: str) -> str:
    """Add the label `gpu`, the GPU's index, and the labels `more` of its identity."""
    return f"({expression}) * on ({DEVICE}) group_left ({', '.join(('gpu', *more))}) {series(GpuHealth.info)}"


def join_device(expression: str) -> str:
    """Add the label `gpu`, also for MIG instances: 0 is a GPU, 0/7/0 an instance of it."""
    return f"({expression}) * on ({DEVICE}) group_left (gpu) max by ({DEVICE}, gpu) ({devices()})"


def devices() -> str:
    """Select GPUs and MIG instances, with the label `gpu`: for an instance all three numbers, as in CUDA."""
    return f"{series(GpuHealth.info)} or {instances(series(GpuHealth.info))}"


def instances(gpus: str) -> str:
    """Select the MIG instances of these GPUs, as in `devices`."""
    parents = f'label_replace({gpus}, "gpu_uuid", "$1", "uuid", "(.+)")'
    found = f"{series(MigReadings.info)} * on ({BOX}, gpu_uuid) group_left (gpu) {parents}"
    return f'label_join({found}, "gpu", "/", "gpu", "gpu_instance", "compute_instance")'


def join_run(expression: str) -> str:
    """Add the labels `run_name` and `pid`, which distinguishes runs of the same name."""
    return f"({expression}) * on ({RUN}) group_left (run_name, pid) {series(RunReadings.info)}"


def last_on_lost(expression: str) -> str:
    """Return the last time in the time range at which GPUs that are lost now had each series."""
    # In steps: all samples of a fleet's GPUs would take long to read.
    return f"max_over_time(timestamp({expression})[$__range:$__interval]) and on ({DEVICE}) {series(GpuHealth.up)} == 0"


def headroom_ratio() -> str:
    """Return a run's headroom on a GPU as a share of its used memory plus headroom."""
    return f"1 / (1 + {_times_in_use()})"


def least_headroom_ratio(each: str, but: Mapping[str, str] = _ANY) -> str:
    """Return the lowest of these shares by the labels `each`, aggregated first to be faster; `but` as in `series`."""
    return f"1 / (1 + max by ({each}) ({_times_in_use(but)}))"


def _times_in_use(but: Mapping[str, str] = _ANY) -> str:
    """Return used memory over headroom; with the sum of both as divisor, each point would read the headroom twice."""
    return f"{series(RunReadings.allocator_memory_bytes, but)} / {series(RunReadings.memory_headroom_bytes, but)}"


def pressure() -> str:
    """Return the pressure levels that were above 0 in the time range."""
    level = series(PressureReadings.pressure_level)
    return f"({level} and max_over_time({level}[$__range] @ end()) > 0)"


def placed(expression: str) -> str:
    """Add the label `place` for links: the cluster if targets have that label, else Grafana's All."""
    anywhere = f'label_replace({expression}, "place", "All", "", "")'
    return f'label_replace({anywhere}, "place", "$1", "cluster", "(.+)")'


def filter_owners(expression: str) -> str:
    """Keep the devices on which the chosen owners hold memory; all devices if all owners are chosen."""
    # This series has no owner, so that only the pattern for all matches it: it also matches an absent label.
    everyone = series(GpuHealth.up).replace("}", ',owner=~"$owner"}')
    return f"{expression} and on ({DEVICE}) ({everyone} or {series(OwnerReadings.owner_gpu_memory_used_bytes)})"


def boxes() -> str:
    """Select `up` of the hosts: 1 if the daemon answers Prometheus, else 0."""
    return 'up{job="gpuwarden",cluster=~"$cluster",instance=~"$instance"}'


def firing(*further: str) -> str:
    """Select firing alerts of the chosen hosts, GPUs, runs and owners, and alerts without those labels."""
    matchers = ('alertstate="firing"', *_ALERT_MATCHERS, *further)
    return f"ALERTS{{{','.join(matchers)}}}"


def active_since() -> str:
    """Return the Unix time from which the same alerts, and pending ones, have been active."""
    return f"ALERTS_FOR_STATE{{{','.join(_ALERT_MATCHERS)}}}"
