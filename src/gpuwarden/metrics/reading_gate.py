"""Gate for the readings of one GPU: values that no GPU can have are refused, counted and left out.

NVML may return success with nonsense: a memory of 0 bytes (Syllo/nvtop#411), a utilization of 808,334,905 %
(NVIDIA/dcgm-exporter#418), a temperature of 2^31 degrees.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

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
MIN_RESET_SECONDS = 60.0  # after which a counter that went back and stands still was reset


@dataclass(slots=True)
class _Counted:
    """One counter: the driver's last value that passed, its time, and how much of it is left out.

    `suspect` is the first of the values since then that do not follow it, with its time.
    """

    value: float
    at: float
    left_out: float = 0.0
    suspect: tuple[float, float] | None = None


class ReadingGate:
    """Gate of one GPU and its MIG instances. Used by one thread at a time; `clock` is monotonic, `uuid` for the log.

    A counter passes if it rises, no faster than it can. Else it is refused, until the next values rise from there too:
    - It went back: the driver has reset it, and it restarts. One that stands still after that has to do so for
      MIN_RESET_SECONDS, as a driver that returns 0 for a while would make a jump of its return.
    - It jumped: it continues at the value before, without the jump.
    """

    def __init__(self, clock: Callable[[], float], uuid: str | None = None) -> None:
        self._clock = clock
        self._uuid = uuid
        self._counters: dict[tuple[Metric[Any], Labels], _Counted] = {}
        self._logged: set[Metric[Any]] = set()

    def clear(self) -> None:
        """Drop what is known of counters, after a reset of the GPU."""
        self._counters.clear()

    def filter(self, row: Metric[Any], reading: Reading, earlier: Readings, errors: Counter[str]) -> Reading:
        """Return a reading without refused values, which are counted in `errors`; None where it was one value.

        `earlier` are the readings of the rows above, by one of which the row may be bounded.
        """
        if isinstance(reading, (int, float)):
            return self._pass(row, reading, earlier, errors)
        if row.kind == "info" or not isinstance(reading, Mapping):
            return reading
        if row.kind == "gauge" and _are_within_bounds(row, reading.values(), earlier):  # cheaper than one by one
            return reading
        passed = {labels: self._pass(row, each, earlier, errors, labels) for labels, each in reading.items()}
        return {labels: each for labels, each in passed.items() if each is not None}

    def admits(self, row: Metric[Any], value: float, earlier: Readings, errors: Counter[str]) -> bool:
        """Return whether a value could be one of a gauge; count it in `errors` if not."""
        return self._pass(row, value, earlier, errors) is not None

    def _pass(
        self, row: Metric[Any], value: Any, earlier: Readings, errors: Counter[str], labels: Labels = ()
    ) -> float | None:
        """Return the value to show; None, counted in `errors`, for one that is refused, the first of a row logged."""
        if _are_within_bounds(row, (value,), earlier):
            passed = value if row.kind == "gauge" else self._count(row, labels, value)
            if passed is not None:
                return cast("float", passed)
        errors[IMPLAUSIBLE] += 1
        if row not in self._logged and _find_high(row, earlier) is not None:  # otherwise the row above has been logged
            self._logged.add(row)
            log.warning(
                "implausible reading refused, further ones are only counted %s",
                format_fields(gpu=self._uuid, metric=row.name, labels=",".join(labels) or None, value=value),
            )
        return None

    def _count(self, row: Metric[Any], labels: Labels, value: float) -> float | None:
        """Return the value of a counter to show; None if it is refused."""
        now, rate = self._clock(), MAX_RATES[row.unit]
        counter = self._counters.get((row, labels))
        if counter is None:
            self._counters[row, labels] = _Counted(value, now)
            return value

        def follows(before: float, at: float) -> bool:
            return 0 <= value - before <= rate * (now - at + UPDATE_SECONDS)

        if not follows(counter.value, counter.at):
            if counter.suspect is None or not follows(*counter.suspect):
                counter.suspect = value, now
                return None
            went_back, stands_still = value < counter.value, value == counter.suspect[0]
            if went_back and stands_still and now - counter.suspect[1] < MIN_RESET_SECONDS:
                return None
            counter.left_out = 0.0 if went_back else counter.left_out + value - counter.value
        counter.value, counter.at, counter.suspect = value, now, None
        return value - counter.left_out


def _are_within_bounds(row: Metric[Any], values: Iterable[Any], earlier: Readings) -> bool:
    low, high = (row.bounds or DEFAULT_BOUNDS[row.kind, row.unit])[0], _find_high(row, earlier)
    if high is None:
        return False
    for value in values:  # noqa: SIM110 - all() takes twice the time
        if not low <= value <= high:
            return False
    return True


def _find_high(row: Metric[Any], earlier: Readings) -> float | None:
    """Return the greatest value of a row; None if the row above that bounds it was refused."""
    high = (row.bounds or DEFAULT_BOUNDS[row.kind, row.unit])[1]
    if not isinstance(high, Metric):
        return high
    reading = earlier.get(high, math.inf)
    return reading if isinstance(reading, (int, float)) else None
