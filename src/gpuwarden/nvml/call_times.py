"""Calls of NVML's functions and the time that they take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from types import SimpleNamespace
from typing import Any, cast

from gpuwarden.nvml.interface import FUNCTIONS, Nvml

MAX_PENDING = 100_000  # calls between two updates


class CallTimes:
    """Number and seconds of the calls of each function, failed calls too. Any thread may call; one reads."""

    def __init__(self) -> None:
        self._totals: dict[str, tuple[int, float]] = {}
        self._pending: deque[tuple[str, float]] = deque(maxlen=MAX_PENDING)  # += is not atomic, append is

    def measure(self, nvml: Nvml) -> Nvml:
        """Return NVML with its functions measured, except those that wait for an event."""
        functions = {name: getattr(nvml, name) for name in FUNCTIONS if hasattr(nvml, name)}
        functions |= {name: self._timed(name, call) for name, call in functions.items() if "Wait" not in name}
        return cast("Nvml", SimpleNamespace(c_nvmlGpmMetricsGet_t=nvml.c_nvmlGpmMetricsGet_t, **functions))

    def totals(self) -> dict[str, tuple[int, float]]:
        """Return the number of calls until now and their seconds, by function."""
        while self._pending:
            name, seconds = self._pending.popleft()
            calls, total = self._totals.get(name, (0, 0.0))
            self._totals[name] = calls + 1, total + seconds
        return dict(self._totals)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        record = self._pending.append

        def timed(*arguments: Any) -> Any:
            began = perf_counter()
            try:
                return call(*arguments)
            finally:
                record((name, perf_counter() - began))

        return timed
