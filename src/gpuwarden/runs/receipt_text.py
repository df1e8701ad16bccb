"""A receipt for people: durations, sizes and the one line of the log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpuwarden.runs.receipt import Receipt

_GIB, _MIB, _KIB = 2**30, 2**20, 2**10
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_SHORT = 10.0  # seconds below which tenths matter
_LEAST_MS = 0.001  # that is told from nothing
_WATT_HOUR = 3600.0  # joules


def duration(seconds: float) -> str:
    """Write a time that was measured exactly, such as a step's: 12.3ms, 1.25s, and longer ones as `lasting` does."""
    milliseconds = float(f"{seconds * 1000:.3g}")  # rounded before the unit is chosen
    if milliseconds < 1000:  # noqa: PLR2004 - a second
        return f"{milliseconds:.15g}ms" if milliseconds >= _LEAST_MS else "0ms"
    return f"{seconds:.3g}s" if seconds < _SHORT else lasting(seconds)


def lasting(seconds: float) -> str:
    """Write a time that polls add up as people do: 0.4s, 45s, 2h13m."""
    if round(seconds, 1) < _SHORT:
        return f"{seconds:.1f}s" if seconds else "0s"
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole}s"
    if whole < _HOUR:
        return f"{whole // _MINUTE}m{whole % _MINUTE:02d}s"
    if whole < _DAY:
        return f"{whole // _HOUR}h{whole % _HOUR // _MINUTE:02d}m"
    return f"{whole // _DAY}d{whole % _DAY // _HOUR:02d}h"


def size(count: float) -> str:
    """Write bytes in GiB, or in MiB or KiB below a tenth of one."""
    for unit, name in ((_GIB, "GiB"), (_MIB, "MiB")):
        if count >= unit / 10:
            return f"{count / unit:.1f} {name}"
    return f"{count / _KIB:.0f} KiB" if count >= _KIB else f"{count:.0f} B"


def energy(joules: float) -> str:
    """Write joules as they are, in Wh from ten of these on, and in kWh from a tenth of one on."""
    if joules < 10 * _WATT_HOUR:
        return f"{joules:.0f} J"
    if joules < 100 * _WATT_HOUR:
        return f"{joules / _WATT_HOUR:.1f} Wh"
    return f"{joules / _WATT_HOUR / 1000:.2f} kWh"


def ratio(share: float) -> str:
    """Write a ratio in percent."""
    return f"{round(share * 100, 1):.15g} %"


def short(count: int) -> str:
    """Write a count in few letters: 99999, 100k, 1.5M."""
    for unit, letter in ((1, ""), (1e3, "k"), (1e6, "M"), (1e9, "G")):
        rounded = float(f"{count / unit:.3g}") if letter else count
        if rounded < (1000 if letter else 100_000):
            break
    return f"{rounded:.15g}{letter}"


def worst(seconds: Mapping[str, float] | None) -> tuple[str, float] | None:
    """Return the reason that held for longest; reasons may hold at once, so they do not add up."""
    return max(seconds.items(), key=lambda entry: entry[1]) if seconds else None


def log_line(receipt: Receipt) -> str:
    """Sum a run up that has ended, with what shows how it did."""
    said = " ".join(f"{name}={text}" for name, text in _figures(receipt).items() if text)
    how = f"{receipt.outcome} after {lasting(receipt.duration_seconds)} ({receipt.evidence})"
    return f"run={receipt.run_id} name={receipt.name!r} ended: {how}: {said or 'nothing is known of it'}"


def _figures(receipt: Receipt) -> dict[str, str]:
    """Return what is known and worth a word, by its name."""
    peaks = [each.memory_peak_bytes for each in receipt.devices if each.memory_peak_bytes is not None]
    left = [each.headroom_at_peak_bytes for each in receipt.devices if each.headroom_at_peak_bytes is not None]
    throttled = worst(receipt.throttled_seconds)
    return {
        "steps": _known(str, receipt.steps),
        "p50": _known(duration, receipt.step_median_seconds),
        "p95": _known(duration, receipt.step_p95_seconds),
        "peak": _known(_together, max(peaks, default=None)),
        "headroom_at_peak": _known(_together, min(left, default=None)),
        "gpu_seconds": _known(_tenths, receipt.gpu_seconds),
        "idle": _known("{:.2f}".format, receipt.gpu_idle_ratio),
        "energy": _known(energy, receipt.energy_joules).replace(" ", ""),
        "throttled": f"{lasting(throttled[1])}({throttled[0]})" if throttled and throttled[1] else "",
        "input_wait": _known("{:.2f}".format, receipt.input_wait_ratio),
        "errors": counts(receipt.errors or {}),
        "xids": counts(receipt.xids or {}),
    }


def counts(by_name: Mapping[str, int]) -> str:
    """Write counts behind their names."""
    return ",".join(f"{name}:{count}" for name, count in by_name.items())


def _tenths(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < _SHORT else f"{seconds:.0f}"


def _together(count: float) -> str:
    return size(count).replace(" ", "")


def _known(write: Callable[[Any], str], value: float | None) -> str:
    return "" if value is None else write(value)
