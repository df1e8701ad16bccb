"""Leaks of a run on GPUs and host: metrics, log lines, and the sampling rate of the host."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.analysis.memory.leak_watch import MAX_LOGGED_LEAKS, LeakWatch
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
WHO = ("7-1", "resnet")
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


class Trained:
    """A run on GPU-0 whose allocator has a limit of 1 GiB, polled once a second."""

    def __init__(self) -> None:
        self.runs = RunRegistry(limit=1, expiry=30.0, overhead=0.0)
        self.box = snapshot(gpu(0, free=0, held={7: GIB}))
        self.runs.receive(PEER, Hello("resnet", "tensorflow", {"GPU:0": "GPU-0"}), 0.0)
        self.now = 0.0
        self.steps = 0

    def report(self, current: int) -> None:
        """Report what is in use; four of these are a second."""
        self.now += 0.25
        self.steps += 10
        memory = {"GPU:0": DeviceMemory(current, current + 64 * MIB, limit=GIB)}
        self.runs.receive(PEER, replace(REPORT, steps=self.steps, memory=memory, epoch=int(self.now / 2)), self.now)

    def poll(self) -> RunSnapshot:
        """Poll, and return the run."""
        (run,) = self.runs.update(self.box, self.now)
        return run

    def second(self, begin: int, rate: int) -> RunSnapshot:
        """Train for a second from `begin` bytes on, by `rate` bytes a second more."""
        for quarter in range(4):
            self.report(begin + rate * quarter // 4)
        return self.poll()


def on_gpu(reading: Reading) -> float:
    """Return the one number there is."""
    assert isinstance(reading, dict)
    (value,) = reading.values()
    assert isinstance(value, float)
    return value


def test_growth_is_in_the_rows_until_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    """Rate and time are there while the run leaks, gone soon after it has stopped, and the log has a line for each."""
    caplog.set_level(logging.INFO)
    it = Trained()
    for second in range(30):
        run = it.second((200 + 20 * second) * MIB, 20 * MIB)
    rate, seconds, lower, upper = (on_gpu(row.read(run)) for row in ROWS)
    assert rate == pytest.approx(20 * MIB, rel=0.02)
    left = (1024 - 64 - (200 + 20 * 30)) / 20
    assert seconds == pytest.approx(left, abs=1.5)
    assert lower <= seconds <= upper
    for _ in range(10):
        run = it.second(800 * MIB, 0)
    assert [row.read(run) for row in ROWS] == [{}] * 4
    told = [record.getMessage() for record in caplog.records if "memory leak" in record.getMessage()]
    assert len(told) == 2
    assert 'name=resnet device=GPU-0 growth="1.17 GiB a minute" out_of_memory="in about' in told[0]
    assert told[1].startswith("memory leak ended run=7-1 name=resnet device=GPU-0 grown=")


def test_a_run_that_ends_or_falls_silent_has_no_growth(caplog: pytest.LogCaptureFixture) -> None:
    """What is not current does not grow, and that is no news for the log."""
    caplog.set_level(logging.INFO)
    it = Trained()
    for second in range(30):
        run = it.second((200 + 20 * second) * MIB, 20 * MIB)
    assert run.leaks
    it.now += 31.0
    assert it.poll().leaks == {}
    it.second(900 * MIB, 0)
    it.runs.exited(PEER, it.now)
    assert it.poll().leaks == {}
    assert "leak ended" not in caplog.text


def test_that_nothing_grows_after_an_out_of_memory_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    """While it tidies up it reports still; but where it goes on and leaks again, the end of that is news."""
    caplog.set_level(logging.INFO)
    it = Trained()
    for second in range(30):
        it.second((200 + 20 * second) * MIB, 20 * MIB)
    it.runs.receive(PEER, Error("device_oom", "ResourceExhaustedError", "OOM", "train", it.steps), it.now)
    for _ in range(20):
        run = it.second(800 * MIB, 0)
    assert run.leaks == {}
    assert "leak ended" not in caplog.text
    for second in range(30):
        it.second((800 + 4 * second) * MIB, 4 * MIB)
    for _ in range(20):
        it.second(920 * MIB, 0)
    assert caplog.text.count("memory leak run=7-1 name=resnet device=GPU-0") == 2
    assert caplog.text.count("leak ended") == 1


def test_the_log_of_what_comes_and_goes_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    """The end of a growth is told where its begin was."""
    caplog.set_level(logging.INFO)
    outlook, growth = LeakWatch(), Leak(1.0 * MIB, 60 * MIB)
    for number in range(3 * MAX_LOGGED_LEAKS):
        for found in (growth, None):
            outlook._report(f"GPU-{number % 2}", found, WHO)
    assert caplog.text.count("memory leak run=") == MAX_LOGGED_LEAKS
    assert caplog.text.count("memory leak ended") == MAX_LOGGED_LEAKS


def usage(memory: int, cgroup: CgroupMemory | None = None) -> HostUsage:
    """Make a look at a run's processes."""
    return HostUsage(1.0, None, None, PresentProcesses(memory, 1, "running", None, cgroup))


def test_the_host_ends_at_what_ends_first() -> None:
    """A leak on the host meets its cgroup's limit where that is nearer than the host's own end."""
    ends = []
    for limit in (None, 4 * GIB):
        outlook = LeakWatch()
        for look in range(60):
            held = GIB + look * 40 * MIB
            cgroup = None if limit is None else CgroupMemory(limit, held)
            growth = outlook.update_host(usage(held, cgroup), 6 * GIB - held, WHO, look * 5.0)
        assert growth is not None
        assert growth.bytes_per_second == pytest.approx(8 * MIB, rel=0.02)
        assert growth.left is not None
        ends.append(growth.left.seconds)
        assert outlook.update_host(None, None, WHO, 301.0) is None
    assert ends[1] == pytest.approx((4 * GIB - GIB - 59 * 40 * MIB) / (8 * MIB), rel=0.1)
    assert ends[0] == pytest.approx((6 * GIB - GIB - 59 * 40 * MIB) / (8 * MIB), rel=0.1)


def test_a_fast_leak_on_the_host_is_urgent() -> None:
    """At a rate that leaves two minutes the host is to be looked at often, and not before or after."""
    outlook = LeakWatch()
    wanted = []
    for at, memory in ((0.0, GIB), (5.0, GIB + 10 * MIB), (10.0, 2 * GIB), (15.0, 3 * GIB), (20.0, 3 * GIB)):
        outlook.update_host(usage(memory), 16 * GIB - memory, WHO, at)
        wanted.append(outlook.urgent)
    assert wanted == [False, False, True, True, False]


def test_host_rows() -> None:
    """The rows have the host's growth where there is one."""
    it = Trained()
    runs = it.runs
    for second in range(40):
        it.second(200 * MIB, 0)
        held = GIB + second * 200 * MIB
        (run,) = runs.update(it.box, it.now, {PEER: usage(held)}, available=12 * GIB - held)
        if second == 1:
            assert [row.read(run) for row in HOST_ROWS] == [None] * 4
    rate, seconds, lower, upper = (row.read(run) for row in HOST_ROWS)
    assert rate == pytest.approx(200 * MIB, rel=0.02)
    assert isinstance(lower, float)
    assert isinstance(upper, float)
    assert lower <= seconds <= upper  # type: ignore[operator] # a number
    assert run.leaks == {}
