"""Time that steps waited for their input, where it can be measured, as fields of the run's report."""

from __future__ import annotations

from gpuwarden.protocol.messages import Report


def add_input_wait(report: Report, waited: float, observed: float) -> None:
    """Count `observed` more seconds of steps, `waited` of them for input."""
    report.input_wait_seconds = (report.input_wait_seconds or 0.0) + waited
    report.input_observed_seconds = (report.input_observed_seconds or 0.0) + observed


def clear_input_buffer(report: Report) -> None:
    """Clear the buffer figures, which are of one iterator."""
    report.input_buffered = report.input_buffer_size = None
