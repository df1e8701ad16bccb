"""The daemon on each box: does it keep up, and what does it refuse."""

from __future__ import annotations

from classic import Panel, Query
from panels import timeseries
from series import risen, series, with_gpu

from gpuwarden.daemon.metrics import DaemonReadings
from gpuwarden.gpu.health_metrics import GpuHealth


def daemon() -> list[Panel]:
    """Return the panels of the daemon itself."""
    return [
        timeseries(
            51,
            "Poll duration",
            "How long the driver takes to answer all questions of a poll.",
            Query(series(DaemonReadings.collector_duration_seconds), "{{instance}}"),
            width=8,
            unit="s",
            empty="no driver is asked; paused?",
        ),
        timeseries(
            52,
            "Errors",
            "Failed reads by the driver's error, of single GPUs and of the driver as a whole.",
            Query(with_gpu(risen(GpuHealth.errors_total)), "GPU {{gpu}} {{error}}"),
            Query(risen(DaemonReadings.collector_errors_total), "driver {{error}} on {{instance}}"),
            width=8,
            unit="short",
            empty="no read failed since gpuwarden started",
        ),
        timeseries(
            53,
            "Reports refused",
            "Messages of training runs that were not accepted, by reason; an old client is the usual one.",
            Query(risen(DaemonReadings.reports_rejected_total), "{{reason}} on {{instance}}"),
            width=8,
            unit="short",
            empty="no report was refused since gpuwarden started",
        ),
    ]
