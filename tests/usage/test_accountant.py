"""Usage of GPUs by runs: what is added up, and what is not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu, Snapshot, XidCount
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.metrics.model import Readings
from gpuwarden.protocol.messages import STEP_BUCKETS, DeviceMemory, End, Hello, Report
from gpuwarden.records.recorder import Recorder
from gpuwarden.runs.registry import RunRegistry
from gpuwarden.runs.run_snapshot import JoinedPoll
from gpuwarden.runs.run_state import RunState
from gpuwarden.usage.accountant import UsageAccountant
from gpuwarden.usage.run_usage import NO_USAGE, DeviceUsage, RunUsage
from snapshots import GIB, divided, gpu, snapshot

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
class Box:
    """A GPU that is polled every second: what its counters say follows from what it has done so far."""

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
    xids: Mapping[int, XidCount] = field(default_factory=dict)
    holders: tuple[int, ...] = (ALICE.pid,)

    def __post_init__(self) -> None:
        self.registry = RunRegistry(limit=9, expiry=60.0, overhead=0, wall=lambda: WALL + self.seconds)
        self.accounts = UsageAccountant(SLOW)
        self._look_slowly()

    def meet(self, peer: ProcessKey, **hello: object) -> None:
        """Let a run report on the GPU."""
        said = replace(Hello("resnet", "test", {"GPU:0": "GPU-0"}), **hello)  # type: ignore[arg-type] # of the test's
        self.registry.receive(peer, said, self.seconds)
        self.registry.receive(peer, report(), self.seconds)

    def pass_second(self) -> None:
        """Let the GPU do what it does for a second."""
        self.seconds += 1
        self.joules += self.watts
        self.throttled += self.slowed
        self.kernels += self.busy
        if self.seconds % SLOW == 0:
            self._look_slowly()

    def _look_slowly(self) -> None:
        self.slow_taken = self.seconds
        self.slow = {GpuReadings.clock_event_seconds_total: {("sw_power_cap",): self.throttled, ("gpu_idle",): 9.0}}
        if self.counts_joules:
            self.slow = {**self.slow, GpuReadings.energy_joules_total: self.joules}

    def gpu(self) -> Gpu:
        """Return the GPU as a poll finds it now."""
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

    def join(self, seen: Snapshot | None = None, earlier: RunUsage = NO_USAGE) -> list[RunUsage]:
        """Join a poll, with what an earlier daemon has counted of the first run; return what each run used."""
        now = float(self.seconds)
        found = snapshot(self.gpu()) if seen is None else seen
        runs = self.registry.update(found, now)
        return list(self.accounts.update(JoinedPoll(found, runs, now), {ALICE.run_id: earlier}).values())

    def poll(self, seconds: int, before_each: Callable[[], object] = lambda: None) -> DeviceUsage:
        """Poll for so many seconds and return the first run's share of the GPU."""
        for _ in range(seconds):
            self.pass_second()
            before_each()
            usage = self.join()
        return usage[0].shares["GPU-0"]


@pytest.fixture
def box() -> Box:
    """Make a box with a run that was met in the poll of second 0."""
    made = Box()
    made.meet(ALICE)
    made.join()
    return made


def test_time_and_idle_time(box: Box) -> None:
    """Seconds are those from the first poll that finds the run there; idle ones are those without a kernel."""
    share = box.poll(8)
    assert (share.seconds, share.busy, share.idle) == (8, 6, 2)
    assert set(share.throttled) == {"sw_power_cap"}  # that a GPU has no work is no throttling


def test_energy_is_the_counters(box: Box) -> None:
    """Joules are the differences of the driver's counter, once it is looked at."""
    assert box.poll(9).joules == 0
    share = box.poll(1)
    assert (share.joules, share.joules_by_power) == (3000, None)
    box.meet(BOB)
    assert box.poll(10).joules == 6000
    box.poll(10)
    assert [usage.shares["GPU-0"].joules for usage in box.join()] == [9000, 6000]  # all of it for each


def test_run_that_begins_between_two_looks_has_its_part() -> None:
    """Of what the counters told between two looks, a run has the part in which it held the GPU."""
    box = Box()
    for _ in range(6):
        box.pass_second()
    box.meet(ALICE)
    box.join()
    share = box.poll(4)
    assert share.joules == pytest.approx(1200)
    assert share.throttled["sw_power_cap"] == pytest.approx(2)


def test_end_between_two_looks(box: Box) -> None:
    """What the counters have not told by the run's end is power and clock events as polled."""
    box.poll(13)
    box.registry.receive(ALICE, End("exit"), box.seconds)
    share = box.poll(1)
    assert (share.seconds, share.joules, share.joules_by_power) == (13, 3900, 900)
    assert share.throttled["sw_power_cap"] == 5 + 3
    assert box.poll(10) == share


def test_without_an_energy_counter_power_adds_up() -> None:
    """A GPU that counts no joules has those of its power, and says that they are."""
    box = Box(counts_joules=False)
    box.meet(ALICE)
    box.join()
    share = box.poll(12)
    assert (share.joules, share.joules_by_power) == (3600, 3600)


def test_step_time_lost() -> None:
    """Throttling counts as step time lost while steps are under way: by word, or because some have ended."""
    box = Box(slowed=1.0)
    box.meet(ALICE)
    box.join()

    def tell() -> None:
        said = {1: report(stepping=True), 4: report("test", 9.0), 7: report(seconds=10.0), 8: report(seconds=10.0)}
        if box.seconds in said:
            box.registry.receive(ALICE, said[box.seconds], box.seconds)

    share = box.poll(10, tell)
    assert share.throttled == {"sw_power_cap": 10}
    assert share.throttled_steps["sw_power_cap"] == pytest.approx(4)  # seconds 1 to 3 by word, 7 by what had ended


def test_failed_poll_adds_nothing(box: Box) -> None:
    """Around a poll without an answer no time passes, and the counters' part of it is left out."""
    box.poll(4)
    box.pass_second()
    box.join(snapshot(Gpu(gpu(0).identity, fault="timeout")))
    share = box.poll(5)
    assert (share.seconds, share.busy) == (8, 6)  # not from second 4 to 6
    assert share.joules == pytest.approx(2400)


def test_pause_adds_nothing(box: Box) -> None:
    """While the driver is let go of, whatever its counters did belongs to nobody."""
    box.poll(4)
    for _ in range(60):
        box.pass_second()
        box.join(replace(snapshot(Gpu(gpu(0).identity, fault=None, asked=False)), asked=False))
    share = box.poll(1)
    assert (share.seconds, share.joules, share.joules_by_power) == (4, 1200, 1200)  # of the time before, by power
    share = box.poll(5)  # to second 70, a look
    assert (share.seconds, share.joules_by_power) == (9, 1200)
    assert share.joules == pytest.approx(2700)


def test_gap_between_polls_adds_nothing(box: Box) -> None:
    """A daemon that was stopped for long cannot say what happened meanwhile."""
    box.poll(5)
    for _ in range(100):
        box.pass_second()
    share = box.poll(1)
    assert (share.seconds, share.joules) == (5, 1500)  # of the time before, by power
    assert share.joules_by_power == 1500


def test_counter_that_begins_anew(box: Box) -> None:
    """After a driver is loaded anew its counters are low: that is no energy given back, nor any drawn."""
    box.poll(10)
    box.joules = box.throttled = 0.0
    share = box.poll(10)
    assert share.throttled == {"sw_power_cap": 5}
    assert (share.joules, share.joules_by_power) == (6000, 3000)  # the second half by power


def test_gpu_that_is_not_held_costs_nothing(box: Box) -> None:
    """Neither a run without memory on it, nor the time after it has let go of it, counts."""
    box.poll(10)
    box.holders = ()
    quiet = replace(report(), memory={"GPU:0": DeviceMemory(0, 2 * GIB)})
    box.registry.receive(ALICE, quiet, box.seconds)
    share = box.poll(10)
    assert (share.seconds, share.joules, share.memory_peak) == (10, 3000, 2 * GIB)


def test_process_that_the_driver_lists_holds_the_gpu() -> None:
    """A run whose framework says nothing of memory holds what the driver lists its process on."""
    box = Box()
    box.meet(ALICE, devices={})
    box.join()
    assert box.poll(3).seconds == 3


def test_mig_instance_has_no_energy() -> None:
    """The whole GPU's joules and kernels are not an instance's; what slows its clocks is."""
    box = Box()
    box.meet(ALICE, devices={"GPU:0": "MIG-0-1"})
    for _ in range(11):
        box.pass_second()
        seen = box.gpu()
        instances = divided(0, free=(GIB, GIB), held={ALICE.pid: 1})
        seen = replace(seen, mig=instances.mig, processes=instances.processes)
        (usage,) = box.join(snapshot(seen))
    (share,) = usage.shares.values()
    assert set(usage.shares) == {"MIG-0-1"}
    assert (share.seconds, share.joules, share.idle) == (10, None, None)
    assert share.throttled["sw_power_cap"] > 4


def test_memory_at_its_most(box: Box) -> None:
    """The peak is kept with the headroom of that moment, the least headroom by itself."""
    share = box.poll(1)
    assert (share.memory_peak, share.memory_limit) == (2 * GIB, 4 * GIB)
    assert (share.headroom_at_peak, share.lowest_headroom) == (2 * GIB, 3 * GIB)
    for current, peak in ((3 * GIB, 3 * GIB), (GIB, 3 * GIB)):
        memory = {"GPU:0": DeviceMemory(current, peak, 4 * GIB)}
        box.registry.receive(ALICE, replace(report(), memory=memory), box.seconds)
        share = box.poll(1)
    assert (share.memory_peak, share.headroom_at_peak, share.lowest_headroom) == (3 * GIB, GIB, GIB)


def test_xids_while_it_lived(box: Box) -> None:
    """Those before it began are not its own; one that its end caused is, though told a little later."""
    old = XidCount(3, WALL - 100)
    box = Box(xids={13: old})
    box.meet(ALICE)
    box.join()
    assert box.poll(1).xids == {}
    box.xids = {13: replace(old, count=4, last=WALL - 50), 31: XidCount(1, WALL + 1)}  # one is told late
    assert box.poll(1).xids == {31: 1}
    box.registry.receive(ALICE, End("exit"), box.seconds)
    box.xids = {**box.xids, 43: XidCount(2, WALL + 3)}
    assert box.poll(1).xids == {31: 1, 43: 2}
    box.xids = {**box.xids, 79: XidCount(1, WALL + 50)}
    assert 79 not in box.poll(1).xids


def test_phases(box: Box) -> None:
    """Time counts to the phase that the run was in when polled."""
    box.poll(3)
    box.registry.receive(ALICE, report("test"), box.seconds)
    box.poll(2)
    (usage,) = box.join()
    assert usage.phases == {"train": 3, "test": 2, "predict": 0, "idle": 0}


def test_account_is_taken_up() -> None:
    """What an earlier daemon has counted is there from the first poll, and goes on."""
    box = Box()
    before = DeviceUsage(
        name="H100",
        seconds=100.0,
        busy=70.0,
        idle=30.0,
        joules=2e4,
        throttled={"sw_power_cap": 7.0},
        memory_peak=8 * GIB,
        headroom_at_peak=5.0,
        lowest_headroom=4.0,
        xids={31: 2},
    )
    gone = DeviceUsage("H100", 50.0)
    box.meet(ALICE)
    (usage,) = box.join(earlier=RunUsage({"GPU-0": before, "GPU-9": gone}, {"train": 90.0}, 123))
    assert usage.shares["GPU-0"].seconds == 100
    share = box.poll(10)
    assert (share.seconds, share.busy, share.joules) == (110, 77.5, 23000)
    assert share.throttled == {"sw_power_cap": 12}
    assert (share.memory_peak, share.headroom_at_peak, share.lowest_headroom) == (8 * GIB, 5, 4)
    assert share.xids == {31: 2}
    (usage,) = box.join()
    assert usage.shares["GPU-9"] == gone
    assert usage.phases["train"] == 100
    assert usage.host_memory_peak == 123


def test_late_word_of_an_earlier_daemon_is_added(box: Box) -> None:
    """What was counted before, on several occasions, is added up; of two peaks the higher one stays."""
    held = DeviceUsage("H100", 100.0, 70.0, 30.0, 2e4, None, {"sw_power_cap": 7.0}, {}, GIB, None, None, 4.0, {31: 2})
    gone = DeviceUsage("A100", 50.0)
    box.poll(10)
    box.join(earlier=RunUsage({"GPU-0": held, "GPU-9": gone}, {"predict": 90.0}, 123))
    box.join(earlier=RunUsage({"GPU-9": gone}, {"train": 5.0, "test": 1.0}, 99))
    share = box.poll(1)
    assert (share.seconds, share.joules, share.memory_peak, share.lowest_headroom) == (111, 23000, 2 * GIB, 4)
    assert share.throttled == {"sw_power_cap": 12}
    (usage,) = box.join()
    assert usage.shares["GPU-9"].seconds == 100
    assert usage.phases == {"train": 16, "test": 1, "predict": 90, "idle": 0}
    assert usage.host_memory_peak == 123


def test_nothing_is_kept_without_runs(box: Box) -> None:
    """A run that is forgotten leaves nothing behind."""
    box.poll(2)
    (last,) = box.accounts.update(JoinedPoll(snapshot(box.gpu()), (), 3.0)).values()
    assert last.shares["GPU-0"].joules == 600
    assert not box.accounts.update(JoinedPoll(snapshot(box.gpu()), (), 4.0))
    assert not box.accounts._meters


class WithReceipts:
    """A box whose polls go on to receipts, as the daemon's do."""

    def __init__(self) -> None:
        self.box = Box()
        self.receipts = Recorder(None, 10, most_runs=9)

    def poll(self, seconds: int = 1) -> None:
        """Poll for so many seconds."""
        for _ in range(seconds):
            self.box.pass_second()
            seen, now = snapshot(self.box.gpu()), float(self.box.seconds)
            runs = self.box.registry.update(seen, now)
            poll = JoinedPoll(seen, runs, now)
            usage = self.box.accounts.update(poll, self.receipts.resume(runs))
            self.receipts.update(poll, usage)

    def receipt(self) -> dict[str, Any]:
        """Return the run's receipt."""
        return dict(json.loads(asyncio.run(self.receipts.one(ALICE.run_id)) or b"{}"))

    def gpu_seconds(self) -> float:
        """Return what it says that the run held GPUs for."""
        return float(self.receipt()["gpu_seconds"])


def test_polls_that_miss_a_run_cost_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of our own that keeps a run out of a poll loses no time of it, and counts none again."""
    monkeypatch.setattr("gpuwarden.records.recorder.procfs.is_alive", lambda *_: True)
    it = WithReceipts()
    it.box.meet(ALICE)
    it.poll(11)
    assert it.gpu_seconds() == 10
    for _ in range(3):
        with monkeypatch.context() as broken:
            broken.setattr(RunState, "update", lambda *_args, **_settings: 1 / 0)
            it.poll()
        it.poll()
    assert 10 <= it.gpu_seconds() <= 16


def test_run_that_parts_keeps_what_the_counters_were_not_asked_for_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its energy and its slowed seconds are those of all the time that it held the GPU."""
    monkeypatch.setattr("gpuwarden.records.recorder.procfs.is_alive", lambda *_: True)
    it = WithReceipts()
    it.box.meet(ALICE)
    it.poll(28)  # the counters were looked at last at 20 s
    it.box.registry._forget(ALICE.run_id, float(it.box.seconds))
    it.poll()
    parted = it.receipt()
    assert (parted["gpu_seconds"], parted["energy_joules"]) == (27, 27 * it.box.watts)
    it.box.meet(ALICE)
    it.poll(21)
    receipt = it.receipt()
    assert (receipt["gpu_seconds"], receipt["energy_joules"]) == (47, 47 * it.box.watts)


def test_run_that_is_forgotten_and_back_before_a_poll_keeps_its_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where runs.max is used up, one may give way to another and come back at once."""
    monkeypatch.setattr("gpuwarden.records.recorder.procfs.is_alive", lambda *_: True)
    it = WithReceipts()
    it.box.meet(ALICE)
    it.poll(28)  # the counters were looked at last at 20 s
    it.box.registry._forget(ALICE.run_id, float(it.box.seconds))
    it.box.xids = {31: XidCount(1, WALL + it.box.seconds + 0.5)}
    it.box.meet(ALICE)
    it.poll()
    assert it.gpu_seconds() == 28
    it.poll(11)
    receipt = it.receipt()
    assert receipt["gpu_seconds"] == 39
    assert receipt["energy_joules"] == 39 * it.box.watts
    assert receipt["throttled_seconds"] == {"sw_power_cap": 39 * it.box.slowed}
    assert receipt["xids"] == {"31": 1}
