"""Stalls of a run: a step that takes much longer than its steps usually do, while its process lives.

A client has no thread of its own, so a hanging one is silent. Silence alone is no stall: between steps there is nothing
to report. The first step never counts, as it compiles.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from gpuwarden.formatting import format_fields
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.host.process_tree import HostUsage
from gpuwarden.protocol.messages import Report

log = logging.getLogger(__name__)

Cause = Literal["stopped", "uninterruptible", "gpu_busy", "cpu_busy", "waiting", "unknown"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
_BY_STATE: Mapping[str | None, Cause] = {"running": "cpu_busy", None: "unknown"}
BUSY_GPU = 0.5  # ratio of a GPU's time
BUSY_CPUS = 0.5  # CPUs
CONTENDING_CPUS = 0.1  # of a run in state running: on a busy host it gets less than it needs


@dataclass(frozen=True, slots=True)
class Patience:
    """Maximum time of a step: `factor` times the 95th percentile, at least `least`."""

    factor: float = 10.0
    least: float = 60.0  # seconds

    def seconds(self, report: Report) -> float:
        """Return the maximum time of a step in seconds."""
        return max(self.least, self.factor * (report.step_p95 or 0.0))


@dataclass(frozen=True, slots=True)
class Stall:
    """Stall: seconds without a step, and its likely cause."""

    seconds: float
    cause: Cause


def hangs(report: Report, silent: float, patience: Patience) -> bool:
    """Return whether a run without a step for `silent` seconds is stalled."""
    return report.stepping and report.steps > 0 and silent > patience.seconds(report)


def cause(state: str | None, cpus: float | None, gpu: float | None) -> Cause:
    """Return the likely cause of a stall, by the strongest sign from outside.

    `state` is that of the run's first thread, `cpus` the CPUs in use since the last step, `gpu` the utilization of its
    busiest GPU, from 0 to 1.
    """
    if state in ("stopped", "uninterruptible"):
        return "stopped" if state == "stopped" else "uninterruptible"
    if gpu is not None and gpu >= BUSY_GPU:
        return "gpu_busy"
    if cpus is None:  # unknown for the time of the stall: use the state
        return _BY_STATE.get(state, "waiting")
    busy = CONTENDING_CPUS if state == "running" else BUSY_CPUS
    return "cpu_busy" if cpus >= busy else "waiting"


class StallWatch:
    """Stalls of one run; `stalls` counts them."""

    def __init__(self) -> None:
        self.stalls = 0
        self.stall: Stall | None = None
        self._at: tuple[object, ...] | None = None
        self._moved = 0.0  # monotonic
        self._sampled: tuple[HostUsage, float] | None = None
        self._state: str | None = None  # when its process was last seen
        self._cpus: float | None = None  # that it used
        self._cpus_since = 0.0  # monotonic

    def handle_report(self, report: Report, now: float) -> None:
        """Handle a report; a repeated one is no sign of a step."""
        at = report.steps, report.phase, report.epoch, report.batch, report.stepping
        if at != self._at:
            self._at, self._moved = at, now

    def handle_usage(self, usage: HostUsage | None, now: float) -> None:
        """Handle the host usage of the run's processes, which is sampled less often than this is called."""
        if usage is None or (self._sampled and self._sampled[0] is usage):
            return
        if self._sampled:
            before, when = self._sampled
            self._cpus = max(usage.cpu_seconds - before.cpu_seconds, 0.0) / max(now - when, 1e-3)
            self._cpus_since = when
        self._sampled = usage, now
        self._state = usage.present.state if usage.present else None

    def judge(
        self,
        report: Report | None,
        gpu: Callable[[], float | None],
        state: Callable[[], str | None],
        patience: Patience,
        now: float,
    ) -> Stall | None:
        """Return the current stall of a running run, if any.

        `gpu` returns the utilization of its busiest GPU, `state` the state of its first thread. `state` is read when
        the stall starts, as the last sample may be older; later samples have it.
        """
        silent = now - self._moved
        if report is None or not hangs(report, silent, patience):
            self.stall = None
            return None
        if self.stall is None:
            self.stalls += 1
            self._state = state() or self._state
        cpus = self._cpus if self._cpus_since >= self._moved else None
        self.stall = Stall(silent, cause(self._state, cpus, gpu()))
        return self.stall


def log_change(who: tuple[str, str], before: Stall | None, after: Stall | None, *, up: bool) -> None:
    """Log the start and the end of a stall; `who` is the run's id and name."""
    fields = dict(zip(("run", "name"), who, strict=True))
    if after and not before:
        log.warning("run stalled %s", format_fields(**fields, seconds=round(after.seconds), cause=after.cause))
    elif before and not after:
        event = "run resumed" if up else "stalled run ended"
        log.warning("%s %s", event, format_fields(**fields, seconds=round(before.seconds)))


def busiest(uuids: Iterable[str], snapshot: Snapshot) -> float | None:
    """Return the utilization of the busiest of these GPUs, as a ratio."""
    gpus = [gpu for uuid in uuids if (gpu := snapshot.gpu_with(uuid))]
    return max((busy for gpu in gpus if (busy := gpu.value(GpuReadings.utilization_ratio)) is not None), default=None)
