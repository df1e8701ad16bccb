"""Leaks of a run on its GPUs and on the host: metrics, log lines and the interval of host polls."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from gpuwarden.analysis.memory.leak_watch import LeakWatch
from gpuwarden.host.cgroup_limits import CgroupMemory
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.host.process_tree import HostUsage, PresentProcesses
from gpuwarden.metrics.model import Reading
from gpuwarden.protocol.messages import STEP_BUCKETS, DeviceMemory, Error, Hello, Report
from gpuwarden.runs.metrics import RunReadings
from gpuwarden.runs.registry import RunRegistry
from gpuwarden.runs.run_snapshot import RunSnapshot
from snapshots import GIB, gpu, snapshot

MIB = 1 << 20
PEER = ProcessKey(pid=7, uid=1000, start=1)
RUN_LABELS = ("7-1", "resnet")
REPORT = Report("train", 1, 1.0, (0,) * (len(STEP_BUCKETS) + 1), {})
ROWS = (
    RunReadings.memory_growth_bytes_per_second,
    RunReadings.seconds_to_oom,
    RunReadings.seconds_to_oom_lower,
    RunReadings.seconds_to_oom_upper,
)
HOST_ROWS = (
    RunReadings.host_memory_growth_bytes_per_second,
    RunReadings.seconds_to_host_oom,
    RunReadings.seconds_to_host_oom_lower,
    RunReadings.seconds_to_host_oom_upper,
)


class Training:
    """A run on GPU-0 whose allocator has a limit of 1 GiB, polled once a second."""

    def __init__(self) -> None:
        self.runs = RunRegistry(limit=1, expiry=30.0, overhead=0.0)
        self.gpus = snapshot(gpu(0, free=0, held={7: GIB}))
        self.runs.receive(PEER, Hello("resnet", "tensorflow", {"GPU:0": "GPU-0"}), 0.0)
        self.now = 0.0
        self.steps = 0

    def report(self, current: int) -> None:
        """Report the bytes in use; four reports are one second."""
        self.now += 0.25
        self.steps += 10
        memory = {"GPU:0": DeviceMemory(current, current + 64 * MIB, limit=GIB)}
        self.runs.receive(PEER, replace(REPORT, steps=self.steps, memory=memory, epoch=int(self.now / 2)), self.now)

    def poll(self) -> RunSnapshot:
        """Poll, and return the run."""
        (run,) = self.runs.add_poll(self.gpus, self.now)
        return run

    def second(self, start: int, rate: int) -> RunSnapshot:
        """Train for a second, from `start` bytes at `rate` bytes a second."""
        for quarter in range(4):
            self.report(start + rate * quarter // 4)
        return self.poll()


def single_value(reading: Reading) -> float:
    """Return the only value."""
    assert isinstance(reading, dict)
    (value,) = reading.values()
    assert isinstance(value, float)
    return value


def test_leak_is_in_the_metrics_until_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    """Rate and time left are set while the run leaks, cleared soon after, and logged once each."""
    caplog.set_level(logging.INFO)
    training = Training()
    for second in range(30):
        run = training.second((200 + 20 * second) * MIB, 20 * MIB)
    rate, seconds, lower, upper = (single_value(row.read(run)) for row in ROWS)
    assert rate == pytest.approx(20 * MIB, rel=0.02)
    left = (1024 - 64 - (200 + 20 * 30)) / 20
    assert seconds == pytest.approx(left, abs=1.5)
    assert lower <= seconds <= upper
    for _ in range(10):
        run = training.second(800 * MIB, 0)
    assert [row.read(run) for row in ROWS] == [{}] * 4
    logged = [record.getMessage() for record in caplog.records if "memory leak" in record.getMessage()]
    assert len(logged) == 2
    assert 'name=resnet device=GPU-0 growth="1.17 GiB a minute" out_of_memory="in about' in logged[0]
    assert logged[1].startswith("memory leak ended run=7-1 name=resnet device=GPU-0 grown=")


def test_a_run_that_ends_or_stops_reporting_has_no_leak(caplog: pytest.LogCaptureFixture) -> None:
    """Values that are not current give no leak, and no log line."""
    caplog.set_level(logging.INFO)
    training = Training()
    for second in range(30):
        run = training.second((200 + 20 * second) * MIB, 20 * MIB)
    assert run.leaks
    training.now += 31.0
    assert training.poll().leaks == {}
    training.second(900 * MIB, 0)
    training.runs.exited(PEER, training.now)
    assert training.poll().leaks == {}
    assert "leak ended" not in caplog.text


def test_leak_end_after_an_out_of_memory_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A leak that ends by an out-of-memory is not logged as ended; a later one is."""
    caplog.set_level(logging.INFO)
    training = Training()
    for second in range(30):
        training.second((200 + 20 * second) * MIB, 20 * MIB)
    training.runs.receive(
        PEER, Error("device_oom", "ResourceExhaustedError", "OOM", "train", training.steps), training.now
    )
    for _ in range(20):
        run = training.second(800 * MIB, 0)
    assert run.leaks == {}
    assert "leak ended" not in caplog.text
    for second in range(30):
        training.second((800 + 4 * second) * MIB, 4 * MIB)
    for _ in range(20):
        training.second(920 * MIB, 0)
    assert caplog.text.count("memory leak run=7-1 name=resnet device=GPU-0") == 2
    assert caplog.text.count("leak ended") == 1


def usage(memory: int, cgroup: CgroupMemory | None = None) -> HostUsage:
    """Make a reading of a run's processes."""
    return HostUsage(1.0, None, None, PresentProcesses(memory, 1, "running", None, cgroup))


def test_host_leak_ends_at_the_nearest_limit() -> None:
    """The forecast of a leak on the host uses the cgroup's limit if it is nearer than the host's."""
    forecasts = []
    for limit in (None, 4 * GIB):
        watch = LeakWatch()
        for reading in range(60):
            used = GIB + reading * 40 * MIB
            cgroup = None if limit is None else CgroupMemory(limit, used)
            leak = watch.evaluate_host(usage(used, cgroup), 6 * GIB - used, RUN_LABELS, reading * 5.0)
        assert leak is not None
        assert leak.bytes_per_second == pytest.approx(8 * MIB, rel=0.02)
        assert leak.left is not None
        forecasts.append(leak.left.seconds)
        assert watch.evaluate_host(None, None, RUN_LABELS, 301.0) is None
    assert forecasts[1] == pytest.approx((4 * GIB - GIB - 59 * 40 * MIB) / (8 * MIB), rel=0.1)
    assert forecasts[0] == pytest.approx((6 * GIB - GIB - 59 * 40 * MIB) / (8 * MIB), rel=0.1)


def test_a_fast_leak_on_the_host_is_urgent() -> None:
    """The host is read often while a leak leaves two minutes, and not before or after."""
    watch = LeakWatch()
    urgent = []
    for at, memory in ((0.0, GIB), (5.0, GIB + 10 * MIB), (10.0, 2 * GIB), (15.0, 3 * GIB), (20.0, 3 * GIB)):
        watch.evaluate_host(usage(memory), 16 * GIB - memory, RUN_LABELS, at)
        urgent.append(watch.urgent)
    assert urgent == [False, False, True, True, False]


def test_host_metrics() -> None:
    """The metrics have the host's leak if there is one."""
    training = Training()
    runs = training.runs
    for second in range(40):
        training.second(200 * MIB, 0)
        used = GIB + second * 200 * MIB
        (run,) = runs.add_poll(training.gpus, training.now, {PEER: usage(used)}, available=12 * GIB - used)
        if second == 1:
            assert [row.read(run) for row in HOST_ROWS] == [None] * 4
    rate, seconds, lower, upper = (row.read(run) for row in HOST_ROWS)
    assert rate == pytest.approx(200 * MIB, rel=0.02)
    assert isinstance(lower, float)
    assert isinstance(upper, float)
    assert lower <= seconds <= upper  # type: ignore[operator] # a number
    assert run.leaks == {}
