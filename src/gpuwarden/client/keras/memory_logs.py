"""Memory of a run in the logs that Keras passes to its callbacks at the end of an epoch."""

from __future__ import annotations

from collections.abc import Iterable
from math import nan

from gpuwarden.client.reporter import Reporter

_GIB = 1 << 30


def read_memory_logs(run: Reporter) -> dict[str, float]:
    """Return memory in use, its peak and the headroom in GiB, each of the fullest device; NaN where unknown.

    Always the same keys: CSVLogger writes those of the first epoch, and History has a list for each.
    """
    memory = run.memory.latest().values()
    return {
        "gpu_memory_gib": _max_gib(each.current for each in memory),
        "gpu_memory_peak_gib": _max_gib(each.peak for each in memory),
        "gpu_headroom_gib": nan if run.headroom is None else run.headroom / _GIB,
    }


def _max_gib(figures: Iterable[int]) -> float:
    return max(figures, default=nan) / _GIB
