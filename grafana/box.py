"""The dashboard "box and runs": the answers first, then each GPU, each run, their host, and the daemon itself."""

from __future__ import annotations

from answers import answers
from classic import Json, Panel, Query, Row, dashboard, source_variable, timeseries, variable
from gpus import gpus
from host import host
from runs import runs
from series import risen, series, with_gpu

from gpuwarden.runs.table import RunReadings
from gpuwarden.tables import DaemonReadings, GpuHealth

UID = "gpuwarden-box"


def box() -> Json:
    """Return the dashboard."""
    return dashboard(
        UID,
        "gpuwarden: box and runs",
        "GPU boxes and the training runs on them, as gpuwarden sees both.",
        [source_variable(), *_variables()],
        [
            *answers(UID),
            Row(10, "GPUs of $instance", gpus(), repeat="instance"),
            Row(30, "Runs on $instance", runs(), repeat="instance"),
            Row(40, "Host $instance", host(), repeat="instance"),
            Row(50, "gpuwarden itself", _daemon()),
        ],
    )


def _variables() -> list[Json]:
    """Choose boxes, then among their GPUs and runs, which are shown by what people call them."""
    here = '{instance=~"$instance"}'
    gpus = f'label_join({GpuHealth.info.name}{here}, "label", " · ", "gpu", "name", "instance")'
    runs = f'label_join(last_over_time({RunReadings.info.name}{here}[$__range]), "label", " · ", "run_name", "run_id")'
    return [
        variable("instance", "Box", f"label_values({DaemonReadings.build_info.name}, instance)"),
        variable("gpu", "GPU", f"query_result({gpus})", regex=_labelled("uuid")),
        variable("run", "Run", f"query_result({runs})", regex=_labelled("run_id")),
    ]


def _labelled(value: str) -> str:
    # Grafana writes a result with its labels in the order of their names, so `label` comes before either.
    return rf'/label\W+(?<text>[^"]+)".*\b{value}\W+(?<value>[^"]+)"/'


def _daemon() -> list[Panel]:
    gpu_errors = with_gpu(risen(GpuHealth.errors_total))
    collector_errors = risen(DaemonReadings.collector_errors_total)
    rejected = risen(DaemonReadings.reports_rejected_total)
    return [
        timeseries(
            51,
            "Poll duration",
            "How long the driver takes to answer all questions of a poll.",
            Query(series(DaemonReadings.collector_duration_seconds), "{{instance}}"),
            width=8,
            unit="s",
        ),
        timeseries(
            52,
            "Errors",
            "Failed reads by the driver's error, of single GPUs and of the driver as a whole.",
            Query(gpu_errors, "GPU {{gpu}} {{error}}"),
            Query(collector_errors, "driver {{error}} on {{instance}}"),
            width=8,
            unit="short",
            empty="no read failed since gpuwarden started",
        ),
        timeseries(
            53,
            "Reports refused",
            "Messages of training runs that were not accepted, by reason; an old client is the usual one.",
            Query(rejected, "{{reason}} on {{instance}}"),
            width=8,
            unit="short",
            empty="no report was refused since gpuwarden started",
        ),
    ]
