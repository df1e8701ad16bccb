"""Usage accounting: seconds, energy, throttling, memory peaks and XIDs of a run on each GPU."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import EventCount, Gpu, Snapshot
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.metrics.model import Readings
from gpuwarden.protocol.messages import STEP_BUCKETS, DeviceMemory, End, Hello, Report
from gpuwarden.records.recorder import Recorder
from gpuwarden.runs.registry import RunRegistry
from gpuwarden.runs.run_snapshot import JoinedPoll
from gpuwarden.runs.run_state import RunState
from gpuwarden.usage.accountant import UsageAccountant
from gpuwarden.usage.run_usage import DeviceUsage, RunUsage
from snapshots import GIB, gpu, mig_gpu, snapshot

ALICE = ProcessKey(pid=7, uid=1000, start=1)
BOB = ProcessKey(pid=8, uid=1001, start=2)
SLOW = 10.0
WALL = 1.8e9


def report(phase: str = "train", seconds: float = 0.0, *, stepping: bool = False) -> Report:
    """Make a report of a run that uses 1 GiB."""
    buckets = (0,) * (len(STEP_BUCKETS) + 1)
    memory = {"GPU:0": DeviceMemory(GIB, 2 * GIB, 4 * GIB)}
    return Report(phase, 1, seconds, buckets, memory, stepping=stepping)  # type: ignore[arg-type] # one of PHASES


@dataclass
class Host:
    """A host with one GPU that is polled every second; the driver's counters follow its load."""

    watts: float = 300.0
    busy: float = 0.75
    slowed: float = 0.5  # share of the time, by its power cap
    counts_joules: bool = True
    seconds: int = 0
    joules: float = 5e6
    throttled: float = 1e5
    kernels: float = 1e4
    slow_taken: int = 0
    slow: Readings = field(default_factory=dict)
    xids: Mapping[int, EventCount] = field(default_factory=dict)
    holders: tuple[int, ...] = (ALICE.pid,)

    def __post_init__(self) -> None:
        self.registry = RunRegistry(limit=9, expiry=60.0, overhead=0, wall=lambda: WALL + self.seconds)
        self.accounts = UsageAccountant(SLOW)
        self._read_slow_metrics()

    def start_run(self, peer: ProcessKey, **hello: object) -> None:
        """Start a run that reports on the GPU."""
        message = replace(Hello("resnet", "test", {"GPU:0": "GPU-0"}), **hello)  # type: ignore[arg-type] # fields of a hello
        self.registry.receive(peer, message, self.seconds)
        self.registry.receive(peer, report(), self.seconds)

    def pass_second(self) -> None:
        """Advance the GPU's counters by one second."""
        self.seconds += 1
        self.joules += self.watts
        self.throttled += self.slowed
        self.kernels += self.busy
        if self.seconds % SLOW == 0:
            self._read_slow_metrics()

    def _read_slow_metrics(self) -> None:
        self.slow_taken = self.seconds
        self.slow = {GpuReadings.clock_event_seconds_total: {("sw_power_cap",): self.throttled, ("gpu_idle",): 9.0}}
        if self.counts_joules:
            self.slow = {**self.slow, GpuReadings.energy_joules_total: self.joules}

    def gpu(self) -> Gpu:
        """Return the GPU as a poll reads it now."""
        whole = gpu(0, held=dict.fromkeys(self.holders, GIB))
        quick: Readings = {
            GpuReadings.power_usage_watts: self.watts,
            GpuReadings.busy_seconds_total: self.kernels,
            GpuReadings.clock_event_active: {("sw_power_cap",): float(self.slowed > 0), ("gpu_idle",): 1.0},
        }
        return replace(
            whole,
            readings={**whole.readings, **self.slow, **quick},
            taken=float(self.seconds),
            slow_taken=float(self.slow_taken),
            xids=self.xids,
        )

    def join(self, polled: Snapshot | None = None) -> list[RunUsage]:
        """Evaluate a poll; return the usage of each run."""
        now = float(self.seconds)
        found = snapshot(self.gpu()) if polled is None else polled
        runs = self.registry.add_poll(found, now)
        return list(self.accounts.add_poll(JoinedPoll(found, runs, now)).values())

    def poll(self, seconds: int, before_each: Callable[[], object] = lambda: None) -> DeviceUsage:
        """Poll for `seconds` and return the first run's usage of the GPU."""
        for _ in range(seconds):
            self.pass_second()
            before_each()
            usage = self.join()
        return usage[0].devices["GPU-0"]


@pytest.fixture
def host() -> Host:
    """Return a host whose run was first polled at second 0."""
    made = Host()
    made.start_run(ALICE)
    made.join()
    return made


def test_time_and_idle_time(host: Host) -> None:
    """Time starts at the first poll that finds the run; idle time is time without a kernel."""
    share = host.poll(8)
    assert (share.gpu_seconds, share.busy_seconds, share.idle_seconds) == (8, 6, 2)
    assert set(share.throttled_seconds) == {"sw_power_cap"}  # an idle GPU is not throttled


def test_energy_comes_from_the_counter(host: Host) -> None:
    """Energy is the difference between two readings of the driver's counter."""
    assert host.poll(9).energy_joules == 0
    share = host.poll(1)
    assert (share.energy_joules, share.energy_by_power_joules) == (3000, None)
    host.start_run(BOB)
    assert host.poll(10).energy_joules == 6000
    host.poll(10)
    assert [usage.devices["GPU-0"].energy_joules for usage in host.join()] == [9000, 6000]  # all of it for each


def test_run_that_starts_between_two_readings() -> None:
    """A run that starts between two readings gets its share of the counters' change, by time on the GPU."""
    host = Host()
    for _ in range(6):
        host.pass_second()
    host.start_run(ALICE)
    host.join()
    share = host.poll(4)
    assert share.energy_joules == pytest.approx(1200)
    assert share.throttled_seconds["sw_power_cap"] == pytest.approx(2)


def test_end_between_two_readings(host: Host) -> None:
    """At a run's end, the part not yet read from the counters is estimated from polled power and clock events."""
    host.poll(13)
    host.registry.receive(ALICE, End("exit"), host.seconds)
    share = host.poll(1)
    assert (share.gpu_seconds, share.energy_joules, share.energy_by_power_joules) == (13, 3900, 900)
    assert share.throttled_seconds["sw_power_cap"] == 5 + 3
    assert host.poll(10) == share


def test_energy_without_a_counter_is_integrated_power() -> None:
    """Without an energy counter, power is integrated, and reported as such."""
    host = Host(counts_joules=False)
    host.start_run(ALICE)
    host.join()
    share = host.poll(12)
    assert (share.energy_joules, share.energy_by_power_joules) == (3600, 3600)


def test_step_time_lost() -> None:
    """Throttling counts as lost step time while steps run: reported as stepping, or steps finished."""
    host = Host(slowed=1.0)
    host.start_run(ALICE)
    host.join()

    def send_reports() -> None:
        reports = {1: report(stepping=True), 4: report("test", 9.0), 7: report(seconds=10.0), 8: report(seconds=10.0)}
        if host.seconds in reports:
            host.registry.receive(ALICE, reports[host.seconds], host.seconds)

    share = host.poll(10, send_reports)
    assert share.throttled_seconds == {"sw_power_cap": 10}
    assert share.throttled_step_seconds["sw_power_cap"] == pytest.approx(
        4
    )  # seconds 1 to 3 as reported, 7 by finished steps


def test_failed_poll_adds_nothing(host: Host) -> None:
    """Time around a failed poll, and the counters' change in it, are not counted."""
    host.poll(4)
    host.pass_second()
    host.join(snapshot(Gpu(gpu(0).identity, fault="timeout")))
    share = host.poll(5)
    assert (share.gpu_seconds, share.busy_seconds) == (8, 6)  # not from second 4 to 6
    assert share.energy_joules == pytest.approx(2400)


def test_pause_adds_nothing(host: Host) -> None:
    """Counter changes while the driver is released belong to no run."""
    host.poll(4)
    for _ in range(60):
        host.pass_second()
        host.join(replace(snapshot(Gpu(gpu(0).identity, fault=None, asked=False)), asked=False))
    share = host.poll(1)
    assert (share.gpu_seconds, share.energy_joules, share.energy_by_power_joules) == (
        4,
        1200,
        1200,
    )  # before the pause, from power
    share = host.poll(5)  # to second 70, a slow reading
    assert (share.gpu_seconds, share.energy_by_power_joules) == (9, 1200)
    assert share.energy_joules == pytest.approx(2700)


def test_gap_between_polls_adds_nothing(host: Host) -> None:
    """Time in which the daemon was suspended is not counted."""
    host.poll(5)
    for _ in range(100):
        host.pass_second()
    share = host.poll(1)
    assert (share.gpu_seconds, share.energy_joules) == (5, 1500)  # before the pause, from power
    assert share.energy_by_power_joules == 1500


def test_counter_reset(host: Host) -> None:
    """Counters that restart at 0 after a driver reload add no energy and subtract none."""
    host.poll(10)
    host.joules = host.throttled = 0.0
    share = host.poll(10)
    assert share.throttled_seconds == {"sw_power_cap": 5}
    assert (share.energy_joules, share.energy_by_power_joules) == (6000, 3000)  # the second half from power


def test_gpu_without_allocated_memory_does_not_count(host: Host) -> None:
    """A GPU counts only while the run has memory allocated on it."""
    host.poll(10)
    host.holders = ()
    quiet = replace(report(), memory={"GPU:0": DeviceMemory(0, 2 * GIB)})
    host.registry.receive(ALICE, quiet, host.seconds)
    share = host.poll(10)
    assert (share.gpu_seconds, share.energy_joules, share.memory_peak_bytes) == (10, 3000, 2 * GIB)


def test_listed_process_counts_as_using_the_gpu() -> None:
    """A run that reports no memory uses the GPUs on which the driver lists its process."""
    host = Host()
    host.start_run(ALICE, devices={})
    host.join()
    assert host.poll(3).gpu_seconds == 3


def test_mig_instance_has_no_energy() -> None:
    """A MIG instance has no energy and idle time, which are known for the whole GPU only; throttling applies to it."""
    host = Host()
    host.start_run(ALICE, devices={"GPU:0": "MIG-0-1"})
    for _ in range(11):
        host.pass_second()
        polled = host.gpu()
        instances = mig_gpu(0, free=(GIB, GIB), held={ALICE.pid: 1})
        polled = replace(polled, mig=instances.mig, processes=instances.processes)
        (usage,) = host.join(snapshot(polled))
    (share,) = usage.devices.values()
    assert set(usage.devices) == {"MIG-0-1"}
    assert (share.gpu_seconds, share.energy_joules, share.idle_seconds) == (10, None, None)
    assert share.throttled_seconds["sw_power_cap"] > 4


def test_memory_peak(host: Host) -> None:
    """The peak is stored with the headroom at that moment; the lowest headroom is stored separately."""
    share = host.poll(1)
    assert (share.memory_peak_bytes, share.memory_limit_bytes) == (2 * GIB, 4 * GIB)
    assert (share.headroom_at_peak_bytes, share.lowest_headroom_bytes) == (2 * GIB, 3 * GIB)
    for current, peak in ((3 * GIB, 3 * GIB), (GIB, 3 * GIB)):
        memory = {"GPU:0": DeviceMemory(current, peak, 4 * GIB)}
        host.registry.receive(ALICE, replace(report(), memory=memory), host.seconds)
        share = host.poll(1)
    assert (share.memory_peak_bytes, share.headroom_at_peak_bytes, share.lowest_headroom_bytes) == (3 * GIB, GIB, GIB)


def test_xids_during_the_run(host: Host) -> None:
    """Only XIDs since the run's start count, and those shortly after its end, which the end may have caused."""
    old = EventCount(3, WALL - 100)
    host = Host(xids={13: old})
    host.start_run(ALICE)
    host.join()
    assert host.poll(1).xids == {}
    host.xids = {13: replace(old, count=4, last=WALL - 50), 31: EventCount(1, WALL + 1)}  # one is reported late
    assert host.poll(1).xids == {"31": 1}
    host.registry.receive(ALICE, End("exit"), host.seconds)
    host.xids = {**host.xids, 43: EventCount(2, WALL + 3)}
    assert host.poll(1).xids == {"31": 1, "43": 2}
    host.xids = {**host.xids, 79: EventCount(1, WALL + 50)}
    assert "79" not in host.poll(1).xids


def test_phases(host: Host) -> None:
    """Time counts to the phase that the run was in when polled."""
    host.poll(3)
    host.registry.receive(ALICE, report("test"), host.seconds)
    host.poll(2)
    (usage,) = host.join()
    assert usage.phases == {"train": 3, "test": 2, "predict": 0, "idle": 0}


def test_phases_of_a_run_that_starts_between_two_polls(host: Host) -> None:
    """A run has no time in a phase from before its start."""
    host.registry.receive(BOB, Hello("short", "test", {"GPU:0": "GPU-0"}), host.seconds + 0.75)
    host.registry.receive(BOB, report(), host.seconds + 0.75)
    host.poll(1)
    usage = host.join()[1]
    assert usage.phases["train"] == 0.25


def test_phases_of_a_run_that_starts_during_a_poll(host: Host) -> None:
    """A run that is newer than the poll has no time yet, rather than less than none."""
    host.pass_second()
    host.registry.receive(BOB, Hello("new", "test", {"GPU:0": "GPU-0"}), host.seconds + 0.25)
    host.registry.receive(BOB, report(), host.seconds + 0.25)
    assert set(host.join()[1].phases.values()) == {0.0}
    host.pass_second()
    assert host.join()[1].phases["train"] == 0.75


def test_expired_run_leaves_no_state(host: Host) -> None:
    """A run that has expired leaves no state."""
    host.poll(2)
    (last,) = host.accounts.add_poll(JoinedPoll(snapshot(host.gpu()), (), 3.0)).values()
    assert last.devices["GPU-0"].energy_joules == 600
    assert not host.accounts.add_poll(JoinedPoll(snapshot(host.gpu()), (), 4.0))
    assert not host.accounts._meters


class HostWithRecords:
    """A host whose polls update run records, as in the daemon."""

    def __init__(self) -> None:
        self.host = Host()
        self.recorder = Recorder(None, 10, max_runs=9)

    def poll(self, seconds: int = 1) -> None:
        """Poll for `seconds`."""
        for _ in range(seconds):
            self.host.pass_second()
            polled, now = snapshot(self.host.gpu()), float(self.host.seconds)
            runs = self.host.registry.add_poll(polled, now)
            poll = JoinedPoll(polled, runs, now)
            usage = self.host.accounts.add_poll(poll)
            self.recorder.add_poll(poll, usage)

    def run_record(self) -> dict[str, Any]:
        """Return the run record."""
        return dict(json.loads(asyncio.run(self.recorder.one(ALICE.run_id)) or b"{}"))

    def gpu_seconds(self) -> float:
        """Return the GPU seconds in the run record."""
        return float(self.run_record()["gpu_seconds"])


def test_poll_that_misses_a_run_counts_time_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An internal error that drops a run from a poll neither loses its time nor counts it twice."""
    monkeypatch.setattr("gpuwarden.records.recorder.procfs.is_alive", lambda *_: True)
    recorded = HostWithRecords()
    recorded.host.start_run(ALICE)
    recorded.poll(11)
    assert recorded.gpu_seconds() == 10
    for _ in range(3):
        with monkeypatch.context() as broken:
            broken.setattr(RunState, "add_poll", lambda *_args, **_settings: 1 / 0)
            recorded.poll()
        recorded.poll()
    assert 10 <= recorded.gpu_seconds() <= 16


def test_detached_run_keeps_unread_counter_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A detached run's energy and throttled seconds cover all its time on the GPU."""
    monkeypatch.setattr("gpuwarden.records.recorder.procfs.is_alive", lambda *_: True)
    recorded = HostWithRecords()
    recorded.host.start_run(ALICE)
    recorded.poll(28)  # the counters were last read at 20 s
    recorded.host.registry._forget(ALICE.run_id, float(recorded.host.seconds))
    recorded.poll()
    detached = recorded.run_record()
    assert (detached["gpu_seconds"], detached["energy_joules"]) == (27, 27 * recorded.host.watts)
    recorded.host.start_run(ALICE)
    recorded.poll(21)
    run_record = recorded.run_record()
    assert (run_record["gpu_seconds"], run_record["energy_joules"]) == (47, 47 * recorded.host.watts)


def test_run_that_returns_before_the_next_poll_keeps_its_usage(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit runs.max a run may be dropped and reconnect before the next poll."""
    monkeypatch.setattr("gpuwarden.records.recorder.procfs.is_alive", lambda *_: True)
    recorded = HostWithRecords()
    recorded.host.start_run(ALICE)
    recorded.poll(28)  # the counters were last read at 20 s
    recorded.host.registry._forget(ALICE.run_id, float(recorded.host.seconds))
    recorded.host.xids = {31: EventCount(1, WALL + recorded.host.seconds + 0.5)}
    recorded.host.start_run(ALICE)
    recorded.poll()
    assert recorded.gpu_seconds() == 28
    recorded.poll(11)
    run_record = recorded.run_record()
    assert run_record["gpu_seconds"] == 39
    assert run_record["energy_joules"] == 39 * recorded.host.watts
    assert run_record["throttled_seconds"] == {"sw_power_cap": 39 * recorded.host.slowed}
    assert run_record["xids"] == {"31": 1}
