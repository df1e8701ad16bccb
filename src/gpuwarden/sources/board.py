"""The physics of one simulated GPU: power follows load, temperature follows power, clocks give way to both limits.

All forms are closed: an hour costs what a second does, and asking more often changes nothing.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import NamedTuple

POWER_LIMIT = 700.0  # watts, as an H100 SXM's
THRESHOLDS = {"shutdown": 92, "slowdown": 89, "max_operating": 87, "memory_max_operating": 95}  # celsius
# What is left to slowdown at each of them, as T.Limit counts it.
MARGINS = {name: THRESHOLDS["slowdown"] - celsius for name, celsius in THRESHOLDS.items()} | {"memory_max_operating": 0}
MAX_CLOCK, IDLE_CLOCK, MEMORY_CLOCK, CLOCK_STEP = 1980, 345, 2619, 15  # megahertz

_IDLE_WATTS = 69.0
_CONTEXT_WATTS = 117.0  # a context alone keeps the clocks up
_KERNEL_WATTS = 640.0  # above a context's, for kernels of intensity 1 at the highest clock
_CAPPED_WATTS = POWER_LIMIT - 12.0  # the mean under the power cap: the swing below must stay under the limit
_CLOCK_EXPONENT = 2.2  # power rises faster than the clock, as voltage rises with it
_LEAST_CLOCK = 0.3  # of the highest
_HARDWARE_SLOWDOWN = 0.5  # the hardware slows by a factor of two or more
_SLOWDOWN, _MAX_OPERATING = THRESHOLDS["slowdown"], THRESHOLDS["max_operating"]
_HOT = _MAX_OPERATING - 1e-6  # held there, rounding must not let the temperature cross the limit again and again
_THERMAL_SECONDS = 28.0  # time constant of die and heat sink
_CELSIUS_A_WATT = 0.056
_MEMORY_CELSIUS = -5.0  # of HBM against the die, which a busy memory catches up with:
_MEMORY_BUSY_CELSIUS = 9.0
PCIE_BYTES_A_SECOND = {"transmit": 0.3e9, "receive": 2.2e9}  # by a board that is busy all the time
NVLINK_LINKS, NVLINK_LINK_SPEED = 18, 26562  # megabytes a second in each direction
_INLET_CELSIUS, _MIDDLE_CELSIUS = 29.0, 6.0  # GPUs in the middle of the chassis breathe their neighbours' air


class Load(NamedTuple):
    """What software asks of a board; all are ratios. Without a context the clocks idle."""

    utilization: float = 0.0
    bandwidth: float = 0.0
    intensity: float = 0.0  # power of its kernels, compared with the hungriest ones
    context: bool = True
    exchange: float = 0.0  # of NVLink's bandwidth, with other GPUs


NO_LOAD = Load(context=False)


class Pins(NamedTuple):
    """Readings held by a test, in base units; the rest of the board follows them."""

    temperature: float | None = None
    power: float | None = None
    utilization: float | None = None
    memory_used: int | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """Where a board settles: mean power in watts, clock as a ratio of the highest, and what holds the clock down."""

    power: float
    clock: float
    reasons: frozenset[str] = frozenset()


class Board:
    """One GPU's hardware. `advance` moves it through time; readings are of the moment it has reached."""

    def __init__(self, rng: random.Random, *, slot: int, now: float, cooling: float = 1.0) -> None:
        self._phase = rng.uniform(0, 2 * math.pi)
        self._resistance = _CELSIUS_A_WATT / cooling
        self._ambient = _INLET_CELSIUS + _MIDDLE_CELSIUS * (1 - abs(2 * (slot % 8) / 7 - 1)) + rng.uniform(-1, 1)
        self._temperature = self._ambient + self._resistance * _IDLE_WATTS
        self._load = NO_LOAD
        self._time = now
        self.energy = rng.uniform(5e7, 4e8)  # joules: the driver has been loaded for some days
        self.busy = rng.uniform(1e5, 4e5)  # seconds, as `utilization` adds up
        self.exchanged = 0.0  # seconds, as `exchange` adds up
        self.held: dict[str, float] = {}  # seconds that each reason has held the clock down
        self.pins = Pins()

    @property
    def load(self) -> Load:
        """What runs on it now, pins included."""
        if self.pins.utilization is None:
            return self._load
        return self._load._replace(
            utilization=self.pins.utilization, context=True, intensity=self._load.intensity or 0.7
        )

    @property
    def temperature(self) -> float:
        """Core temperature in celsius."""
        return self._temperature if self.pins.temperature is None else self.pins.temperature

    @property
    def memory_temperature(self) -> float:
        """Temperature of the device memory in celsius."""
        return self.temperature + _MEMORY_CELSIUS + _MEMORY_BUSY_CELSIUS * self.load.bandwidth

    @property
    def point(self) -> Point:
        """Where the board settles now."""
        point = self._settle(self.load, self.temperature)
        return point if self.pins.power is None else replace(point, power=self.pins.power)

    @property
    def power(self) -> float:
        """Power drawn at this moment, in watts."""
        mean = self.point.power
        return mean + self._swing(mean) * self._wave(self._time)

    @property
    def clock(self) -> int:
        """SM clock in megahertz, in the steps that the hardware has."""
        clock = self.point.clock
        if clock < 1 and self.load.context:
            clock = min(1.0, clock + 0.012 * self._wave(self._time))  # a governor hunts around its target
        return CLOCK_STEP * round(MAX_CLOCK * clock / CLOCK_STEP)

    @property
    def utilization(self) -> tuple[int, int]:
        """Percent of the sample period with a kernel running, and with device memory busy."""
        load, wave = self.load, self._wave(self._time)
        busy = load.utilization if self.pins.utilization is not None else load.utilization * (1 + 0.025 * wave)
        return round(100 * min(1.0, busy)), round(100 * min(1.0, load.bandwidth * (1 + 0.06 * wave)))

    def advance(self, until: float, load: Load) -> float:
        """Run `load` until that time; return the work done, in seconds at the highest clock."""
        self._load, work = load, 0.0
        while self._time < until:
            point = self.point
            seconds = self._seconds_until_hot(point.power)
            if self._time + seconds < until:
                self._spend(point.power, self._time + seconds)
                self._temperature = _MAX_OPERATING
            else:
                seconds = until - self._time
                self._spend(point.power, until)
            self.busy += seconds * self.load.utilization
            self.exchanged += seconds * self.load.exchange
            self.held |= {reason: self.held.get(reason, 0.0) + seconds for reason in point.reasons}
            work += seconds * point.clock
        return work

    def _settle(self, load: Load, temperature: float) -> Point:
        if not load.context:
            return Point(_IDLE_WATTS, IDLE_CLOCK / MAX_CLOCK, frozenset({"gpu_idle"}))
        kernels = load.utilization * load.intensity * _KERNEL_WATTS
        allowed, reasons = _CAPPED_WATTS, {"sw_power_cap"}
        if temperature >= _HOT:
            # The software slowdown draws just the power that holds the temperature where it is allowed to be.
            sustained = (_MAX_OPERATING - self._ambient) / self._resistance
            if sustained < allowed:
                allowed, reasons = sustained, {"sw_thermal_slowdown"}
        clock = 1.0
        if _CONTEXT_WATTS + kernels > allowed:
            clock = max(_LEAST_CLOCK, (max(0.0, allowed - _CONTEXT_WATTS) / kernels) ** (1 / _CLOCK_EXPONENT))
        else:
            reasons = set()
        if temperature >= _SLOWDOWN:
            clock, reasons = min(clock, _HARDWARE_SLOWDOWN), reasons | {"hw_slowdown", "hw_thermal_slowdown"}
        return Point(_CONTEXT_WATTS + kernels * clock**_CLOCK_EXPONENT, clock, frozenset(reasons))

    def _seconds_until_hot(self, power: float) -> float:
        """How long the board draws that much before heat makes it slow down; endless when it never does."""
        equilibrium = self._ambient + self._resistance * power
        if self.pins.temperature is not None or self._temperature >= _HOT or equilibrium <= _MAX_OPERATING:
            return math.inf
        return _THERMAL_SECONDS * math.log((equilibrium - self._temperature) / (equilibrium - _MAX_OPERATING))

    def _spend(self, power: float, until: float) -> None:
        """Draw that mean power until that time: energy is its integral, temperature closes in on its equilibrium."""
        seconds = until - self._time
        self.energy += power * seconds + self._swing(power) * (self._wave_sum(until) - self._wave_sum(self._time))
        equilibrium = self._ambient + self._resistance * power
        self._temperature = equilibrium + (self._temperature - equilibrium) * math.exp(-seconds / _THERMAL_SECONDS)
        self._time = until

    def _swing(self, power: float) -> float:
        return 0.0 if self.pins.power is not None else 0.4 + 0.018 * max(0.0, power - _IDLE_WATTS)

    def _wave(self, time: float) -> float:
        """Return the coming and going of steps: two periods without a common one, between -1 and 1."""
        return 0.6 * math.sin(0.83 * time + self._phase) + 0.4 * math.sin(2.17 * time + 3 * self._phase)

    def _wave_sum(self, time: float) -> float:
        """Return the integral of `_wave`."""
        return -0.6 / 0.83 * math.cos(0.83 * time + self._phase) - 0.4 / 2.17 * math.cos(2.17 * time + 3 * self._phase)
