"""Usage of GPUs by a run, as values: from polls, or from the record of an earlier daemon."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")
Key = TypeVar("Key")
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, slots=True)
class DeviceUsage:
    """Usage of one GPU or MIG instance up to now; None or empty if unknown.

    `seconds` is the time with memory allocated there, `busy` and `idle` its parts with and without a running kernel of
    any process. `joules` is the energy of the whole GPU, `joules_by_power` its part computed from polled power.
    `throttled` is seconds by reason, `throttled_steps` the part in training steps. `xids` counts by code.
    """

    name: str
    seconds: float = 0.0
    busy: float | None = None
    idle: float | None = None
    joules: float | None = None
    joules_by_power: float | None = None
    throttled: Mapping[str, float] = field(default_factory=dict)
    throttled_steps: Mapping[str, float] = field(default_factory=dict)
    memory_peak: int | None = None
    memory_limit: int | None = None
    headroom_at_peak: float | None = None
    lowest_headroom: float | None = None
    xids: Mapping[int, int] = field(default_factory=dict)

    def after(self, earlier: DeviceUsage) -> DeviceUsage:
        """Return this usage and earlier one together."""
        peak = earlier if (earlier.memory_peak or 0) >= (self.memory_peak or 0) else self
        return DeviceUsage(
            self.name,
            seconds=self.seconds + earlier.seconds,
            busy=sum_of_known(self.busy, earlier.busy),
            idle=sum_of_known(self.idle, earlier.idle),
            joules=sum_of_known(self.joules, earlier.joules),
            joules_by_power=sum_of_known(self.joules_by_power, earlier.joules_by_power),
            throttled=sum_by_key(earlier.throttled, self.throttled),
            throttled_steps=sum_by_key(earlier.throttled_steps, self.throttled_steps),
            memory_peak=peak.memory_peak,
            memory_limit=earlier.memory_limit if self.memory_limit is None else self.memory_limit,
            headroom_at_peak=peak.headroom_at_peak,
            lowest_headroom=min(known(earlier.lowest_headroom, self.lowest_headroom), default=None),
            xids=sum_by_key(earlier.xids, self.xids),
        )


@dataclass(frozen=True, slots=True)
class RunUsage:
    """Usage by one run up to now: shares by UUID of a GPU or MIG instance, seconds by phase, bytes of host memory."""

    shares: Mapping[str, DeviceUsage] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    host_memory_peak: int | None = None

    def after(self, earlier: RunUsage) -> RunUsage:
        """Return this usage and earlier one together."""
        shares = dict(earlier.shares)
        for uuid, share in self.shares.items():
            shares[uuid] = share.after(shares[uuid]) if uuid in shares else share
        peak = max(known(earlier.host_memory_peak, self.host_memory_peak), default=None)
        return RunUsage(shares, sum_by_key(earlier.phases, self.phases), peak)


NO_USAGE = RunUsage()


def sum_of_known(one: float | None, other: float | None) -> float | None:
    """Return the sum of the values that are not None; None if both are."""
    return one if other is None else other if one is None else one + other


def known(*values: T | None) -> list[T]:
    """Return the values that are not None."""
    return [each for each in values if each is not None]


def sum_by_key(one: Mapping[Key, Number], other: Mapping[Key, Number]) -> dict[Key, Number]:
    """Return the sum of the values of each key."""
    sums = dict(one)
    for key, value in other.items():
        sums[key] = sums[key] + value if key in sums else value
    return sums
