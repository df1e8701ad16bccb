"""Gate for the readings of one GPU: values that no GPU can have are refused, counted and left out.

NVML may return success with nonsense: a memory of 0 bytes (Syllo/nvtop#411), a utilization of 808,334,905 %
(NVIDIA/dcgm-exporter#418), a temperature of 2^31 degrees.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gpuwarden.formatting import format_fields
from gpuwarden.metrics.model import Kind, Labels, Metric, Reading, Readings, Unit

log = logging.getLogger(__name__)

IMPLAUSIBLE = "implausible"  # counted with NVML's errors

# Bounds of rows that have none of their own. They are far beyond today's hardware: nonsense is off by magnitudes.
DEFAULT_BOUNDS: Mapping[tuple[Kind, Unit], tuple[float, float]] = {
    ("gauge", ""): (0, 1),  # a flag
    ("gauge", "bytes"): (0, 2**50),
    ("gauge", "bytes_per_second"): (0, 2**44),
    ("gauge", "celsius"): (-100, 200),
    ("gauge", "hertz"): (0, 50e9),  # below 0xFFFF MHz
    ("gauge", "ratio"): (0, 1),
    ("gauge", "seconds"): (0, 3600),
    ("gauge", "watts"): (0, 20_000),
    ("counter", ""): (0, 1e15),
    ("counter", "bytes"): (0, 2**70),
    ("counter", "joules"): (0, 1e12),
    ("counter", "seconds"): (0, 1e9),
}
# How much a counter can rise in a second.
MAX_RATES: Mapping[Unit, float] = {
    "": 1e6,  # errors of a failing link
    "bytes": DEFAULT_BOUNDS["gauge", "bytes_per_second"][1],
    "joules": DEFAULT_BOUNDS["gauge", "watts"][1],
    "seconds": 2,
}
UPDATE_SECONDS = 2.0  # by which the driver may update a counter late
MIN_RESET_SECONDS = 600.0  # after which a counter that went back and stands still was reset


class ReadingGate:
    """Gate of one GPU and its MIG instances. Used by one thread at a time; `clock` is monotonic, `uuid` for the log.

    A counter passes only if it rises, no faster than it can. One that went back was reset, and passes again, once it
    rises from there or has stayed there for MIN_RESET_SECONDS. One that jumped stays out as long as it stands still.
    """

    def __init__(self, clock: Callable[[], float], uuid: str | None = None) -> None:
        self._clock = clock
        self._uuid = uuid
        self._passed: dict[tuple[Metric[Any], Labels], tuple[float, float]] = {}  # value and time of counters
        self._refused: dict[tuple[Metric[Any], Labels], tuple[float, float]] = {}  # since they last passed
        self._logged: set[Metric[Any]] = set()

    def clear(self) -> None:
        """Drop what is known of counters, after a reset of the GPU."""
        self._passed.clear()
        self._refused.clear()

    def filter(self, row: Metric[Any], reading: Reading, earlier: Readings, errors: Counter[str]) -> Reading:
        """Return a reading without refused values, which are counted in `errors`; None where it was one value.

        `earlier` are the readings of the rows above, by one of which the row may be bounded.
        """
        if isinstance(reading, (int, float)):
            return reading if self.admit(row, reading, earlier, errors) else None
        if row.kind == "info" or not isinstance(reading, Mapping):
            return reading
        if row.kind == "gauge" and self._are_within_bounds(row, reading.values(), earlier):  # cheaper than one by one
            return reading
        kept = {labels: each for labels, each in reading.items() if self.admit(row, each, earlier, errors, labels)}
        return reading if len(kept) == len(reading) else kept

    def admit(self, row: Metric[Any], value: Any, earlier: Readings, errors: Counter[str], labels: Labels = ()) -> bool:
        """Return whether a value passes; count it in `errors` if it does not, and log the first one of its row."""
        is_within = self._are_within_bounds(row, (value,), earlier)
        if is_within and (row.kind == "gauge" or self._rises(row, labels, value)):
            return True
        errors[IMPLAUSIBLE] += 1
        if row not in self._logged and _find_high(row, earlier) is not None:  # otherwise the row above has been logged
            self._logged.add(row)
            log.warning(
                "implausible reading refused, further ones are only counted %s",
                format_fields(gpu=self._uuid, metric=row.name, labels=",".join(labels) or None, value=value),
            )
        return False

    @staticmethod
    def _are_within_bounds(row: Metric[Any], values: Iterable[Any], earlier: Readings) -> bool:
        low, high = (row.bounds or DEFAULT_BOUNDS[row.kind, row.unit])[0], _find_high(row, earlier)
        if high is None:
            return False
        for value in values:  # noqa: SIM110 - all() takes twice the time
            if not low <= value <= high:
                return False
        return True

    def _rises(self, row: Metric[Any], labels: Labels, value: float) -> bool:
        key, now, rate = (row, labels), self._clock(), MAX_RATES[row.unit]
        passed, refused = self._passed.get(key), self._refused.get(key)
        stays = refused is not None and value == refused[0]

        def follows(before: tuple[float, float]) -> bool:
            return 0 <= value - before[0] <= rate * (now - before[1] + UPDATE_SECONDS)

        def was_reset(before: tuple[float, float]) -> bool:
            return follows(before) and (not stays or now - before[1] >= MIN_RESET_SECONDS)

        if passed is None or (follows(passed) and not stays) or (value < passed[0] and refused and was_reset(refused)):
            self._passed[key] = value, now
            self._refused.pop(key, None)
            return True
        if not stays:
            self._refused[key] = value, now
        return False


def _find_high(row: Metric[Any], earlier: Readings) -> float | None:
    """Return the greatest value of a row; None if the row above that bounds it was refused."""
    high = (row.bounds or DEFAULT_BOUNDS[row.kind, row.unit])[1]
    if not isinstance(high, Metric):
        return high
    reading = earlier.get(high, math.inf)
    return reading if isinstance(reading, (int, float)) else None
