"""Simulated hardware of one GPU: load sets power, power sets temperature, and both limit the clocks."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from faulty_simulation import MAX_OPERATING, SLOWDOWN

POWER_LIMIT = 700.0  # watts, as an H100 SXM's
MAX_CLOCK, IDLE_CLOCK, CLOCK_STEP = 1980, 345, 15  # megahertz

_IDLE_WATTS = 69.0
_CONTEXT_WATTS = 117.0  # a context alone keeps the clocks up
_KERNEL_WATTS = 640.0  # in addition to a context's, for kernels of intensity 1 at the highest clock
_CAPPED_WATTS = POWER_LIMIT - 12.0  # mean at the power cap: swings must stay below the limit
_SWING_RATIO = 0.018
_CLOCK_EXPONENT = 2.2  # power rises faster than the clock, as voltage rises with it
_MIN_CLOCK_RATIO = 0.3
_HARDWARE_SLOWDOWN_RATIO = 0.5
_HOT = MAX_OPERATING - 1e-6  # rounding must not put a board that is held there below it
_THERMAL_SECONDS = 28.0  # time constant of die and heat sink
_CELSIUS_PER_WATT = 0.056
_INLET_CELSIUS, _MIDDLE_CELSIUS = 29.0, 6.0  # GPUs in the middle of the chassis get warmer air


@dataclass(frozen=True, slots=True)
class Load:
    """Load of software on a board; all are ratios. Without a context the clocks idle."""

    utilization: float = 0.0
    bandwidth: float = 0.0
    intensity: float = 0.0  # power of its kernels, relative to the most demanding ones
    context: bool = True
    exchange: float = 0.0  # ratio of NVLink's bandwidth


NO_LOAD = Load(context=False)


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """Operating point: mean power in watts, clock as a ratio of the highest, and the reasons that limit the clock."""

    power: float
    clock: float
    reasons: frozenset[str] = frozenset()


class Board:
    """Hardware of one GPU. `advance` moves its time forward; readings are of its current time."""

    def __init__(self, rng: random.Random, *, slot: int, cooling: float = 1.0) -> None:
        self._phase = rng.uniform(0, 2 * math.pi)
        self._resistance = _CELSIUS_PER_WATT / cooling
        self._ambient = _INLET_CELSIUS + _MIDDLE_CELSIUS * (1 - abs(2 * (slot % 8) / 7 - 1)) + rng.uniform(-1, 1)
        self._temperature = self._ambient + self._resistance * _IDLE_WATTS
        self._time = 0.0
        self.load = NO_LOAD
        self.pinned: float | None = None  # temperature that a test holds the board at, in celsius
        self.energy = rng.uniform(5e7, 4e8)  # joules: the driver has been loaded for some days
        self.busy = rng.uniform(1e5, 4e5)  # seconds, as `utilization` adds up
        self.exchanged = 0.0  # seconds, as `exchange` adds up
        self.held: dict[str, float] = {}  # seconds that each reason has limited the clock

    @property
    def temperature(self) -> float:
        """Core temperature in celsius."""
        return self._temperature if self.pinned is None else self.pinned

    @property
    def memory_temperature(self) -> float:
        """Temperature of the device memory in celsius."""
        return self.temperature - 5 + 9 * self.load.bandwidth

    @property
    def power(self) -> float:
        """Current power draw, in watts."""
        mean = self.point.power
        return mean + _SWING_RATIO * (mean - _IDLE_WATTS) * self._wave

    @property
    def clock(self) -> int:
        """SM clock in megahertz, in steps of the hardware."""
        return CLOCK_STEP * round(MAX_CLOCK * self.point.clock / CLOCK_STEP)

    @property
    def utilization(self) -> tuple[int, int]:
        """Percent of the sample period with a kernel running, and with device memory busy."""
        busy, bandwidth = self.load.utilization, self.load.bandwidth
        return (
            round(100 * min(1.0, busy * (1 + 0.025 * self._wave))),
            round(100 * min(1.0, bandwidth * (1 + 0.06 * self._wave))),
        )

    @property
    def reasons(self) -> frozenset[str]:
        """Reasons that limit the clock."""
        return self.point.reasons

    @property
    def point(self) -> OperatingPoint:
        """Operating point for the current load and temperature."""
        if not self.load.context:
            return OperatingPoint(_IDLE_WATTS, IDLE_CLOCK / MAX_CLOCK, frozenset({"gpu_idle"}))
        kernels = self.load.utilization * self.load.intensity * _KERNEL_WATTS
        allowed, reason = _CAPPED_WATTS, "sw_power_cap"
        # Software slowdown allows the power that keeps the temperature at its limit.
        sustained = (MAX_OPERATING - self._ambient) / self._resistance
        if self.temperature >= _HOT and sustained < allowed:
            allowed, reason = sustained, "sw_thermal_slowdown"
        clock, reasons = 1.0, set[str]()
        if _CONTEXT_WATTS + kernels > allowed:
            clock = max(_MIN_CLOCK_RATIO, (max(0.0, allowed - _CONTEXT_WATTS) / kernels) ** (1 / _CLOCK_EXPONENT))
            reasons = {reason}
        if self.temperature >= SLOWDOWN:
            clock = min(clock, _HARDWARE_SLOWDOWN_RATIO)
            reasons |= {"hw_slowdown", "hw_thermal_slowdown"}
        return OperatingPoint(_CONTEXT_WATTS + kernels * clock**_CLOCK_EXPONENT, clock, frozenset(reasons))

    def advance(self, seconds: float, load: Load) -> float:
        """Run `load` for that time; return the clock, as a ratio of the highest."""
        self.load = load
        point = self.point
        self._time += seconds
        self.energy += point.power * seconds
        self.busy += seconds * load.utilization
        self.exchanged += seconds * load.exchange
        for reason in point.reasons:
            self.held[reason] = self.held.get(reason, 0.0) + seconds
        equilibrium = self._ambient + self._resistance * point.power
        warmed = equilibrium + (self._temperature - equilibrium) * math.exp(-seconds / _THERMAL_SECONDS)
        self._temperature = min(warmed, MAX_OPERATING)
        return point.clock

    @property
    def _wave(self) -> float:
        """Variation of a load over time, from -1 to 1: two sines with unrelated periods."""
        return 0.6 * math.sin(0.83 * self._time + self._phase) + 0.4 * math.sin(2.17 * self._time + 3 * self._phase)
