"""Pressure levels, none, warning or critical: of runs on their memory, and of GPUs on their cooling.

Pure: from what a poll has found to levels, by thresholds of the configuration. A level rises at once, as a warning that
waits is none; it falls only when things have been clearly better for a while, so that it does not flicker.
docs/understand/pressure.md says the same to users.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from gpuwarden.config.schema import PressureConfig as Limits
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.metrics.model import Labels
from gpuwarden.protocol.messages import LEVELS, Level
from gpuwarden.runs.run_snapshot import JoinedPoll, RunSnapshot

RANK: Mapping[Level, int] = {level: rank for rank, level in enumerate(LEVELS)}
CLEARLY = 1.5  # times a threshold of memory that has to be left for it to be clearly better,
CLEARLY_COOLER = 3.0  # and degrees beyond one of heat
_BY_DRIVER, _BY_HARDWARE = "sw_thermal_slowdown", "hw_thermal_slowdown"  # clock event reasons


def memory_level(limits: Limits, share: float, seconds_to_oom: float | None, ease: float = 1.0) -> Level:
    """Judge a run on a device by the share of its memory that it can still allocate, and by when that will be none.

    `ease` widens the thresholds: what is no pressure with 1.5 is clearly none.
    """
    ahead = float("inf") if seconds_to_oom is None else seconds_to_oom
    if share <= limits.memory_critical * ease or ahead <= limits.oom_critical * ease:
        return "critical"
    return "warning" if share <= limits.memory_warning * ease or ahead <= limits.oom_warning * ease else "none"


def thermal_level(limits: Limits, margin: float | None, slowed: tuple[bool, bool], ease: float = 0.0) -> Level:
    """Judge a GPU by the degrees left before it slows down, and by whether heat slows it: by driver, by hardware."""
    left = float("inf") if margin is None else margin
    by_driver, by_hardware = slowed
    if by_hardware or left <= limits.thermal_critical + ease:
        return "critical"
    return "warning" if by_driver or left <= limits.thermal_warning + ease else "none"


@dataclass(slots=True)
class LevelHysteresis:
    """One level as time passes; times are monotonic."""

    level: Level = "none"
    better_since: float | None = None
    worst: Level = "none"  # since then

    def update(self, strictly: Level, clearly: Level, hold: float, now: float) -> Level:
        """Update with the level by the thresholds and the one that leaves no doubt; return the one that stands."""
        if RANK[strictly] > RANK[self.level]:
            self.level, self.better_since = strictly, None
        elif RANK[clearly] >= RANK[self.level]:
            self.better_since = None
        elif self.better_since is None:
            self.better_since, self.worst = now, clearly
        else:
            self.worst = max(self.worst, clearly, key=RANK.__getitem__)
        if self.better_since is not None and now - self.better_since >= hold:
            self.level, self.better_since = self.worst, None
        return self.level


@dataclass(frozen=True, slots=True)
class RunPressure:
    """One run on one device, in bytes; `level` is what stands, `seconds_to_oom` is there while the run grows."""

    level: Level
    headroom: float
    in_use: float
    seconds_to_oom: float | None = None

    @property
    def share(self) -> float:
        """Headroom as a ratio of what the run uses and can still allocate."""
        return _share(self.headroom, self.in_use)

    def slack(self, limits: Limits) -> tuple[float, float]:
        """Return by how much others, and by how much the run itself, may grow until its level rises."""
        if self.level == "critical":
            return float("inf"), float("inf")
        share = limits.memory_warning if self.level == "none" else limits.memory_critical
        return self.headroom - share * self.in_use / (1 - share), self.headroom - share * (self.headroom + self.in_use)


@dataclass(frozen=True, slots=True)
class Pressure:
    """The pressure of one poll: `levels` by UUID of a GPU or MIG instance and resource, `of_runs` by run and UUID.

    `limits` are the thresholds that they were judged by.
    """

    levels: Mapping[Labels, Level] = field(default_factory=dict)
    of_runs: Mapping[tuple[str, str], RunPressure] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)


class PressureWatch:
    """Watch over pressure, from poll to poll. Used by one event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._memory: dict[tuple[str, str], LevelHysteresis] = {}  # by run and UUID
        self._thermal: dict[str, LevelHysteresis] = {}  # by UUID

    def update(self, poll: JoinedPoll) -> Pressure:
        """Judge a poll, with its runs. What one poll does not know of does not end an episode."""
        living = {run.peer.run_id: run for run in poll.runs if run.up}
        of_runs = dict(self._runs(living.values(), poll.now))
        self._memory = {key: standing for key, standing in self._memory.items() if key[0] in living}
        levels: dict[Labels, Level] = {}
        for (_run_id, uuid), each in of_runs.items():
            levels[uuid, "memory"] = max(each.level, levels.get((uuid, "memory"), "none"), key=RANK.__getitem__)
        for gpu in poll.snapshot.gpus:
            if gpu.up:
                levels |= {(uuid, "memory"): "none" for uuid in _unused(gpu) if (uuid, "memory") not in levels}
                self._judge_heat(gpu, levels, poll.now)
        known = {gpu.identity.uuid for gpu in poll.snapshot.gpus}
        self._thermal = {uuid: standing for uuid, standing in self._thermal.items() if uuid in known}
        return Pressure(levels, of_runs, self._limits)

    def _runs(self, runs: Iterable[RunSnapshot], now: float) -> Iterator[tuple[tuple[str, str], RunPressure]]:
        for run in runs:
            for uuid, left in run.headroom.items():
                key = run.peer.run_id, uuid
                in_use = run.memory[uuid].current
                growth = run.growth.get(uuid)
                share, seconds = _share(left, in_use), growth.left.seconds if growth and growth.left else None
                standing = self._memory.get(key)
                if standing is None:
                    standing = self._memory[key] = LevelHysteresis()
                strictly = memory_level(self._limits, share, seconds)
                clearly = memory_level(self._limits, share, seconds, CLEARLY)
                yield (
                    key,
                    RunPressure(standing.update(strictly, clearly, self._limits.hold, now), left, in_use, seconds),
                )

    def _judge_heat(self, gpu: Gpu, levels: dict[Labels, Level], now: float) -> None:
        margin = gpu.value(GpuReadings.temperature_margin_celsius)
        slowed = [gpu.value(GpuReadings.clock_event_active, reason) for reason in (_BY_DRIVER, _BY_HARDWARE)]
        if margin is None and slowed == [None, None]:
            return
        uuid, slowed_by = gpu.identity.uuid, (bool(slowed[0]), bool(slowed[1]))
        standing = self._thermal.setdefault(uuid, LevelHysteresis())
        strictly = thermal_level(self._limits, margin, slowed_by)
        clearly = thermal_level(self._limits, margin, slowed_by, CLEARLY_COOLER)
        levels[uuid, "thermal"] = standing.update(strictly, clearly, self._limits.hold, now)


def _share(headroom: float, in_use: float) -> float:
    whole = headroom + in_use
    return headroom / whole if whole else 0.0


def _unused(gpu: Gpu) -> list[str]:
    """Return the GPU, or those of its MIG instances, on which the driver lists no process.

    One that processes without a report hold is none of these: what they have allocated does not tell what they need.
    """
    if not gpu.process_lists:
        return []  # nobody tells who is there
    if not gpu.mig:
        return [] if gpu.processes else [gpu.identity.uuid]
    taken = {process.instance for process in gpu.processes}
    return [each.identity.uuid for each in gpu.mig if each.identity.uuid not in taken]
