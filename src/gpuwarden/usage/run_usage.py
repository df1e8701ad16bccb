"""Usage of GPUs by one run, counted from poll to poll."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.protocol.messages import PHASES, DeviceMemory, Phase
from gpuwarden.usage.gpu_meter import Lapse, Meter, Window, throttled_seconds

T = TypeVar("T")


@dataclass(slots=True)
class DeviceUsage:
    """Usage of one GPU or MIG instance up to now; None or empty where it is not known.

    `seconds` are those in which the run held memory there, `busy` and `idle` the ones of them with and without a kernel
    of any process running. `joules` are the whole GPU's, of them `joules_by_power` its power added up over the polls.
    `throttled` is seconds by reason, `throttled_steps` the part of them in training steps. `xids` counts by code.
    """

    name: str
    seconds: float = 0.0
    busy: float | None = None
    idle: float | None = None
    joules: float | None = None
    joules_by_power: float | None = None
    throttled: dict[str, float] = field(default_factory=dict)
    throttled_steps: dict[str, float] = field(default_factory=dict)
    memory_peak: int | None = None
    memory_limit: int | None = None
    headroom_at_peak: float | None = None
    lowest_headroom: float | None = None
    xids: dict[int, int] = field(default_factory=dict)

    def add(self, before: DeviceUsage) -> None:
        """Add what was counted before."""
        self.seconds += before.seconds
        self.busy = _sum(self.busy, before.busy)
        self.idle = _sum(self.idle, before.idle)
        self.joules = _sum(self.joules, before.joules)
        self.joules_by_power = _sum(self.joules_by_power, before.joules_by_power)
        for reason, seconds in before.throttled.items():
            self.throttled[reason] = self.throttled.get(reason, 0.0) + seconds
        for reason, seconds in before.throttled_steps.items():
            self.throttled_steps[reason] = self.throttled_steps.get(reason, 0.0) + seconds
        for code, count in before.xids.items():
            self.xids[code] = self.xids.get(code, 0) + count
        if (before.memory_peak or 0) >= (self.memory_peak or 0):
            self.memory_peak, self.headroom_at_peak = before.memory_peak, before.headroom_at_peak
        if self.memory_limit is None:
            self.memory_limit = before.memory_limit
        self.lowest_headroom = min(_known(self.lowest_headroom, before.lowest_headroom), default=None)

    def copy(self) -> DeviceUsage:
        """Return a copy that further polls do not change."""
        return replace(
            self,
            throttled=dict(self.throttled),
            throttled_steps=dict(self.throttled_steps),
            xids=dict(self.xids),
        )

    def update_memory(self, memory: DeviceMemory | None, left: float | None, at_peak: float | None) -> None:
        """Record the peak of the run's memory, and its headroom then and at its lowest."""
        if memory is not None and (self.memory_peak is None or memory.peak > self.memory_peak):
            self.memory_peak, self.headroom_at_peak = memory.peak, at_peak
        elif self.headroom_at_peak is None:
            self.headroom_at_peak = at_peak
        if memory is not None:
            self.memory_limit = memory.limit
        self.lowest_headroom = min(_known(self.lowest_headroom, left), default=None)


class Tally:
    """Counter of one run's share of one GPU or MIG instance.

    The driver's counters are read seldom: what they count is the run's in the proportion of the time that it held the
    GPU since the last reading. Where the run ends before the next reading, power and clock events as polled stand in.
    """

    def __init__(self, share: DeviceUsage, gpu: Gpu, *, whole: bool) -> None:
        self.share = share
        self._whole = whole
        self._xids_before = {code: xid.count for code, xid in gpu.xids.items()}
        self._begin_window()
        if whole and gpu.value(GpuReadings.busy_seconds_total) is not None:
            share.busy, share.idle = share.busy or 0.0, share.idle or 0.0
        if whole and any(
            gpu.value(row) is not None for row in (GpuReadings.energy_joules_total, GpuReadings.power_usage_watts)
        ):
            share.joules = share.joules or 0.0
        for reason in throttled_seconds(gpu):
            share.throttled.setdefault(reason, 0.0)
            share.throttled_steps.setdefault(reason, 0.0)

    def _begin_window(self) -> None:
        self._held = self._stepped = 0.0
        self._joules: float | None = None
        self._events: dict[str, tuple[float, float]] = {}  # seconds, and those in steps

    def update(self, meter: Meter, *, held: bool, stepping: bool) -> None:
        """Add what the GPU did since the last poll, if the run held it."""
        if meter.lapse is not None and held:
            self._add_lapse(meter.lapse, counts_joules=meter.counts_joules, stepping=stepping)
        if meter.window is not None:
            self._add_window(meter.window)

    def _add_lapse(self, lapse: Lapse, *, counts_joules: bool, stepping: bool) -> None:
        share, seconds = self.share, lapse.seconds
        share.seconds += seconds
        if self._whole and lapse.busy is not None:
            share.busy = (share.busy or 0.0) + lapse.busy
            share.idle = (share.idle or 0.0) + seconds - lapse.busy
        self._held += seconds
        in_steps = seconds if stepping else 0.0
        self._stepped += in_steps
        for reason in lapse.active:
            before = self._events.get(reason, (0.0, 0.0))
            self._events[reason] = before[0] + seconds, before[1] + in_steps
        if self._whole and lapse.joules is not None:
            if counts_joules:
                self._joules = (self._joules or 0.0) + lapse.joules
            else:
                self._add_joules_by_power(lapse.joules)

    def _add_window(self, window: Window) -> None:
        if self._held:
            part, in_steps = (min(each / window.seconds, 1.0) for each in (self._held, self._stepped))
            if self._whole and window.joules is not None:  # the counter is the whole GPU's
                self.share.joules = (self.share.joules or 0.0) + window.joules * part
            else:
                self._add_joules_by_power(self._joules)
            self._add_throttled({r: (each * part, each * in_steps) for r, each in window.throttled.items()})
        self._begin_window()

    def settle(self) -> None:
        """Count what was polled since the driver's counters were last read: the run has ended, or the daemon does."""
        self._add_joules_by_power(self._joules)
        self._add_throttled(self._events)
        self._begin_window()

    def _add_joules_by_power(self, joules: float | None) -> None:
        self.share.joules = _sum(self.share.joules, joules)
        self.share.joules_by_power = _sum(self.share.joules_by_power, joules)

    def _add_throttled(self, seconds: Mapping[str, tuple[float, float]]) -> None:
        throttled, steps = self.share.throttled, self.share.throttled_steps
        for reason, (each, in_steps) in seconds.items():
            throttled[reason] = throttled.get(reason, 0.0) + each
            steps[reason] = steps.get(reason, 0.0) + in_steps

    def update_xids(self, gpu: Gpu, first: float, last: float) -> None:
        """Count XIDs that are new and came from `first` to `last`, in Unix time."""
        for code, xid in gpu.xids.items():
            new = xid.count - self._xids_before.get(code, 0)
            if new > 0:
                self._xids_before[code] = xid.count
                if first <= xid.last <= last:
                    self.share.xids[code] = self.share.xids.get(code, 0) + new


@dataclass(slots=True)
class RunUsage:
    """Usage by one run up to now: shares by UUID of a GPU or MIG instance, seconds by phase, bytes of host memory.

    A run's own account goes on from poll to poll, on the event loop; `now` copies it. `tallies` are of the devices that
    it holds or held while this daemon watched it; `step_seconds` is as of its last report.
    """

    shares: dict[str, DeviceUsage] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    host_memory_peak: int | None = None
    tallies: dict[str, Tally] = field(default_factory=dict, init=False, repr=False, compare=False)
    step_seconds: float = field(default=0.0, init=False, repr=False, compare=False)
    up: bool = field(default=True, init=False, repr=False, compare=False)

    def now(self) -> RunUsage:
        """Return a copy that further polls do not change."""
        shares = {uuid: share.copy() for uuid, share in self.shares.items()}
        return RunUsage(shares, dict(self.phases), self.host_memory_peak)

    def resume(self, before: RunUsage) -> None:
        """Add what was counted before, by an earlier daemon or before the run was gone for a while."""
        for uuid, share in before.shares.items():
            if uuid in self.shares:
                self.shares[uuid].add(share)
            else:
                self.shares[uuid] = share.copy()
        for phase, seconds in before.phases.items():
            self.phases[phase] = self.phases.get(phase, 0.0) + seconds
        self.host_memory_peak = max(_known(self.host_memory_peak, before.host_memory_peak), default=None)

    def take_over(self, other: RunUsage) -> None:
        """Become the other account of the same run, which nothing else keeps, with what is under way."""
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))

    def hold(self, uuid: str, gpu: Gpu, *, whole: bool) -> None:
        """Begin to count usage of a GPU or MIG instance, from this poll on."""
        share = self.shares.setdefault(uuid, DeviceUsage(gpu.identity.name))
        self.tallies[uuid] = Tally(share, gpu, whole=whole)

    def add_phase(self, phase: Phase, seconds: float) -> None:
        """Count time in a phase."""
        if not self.phases:
            self.phases = dict[str, float].fromkeys(PHASES, 0.0)
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds  # an earlier daemon's count may lack it

    def update_host_memory(self, used: int) -> None:
        """Record the peak of host memory, in bytes."""
        self.host_memory_peak = max(_known(self.host_memory_peak, used or None), default=None)

    def settle(self) -> None:
        """Count all that was polled: the run has ended, or the daemon does."""
        for tally in self.tallies.values():
            tally.settle()


def _sum(one: float | None, other: float | None) -> float | None:
    return one if other is None else other if one is None else one + other


def _known(*values: T | None) -> list[T]:
    return [each for each in values if each is not None]
