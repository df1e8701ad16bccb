"""Usage of GPUs by a run since this daemon first saw it, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")
Key = TypeVar("Key")
Number = TypeVar("Number", int, float)


@dataclass(slots=True)
class DeviceUsage:
    """Usage of one GPU or MIG instance up to now; None or empty if unknown.

    `gpu_seconds` is the time with memory allocated there, `busy_seconds` and `idle_seconds` its parts with and without
    a running kernel of any process. `energy_joules` is the energy of the whole GPU, `energy_by_power_joules` its part
    computed from polled power. `throttled_seconds` is by reason, `throttled_step_seconds` the part in training steps.
    `xids` counts by code. The names are those of RecordedDevice, which has the rules for joining usage.
    """

    name: str
    gpu_seconds: float = 0.0
    busy_seconds: float | None = None
    idle_seconds: float | None = None
    energy_joules: float | None = None
    energy_by_power_joules: float | None = None
    throttled_seconds: Mapping[str, float] = field(default_factory=dict)
    throttled_step_seconds: Mapping[str, float] = field(default_factory=dict)
    memory_peak_bytes: int | None = None
    memory_limit_bytes: int | None = None
    headroom_at_peak_bytes: float | None = None
    lowest_headroom_bytes: float | None = None
    xids: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunUsage:
    """Usage by one run up to now: devices by UUID of a GPU or MIG instance, seconds by phase, bytes of host memory."""

    devices: Mapping[str, DeviceUsage] = field(default_factory=dict)
    phases: Mapping[str, float] = field(default_factory=dict)
    host_memory_peak: int | None = None


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
