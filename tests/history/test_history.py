"""History of the last minutes: series for charts, and events."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from gpuwarden.analysis.oom.diagnosis import Diagnosis
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import EventCount, Gpu, GpuProcess
from gpuwarden.health.detector import Detector
from gpuwarden.history.event_log import MAX_EVENTS, MAX_TEXT, Event, EventLog
from gpuwarden.history.series import (
    COARSE_SECONDS,
    HOUR_SECONDS,
    INTERVAL_SECONDS,
    MAX_SUBJECTS,
    WINDOW_SECONDS,
    HistorySeries,
    read_columns,
)
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.pressure.levels import Pressure
from gpuwarden.protocol.messages import STEP_BUCKETS, DeviceMemory, Error, Hello, Report
from gpuwarden.runs.outcome import Ending
from gpuwarden.runs.run_snapshot import RunSnapshot, SeenError
from gpuwarden.runs.stall import Stall
from gpuwarden.state import State
from snapshots import GIB, gpu, mig_gpu, snapshot


def poll(*gpus: Gpu, at: float = 1.0, **more: Any) -> State:
    """Return a poll at a Unix time."""
    return State(source="nvml", poll_interval=1.0, snapshot=replace(snapshot(*gpus), time=at), **more)


def a_run(pid: int = 7, *, steps: int = 0, **more: Any) -> RunSnapshot:
    """Return a run on GPU 0 after this number of steps."""
    report = Report("train", steps, 1.0, (0,) * (len(STEP_BUCKETS) + 1), {})
    memory = {"GPU-0": DeviceMemory(GIB, GIB)}
    known: dict[str, Any] = {
        "memory": memory,
        "headroom": {"GPU-0": 2.0 * GIB},
        "up": True,
        "current": True,
        "began": 1.0,
    }
    return RunSnapshot(ProcessKey(pid, 1000, 1), Hello("unet", "none", {}), report, 1.0, **(known | more))


def gpu_using(index: int, used: float) -> Gpu:
    """Return a GPU with some memory in use."""
    whole = gpu(index)
    return replace(whole, readings={**whole.readings, GpuReadings.memory_used_bytes: used})


def read(series: HistorySeries, kind: Any, now: float) -> dict[Any, Any]:
    """Return all series of a kind."""
    return read_columns(series.chart(now), kind)


def times_of(series: HistorySeries, now: float) -> list[float]:
    """Return the times of the points of charts."""
    return [frame.time for frame in series.chart(now)]


def test_points_cover_an_hour() -> None:
    """Polls every second give a point every 5 s of the last ten minutes, and every 30 s of the hour before."""
    series = HistorySeries()
    for second in range(4000):
        series.add_poll(poll(gpu_using(0, float(second)), at=1000.0 + second), float(second))
    assert series.points == 800
    times = times_of(series, 4999.0)
    steps = [later - before for before, later in pairwise(times)]
    seam = next(place for place, step in enumerate(steps) if step != COARSE_SECONDS)
    assert INTERVAL_SECONDS <= steps[seam] < COARSE_SECONDS
    assert set(steps[seam + 1 :]) == {INTERVAL_SECONDS}
    fine = seam + 1
    assert WINDOW_SECONDS - INTERVAL_SECONDS <= times[-1] - times[fine] < WINDOW_SECONDS + COARSE_SECONDS
    assert HOUR_SECONDS - COARSE_SECONDS <= times[-1] - times[0] <= HOUR_SECONDS
    used = read(series, "gpus", 4999.0)["GPU-0",]["memory_used_bytes"]
    assert used == [at - 1000.0 for at in times]
    assert times_of(series, 4995.0 + HOUR_SECONDS) == [4995.0]  # polls failed since then


def test_clock_set_back_keeps_times_in_order() -> None:
    """Points with a repeated time are left out, so that no chart runs backwards."""
    series = HistorySeries()
    for second in range(300):
        series.add_poll(poll(gpu_using(0, 1.0), at=1000.0 + second), float(second))
    for second in range(300, 500):
        at = 800.0 + second  # 200 s occur twice
        series.add_poll(poll(gpu_using(0, 2.0), at=at), float(second))
        times = times_of(series, at)
        assert times == sorted(times)
        assert times[0] == 1000.0
    assert read(series, "gpus", 1299.0)["GPU-0",]["memory_used_bytes"] == [1.0] * 20 + [2.0] * 40


def test_unknown_values_are_gaps() -> None:
    """A GPU that did not respond, and a run before its start, have gaps."""
    series = HistorySeries()
    lost = replace(gpu(0), readings={}, fault="gpu_is_lost")
    series.add_poll(poll(lost, at=1.0), 1.0)
    series.add_poll(poll(gpu_using(0, 5.0), mig_gpu(1, free=[GIB]), at=11.0, runs=(a_run(steps=9),)), 11.0)
    gpus = read(series, "gpus", 11.0)
    assert gpus["GPU-0",] == {"memory_used_bytes": [None, 5.0], "memory_in_use_bytes": [None, GIB]}
    assert gpus["MIG-1-0",] == {}
    assert read(series, "runs", 11.0) == {("7-1",): {"steps": [None, 9]}}
    device = {"memory_in_use_bytes": [None, GIB], "headroom_bytes": [None, 2 * GIB]}
    assert read(series, "devices", 11.0) == {("7-1", "GPU-0"): device}


def test_step_rate_covers_the_last_minute() -> None:
    """The rate covers the last minute; a run polled once has none."""
    series = HistorySeries()
    series.add_poll(poll(at=0.0, runs=(a_run(steps=0),)), 0.0)
    assert series.pace("7-1") is None
    assert series.pace("8-1") is None
    for point in range(1, 40):
        series.add_poll(poll(at=5.0 * point, runs=(a_run(steps=min(point, 20) * 10),)), 5.0 * point)
        if point == 10:
            assert series.pace("7-1") == 2.0
    assert series.pace("7-1") == 0.0


def test_ended_runs_are_dropped_with_their_points() -> None:
    """The series of an ended run stop, and are dropped an hour later."""
    series = HistorySeries()
    series.add_poll(poll(at=0.0, runs=(a_run(),)), 0.0)
    for at in range(5, int(HOUR_SECONDS) + 1, 5):
        series.add_poll(poll(at=at, runs=(a_run(up=False),)), at)
    assert read(series, "runs", HOUR_SECONDS)
    series.add_poll(poll(at=HOUR_SECONDS + 5), HOUR_SECONDS + 5)
    assert not read(series, "runs", HOUR_SECONDS + 5)


def sampled(index: int, at: float) -> Gpu:
    """Return a GPU with ten memory samples of the last second, and four processes."""
    samples = tuple((at - 1 + each / 10, GIB + each) for each in range(10))
    processes = tuple(GpuProcess(100 * index + each, "compute", GIB) for each in range(4))
    return replace(gpu_using(index, at), memory_samples=samples, processes=processes)


@pytest.mark.slow
def test_hour_takes_8_mib() -> None:
    """8 GPUs and 64 runs fit, polled each second with early polls between; subjects over the limit are counted."""
    runs = tuple(a_run(pid) for pid in range(1, 65))
    tracemalloc.start()
    series = HistorySeries()
    for at in range(-3000, 0, 5):
        series.add_poll(poll(*(gpu_using(index, 0.0) for index in range(8)), at=at, runs=runs), at)
    for second in range(700):
        series.add_poll(
            poll(*(sampled(index, float(second)) for index in range(8)), at=float(second), runs=runs), second
        )
        series.add_poll(poll(*(gpu_using(index, 0.0) for index in range(8)), at=second + 0.3, runs=runs), second + 0.3)
    taken, _peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 8 << 20
    frames = series.frames()
    assert 599.0 <= frames[-1].time - frames[0].time <= 600.0
    assert [frame.time for frame in frames[-4:]] == [698.0, 698.3, 699.0, 699.3]
    assert len(frames) <= 570 * 1.2 + 62  # one a second, and one more for a point of a chart
    assert not frames[0].samples
    assert len(frames[-2].samples["GPU-0"]) == 10
    crowd = tuple(a_run(pid) for pid in range(1, 300))
    series.add_poll(poll(*(gpu_using(index, 0.0) for index in range(8)), at=1e4, runs=crowd), 1e4)
    assert len(series.frames()[-1].subjects) == MAX_SUBJECTS
    assert series.dropped == 1 + 8 + 2 * 299 - MAX_SUBJECTS


class DetectedEvents(EventLog):
    """Event log with a detector."""

    def __init__(self) -> None:
        super().__init__()
        self._detector = Detector()

    def add_poll(self, state: State) -> Sequence[Event]:
        """Add the events of a poll that is not evaluated yet."""
        return super().add_poll(replace(state, detection=self._detector.evaluate(state, state.snapshot.time)))


def texts(events: EventLog) -> list[str]:
    """Return the texts of the events, newest first."""
    return [event.text for event in events.newest_first()]


def test_each_change_is_one_event() -> None:
    """Lost and recovered GPUs, pressure, runs, stalls and OOM errors are events; an unchanged poll is not."""
    events = DetectedEvents()
    quiet = poll(gpu(0), at=1.0)
    events.add_poll(quiet)
    assert texts(events) == []
    lost = poll(replace(gpu(0), fault="gpu_is_lost"), at=2.0)
    for state in (lost, lost, replace(quiet, snapshot=replace(quiet.snapshot, time=3.0))):
        events.add_poll(state)
    assert texts(events) == ["GPU 0 responding again", "GPU 0 not responding: GPU is lost"]
    levels: list[Any] = ["none", "warning", "warning", "critical", "none"]
    for at, level in enumerate(levels, 4):
        events.add_poll(poll(gpu(0), at=float(at), pressure=Pressure({("GPU-0", "memory"): level})))
    assert texts(events)[:3] == [
        "GPU 0 no longer low on memory",
        "GPU 0 almost out of memory",
        "GPU 0 memory running low",
    ]
    assert [event.level for event in events.newest_first()][:3] == ["info", "critical", "warning"]


def test_driver_fault_is_an_event() -> None:
    """A driver fault is an event, and so is its end."""
    events = DetectedEvents()
    whole = poll(at=1.0)
    events.add_poll(replace(whole, snapshot=replace(whole.snapshot, fault="driver_not_loaded")))
    events.add_poll(poll(at=2.0))
    assert texts(events) == ["driver responding again", "driver not responding: driver not loaded"]


def test_pause_does_not_end_a_driver_fault() -> None:
    """A pause neither ends a driver fault nor repeats it."""
    events = DetectedEvents()
    for at, asked in enumerate((True, False, True), 1):
        whole = poll(at=float(at))
        fault = "driver_not_loaded" if asked else None
        events.add_poll(replace(whole, snapshot=replace(whole.snapshot, fault=fault, asked=asked)))
    assert texts(events) == ["driver not responding: driver not loaded"]


def test_throttling_that_comes_and_goes_is_one_event() -> None:
    """Throttling is a new event after a quiet minute, and its end is none."""
    events = DetectedEvents()
    hot = replace(gpu(0), readings={GpuReadings.clock_event_active: {("hw_thermal_slowdown",): 1.0}})
    for at in (0.0, 1.0, 2.0, 30.0, 31.0, 100.0, 101.0):
        events.add_poll(poll(hot if at in {0.0, 2.0, 30.0, 100.0} else gpu(0), at=at))
    assert [event.timestamp_seconds for event in events.newest_first()] == [100.0, 0.0]


def test_unknown_pressure_does_not_end_it() -> None:
    """A GPU that does not answer is not called cool; pressure of a MIG instance is an event of the instance."""
    events = DetectedEvents()
    levels: list[dict[Any, Any]] = [{("GPU-0", "thermal"): "critical"}, {}, {("GPU-0", "thermal"): "none"}]
    for at, known in enumerate(levels):
        events.add_poll(poll(gpu(0), at=float(at), pressure=Pressure(known)))
        assert len(texts(events)) == (1 if at < 2 else 2)
    assert texts(events)[0] == "GPU 0 no longer hot"
    both = Pressure({("MIG-1-0", "memory"): "warning", ("MIG-1-1", "memory"): "warning"})
    new = events.add_poll(poll(mig_gpu(1, free=[GIB, GIB]), at=9.0, pressure=both))
    assert [event.uuid for event in new] == ["MIG-1-0", "MIG-1-1"]


def test_xids_of_the_last_hour_are_events() -> None:
    """Each XID has its own time, again on repetition; older ones from the kernel log are left out."""
    events = DetectedEvents()
    events.add_poll(poll(replace(gpu(0), xids={79: EventCount(1, 100_000.0), 13: EventCount(5, 5.0)}), at=100_001.0))
    again = poll(replace(gpu(0), xids={79: EventCount(2, 100_005.0)}), at=100_006.0)
    events.add_poll(again)
    events.add_poll(again)
    assert [(event.timestamp_seconds, event.kind, event.level) for event in events.newest_first()] == [
        (100_005.0, "GpuXidCritical", "critical"),
        (100_000.0, "GpuXidCritical", "critical"),
    ]


def test_run_lifecycle_events() -> None:
    """Start, stall, out-of-memory error with its diagnosis, and final outcome are events."""
    events = DetectedEvents()
    error = Error("device_oom", "ResourceExhaustedError", "OOM", "train", 5)
    seen_error = SeenError(error, 3.0, {}, diagnosis=Diagnosis("leak", "It grew.", "Mend it."))
    last = {"device_oom": 3.0}
    ending = Ending("out_of_memory", "the kernel says so", 5.0)
    life = [
        a_run(),
        a_run(stall=Stall(61.4, "stopped")),
        a_run(errors=(seen_error,), last_errors=last),
        a_run(errors=(replace(seen_error, diagnosis=None),), last_errors=last),  # the same with another diagnosis
        a_run(errors=(seen_error,), last_errors=last, up=False, ending=ending),
        a_run(errors=(seen_error,), last_errors=last, up=False, ending=replace(ending, settled=True)),
    ]
    for run in life:
        events.add_poll(poll(gpu(0), at=2.0, runs=(run,)))
        events.add_poll(poll(gpu(0), at=2.0, runs=(run,)))
    assert texts(events) == [
        "run unet ended: out of memory (the kernel says so)",
        "run unet out of device memory: leak. It grew.",
        "run unet stalled: no training step for 1m01s (cause: stopped)",
        "run unet started",
    ]
    assert {(event.run_id, event.run_name) for event in events.newest_first()} == {("7-1", "unet")}


def test_events_are_bounded() -> None:
    """The newest events stay; a long text is truncated."""
    events = DetectedEvents()
    for pid in range(1, 2 * MAX_EVENTS):
        long = Ending("failed", "why " * 500, float(pid), settled=True)
        events.add_poll(poll(at=float(pid), runs=(a_run(pid, began=float(pid), ending=long, up=False),)))
    assert len(events.newest_first()) == MAX_EVENTS
    assert max(len(text) for text in texts(events)) == MAX_TEXT
    assert events.newest_first()[0].timestamp_seconds == 2 * MAX_EVENTS - 1


def test_one_users_events_leave_those_of_others() -> None:
    """A user whose runs fail all the time displaces neither a lost GPU nor the end of another user's run."""
    events = DetectedEvents()
    other = a_run(7, ending=Ending("failed", "exit status 1", 1.0, settled=True), up=False)
    events.add_poll(poll(replace(gpu(0), fault="gpu_is_lost"), at=1.0, runs=(other,)))
    kept = events.newest_first()
    for pid in range(100, 100 + 2 * MAX_EVENTS):
        run = replace(a_run(pid), peer=ProcessKey(pid, 1234, 1))
        events.add_poll(poll(replace(gpu(0), fault="gpu_is_lost"), at=float(pid), runs=(run,)))
    assert len(events.newest_first()) == MAX_EVENTS
    assert [each for each in events.newest_first() if each in kept] == kept
