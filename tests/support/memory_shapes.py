"""Trainings whose memory has a known shape, reported as the callback does: between steps, four times a second.

Bytes by time, for tests of what looks for growth. Nothing here is random but by its seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gpuwarden.analysis.memory.downsampling import Downsampled
from gpuwarden.analysis.memory.leak_detector import Leak, LeakDetector
from gpuwarden.analysis.memory.memory_history import MemoryWindow, window_from_sample
from gpuwarden.protocol.messages import DeviceMemory

MIB = 1 << 20
REPORT_SECONDS = 0.25
POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Training:
    """A training of some `seconds`, which ends earlier if a step finds no memory.

    `kept` gives by time the bytes that stay on top of `base`; `noise` are bytes of batches that wait, `transient` those
    of a step, of which `varied` is a random share. A `step` and an `epoch` last so many seconds; a validation of
    `validation` seconds at an epoch's end leaves `leaked` bytes.
    """

    kept: Callable[[float], float] = lambda _at: 0.0
    seconds: float = 120.0
    cap: int = 512 * MIB
    base: int = 150 * MIB
    transient: int = 60 * MIB
    noise: int = 0
    varied: float = 0.0
    step: float = 0.0625  # exact in binary, as are sums of it: times that are shifted stay the same distances apart
    epoch: float = 2.0
    validation: float = 0.0
    leaked: int = 0
    seed: int = 1


@dataclass
class DetectedLeaks:
    """Results of each poll, and the time when there was no memory left, if ever."""

    polls: list[tuple[float, Leak | None]] = field(default_factory=list)
    ended: float | None = None

    @property
    def leaks(self) -> list[tuple[float, Leak]]:
        """The polls at which it grew."""
        return [(at, growth) for at, growth in self.polls if growth is not None]


class MemorySeries(Downsampled[MemoryWindow]):
    """Series of a run's memory in use."""

    def add_report(self, at: float, current: float, peak: float | None = None, limit: float | None = None) -> None:
        """Add one report, in bytes."""
        memory = DeviceMemory(int(current), int(current if peak is None else peak))
        since = at if self.newest is None else self.newest.ended
        self.append(window_from_sample(at, memory, since=since, limit=limit))


class OutOfMemoryError(Exception):
    """A step found no memory, at a time."""


def _reports(training: Training) -> Iterator[tuple[float, float, float]]:
    """Yield times, bytes in use, and the allocator's mark."""
    chance = random.Random(training.seed)  # noqa: S311 - the same each time
    at, due, peak, leaked = 0.0, 0.0, 0.0, 0.0
    epoch_ends = training.epoch
    while at < training.seconds:
        if at >= epoch_ends:
            ends = at + training.validation
            while at < ends:
                held = training.base + training.kept(at) + leaked
                peak = max(peak, held + training.transient / 2)
                yield at, held, peak
                leaked += training.leaked * REPORT_SECONDS / training.validation
                at += REPORT_SECONDS
            epoch_ends = at + training.epoch
        held = training.base + training.kept(at) + leaked + chance.random() * training.noise
        highest = held + training.transient * (1 - training.varied * chance.random())
        if highest > training.cap:
            raise OutOfMemoryError(at)
        peak = max(peak, highest)
        if at >= due:
            due = at + REPORT_SECONDS
            yield at, held, peak
        at += training.step


def detect_leaks(training: Training, *, scale: float = 1.0, shift: float = 0.0) -> DetectedLeaks:
    """Simulate the training, and evaluate each poll. Bytes are multiplied by `scale`, times shifted by `shift`."""
    seen, memory, watch, due = DetectedLeaks(), MemorySeries(), LeakDetector(), POLL_SECONDS
    try:
        for at, current, peak in _reports(training):
            while at >= due:
                seen.polls.append((due, watch.evaluate(memory, due + shift)))
                due += POLL_SECONDS
            memory.add_report(at + shift, current * scale, peak * scale, training.cap * scale)
    except OutOfMemoryError as error:
        seen.ended = error.args[0]
    return seen
