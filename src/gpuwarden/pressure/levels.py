"""Pressure levels (none, warning, critical): memory of runs, temperature of GPUs.

A level rises at once, and falls only after the values have been clearly better for `pressure.hold`, so that it does not
flicker. A level by the OOM forecast ends with the leak: the leak detector has a hysteresis of its own. The user page is
docs/understand/pressure.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from gpuwarden.analysis.memory.headroom import HeadroomLimit
from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.config.schema import PressureConfig as Limits
from gpuwarden.formatting import format_ratio
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.metrics.model import Labels
from gpuwarden.protocol.messages import LEVEL_RANK, Level
from gpuwarden.runs.run_snapshot import JoinedPoll, RunSnapshot

CLEAR_MEMORY_FACTOR = 1.5  # times a memory threshold: above this, memory is clearly better
CLEAR_TEMPERATURE_CELSIUS = 3.0  # above a temperature threshold, likewise
_BY_DRIVER, _BY_HARDWARE = "sw_thermal_slowdown", "hw_thermal_slowdown"  # clock event reasons


def headroom_level(limits: Limits, share: float, factor: float = 1.0) -> Level:
    """Return the level of a run on a device by its headroom ratio.

    `factor` widens the thresholds: a level that is none with CLEAR_MEMORY_FACTOR is clearly none.
    """
    if share <= limits.memory_critical * factor:
        return "critical"
    return "warning" if share <= limits.memory_warning * factor else "none"


def forecast_level(limits: Limits, seconds_to_oom: float | None, factor: float = 1.0) -> Level:
    """Return the level of a run on a device by its OOM forecast."""
    if seconds_to_oom is None:
        return "none"
    if seconds_to_oom <= limits.oom_critical * factor:
        return "critical"
    return "warning" if seconds_to_oom <= limits.oom_warning * factor else "none"


def thermal_level(limits: Limits, margin: float | None, throttled: tuple[bool, bool], extra: float = 0.0) -> Level:
    """Return the level of a GPU, by its margin in degrees Celsius, and whether it is thermally throttled.

    `throttled`: by the driver, by the hardware. `extra` degrees are added to the thresholds.
    """
    left = float("inf") if margin is None else margin
    by_driver, by_hardware = throttled
    if by_hardware or left <= limits.thermal_critical + extra:
        return "critical"
    return "warning" if by_driver or left <= limits.thermal_warning + extra else "none"


def worse(one: Level, other: Level) -> Level:
    """Return the worse of two levels."""
    return max(one, other, key=LEVEL_RANK.__getitem__)


@dataclass(slots=True)
class LevelHysteresis:
    """One level over time, with hysteresis; times are monotonic."""

    level: Level = "none"
    better_since: float | None = None
    worst: Level = "none"  # since `better_since`

    def update(self, strictly: Level, clearly: Level, hold: float, now: float) -> Level:
        """Update with the levels by the thresholds and by the wider ones (`clearly`); return the current level."""
        if LEVEL_RANK[strictly] > LEVEL_RANK[self.level]:
            self.level, self.better_since = strictly, None
        elif LEVEL_RANK[clearly] >= LEVEL_RANK[self.level]:
            self.better_since = None
        elif self.better_since is None:
            self.better_since, self.worst = now, clearly
        else:
            self.worst = worse(self.worst, clearly)
        if self.better_since is not None and now - self.better_since >= hold:
            self.level, self.better_since = self.worst, None
        return self.level


@dataclass(slots=True)
class _MemoryLevels:
    """Levels of one run on one device, by its headroom and by its OOM forecast."""

    by_headroom: LevelHysteresis = field(default_factory=LevelHysteresis)
    by_forecast: LevelHysteresis = field(default_factory=LevelHysteresis)

    def evaluate(self, limits: Limits, share: float, leak: Leak | None, now: float) -> Level:
        """Return the worse of both levels at a poll."""
        seconds = leak.left.seconds if leak and leak.left else None
        if leak is None:
            self.by_forecast = LevelHysteresis()
        clearly = CLEAR_MEMORY_FACTOR
        return worse(
            self.by_headroom.update(
                headroom_level(limits, share), headroom_level(limits, share, clearly), limits.hold, now
            ),
            self.by_forecast.update(
                forecast_level(limits, seconds), forecast_level(limits, seconds, clearly), limits.hold, now
            ),
        )


@dataclass(frozen=True, slots=True)
class RunPressure:
    """Pressure of one run on one device, in bytes; `seconds_to_oom` is set while memory grows.

    `in_step`: the headroom is what the last steps left at their peak. `limit` is the one reached first.
    """

    level: Level
    headroom: float
    in_use: float
    seconds_to_oom: float | None = None
    in_step: bool = False
    limit: HeadroomLimit | None = None

    @property
    def share(self) -> float:
        """Headroom as a ratio of used memory plus headroom."""
        return headroom_ratio(self.headroom, self.in_use)

    @property
    def left_text(self) -> str:
        """Text of what is left, and of a limit that was set outside of the program."""
        limit = self.limit.text if self.limit and self.limit.kind in ("mps", "cgroup") else ""
        return f"left{' within a step' if self.in_step else ''}{limit} ({format_ratio(self.share)})"

    def strict_level(self, limits: Limits) -> Level:
        """Return the level by the thresholds alone, without hysteresis."""
        return worse(headroom_level(limits, self.share), forecast_level(limits, self.seconds_to_oom))

    def slack(self, limits: Limits) -> tuple[float, float]:
        """Return the bytes by which others, and by which the run itself, may grow until its level rises."""
        if self.level == "critical":
            return float("inf"), float("inf")
        share = limits.memory_warning if self.level == "none" else limits.memory_critical
        return self.headroom - share * self.in_use / (1 - share), self.headroom - share * (self.headroom + self.in_use)


@dataclass(frozen=True, slots=True)
class Pressure:
    """Pressure at one poll: `levels` by UUID of a GPU or MIG instance and resource, `of_runs` by run and UUID.

    `limits` are the thresholds.
    """

    levels: Mapping[Labels, Level] = field(default_factory=dict)
    of_runs: Mapping[tuple[str, str], RunPressure] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)


class PressureWatch:
    """Pressure levels from poll to poll. Used by one event loop."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._memory: dict[tuple[str, str], _MemoryLevels] = {}  # by run and UUID
        self._thermal: dict[str, LevelHysteresis] = {}  # by UUID

    def evaluate(self, poll: JoinedPoll) -> Pressure:
        """Evaluate a poll and its runs. A value missing from one poll does not end an episode."""
        living = {run.peer.run_id: run for run in poll.runs if run.up}
        of_runs = dict(self._runs(living.values(), poll.now))
        self._memory = {key: standing for key, standing in self._memory.items() if key[0] in living}
        levels: dict[Labels, Level] = {}
        for (_run_id, uuid), each in of_runs.items():
            levels[uuid, "memory"] = worse(each.level, levels.get((uuid, "memory"), "none"))
        for gpu in poll.snapshot.gpus:
            if gpu.up:
                levels |= {(uuid, "memory"): "none" for uuid in _unused(gpu) if (uuid, "memory") not in levels}
                self._update_thermal(gpu, levels, poll.now)
        known = {gpu.identity.uuid for gpu in poll.snapshot.gpus}
        self._thermal = {uuid: standing for uuid, standing in self._thermal.items() if uuid in known}
        return Pressure(levels, of_runs, self.limits)

    def _runs(self, runs: Iterable[RunSnapshot], now: float) -> Iterator[tuple[tuple[str, str], RunPressure]]:
        for run in runs:
            for uuid, between_steps in run.headroom.items():
                key = run.peer.run_id, uuid
                left = run.headroom_in_step.get(uuid, between_steps)
                in_use, in_step = run.memory[uuid].current, uuid in run.headroom_in_step
                leak = run.leaks.get(uuid)
                levels = self._memory.setdefault(key, _MemoryLevels())
                level = levels.evaluate(self.limits, headroom_ratio(left, in_use), leak, now)
                if not run.devices.get(uuid) and level == "critical":  # the driver cannot confirm it
                    level = "warning"
                seconds = leak.left.seconds if leak and leak.left else None
                yield key, RunPressure(level, left, in_use, seconds, in_step, run.headroom_limits.get(uuid))

    def _update_thermal(self, gpu: Gpu, levels: dict[Labels, Level], now: float) -> None:
        margin = gpu.value(GpuReadings.temperature_margin_celsius)
        throttled = [gpu.value(GpuReadings.clock_event_active, reason) for reason in (_BY_DRIVER, _BY_HARDWARE)]
        if margin is None and throttled == [None, None]:
            return
        uuid, throttled_by = gpu.identity.uuid, (bool(throttled[0]), bool(throttled[1]))
        standing = self._thermal.setdefault(uuid, LevelHysteresis())
        strictly = thermal_level(self.limits, margin, throttled_by)
        clearly = thermal_level(self.limits, margin, throttled_by, CLEAR_TEMPERATURE_CELSIUS)
        levels[uuid, "thermal"] = standing.update(strictly, clearly, self.limits.hold, now)


def headroom_ratio(headroom: float, in_use: float) -> float:
    """Return headroom as a ratio of used memory plus headroom; bytes."""
    return headroom / (headroom + in_use) if headroom + in_use else 0.0


def _unused(gpu: Gpu) -> list[str]:
    """Return the UUID of the GPU, or of its MIG instances, without a listed process.

    With processes that do not report, the level is unknown: allocated memory does not show what they need.
    """
    if not gpu.process_lists:
        return []  # the processes are unknown
    if not gpu.mig:
        return [] if gpu.processes else [gpu.identity.uuid]
    taken = {process.instance for process in gpu.processes}
    return [each.identity.uuid for each in gpu.mig if each.identity.uuid not in taken]
