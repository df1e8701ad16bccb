"""A receipt in one line of the log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpuwarden.formatting import format_bytes, format_duration, format_elapsed, format_energy
from gpuwarden.records.record import RunRecord

_SHORT = 10.0  # seconds below which tenths matter


def longest_reason(seconds: Mapping[str, float] | None) -> tuple[str, float] | None:
    """Return the reason that held for longest; reasons may hold at once, so they do not add up."""
    return max(seconds.items(), key=lambda entry: entry[1]) if seconds else None


def log_line(receipt: RunRecord) -> str:
    """Sum a run up that has ended, with what shows how it did."""
    said = " ".join(f"{name}={text}" for name, text in _figures(receipt).items() if text)
    how = f"{receipt.outcome} after {format_elapsed(receipt.duration_seconds)} ({receipt.evidence})"
    return f"run={receipt.run_id} name={receipt.name!r} ended: {how}: {said or 'nothing is known of it'}"


def _figures(receipt: RunRecord) -> dict[str, str]:
    """Return what is known and worth a word, by its name."""
    peaks = [each.memory_peak_bytes for each in receipt.devices if each.memory_peak_bytes is not None]
    left = [each.headroom_at_peak_bytes for each in receipt.devices if each.headroom_at_peak_bytes is not None]
    throttled = longest_reason(receipt.throttled_seconds)
    return {
        "steps": _known(str, receipt.steps),
        "p50": _known(format_duration, receipt.step_median_seconds),
        "p95": _known(format_duration, receipt.step_p95_seconds),
        "peak": _known(_together, max(peaks, default=None)),
        "headroom_at_peak": _known(_together, min(left, default=None)),
        "gpu_seconds": _known(_tenths, receipt.gpu_seconds),
        "idle": _known("{:.2f}".format, receipt.gpu_idle_ratio),
        "energy": _known(format_energy, receipt.energy_joules).replace(" ", ""),
        "throttled": f"{format_elapsed(throttled[1])}({throttled[0]})" if throttled and throttled[1] else "",
        "input_wait": _known("{:.2f}".format, receipt.input_wait_ratio),
        "errors": format_counts(receipt.errors or {}),
        "xids": format_counts(receipt.xids or {}),
    }


def format_counts(by_name: Mapping[str, int]) -> str:
    """Write counts behind their names."""
    return ",".join(f"{name}:{count}" for name, count in by_name.items())


def _tenths(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < _SHORT else f"{seconds:.0f}"


def _together(count: float) -> str:
    return format_bytes(count).replace(" ", "")


def _known(write: Callable[[Any], str], value: float | None) -> str:
    return "" if value is None else write(value)
