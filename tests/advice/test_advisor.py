"""Advice for each run, poll by poll, and the limits that trigger an early poll."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from gpuwarden.advice.advisor import HUNG_SECONDS, MIN_GROWTH_BYTES, Advisor
from gpuwarden.advice.delivery_state import AdviceRound, DeliveryState
from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.analysis.memory.oom_forecast import TimeLeft
from gpuwarden.analysis.oom.co_tenants import REST_SECONDS, CoTenantTracker
from gpuwarden.config.schema import PressureConfig as Limits
from gpuwarden.config.thresholds import XID_SECONDS
from gpuwarden.gpu.memory_sampler import NO_LIMIT
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import HUNG, Gpu, XidCount
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.host.process_tree import HostUsage, PresentProcesses
from gpuwarden.owners.resolver import Owners
from gpuwarden.pressure.levels import PressureWatch
from gpuwarden.protocol.codec import decode_advice, encode
from gpuwarden.protocol.messages import Advice, DeviceMemory, Hello
from gpuwarden.runs.run_events import RunEventKind
from gpuwarden.runs.run_snapshot import JoinedPoll, RunSnapshot
from snapshots import GIB, divided, gpu, snapshot

BEGAN = 1000.0  # Unix time


class Box:
    """An advisor and what it sends, with polls one second apart unless said."""

    def __init__(self, *, alerting: bool = False) -> None:
        self.sent: list[tuple[int, Advice]] = []
        self.takes = True
        self.marks: list[tuple[int, RunEventKind, str]] = []
        self.parents: dict[int, int] = {}
        self.advice = AdviceRound()
        self.advisor = Advisor(Limits(), alerting=alerting, nearest_above=self._nearest_above)
        self._co_tenants = CoTenantTracker()
        self._watch = PressureWatch(Limits())
        self.now = 0.0

    def _nearest_above(self, pid: int, tops: Collection[int]) -> int:
        while pid not in tops and pid:
            pid = self.parents.get(pid, 0)
        return pid

    def poll(self, gpus: list[Gpu], *runs: RunSnapshot, passed: float = 1.0) -> list[tuple[int, str, str]]:
        """Make a poll; return pid, kind and level of what was sent."""
        self.now += passed
        seen = replace(snapshot(*gpus), time=BEGAN + self.now)
        owners = Owners(by_pid={9: {"user": "alice", "run": "9-1"}})
        co_tenants = self._co_tenants.update(seen, owners, self.now)
        poll = JoinedPoll(seen, runs, self.now, owners, co_tenants)
        self.advice = self.advisor.update(poll, self._watch.update(poll))
        for message in self.advice.messages:
            assert decode_advice(encode(message.advice)) == message.advice  # fit for the wire
        sent = self.advice.messages if self.takes else ()
        self.advisor.confirm(sent, self.now)
        self.sent += [(each.run.pid, each.advice) for each in sent]
        for run_id, events in self.advice.events_with(sent).items():
            assert {event.uuid for event in events} <= {"GPU-0", "MIG-0-1"}
            self.marks += [(int(run_id.partition("-")[0]), event.kind, event.text) for event in events]
        return [(each.run.pid, each.advice.kind, each.advice.level) for each in sent]


def run(number: int, uuid: str, *, in_use: float = 50, left: float | None = 50) -> RunSnapshot:
    """Make a run that hears, with GiB in use and left; None for what is not known."""
    memory = {uuid: DeviceMemory(int(in_use * GIB), int(in_use * GIB))}
    headroom = {} if left is None else {uuid: left * GIB}
    hello = Hello(f"run-{number}", "none", {}, hears=True)
    return RunSnapshot(
        ProcessKey(number, 1000, 1),
        hello,
        None,
        None,
        True,
        True,
        memory,
        headroom,
        began=BEGAN,
        devices=(uuid,),
    )


def holding(each: Gpu, held: dict[int, float], used: float = 30) -> Gpu:
    """Have processes hold GiB, and so much in use on the whole."""
    listed = gpu(each.identity.index, held={pid: int(count * GIB) for pid, count in held.items()})
    readings = {**each.readings, GpuReadings.memory_used_bytes: used * GIB}
    return replace(each, processes=listed.processes, process_lists=("compute",), readings=readings)


def down(index: int, fault: str = "gpu_is_lost") -> Gpu:
    """Make a GPU that does not answer."""
    return Gpu(gpu(index).identity, fault=fault)


def test_what_was_not_sent_is_sent_later() -> None:
    """A message that finds no room is counted, and tried again for as long as it holds."""
    box, near = Box(), run(7, "GPU-0", left=1)
    box.takes = False
    assert box.poll([gpu(0)], near) == box.poll([gpu(0)], near) == []
    box.takes = True
    assert box.poll([gpu(0)], near) == [(7, "pressure", "critical")]
    assert box.sent[-1][1].serial == 1
    assert box.poll([gpu(0)], near) == []


def test_nothing_is_told_of_what_is_not_known() -> None:
    """A run whose headroom is not known any more hears neither better nor worse, nor the same again when it is."""
    box, near = Box(), run(7, "GPU-0", left=1)
    box.poll([gpu(0)], near)
    assert box.poll([gpu(0)], replace(near, headroom={}), passed=3600) == []
    assert box.poll([gpu(0)], near) == []


def test_ended_run_is_not_told() -> None:
    """Nobody hears who is gone."""
    box = Box()
    assert box.poll([gpu(0)], replace(run(7, "GPU-0", left=1), up=False)) == []
    assert box.advice.gpu_limits == {}


def test_run_on_an_instance_is_told_of_the_loss_of_its_gpu() -> None:
    """A GPU that is lost names no instances; those of before are remembered, until it is divided anew."""
    box, there = Box(), run(7, "MIG-0-1", left=None)
    whole = divided(0, free=(GIB, GIB))
    assert box.poll([whole], there) == []
    assert box.poll([down(0)], there) == [(7, "gpu_lost", "critical")]
    assert box.sent[-1][1].uuid == "GPU-0"
    assert box.poll([divided(0, free=(GIB,))], there) == []
    assert box.poll([down(0)], there) == []


def test_slow_gpu_is_not_lost() -> None:
    """One that hangs counts as lost after a while only; one that the driver calls lost does at once."""
    box, there = Box(), run(7, "GPU-0", left=None)
    assert box.poll([down(0, HUNG)], there) == []
    assert box.poll([gpu(0)], there) == box.poll([down(0, HUNG)], there, passed=60) == []
    assert box.poll([down(0, HUNG)], there, passed=HUNG_SECONDS) == [(7, "gpu_lost", "critical")]


def test_xids_of_before_and_of_long_ago_are_not_told() -> None:
    """Of XIDs those count that came while the run lived, each code once until it has been quiet for an hour."""
    box, there = Box(), run(7, "GPU-0", left=None)

    def with_xid(last: float) -> list[Gpu]:
        return [replace(gpu(0), xids={79: XidCount(1, last), 13: XidCount(1, last)})]

    assert box.poll(with_xid(BEGAN - 1), there) == []
    assert box.poll(with_xid(BEGAN + 1), there) == [(7, "xid", "critical")]
    assert box.poll(with_xid(BEGAN + 3000), there, passed=3000) == []
    assert box.poll(with_xid(BEGAN + 3000), there, passed=XID_SECONDS) == []
    assert box.poll(with_xid(BEGAN + 9000), there, passed=3000) == [(7, "xid", "critical")]


def test_neighbours_growth() -> None:
    """It counts from when the neighbour held least, the largest one is told with who it is, and once while it grows."""
    box, there = Box(), run(7, "GPU-0")
    assert box.poll([holding(gpu(0), {7: 51, 9: 10, 8: 1})], there) == []  # what was there before is no growth
    assert box.poll([holding(gpu(0), {7: 71, 9: 14, 8: 2})], there) == []  # a twelfth; its own is no neighbour's
    assert box.poll([holding(gpu(0), {7: 71, 9: 16, 8: 6})], there) == [(7, "neighbour", "warning")]
    assert "process 9 of user alice, run 9-1 took 6.00 GiB on GPU 0" in box.sent[-1][1].text
    assert "within 2.0s: 50.0 GiB of headroom left" in box.sent[-1][1].text
    for more in range(20):
        assert box.poll([holding(gpu(0), {7: 71, 9: 17 + more, 8: 6})], there, passed=REST_SECONDS / 2) == []
    assert box.poll([holding(gpu(0), {7: 71, 9: 36, 8: 6})], there, passed=2 * REST_SECONDS) == []
    assert box.poll([holding(gpu(0), {7: 71, 9: 46, 8: 6})], there) == [(7, "neighbour", "warning")]


def test_a_runs_own_processes_are_no_neighbours() -> None:
    """Neither workers that were seen, nor one that has begun since, nor one without a pid; but another run's are."""
    box, there, child = Box(), run(7, "GPU-0"), run(8, "GPU-0")
    there = replace(
        there, host_usage=HostUsage(0.0, None, None, PresentProcesses(0, 3, "running", None, None, pids=(7, 71, 72)))
    )
    box.parents = {73: 72, 72: 7, 8: 7, 81: 8}
    after: dict[int, float] = {7: 21, 71: 9, 72: 8, 73: 10, 0: 11}
    box.poll([holding(gpu(0), {7: 21, 71: 1, 72: 1})], there)
    assert box.poll([holding(gpu(0), after)], there) == []
    assert box.advice.gpu_limits["GPU-0"] == pytest.approx(35 * GIB)  # a tenth of what is left, for who may come
    told = box.poll([holding(gpu(0), {**after, 8: 1, 81: 7, 9: 6})], there, child)
    assert told == [(7, "neighbour", "warning"), (8, "neighbour", "warning")]
    assert [advice.text.split()[1] for _, advice in box.sent] == ["81", "73"]


@pytest.mark.parametrize("pid", [0, 4711])
def test_run_that_is_listed_by_another_pid_is_no_neighbour_of_itself(pid: int) -> None:
    """Where the driver does not list the run by its pid, it may be any process that grows."""
    box, there = Box(), run(7, "GPU-0")
    box.poll([holding(gpu(0), {pid: 10})], there)
    assert box.poll([holding(gpu(0), {pid: 40})], there) == []


def test_neighbours_take_nothing_from_a_limit_of_its_own() -> None:
    """A run that may have 60 GiB, with 10 of them left, is told of no neighbour; one that the device bounds is."""
    for limit, told in ((60, []), (90, [(7, "neighbour", "warning")])):
        box, there = Box(), run(7, "GPU-0", left=10)
        there = replace(there, memory={"GPU-0": DeviceMemory(50 * GIB, 50 * GIB, limit * GIB)})
        box.poll([holding(gpu(0), {7: 51, 9: 4})], there)
        assert box.poll([holding(gpu(0), {7: 51, 9: 24})], there) == told


def test_neighbours_are_told_seldom() -> None:
    """Of one neighbour after the other a run hears once a minute."""
    box, there = Box(), run(7, "GPU-0")
    box.poll([holding(gpu(0), {7: 51})], there)
    told = [box.poll([holding(gpu(0), {7: 51, 100 + n: 20})], there, passed=1.0) for n in range(120)]
    assert sum(map(len, told)) == 2


def test_growth_counts_from_when_the_run_began() -> None:
    """What a neighbour took before a run began is no news to it; what it takes after that is."""
    box, there = Box(), run(7, "GPU-0")
    late = replace(there, began=BEGAN + 2.5)
    box.poll([holding(gpu(0), {7: 51, 9: 1})], late)
    assert box.poll([holding(gpu(0), {7: 51, 9: 21})], late) == []
    assert box.poll([holding(gpu(0), {7: 51, 9: 21})], late) == []
    assert box.poll([holding(gpu(0), {7: 51, 9: 22})], late) == [(7, "neighbour", "warning")]


def test_little_growth_is_no_news() -> None:
    """Where next to nothing is left a tenth of it is nothing."""
    box, there = Box(), run(7, "GPU-0", left=0.01)
    box.poll([holding(gpu(0), {7: 51, 9: 10})], there)
    assert box.poll([holding(gpu(0), {7: 51, 9: 10 + (MIN_GROWTH_BYTES - 1) / GIB})], there) == []
    assert box.poll([holding(gpu(0), {7: 51, 9: 10 + MIN_GROWTH_BYTES / GIB})], there) == [(7, "neighbour", "warning")]


@pytest.mark.parametrize(
    ("left", "of_others", "own"),
    [
        (50.0, 5.0, 40.0),  # a tenth for a neighbour; its own: to a tenth of 100
        (5.0, 0.5, 5 - 0.05 * 55),  # warning: on to critical
        (4.0, 4 - 0.05 * 50 / 0.95, 4 - 0.05 * 54),  # the same, told of a neighbour a short time ago
        (1.0, NO_LIMIT, NO_LIMIT),
    ],
)
def test_limits_beyond_which_there_may_be_news(left: float, of_others: float, own: float) -> None:
    """What others may take, and the run itself, until there is something to tell."""
    box, there = Box(), run(7, "GPU-0", left=left)
    if left in (1.0, 4.0):
        box.advisor._states[there.peer.run_id] = DeliveryState(neighbour_at=0.0)
    box.poll([holding(gpu(0), {7: 51})], there)
    assert box.advice.gpu_limits["GPU-0"] == pytest.approx((30 + of_others) * GIB)
    assert box.advice.run_limits["7-1"]["GPU-0"] == pytest.approx((50 + own) * GIB)


def test_limits_are_the_least_of_all_runs() -> None:
    """The run that is closest decides; where none is known to be close it counts that the GPU answers."""
    box, gpus = Box(), [holding(gpu(n), {7: 51}) for n in range(3)]
    box.poll(gpus, run(7, "GPU-0"), run(8, "GPU-0", left=20), run(5, "GPU-1", left=None))
    assert box.advice.gpu_limits == {"GPU-0": pytest.approx(32 * GIB), "GPU-1": NO_LIMIT}


@pytest.mark.parametrize("alerting", [True, False])
def test_limits_of_runs_that_do_not_hear(alerting: bool) -> None:  # noqa: FBT001 - pytest's
    """They count where somebody else gets alerts, who is not told of neighbours; the run itself is told nothing."""
    box, there = Box(alerting=alerting), run(7, "GPU-0")
    deaf = replace(there, hello=replace(there.hello, hears=False))
    assert box.poll([holding(gpu(0), {7: 51})], deaf) == []
    at_warning = 50 - 0.1 * 50 / 0.9
    assert box.advice.gpu_limits == ({"GPU-0": pytest.approx((30 + at_warning) * GIB)} if alerting else {})
    assert box.advice.run_limits == ({"7-1": {"GPU-0": pytest.approx(90 * GIB)}} if alerting else {})


def test_neighbour_that_goes_on_is_no_reason_for_polls() -> None:
    """Once it has been told, what it takes further does not count before a level changes."""
    box, there = Box(), run(7, "GPU-0")
    box.poll([holding(gpu(0), {7: 51, 9: 1})], there)
    box.poll([holding(gpu(0), {7: 51, 9: 21})], there)
    for more in range(3):
        box.poll([holding(gpu(0), {7: 51, 9: 22 + more})], there, passed=REST_SECONDS * 0.9)
        assert box.advice.gpu_limits["GPU-0"] == pytest.approx((30 + 50 - 0.1 * 50 / 0.9) * GIB)


def test_faults_stand_in_every_story() -> None:
    """Who does not hear, and whom no message reaches, has it in its story once: XIDs that need a reset, and losses."""
    box, mute = Box(), run(8, "GPU-0")
    deaf = replace(run(7, "GPU-0"), hello=replace(mute.hello, hears=False))
    box.takes = False
    ill = replace(gpu(0), xids={48: XidCount(1, BEGAN + 1)})
    for _ in range(3):
        assert box.poll([ill], deaf, mute) == []
    for _ in range(3):
        assert box.poll([replace(down(0), xids=ill.xids)], deaf) == []
    told = [(pid, kind, text.partition(":")[0]) for pid, kind, text in box.marks]
    assert told == [
        (7, "event", "GPU 0 reported XID 48"),
        (8, "event", "GPU 0 reported XID 48"),
        (7, "event", "GPU 0 no longer answers the driver"),
    ]
    assert box.advice.gpu_limits == {}  # nobody hears: no reason for a poll


def test_pressure_stands_in_every_story() -> None:
    """Each change of a level is marked once, whether the run hears or not: of its memory, and of its GPU's heat."""
    box, deaf = Box(), replace(run(7, "GPU-0"), hello=Hello("deaf", "none", {}))
    near = replace(deaf, headroom={"GPU-0": GIB})
    hot = replace(gpu(0), readings={**gpu(0).readings, GpuReadings.temperature_margin_celsius: 2.0})
    for each, passed in ((deaf, 1.0), (near, 1.0), (near, 1.0), (deaf, 1.0), (deaf, 3600.0), (deaf, 1.0)):
        assert box.poll([gpu(0)], each, passed=passed) == []
    for _ in range(2):
        box.poll([hot], deaf)
    assert [(pid, kind, text.partition(":")[0]) for pid, kind, text in box.marks] == [
        (7, "pressure", "GPU 0 is almost out of memory"),
        (7, "pressure", "GPU 0 is no longer low on memory"),
        (7, "pressure", "GPU 0 is hot"),
    ]


def test_neighbour_stands_in_the_story() -> None:
    """One that a run was told of is marked there once, when the message has gone."""
    box, there = Box(), run(7, "GPU-0")
    box.poll([holding(gpu(0), {7: 51, 9: 1})], there)
    box.takes = False
    box.poll([holding(gpu(0), {7: 51, 9: 21})], there)
    assert box.marks == []
    box.takes = True
    for _ in range(3):
        box.poll([holding(gpu(0), {7: 51, 9: 21})], there)
    ((pid, kind, text),) = box.marks
    assert (pid, kind) == (7, "neighbour")
    assert text.startswith("process 9 of user alice, run 9-1 took 20.0 GiB on GPU 0 within")


@pytest.mark.parametrize(
    ("left", "seconds", "expected"),
    [
        (50, 300.0, "will soon be out of memory: 50.0 GiB of headroom"),
        (50, 30.0, "will very soon be out of memory: 50.0 GiB of headroom"),
        (1, 30.0, "is almost out of memory: 1.00 GiB of headroom"),
        (5, 30.0, "will very soon be out of memory: 5.00 GiB of headroom"),
        (5, 300.0, "is low on memory: 5.00 GiB of headroom"),
    ],
)
def test_the_text_has_the_reason_of_the_pressure(left: int, seconds: float, expected: str) -> None:
    """The text says which it is: little headroom, or headroom that will soon be gone."""
    box, there = Box(), run(7, "GPU-0", left=left)
    growth = Leak(1.0, GIB, TimeLeft(seconds, 0.0, None))
    box.poll([gpu(0)], replace(there, leaks={"GPU-0": growth}))
    assert box.sent[-1][1].text.startswith(f"GPU 0 (GPU-0) {expected}")
    assert box.marks[-1][2].startswith(f"GPU 0 {expected}")
