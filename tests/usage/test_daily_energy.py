"""Energy of all GPUs since midnight."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.usage.daily_energy import DailyEnergy, Energy
from snapshots import gpu, snapshot

MIDNIGHT = 1_800_057_600.0  # UTC


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the time zone."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def counting(index: int, at: float, joules: float) -> Gpu:
    """Return a GPU with an energy counter, as read at a monotonic time."""
    return replace(gpu(index), readings={GpuReadings.energy_joules_total: joules}, taken=at, slow_taken=at)


def drawing(index: int, at: float, watts: float) -> Gpu:
    """Return a GPU that reports only its power."""
    return replace(gpu(index), readings={GpuReadings.power_usage_watts: watts}, taken=at, slow_taken=0.0)


def test_energy_is_counted_or_integrated() -> None:
    """A counter's increase, and power without one, are added; a reset counter and a long gap add nothing."""
    energy = DailyEnergy(10.0)
    at = MIDNIGHT + 3600
    assert energy.add_poll(replace(snapshot(counting(0, 0.0, 500.0), drawing(1, 0.0, 100.0)), time=at)) is None
    polled = replace(snapshot(counting(0, 10.0, 3500.0), drawing(1, 10.0, 100.0)), time=at + 10)
    assert energy.add_poll(polled) == Energy(4000.0, at)
    energy.add_poll(replace(snapshot(counting(0, 20.0, 0.0), drawing(1, 100.0, 100.0)), time=at + 100))
    assert energy.add_poll(replace(snapshot(counting(0, 30.0, 50.0)), time=at + 110)) == Energy(4050.0, at)


def test_day_starts_at_local_midnight() -> None:
    """The first poll of a day starts at zero."""
    energy = DailyEnergy(10.0)
    for second in range(20):
        polled = snapshot(counting(0, float(second), 100.0 * second))
        found = energy.add_poll(replace(polled, time=MIDNIGHT - 10 + second))
    assert found == Energy(1000.0, MIDNIGHT)


def test_host_without_power_readings_has_no_energy() -> None:
    """Without counters and power no energy is known."""
    energy = DailyEnergy(10.0)
    assert [energy.add_poll(snapshot(gpu(0))) for _ in range(3)] == [None] * 3
