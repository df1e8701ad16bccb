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
from gpuwarden.pressure.levels import Pressure, PressureWatch, RunPressure, memory_level, thermal_level
from gpuwarden.protocol.messages import DeviceMemory, Hello, Level
from gpuwarden.runs.run_snapshot import JoinedPoll, RunSnapshot
from snapshots import GIB, divided, gpu, snapshot

LIMITS = Limits()
COOL = (False, False)


def run(number: int, uuid: str, *, in_use: float, left: float) -> RunSnapshot:
    """Make a run with GiB in use and left on one device."""
    memory = {uuid: DeviceMemory(int(in_use * GIB), int(in_use * GIB))}
    peer = ProcessKey(number, 1000, 1)
    return RunSnapshot(peer, Hello(f"run-{number}", "none", {}), None, None, True, True, memory, {uuid: left * GIB})


def listed(each: Gpu, *pids: int) -> Gpu:
    """Have the driver list these processes on a GPU."""
    processes = tuple(GpuProcess(pid, "compute", GIB) for pid in pids)
    return replace(each, processes=processes, process_lists=("compute", "graphics"))


def hot(each: Gpu, margin: float | None = None, *reasons: str) -> Gpu:
    """Give a GPU a margin, and clock event reasons that hold among those it knows."""
    known = ("sw_thermal_slowdown", "hw_thermal_slowdown", "gpu_idle")
    readings: dict[Metric[Any], Reading] = {
        **each.readings,
        GpuReadings.temperature_margin_celsius: margin,
        GpuReadings.clock_event_active: {(name,): float(name in reasons) for name in known},
    }
    return replace(each, readings=readings)


def test_defaults_are_those_of_the_alerts() -> None:
    """Memory is critical where RunNearOutOfMemory fires, heat begins where GpuNearThermalSlowdown does."""
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
    """The worse of the two counts: what is left, and when that will be nothing."""
    assert memory_level(LIMITS, share, seconds) == level


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
    """The margin counts, and that heat slows the GPU down whatever the margin says."""
    assert thermal_level(LIMITS, margin, slowed) == level


class Box:
    """A watch, and what a run there has left, in shares of 100 GiB."""

    def __init__(self) -> None:
        self.watch = PressureWatch(LIMITS)

    def level(self, percent: float, now: float) -> Level:
        """Let a poll find so much left; return the level."""
        there = run(7, "GPU-0", in_use=100 - percent, left=percent)
        return self.watch.update(JoinedPoll(snapshot(listed(gpu(0), 7)), [there], now)).levels["GPU-0", "memory"]


def test_level_rises_at_once() -> None:
    """From one poll to the next the level is what the thresholds say, if that is worse."""
    box = Box()
    assert [box.level(percent, now) for now, percent in enumerate((50, 9, 4))] == ["none", "warning", "critical"]
    assert Box().level(1, 0.0) == "critical"


def test_level_falls_late() -> None:
    """It has to be clearly better, and for a while; a moment of less begins the while anew."""
    box = Box()
    box.level(4, 0.0)
    assert box.level(7, 100.0) == "critical"  # beyond the threshold, not clearly
    assert box.level(40, 101.0) == "critical"
    assert box.level(7, 120.0) == "critical"
    assert box.level(40, 121.0) == "critical"
    assert box.level(40, 150.9) == "critical"
    assert box.level(40, 151.0) == "none"


def test_level_falls_to_the_worst_of_the_while() -> None:
    """What was a warning for a part of the while is one afterwards, and none only a while later."""
    box = Box()
    box.level(4, 0.0)
    box.level(12, 1.0)  # clearly not critical, not clearly none
    assert box.level(40, 30.9) == "critical"
    assert box.level(40, 31.0) == "warning"
    assert box.level(40, 60.9) == "warning"
    assert box.level(40, 61.0) == "warning"  # the while begins with what is clearly none
    assert box.level(40, 91.0) == "none"


def test_flicker_about_a_threshold_is_one_episode() -> None:
    """A headroom that goes to and fro about a threshold changes the level once."""
    box = Box()
    levels = [box.level(4.9 if second % 2 else 5.1, float(second)) for second in range(200)]
    assert levels == ["warning"] + ["critical"] * 199


def test_what_is_not_known_for_a_while_ends_no_episode() -> None:
    """A GPU that did not answer once, and a headroom not known meanwhile, are judged on from where they were."""
    watch = PressureWatch(LIMITS)
    near = run(7, "GPU-0", in_use=96, left=4)
    better = run(7, "GPU-0", in_use=50, left=50)
    critical = {("GPU-0", "memory"): "critical", ("GPU-0", "thermal"): "warning"}
    assert watch.update(JoinedPoll(snapshot(hot(gpu(0), 3.0)), [near], 0.0)).levels == critical
    down = Gpu(gpu(0).identity, fault="timeout")
    assert watch.update(JoinedPoll(snapshot(down), [replace(near, headroom={})], 1.0)).levels == {}
    assert watch.update(JoinedPoll(snapshot(hot(gpu(0), 50.0)), [better], 2.0)).levels == critical
    watch.update(JoinedPoll(snapshot(hot(gpu(0), 50.0)), [replace(better, up=False, headroom={})], 3.0))
    assert watch.update(JoinedPoll(snapshot(), [better], 4.0)).levels == {
        ("GPU-0", "memory"): "none"
    }  # it has ended meanwhile
    assert watch.update(JoinedPoll(snapshot(hot(gpu(0), 7.0)), [], 5.0)).levels == {("GPU-0", "thermal"): "none"}


def test_level_of_a_gpu_is_that_of_its_worst_run() -> None:
    """Of two runs the one with less left counts, and once it is gone the other does, at once."""
    watch = PressureWatch(LIMITS)
    near, far = run(7, "GPU-0", in_use=96, left=4), run(8, "GPU-0", in_use=50, left=50)
    box = snapshot(listed(gpu(0), 7, 8))
    pressure = watch.update(JoinedPoll(box, [near, far], 0.0))
    assert pressure.levels == {("GPU-0", "memory"): "critical"}
    assert {key: each.level for key, each in pressure.of_runs.items()} == {
        ("7-1", "GPU-0"): "critical",
        ("8-1", "GPU-0"): "none",
    }
    assert watch.update(JoinedPoll(box, [far], 1.0)).levels == {("GPU-0", "memory"): "none"}
    assert watch.update(JoinedPoll(box, [far, replace(near, headroom={"GPU-0": 50 * GIB})], 2.0)).levels == {
        ("GPU-0", "memory"): "none"
    }  # nothing is remembered of a run that is gone


def test_memory_without_a_report_has_no_level() -> None:
    """What others hold does not say what they need; an unused GPU has none, an unknown one nothing."""
    free, taken, silent = listed(gpu(0)), listed(gpu(1), 9), replace(gpu(2), processes=())
    down = Gpu(gpu(3).identity, fault="gpu_is_lost", process_lists=("compute",))
    assert PressureWatch(LIMITS).update(JoinedPoll(snapshot(free, taken, silent, down), [], 0.0)).levels == {
        ("GPU-0", "memory"): "none"
    }


def test_growth_that_ends_in_an_out_of_memory_counts() -> None:
    """A run with much left that will have none in five minutes is under pressure, until it has ceased to grow."""
    watch, box = PressureWatch(LIMITS), snapshot(listed(gpu(0), 7))
    still = run(7, "GPU-0", in_use=50, left=50)
    growth = Leak(1.0, GIB, TimeLeft(300.0, 250.0, None))
    grows = replace(still, leaks={"GPU-0": growth})
    unbounded = replace(still, leaks={"GPU-0": replace(growth, left=None)})
    seen = [watch.update(JoinedPoll(box, [each], now)) for each, now in ((grows, 0.0), (unbounded, 1.0), (still, 31.0))]
    assert [each.levels["GPU-0", "memory"] for each in seen] == ["warning", "warning", "none"]
    assert [each.of_runs["7-1", "GPU-0"].seconds_to_oom for each in seen] == [300.0, None, None]


def test_mig_instances_have_memory_of_their_own() -> None:
    """Each instance is judged by its own runs and processes, and the divided GPU by none."""
    box = replace(divided(0, free=(1, 2, 3), held={7: 0, 9: 1}), process_lists=("compute",))
    there = run(7, "MIG-0-0", in_use=9.7, left=0.3)
    assert PressureWatch(LIMITS).update(JoinedPoll(snapshot(box), [there], 0.0)).levels == {
        ("MIG-0-0", "memory"): "critical",
        ("MIG-0-2", "memory"): "none",
    }


def test_heat_is_judged_where_the_device_tells_of_it() -> None:
    """Margin and clock event reasons make the level, which falls late; a device that tells neither has none."""
    watch = PressureWatch(LIMITS)

    def levels(*gpus: Gpu, now: float) -> Pressure:
        return watch.update(JoinedPoll(snapshot(*gpus), [], now))

    first = levels(hot(gpu(0), 40.0), hot(gpu(1), 5.0), hot(gpu(2), None, "hw_thermal_slowdown"), gpu(3), now=0.0)
    assert first.levels == {
        ("GPU-0", "thermal"): "none",
        ("GPU-1", "thermal"): "warning",
        ("GPU-2", "thermal"): "critical",
    }
    assert levels(hot(gpu(1), 7.9), now=50.0).levels["GPU-1", "thermal"] == "warning"
    levels(hot(gpu(1), 8.1), now=51.0)
    assert levels(hot(gpu(1), 8.1), now=81.0).levels["GPU-1", "thermal"] == "none"
    assert levels(hot(gpu(1), 40.0, "gpu_idle"), now=82.0).levels["GPU-1", "thermal"] == "none"


@pytest.mark.parametrize(("level", "share"), [("none", LIMITS.memory_warning), ("warning", LIMITS.memory_critical)])
def test_slack_ends_where_the_level_rises(level: Level, share: float) -> None:
    """Just below the bytes that others, or the run itself, may take the level stays, at them it rises."""
    here = RunPressure(level, 30 * GIB, 50 * GIB)
    others, own = here.slack(LIMITS)

    def left(taken: float, grown: float) -> float:
        return RunPressure(level, here.headroom - taken - grown, here.in_use + grown).share

    assert left(others - 1, 0) > share >= left(others + 1, 0)
    assert left(0, own - 1) > share >= left(0, own + 1)


def test_critical_has_no_next_level() -> None:
    """Where it cannot get worse nothing is to be waited for."""
    assert RunPressure("critical", 0, GIB).slack(LIMITS) == (float("inf"), float("inf"))
