"""Stalls of a run: a step under way for much longer than its steps usually take, while its process lives.

A client has no thread of its own, so one that hangs is silent. Silence alone is no stall: it may have nothing to say
between steps. The first step of all compiles, for as long as that takes.
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

MAX_LOGGED_STALLS = 20  # of a run
Cause = Literal["stopped", "uninterruptible", "gpu_busy", "cpu_busy", "waiting", "unknown"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
_BY_STATE: Mapping[str | None, Cause] = {"running": "cpu_busy", None: "unknown"}
BUSY_GPU = 0.5  # ratio of a GPU's time
BUSY_CPUS = 0.5  # CPUs
CONTENDING_CPUS = 0.1  # of a run that was found to run, or to wait for a CPU: on a full host it gets less than it asks


@dataclass(frozen=True, slots=True)
class Patience:
    """Limit on the time of a step: `factor` times what its slow ones do (the 95th percentile), `least` at least."""

    factor: float = 10.0
    least: float = 60.0  # seconds

    def seconds(self, report: Report) -> float:
        """Return how long a run's step may take."""
        return max(self.least, self.factor * (report.step_p95 or 0.0))


@dataclass(frozen=True, slots=True)
class Signs:
    """State of a run as seen from outside: its first thread's state, CPUs it uses, how busy its GPUs are.

    The CPUs are of a time in which it made no step.
    """

    state: str | None = None
    cpus: float | None = None
    gpu: float | None = None


@dataclass(frozen=True, slots=True)
class Stall:
    """A step that hangs: seconds without one, and what the run seems to be doing."""

    seconds: float
    cause: Cause


def hangs(report: Report, silent: float, patience: Patience) -> bool:
    """Return whether a run that made no step for `silent` seconds hangs."""
    return report.stepping and report.steps > 0 and silent > patience.seconds(report)


def cause(signs: Signs) -> Cause:
    """Return what a run does that makes no step, by the sign that says most."""
    if signs.state in ("stopped", "uninterruptible"):
        return "stopped" if signs.state == "stopped" else "uninterruptible"
    if signs.gpu is not None and signs.gpu >= BUSY_GPU:
        return "gpu_busy"
    if signs.cpus is None:  # not known of the time in which it hangs: the state has to do
        return _BY_STATE.get(signs.state, "waiting")
    busy = CONTENDING_CPUS if signs.state == "running" else BUSY_CPUS
    return "cpu_busy" if signs.cpus >= busy else "waiting"


class StallWatch:
    """Watch over the steps of one run. `stalls` counts how often it hung."""

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
        """Handle a report; one that says the same again is no sign of a step."""
        at = report.steps, report.phase, report.epoch, report.batch, report.stepping
        if at != self._at:
            self._at, self._moved = at, now

    def handle_usage(self, usage: HostUsage | None, now: float) -> None:
        """Handle what the run's processes use, which is sampled more seldom than this is called."""
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
        """Return the stall that a living run is in, if any.

        `gpu` tells how busy the busiest of its GPUs is, and `state` that of its first thread: asked as the stall
        begins, since the last look may be of before, and not again, as each look tells it too.
        """
        silent = now - self._moved
        if report is None or not hangs(report, silent, patience):
            self.stall = None
            return None
        if self.stall is None:
            self.stalls += 1
            self._state = state() or self._state
        cpus = self._cpus if self._cpus_since >= self._moved else None
        self.stall = Stall(silent, cause(Signs(self._state, cpus, gpu())))
        return self.stall


def log_change(who: tuple[str, str], before: Stall | None, after: Stall | None, stalls: int, *, up: bool) -> None:
    """Log the start and the end of a stall, up to MAX_LOGGED_STALLS a run; `who` is the run's id and name."""
    if stalls > MAX_LOGGED_STALLS:
        return
    fields = dict(zip(("run", "name"), who, strict=True))
    if after and not before:
        log.warning("run stalled %s", format_fields(**fields, seconds=round(after.seconds), cause=after.cause))
    elif before and not after:
        event = "run resumed" if up else "stalled run ended"
        log.warning("%s %s", event, format_fields(**fields, seconds=round(before.seconds)))


def busiest(uuids: Iterable[str], snapshot: Snapshot) -> float | None:
    """Return how busy the busiest of these GPUs is, as a ratio of its time."""
    gpus = [gpu for uuid in uuids if (gpu := snapshot.gpu_with(uuid))]
    return max((busy for gpu in gpus if (busy := gpu.value(GpuReadings.utilization_ratio)) is not None), default=None)
