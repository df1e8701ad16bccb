"""Panels of the daemon: poll duration, driver errors, rejected reports."""

from __future__ import annotations

from classic import Panel, Query
from looks import NOT_POLLED
from panels import timeseries
from series import join_gpu, risen, series

from gpuwarden.daemon.metrics import DaemonReadings
from gpuwarden.gpu.health_metrics import GpuHealth


def daemon() -> list[Panel]:
    """Return the panels."""
    return [
        timeseries(
            51,
            "Poll duration",
            "Time that the driver takes to answer one poll.",
            Query(series(DaemonReadings.collector_duration_seconds), "{{instance}}"),
            width=8,
            unit="s",
            empty=NOT_POLLED,
        ),
        timeseries(
            52,
            "Driver errors",
            "Failed reads by NVML error, of single GPUs and of the driver as a whole.",
            Query(join_gpu(risen(GpuHealth.errors_total)), "GPU {{gpu}} {{error}}"),
            Query(risen(DaemonReadings.collector_errors_total), "driver {{error}} on {{instance}}"),
            width=8,
            unit="short",
            empty="no driver errors",
        ),
        timeseries(
            53,
            "Rejected reports",
            "Messages from training runs that were rejected, by reason; usually the client is too old.",
            Query(risen(DaemonReadings.reports_rejected_total), "{{reason}} on {{instance}}"),
            width=8,
            unit="short",
            empty="no rejected reports",
        ),
    ]
