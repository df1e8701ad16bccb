"""Summary of a run record in one log line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpuwarden.formatting import format_bytes, format_duration, format_elapsed, format_energy, format_fields
from gpuwarden.records.record import RunRecord

MAX_TENTHS_SECONDS = 10.0  # below which tenths matter


def find_longest_reason(seconds: Mapping[str, float] | None) -> tuple[str, float] | None:
    """Return the reason with the most time; several may apply at once, so they do not add up."""
    return max(seconds.items(), key=lambda entry: entry[1]) if seconds else None


def format_summary(record: RunRecord) -> str:
    """Return the log line of a run that has ended: outcome, evidence and usage."""
    figures = {name: text for name, text in _figures(record).items() if text}
    fields = format_fields(
        run=record.run_id,
        name=record.name,
        outcome=record.outcome,
        after=format_elapsed(record.duration_seconds),
        evidence=record.evidence,
        **figures,
    )
    return f"run ended {fields}"


def _figures(record: RunRecord) -> dict[str, str]:
    """Return the figures by name; empty where unknown."""
    peaks = [each.memory_peak_bytes for each in record.devices if each.memory_peak_bytes is not None]
    left = [each.headroom_at_peak_bytes for each in record.devices if each.headroom_at_peak_bytes is not None]
    throttled, loss = find_longest_reason(record.throttled_seconds), record.nonfinite_loss
    return {
        "steps": _known(str, record.steps),
        "p50": _known(format_duration, record.step_median_seconds),
        "p95": _known(format_duration, record.step_p95_seconds),
        "peak": _known(_compact_bytes, max(peaks, default=None)),
        "headroom_at_peak": _known(_compact_bytes, min(left, default=None)),
        "gpu_seconds": _known(_tenths, record.gpu_seconds),
        "idle": _known("{:.2f}".format, record.gpu_idle_ratio),
        "energy": _known(format_energy, record.energy_joules).replace(" ", ""),
        "throttled": f"{format_elapsed(throttled[1])}({throttled[0]})" if throttled and throttled[1] else "",
        "input_wait": _known("{:.2f}".format, record.input_wait_ratio),
        "nonfinite_loss_steps": str(loss.steps) if loss and loss.steps else "",
        "nonfinite_validations": str(loss.validations) if loss and loss.validations else "",
        "no_gpu": record.no_gpu or "",
        "errors": format_counts(record.errors or {}),
        "xids": format_counts(record.xids or {}),
    }


def format_counts(by_name: Mapping[str, int]) -> str:
    """Return counts behind their names: `device_oom:2,nan:1`."""
    return ",".join(f"{name}:{count}" for name, count in by_name.items())


def _tenths(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < MAX_TENTHS_SECONDS else f"{seconds:.0f}"


def _compact_bytes(count: float) -> str:
    return format_bytes(count).replace(" ", "")


def _known(write: Callable[[Any], str], value: float | None) -> str:
    return "" if value is None else write(value)
