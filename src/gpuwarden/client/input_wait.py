"""Time that steps waited for their input, where it can be measured: fields of a run's state."""

from __future__ import annotations

from gpuwarden.protocol.messages import Report


def add_input_wait(state: Report, waited: float, observed: float) -> None:
    """Count `observed` more seconds of steps, `waited` of them for input."""
    state.input_wait_seconds = (state.input_wait_seconds or 0.0) + waited
    state.input_observed_seconds = (state.input_observed_seconds or 0.0) + observed


def clear_input_buffer(state: Report) -> None:
    """Clear the buffer figures, which are of one iterator."""
    state.input_buffered = state.input_buffer_size = None
