"""Pressure levels: thresholds, immediate rise, delayed fall, and devices without a level."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.analysis.memory.oom_forecast import TimeLeft
from gpuwarden.config import thresholds
from gpuwarden.config.schema import PressureConfig as Limits
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu, GpuProcess
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.metrics.model import Metric, Reading
from gpuwarden.pressure.levels import (
    Pressure,
    PressureWatch,
    RunPressure,
    forecast_level,
    headroom_level,
    thermal_level,
    worse,
)
from gpuwarden.protocol.messages import DeviceMemory, Hello, Level
from gpuwarden.runs.run_snapshot import JoinedPoll, RunSnapshot
from snapshots import GIB, gpu, mig_gpu, snapshot

LIMITS = Limits()
COOL = (False, False)


def run(number: int, uuid: str, *, in_use: float, left: float) -> RunSnapshot:
    """Make a run with GiB in use and left on one device."""
    memory = {uuid: DeviceMemory(int(in_use * GIB), int(in_use * GIB))}
    peer = ProcessKey(number, 1000, 1)
    hello, headroom = Hello(f"run-{number}", "none", {}), {uuid: left * GIB}
    return RunSnapshot(peer, hello, None, None, True, True, memory, headroom, devices={uuid: True})


def listed(each: Gpu, *pids: int) -> Gpu:
    """Return a GPU on which the driver lists these processes."""
    processes = tuple(GpuProcess(pid, "compute", GIB) for pid in pids)
    return replace(each, processes=processes, process_lists=("compute", "graphics"))


def heated(each: Gpu, margin: float | None = None, *reasons: str) -> Gpu:
    """Return a GPU with a temperature margin, and with these clock event reasons active."""
    known = ("sw_thermal_slowdown", "hw_thermal_slowdown", "gpu_idle")
    readings: dict[Metric[Any], Reading] = {
        **each.readings,
        GpuReadings.temperature_margin_celsius: margin,
        GpuReadings.clock_event_active: {(name,): float(name in reasons) for name in known},
    }
    return replace(each, readings=readings)


def test_headroom_within_steps() -> None:
    """A run that grows with its steps has what these leave, not what is free between them."""
    between = run(1, "GPU-0", in_use=40.0, left=8.0)
    watch = PressureWatch(LIMITS)
    poll = JoinedPoll(snapshot(listed(gpu(0), 1)), [between], 0.0)
    assert watch.evaluate(poll).of_runs[between.peer.run_id, "GPU-0"].level == "none"
    within = replace(between, headroom_in_step={"GPU-0": GIB})
    pressure = watch.evaluate(replace(poll, runs=[within])).of_runs[between.peer.run_id, "GPU-0"]
    assert (pressure.level, pressure.headroom, pressure.left_text) == ("critical", GIB, "left within a step (2.4 %)")


def test_defaults_are_those_of_the_alerts() -> None:
    """Memory is critical where RunNearOutOfMemory fires; heat is a warning where GpuNearThermalSlowdown does."""
    assert LIMITS.memory_critical == thresholds.NEAR_OUT_OF_MEMORY < LIMITS.memory_warning == thresholds.LITTLE_MEMORY
    assert LIMITS.thermal_warning == thresholds.NEAR_SLOWDOWN > LIMITS.thermal_critical == thresholds.SLOWDOWN
    assert LIMITS.oom_critical == thresholds.OUT_OF_MEMORY_SOON_SECONDS
    assert LIMITS.oom_warning == thresholds.OUT_OF_MEMORY_AHEAD_SECONDS


@pytest.mark.parametrize(
    ("share", "seconds", "level"),
    [
        (0.11, None, "none"),
        (0.10, None, "warning"),
        (0.051, None, "warning"),
        (0.05, None, "critical"),
        (0.0, None, "critical"),
        (0.9, 601.0, "none"),
        (0.9, 600.0, "warning"),
        (0.9, 60.0, "critical"),
        (0.07, 60.0, "critical"),
        (0.05, 9999.0, "critical"),
    ],
)
def test_levels_of_memory(share: float, seconds: float | None, level: Level) -> None:
    """The worse of headroom and OOM forecast sets the level."""
    assert worse(headroom_level(LIMITS, share), forecast_level(LIMITS, seconds)) == level


@pytest.mark.parametrize(
    ("margin", "slowed", "level"),
    [
        (6.0, COOL, "none"),
        (5.0, COOL, "warning"),
        (0.5, COOL, "warning"),
        (0.0, COOL, "critical"),
        (-2.0, COOL, "critical"),
        (None, COOL, "none"),
        (30.0, (True, False), "warning"),
        (30.0, (False, True), "critical"),
        (None, (False, True), "critical"),
    ],
)
def test_levels_of_heat(margin: float | None, slowed: tuple[bool, bool], level: Level) -> None:
    """The level follows the margin, and thermal throttling whatever the margin."""
    assert thermal_level(LIMITS, margin, slowed) == level


class RunOnGpu:
    """A pressure watch of one run that uses up to 100 GiB of a GPU."""

    def __init__(self) -> None:
        self.watch = PressureWatch(LIMITS)

    def level(self, percent: float, now: float) -> Level:
        """Poll with this headroom in percent; return the level."""
        there = run(7, "GPU-0", in_use=100 - percent, left=percent)
        return self.watch.evaluate(JoinedPoll(snapshot(listed(gpu(0), 7)), [there], now)).levels["GPU-0", "memory"]


def test_level_rises_at_once() -> None:
    """A worse level applies from the next poll."""
    host = RunOnGpu()
    assert [host.level(percent, now) for now, percent in enumerate((50, 9, 4))] == ["none", "warning", "critical"]
    assert RunOnGpu().level(1, 0.0) == "critical"


def test_unverified_run_is_a_warning_at_most() -> None:
    """A run that the driver's list cannot confirm is a warning, for itself and for its GPU."""
    there = replace(run(7, "GPU-0", in_use=99, left=0), devices={"GPU-0": False})
    pressure = PressureWatch(LIMITS).evaluate(JoinedPoll(snapshot(listed(gpu(0), 8)), [there], 0.0))
    assert pressure.levels["GPU-0", "memory"] == pressure.of_runs["7-1", "GPU-0"].level == "warning"


def test_level_falls_late() -> None:
    """The level falls after memory was clearly better for the whole hold time; one poll below restarts it."""
    host = RunOnGpu()
    host.level(4, 0.0)
    assert host.level(7, 100.0) == "critical"  # above the threshold, but not clearly
    assert host.level(40, 101.0) == "critical"
    assert host.level(7, 120.0) == "critical"
    assert host.level(40, 121.0) == "critical"
    assert host.level(40, 150.9) == "critical"
    assert host.level(40, 151.0) == "none"


def test_level_falls_to_the_worst_within_the_hold_time() -> None:
    """A level that was a warning within the hold time falls to warning, and to none a hold time later."""
    host = RunOnGpu()
    host.level(4, 0.0)
    host.level(12, 1.0)  # clearly not critical, not clearly none
    assert host.level(40, 30.9) == "critical"
    assert host.level(40, 31.0) == "warning"
    assert host.level(40, 60.9) == "warning"
    assert host.level(40, 61.0) == "warning"  # the hold time starts when it is clearly none
    assert host.level(40, 91.0) == "none"


def test_oscillation_about_a_threshold_is_one_episode() -> None:
    """Headroom that oscillates about a threshold changes the level once."""
    host = RunOnGpu()
    levels = [host.level(4.9 if second % 2 else 5.1, float(second)) for second in range(200)]
    assert levels == ["warning"] + ["critical"] * 199


def test_unknown_values_do_not_end_an_episode() -> None:
    """A GPU that misses a poll, or an unknown headroom, keeps the level from before."""
    watch = PressureWatch(LIMITS)
    near = run(7, "GPU-0", in_use=96, left=4)
    better = run(7, "GPU-0", in_use=50, left=50)
    critical = {("GPU-0", "memory"): "critical", ("GPU-0", "thermal"): "warning"}
    assert watch.evaluate(JoinedPoll(snapshot(heated(gpu(0), 3.0)), [near], 0.0)).levels == critical
    down = Gpu(gpu(0).identity, fault="timeout")
    assert watch.evaluate(JoinedPoll(snapshot(down), [replace(near, headroom={})], 1.0)).levels == {}
    assert watch.evaluate(JoinedPoll(snapshot(heated(gpu(0), 50.0)), [better], 2.0)).levels == critical
    watch.evaluate(JoinedPoll(snapshot(heated(gpu(0), 50.0)), [replace(better, up=False, headroom={})], 3.0))
    assert watch.evaluate(JoinedPoll(snapshot(), [better], 4.0)).levels == {
        ("GPU-0", "memory"): "none"
    }  # the run has ended in between
    assert watch.evaluate(JoinedPoll(snapshot(heated(gpu(0), 7.0)), [], 5.0)).levels == {("GPU-0", "thermal"): "none"}


def test_level_of_a_gpu_is_that_of_its_worst_run() -> None:
    """The run with less headroom sets the level; once it is gone, the other does at once."""
    watch = PressureWatch(LIMITS)
    near, far = run(7, "GPU-0", in_use=96, left=4), run(8, "GPU-0", in_use=50, left=50)
    host = snapshot(listed(gpu(0), 7, 8))
    pressure = watch.evaluate(JoinedPoll(host, [near, far], 0.0))
    assert pressure.levels == {("GPU-0", "memory"): "critical"}
    assert {key: each.level for key, each in pressure.of_runs.items()} == {
        ("7-1", "GPU-0"): "critical",
        ("8-1", "GPU-0"): "none",
    }
    assert watch.evaluate(JoinedPoll(host, [far], 1.0)).levels == {("GPU-0", "memory"): "none"}
    assert watch.evaluate(JoinedPoll(host, [far, replace(near, headroom={"GPU-0": 50 * GIB})], 2.0)).levels == {
        ("GPU-0", "memory"): "none"
    }  # a run that is gone leaves no state


def test_memory_without_a_report_has_no_level() -> None:
    """Memory of processes that do not report gives no level; an unused GPU has level none."""
    free, taken, silent = listed(gpu(0)), listed(gpu(1), 9), replace(gpu(2), processes=())
    down = Gpu(gpu(3).identity, fault="gpu_is_lost", process_lists=("compute",))
    assert PressureWatch(LIMITS).evaluate(JoinedPoll(snapshot(free, taken, silent, down), [], 0.0)).levels == {
        ("GPU-0", "memory"): "none"
    }


def test_oom_forecast_raises_the_level() -> None:
    """A run with an OOM forecast of five minutes is under pressure until it stops leaking, whatever its headroom."""
    watch, host = PressureWatch(LIMITS), snapshot(listed(gpu(0), 7))
    steady = run(7, "GPU-0", in_use=50, left=50)
    leak = Leak(1.0, GIB, TimeLeft(300.0, 250.0, None))
    leaking = replace(steady, leaks={"GPU-0": leak})
    unbounded = replace(steady, leaks={"GPU-0": replace(leak, left=None)})
    results = [
        watch.evaluate(JoinedPoll(host, [each], now))
        for each, now in ((leaking, 0.0), (unbounded, 1.0), (steady, 31.0))
    ]
    assert [each.levels["GPU-0", "memory"] for each in results] == ["warning", "warning", "none"]
    assert [each.of_runs["7-1", "GPU-0"].seconds_to_oom for each in results] == [300.0, None, None]


def test_level_by_forecast_ends_with_the_leak() -> None:
    """A buffer that filled to its bound is no pressure at once; a level by the headroom is held as ever."""
    watch, host = PressureWatch(LIMITS), snapshot(listed(gpu(0), 7))

    def level(percent: float, seconds: float | None, now: float) -> Level:
        there = run(7, "GPU-0", in_use=100 - percent, left=percent)
        leak = Leak(1.0, GIB, TimeLeft(seconds, 0.0, None)) if seconds is not None else None
        there = replace(there, leaks={"GPU-0": leak} if leak else {})
        return watch.evaluate(JoinedPoll(host, [there], now)).levels["GPU-0", "memory"]

    assert [level(50, 50.0, 0.0), level(50, 70.0, 1.0), level(50, 200.0, 2.0)] == ["critical"] * 3
    assert level(50, None, 3.0) == "none"
    assert level(8, 50.0, 4.0) == "critical"
    assert level(50, None, 5.0) == "warning"
    assert [level(50, None, 34.9), level(50, None, 35.0)] == ["warning", "none"]


def test_mig_instances_have_levels_of_their_own() -> None:
    """Each instance has a level from its own runs and processes; the GPU as a whole has none."""
    host = replace(mig_gpu(0, free=(1, 2, 3), held={7: 0, 9: 1}), process_lists=("compute",))
    there = run(7, "MIG-0-0", in_use=9.7, left=0.3)
    assert PressureWatch(LIMITS).evaluate(JoinedPoll(snapshot(host), [there], 0.0)).levels == {
        ("MIG-0-0", "memory"): "critical",
        ("MIG-0-2", "memory"): "none",
    }


def test_thermal_level_needs_a_reading() -> None:
    """Margin and clock event reasons set the level, which falls late; a device that reports neither has no level."""
    watch = PressureWatch(LIMITS)

    def levels(*gpus: Gpu, now: float) -> Pressure:
        return watch.evaluate(JoinedPoll(snapshot(*gpus), [], now))

    first = levels(
        heated(gpu(0), 40.0),
        heated(gpu(1), 5.0),
        heated(gpu(2), None, "hw_thermal_slowdown"),
        gpu(3),
        now=0.0,
    )
    assert first.levels == {
        ("GPU-0", "thermal"): "none",
        ("GPU-1", "thermal"): "warning",
        ("GPU-2", "thermal"): "critical",
    }
    assert levels(heated(gpu(1), 7.9), now=50.0).levels["GPU-1", "thermal"] == "warning"
    levels(heated(gpu(1), 8.1), now=51.0)
    assert levels(heated(gpu(1), 8.1), now=81.0).levels["GPU-1", "thermal"] == "none"
    assert levels(heated(gpu(1), 40.0, "gpu_idle"), now=82.0).levels["GPU-1", "thermal"] == "none"


@pytest.mark.parametrize(("level", "share"), [("none", LIMITS.memory_warning), ("warning", LIMITS.memory_critical)])
def test_slack_ends_where_the_level_rises(level: Level, share: float) -> None:
    """The level stays as long as allocations are below the slack, and rises beyond it."""
    here = RunPressure(level, 30 * GIB, 50 * GIB)
    others, own = here.slack(LIMITS)

    def left(taken: float, grown: float) -> float:
        return RunPressure(level, here.headroom - taken - grown, here.in_use + grown).share

    assert left(others - 1, 0) > share >= left(others + 1, 0)
    assert left(0, own - 1) > share >= left(0, own + 1)


def test_critical_has_no_next_level() -> None:
    """The highest level has infinite slack."""
    assert RunPressure("critical", 0, GIB).slack(LIMITS) == (float("inf"), float("inf"))
