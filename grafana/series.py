"""PromQL over the metric tables: a misspelt metric or label fails when a dashboard is written, not when it is shown."""

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

# What tells one box, device or run from another. A site may have given its targets a cluster, and further labels, which
# an aggregation has to leave out or a match to name.
BOX = "cluster, job, instance"
DEVICE, RUN = f"{BOX}, uuid", f"{BOX}, run_id"

_LABELS = {row: table.key + row.labels for table in TABLES for row in table.rows}
_VARIABLES = {"cluster": "$cluster", "instance": "$instance", "uuid": "$gpu", "run_id": "$run", "owner": "$owner"}
# A MIG instance has a UUID of its own. Who chooses its GPU has chosen it too: a hidden variable has the instances then.
_DEVICES = {**_VARIABLES, "uuid": "$gpu|$mig"}
_OF_DEVICES = {row for table in (MigReadings, PressureReadings, RunReadings, RunUsageReadings) for row in table.rows}
# What a process of no run has, too.
_OF_SOME = {**_VARIABLES, "run_id": "($run)|"}
_OF_PROCESSES = set(ProcessReadings.rows)


_ANY: Mapping[str, str] = MappingProxyType({})
# Takes nothing where a series that was recorded of it is read instead: a hidden variable matches all jobs then, and
# else none, so that of an `or` of both one side costs nothing.
UNLESS_RECORDED: Mapping[str, str] = MappingProxyType({"job": "$recorded"})


def series(row: Metric[Any], but: Mapping[str, str] = _ANY, like: Mapping[str, str] = _ANY, **only: str) -> str:
    """Select a metric's series among the chosen boxes, GPUs, runs and owners.

    `only` fixes further labels, `like` takes what its patterns match, `but` leaves that out. Raises ValueError for a
    label that the metric does not have.
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
    """Select what a rule recorded, by box and by these labels, where it is to be read in place of all samples.

    Raises KeyError for a name that no rule has.
    """
    chosen = {**{label: _VARIABLES[label] for label in ("cluster", "instance", *labels)}, "job": "$recorded"}
    matchers = (f'{label}=~"{value}"' for label, value in chosen.items())
    return f"{RECORDED[name].name}{{{','.join(matchers)}}}"


def rate(row: Metric[Any], but: Mapping[str, str] = _ANY, **only: str) -> str:
    """Return a counter's increase a second; `but` and `only` as in `series`."""
    return f"rate({series(row, but, _ANY, **only)}[$__rate_interval])"


def last(row: Metric[Any], **only: str) -> str:
    """Return what was read last in the time range, of what is gone too; `only` as in `series`."""
    return f"last_over_time({series(row, _ANY, _ANY, **only)}[$__range])"


def risen(row: Metric[Any], **only: str) -> str:
    """Return a counter's increase, of the series alone that are not 0: legends of zeros say nothing.

    Not of those that rose: one that begins at 1 has never risen to Prometheus' eyes.
    """
    counter = series(row, _ANY, _ANY, **only)
    return f"increase({counter}[$__rate_interval]) and max_over_time({counter}[$__range] @ end()) > 0"


def with_gpu(expression: str, *more: str) -> str:
    """Add the label `gpu`, the GPU's index, and more of its identity."""
    return f"({expression}) * on ({DEVICE}) group_left ({', '.join(('gpu', *more))}) {series(GpuHealth.info)}"


def with_device(expression: str) -> str:
    """Add the label `gpu` to what may be of a MIG instance: 0 is a GPU's index, 0/7/0 an instance of it."""
    return f"({expression}) * on ({DEVICE}) group_left (gpu) max by ({DEVICE}, gpu) ({devices()})"


def devices() -> str:
    """Select GPUs and their MIG instances, with the label `gpu`; of an instance all three numbers, as CUDA has them."""
    return f"{series(GpuHealth.info)} or {instances(series(GpuHealth.info))}"


def instances(gpus: str) -> str:
    """Select the MIG instances of these GPUs, as in `devices`."""
    parents = f'label_replace({gpus}, "gpu_uuid", "$1", "uuid", "(.+)")'
    found = f"{series(MigReadings.info)} * on ({BOX}, gpu_uuid) group_left (gpu) {parents}"
    return f'label_join({found}, "gpu", "/", "gpu", "gpu_instance", "compute_instance")'


def with_run(expression: str) -> str:
    """Add the labels `run_name` and `pid`, which tell two runs of one name apart."""
    return f"({expression}) * on ({RUN}) group_left (run_name, pid) {series(RunReadings.info)}"


def headroom_ratio() -> str:
    """Of the memory a run uses and can still allocate on a GPU, the part it can still allocate."""
    return f"1 / (1 + {_times_in_use()})"


def least_headroom_ratio(each: str, but: Mapping[str, str] = _ANY) -> str:
    """Return the least of these parts by the labels `each`: what is aggregated first is quicker to calculate with.

    `but` is as in `series`.
    """
    return f"1 / (1 + max by ({each}) ({_times_in_use(but)}))"


def _times_in_use(but: Mapping[str, str] = _ANY) -> str:
    """Tell how many times its headroom a run has in use: over the sum of both, each point would find headroom twice."""
    return f"{series(RunReadings.allocator_memory_bytes, but)} / {series(RunReadings.memory_headroom_bytes, but)}"


def pressure() -> str:
    """Return the levels of pressure that rose in the time range: lines of zeros say nothing."""
    level = series(PressureReadings.pressure_level)
    return f"({level} and max_over_time({level}[$__range] @ end()) > 0)"


def placed(expression: str) -> str:
    """Add the label `place` for links: the cluster, where targets have that label, else the word for all clusters."""
    anywhere = f'label_replace({expression}, "place", "All", "", "")'
    return f'label_replace({anywhere}, "place", "$1", "cluster", "(.+)")'


def of_owners(expression: str) -> str:
    """Leave the devices on which the chosen owners hold memory: all of them, held or not, where all are chosen."""
    # Nobody gives this series an owner, so that only "all" matches it, which matches nothing too.
    anybody = series(GpuHealth.up).replace("}", ',owner=~"$owner"}')
    return f"{expression} and on ({DEVICE}) ({anybody} or {series(OwnerReadings.owner_gpu_memory_used_bytes)})"


def boxes() -> str:
    """Tell which boxes answer Prometheus, by 1 and 0."""
    return 'up{job="gpuwarden",cluster=~"$cluster",instance=~"$instance"}'


def firing(*further: str) -> str:
    """Select what fires for the chosen boxes, GPUs, runs and owners, and what is of none; rules may drop labels."""
    chosen = (f'{label}=~"({variable})|"' for label, variable in _DEVICES.items())
    matchers = ['alertstate="firing"', 'job="gpuwarden"', *chosen]
    return f"ALERTS{{{','.join((*matchers, *further))}}}"
