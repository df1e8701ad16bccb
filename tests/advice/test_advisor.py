"""Advice to each run, poll by poll, and the memory limits beyond which an early poll is needed."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

import pytest

from gpuwarden.advice.advisor import HUNG_SECONDS, MIN_GROWTH_BYTES, Advisor
from gpuwarden.advice.delivery_state import AdviceRound, DeliveryState
from gpuwarden.analysis.memory.headroom import HeadroomLimit, HeadroomLimitKind
from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.analysis.memory.oom_forecast import TimeLeft
from gpuwarden.analysis.oom.co_tenants import REST_SECONDS, CoTenantTracker
from gpuwarden.config.schema import PressureConfig as Limits
from gpuwarden.config.thresholds import XID_SECONDS
from gpuwarden.gpu.memory_sampler import NO_LIMIT
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import HUNG, EventCount, Gpu
from gpuwarden.health.detector import Detector
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.host.process_tree import HostUsage, PresentProcesses
from gpuwarden.owners.resolver import Owners
from gpuwarden.pressure.levels import PressureWatch
from gpuwarden.protocol.codec import decode_reply, encode
from gpuwarden.protocol.messages import Advice, DeviceMemory, Hello
from gpuwarden.runs.run_events import RunEventKind
from gpuwarden.runs.run_snapshot import JoinedPoll, RunSnapshot
from gpuwarden.severity import Severity
from gpuwarden.state import State
from snapshots import GIB, gpu, mig_gpu, snapshot

STARTED = 1000.0  # Unix time


class Host:
    """An advisor and its sent advice, with polls one second apart by default."""

    def __init__(self, *, alerting: bool = False) -> None:
        self.sent: list[tuple[int, Advice]] = []
        self.queue_has_room = True
        self.events: list[tuple[int, RunEventKind, str]] = []
        self.levels: list[Severity | None] = []  # of the events
        self.parents: dict[int, int] = {}
        self.advice = AdviceRound()
        self.advisor = Advisor(Limits(), alerting=alerting, nearest_above=self._nearest_above)
        self._co_tenants = CoTenantTracker()
        self._watch = PressureWatch(Limits())
        self._detector = Detector()
        self.now = 0.0

    def _nearest_above(self, pid: int, tops: Collection[int]) -> int:
        while pid not in tops and pid:
            pid = self.parents.get(pid, 0)
        return pid

    def poll(self, gpus: list[Gpu], *runs: RunSnapshot, seconds: float = 1.0) -> list[tuple[int, str, str]]:
        """Poll once; return PID, kind and level of the sent advice."""
        self.now += seconds
        polled = replace(snapshot(*gpus), time=STARTED + self.now)
        owners = Owners(by_pid={9: {"user": "alice", "run": "9-1"}})
        co_tenants = self._co_tenants.add_poll(polled, owners, self.now)
        poll = JoinedPoll(polled, runs, self.now, owners, co_tenants)
        pressure = self._watch.evaluate(poll)
        state = State("nvml", 1.0, polled, runs, pressure=pressure)
        self.advice = self.advisor.evaluate(poll, pressure, self._detector.evaluate(state, self.now))
        for message in self.advice.messages:
            assert decode_reply(encode(message.advice)) == message.advice  # can be encoded
        sent = self.advice.messages if self.queue_has_room else ()
        self.advisor.confirm(sent, self.now)
        self.sent += [(each.run.pid, each.advice) for each in sent]
        for run_id, new_events in self.advice.events_with(sent).items():
            assert {event.uuid for event in new_events} <= {"GPU-0", "MIG-0-1", "GPU-1d6"}
            self.events += [(int(run_id.partition("-")[0]), event.kind, event.text) for event in new_events]
            self.levels += [event.level for event in new_events]
        return [(each.run.pid, each.advice.kind, each.advice.level) for each in sent]


def run(number: int, uuid: str, *, in_use: float = 50, left: float | None = 50) -> RunSnapshot:
    """Make a run that reads advice, with GiB in use and left; None is unknown."""
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
        began=STARTED,
        devices={uuid: True},
    )


def shared_by(each: Gpu, held: dict[int, float], used: float = 30) -> Gpu:
    """Have processes hold GiB, and so much in use on the whole."""
    listed = gpu(each.identity.index, held={pid: int(count * GIB) for pid, count in held.items()})
    readings = {**each.readings, GpuReadings.memory_used_bytes: used * GIB}
    return replace(each, processes=listed.processes, process_lists=("compute",), readings=readings)


def down(index: int, fault: str = "gpu_is_lost") -> Gpu:
    """Make a GPU that does not answer."""
    return Gpu(gpu(index).identity, fault=fault)


def test_unsent_advice_is_sent_later() -> None:
    """Advice that does not fit the queue is counted, and sent later if it still applies."""
    host, near = Host(), run(7, "GPU-0", left=1)
    host.queue_has_room = False
    assert host.poll([gpu(0)], near) == host.poll([gpu(0)], near) == []
    host.queue_has_room = True
    assert host.poll([gpu(0)], near) == [(7, "pressure", "critical")]
    assert host.sent[-1][1].serial == 1
    assert host.poll([gpu(0)], near) == []


def test_unknown_headroom_gives_no_advice() -> None:
    """A run whose headroom becomes unknown, and known again at the same level, receives nothing."""
    host, near = Host(), run(7, "GPU-0", left=1)
    host.poll([gpu(0)], near)
    assert host.poll([gpu(0)], replace(near, headroom={}), seconds=3600) == []
    assert host.poll([gpu(0)], near) == []


def test_ended_run_receives_no_advice() -> None:
    """An ended run receives no advice and needs no early polls."""
    host = Host()
    assert host.poll([gpu(0)], replace(run(7, "GPU-0", left=1), up=False)) == []
    assert host.advice.gpu_limits == {}


def test_run_on_an_instance_receives_the_loss_of_its_gpu() -> None:
    """A lost GPU lists no instances; the last known ones apply until it is divided again."""
    host, there = Host(), run(7, "MIG-0-1", left=None)
    whole = mig_gpu(0, free=(GIB, GIB))
    assert host.poll([whole], there) == []
    assert host.poll([down(0)], there) == [(7, "gpu_lost", "critical")]
    assert host.sent[-1][1].uuid == "GPU-0"
    assert host.poll([mig_gpu(0, free=(GIB,))], there) == []
    assert host.poll([down(0)], there) == []


def test_slow_gpu_is_not_lost() -> None:
    """A GPU that hangs counts as lost after a while; one that the driver reports as lost does at once."""
    host, there = Host(), run(7, "GPU-0", left=None)
    assert host.poll([down(0, HUNG)], there) == []
    assert host.poll([gpu(0)], there) == host.poll([down(0, HUNG)], there, seconds=60) == []
    assert host.poll([down(0, HUNG)], there, seconds=HUNG_SECONDS) == [(7, "gpu_lost", "critical")]


def test_old_xids_are_not_sent() -> None:
    """An XID counts if it came during the run, each code once until none came for an hour."""
    host, there = Host(), run(7, "GPU-0", left=None)

    def gpu_with_xid(last: float) -> list[Gpu]:
        return [replace(gpu(0), xids={79: EventCount(1, last), 13: EventCount(1, last)})]

    assert host.poll(gpu_with_xid(STARTED - 1), there) == []
    assert host.poll(gpu_with_xid(STARTED + 1), there) == [(7, "xid", "critical")]
    assert host.poll(gpu_with_xid(STARTED + 3000), there, seconds=3000) == []
    assert host.poll(gpu_with_xid(STARTED + 3000), there, seconds=XID_SECONDS) == []
    assert host.poll(gpu_with_xid(STARTED + 9000), there, seconds=3000) == [(7, "xid", "critical")]


def test_leak_is_sent_once_to_a_run_that_takes_a_census() -> None:
    """It is sent once while it lasts, and again when it returns; a run without the switch gets none."""
    host, box = Host(), [gpu(0)]
    leak = {"GPU-0": Leak(1.0, GIB, TimeLeft(3600.0, 3000.0, None))}
    plain = replace(run(7, "GPU-0"), leaks=leak)
    counting = replace(run(8, "GPU-0"), leaks=leak)
    counting = replace(counting, hello=replace(counting.hello, census=True))
    assert host.poll(box, plain, counting) == [(8, "leak", "warning")]
    assert re.fullmatch(r"leak of .* on GPU 0 \(GPU-0\): out of memory .*", host.sent[-1][1].text)
    assert host.poll(box, plain, counting) == []
    assert host.poll(box, plain, replace(counting, leaks={})) == []
    assert host.poll(box, plain, counting) == [(8, "leak", "warning")]


def test_gpu_that_is_not_known_is_sent_once() -> None:
    """A run that names another machine's GPU is warned once; its record has the event, as that of any run."""
    host, box = Host(), [gpu(0)]
    wrong = replace(run(7, "GPU-0"), unknown_gpus={"GPU:0": "GPU-1d6"}, devices={}, memory={}, headroom={})
    deaf = replace(wrong, peer=replace(wrong.peer, pid=8), hello=replace(wrong.hello, hears=False))
    assert host.poll(box, wrong, deaf) == [(7, "unknown_gpu", "warning")]
    assert host.poll(box, wrong, deaf) == []
    text = (
        "GPU:0 is reported as GPU-1d6, which is no GPU of this machine, so its headroom and forecast are unknown; "
        "name the right one with devices="
    )
    assert host.sent[-1][1].text == text
    assert host.events == [(7, "event", text), (8, "event", text)]


def test_co_tenant_growth() -> None:
    """Growth counts from a co-tenant's lowest memory; the largest one is sent, once while it grows."""
    host, there = Host(), run(7, "GPU-0")
    assert host.poll([shared_by(gpu(0), {7: 51, 9: 10, 8: 1})], there) == []  # memory from before is no growth
    assert (
        host.poll([shared_by(gpu(0), {7: 71, 9: 14, 8: 2})], there) == []
    )  # a twelfth; the run's own growth does not count
    assert host.poll([shared_by(gpu(0), {7: 71, 9: 16, 8: 6})], there) == [(7, "co_tenant", "warning")]
    assert "process 9 of user alice, run 9-1 took 6.00 GiB on GPU 0" in host.sent[-1][1].text
    assert "within 2.0s: 50.0 GiB of headroom left" in host.sent[-1][1].text
    for more in range(20):
        assert host.poll([shared_by(gpu(0), {7: 71, 9: 17 + more, 8: 6})], there, seconds=REST_SECONDS / 2) == []
    assert host.poll([shared_by(gpu(0), {7: 71, 9: 36, 8: 6})], there, seconds=2 * REST_SECONDS) == []
    assert host.poll([shared_by(gpu(0), {7: 71, 9: 46, 8: 6})], there) == [(7, "co_tenant", "warning")]


def test_own_processes_are_no_co_tenants() -> None:
    """Known workers, new ones and processes without a PID are the run's own; another run's are co-tenants."""
    host, there, child = Host(), run(7, "GPU-0"), run(8, "GPU-0")
    there = replace(
        there, host_usage=HostUsage(0.0, None, None, PresentProcesses(0, 3, "running", None, None, pids=(7, 71, 72)))
    )
    host.parents = {73: 72, 72: 7, 8: 7, 81: 8}
    after: dict[int, float] = {7: 21, 71: 9, 72: 8, 73: 10, 0: 11}
    host.poll([shared_by(gpu(0), {7: 21, 71: 1, 72: 1})], there)
    assert host.poll([shared_by(gpu(0), after)], there) == []
    assert host.advice.gpu_limits["GPU-0"] == pytest.approx(35 * GIB)  # a tenth of the headroom, for new co-tenants
    sent = host.poll([shared_by(gpu(0), {**after, 8: 1, 81: 7, 9: 6})], there, child)
    assert sent == [(7, "co_tenant", "warning"), (8, "co_tenant", "warning")]
    assert [advice.text.split()[1] for _, advice in host.sent] == ["81", "73"]


@pytest.mark.parametrize("pid", [0, 4711])
def test_run_that_is_listed_by_another_pid_is_no_co_tenant(pid: int) -> None:
    """Any process that grows may be the run if the driver does not list it by its PID."""
    host, there = Host(), run(7, "GPU-0")
    host.poll([shared_by(gpu(0), {pid: 10})], there)
    assert host.poll([shared_by(gpu(0), {pid: 40})], there) == []


def test_co_tenants_do_not_reduce_the_runs_own_limit() -> None:
    """Co-tenants matter to a run bounded by the device, not to one bounded by its own limit."""
    cases: dict[HeadroomLimitKind, list[object]] = {
        "allocator": [],
        "cgroup": [],
        "device": [(7, "co_tenant", "warning")],
    }
    for end, sent in cases.items():
        host, there = Host(), run(7, "GPU-0", left=10)
        there = replace(there, headroom_limits={"GPU-0": HeadroomLimit(end)})
        host.poll([shared_by(gpu(0), {7: 51, 9: 4})], there)
        assert host.poll([shared_by(gpu(0), {7: 51, 9: 24})], there) == sent


def test_co_tenant_advice_is_rate_limited() -> None:
    """Advice on a series of co-tenants is sent once a minute."""
    host, there = Host(), run(7, "GPU-0")
    host.poll([shared_by(gpu(0), {7: 51})], there)
    sent = [host.poll([shared_by(gpu(0), {7: 51, 100 + n: 20})], there, seconds=1.0) for n in range(120)]
    assert sum(map(len, sent)) == 2


def test_growth_counts_from_the_start_of_the_run() -> None:
    """Growth from before the run's start is not sent; later growth is."""
    host, there = Host(), run(7, "GPU-0")
    late = replace(there, began=STARTED + 2.5)
    host.poll([shared_by(gpu(0), {7: 51, 9: 1})], late)
    assert host.poll([shared_by(gpu(0), {7: 51, 9: 21})], late) == []
    assert host.poll([shared_by(gpu(0), {7: 51, 9: 21})], late) == []
    assert host.poll([shared_by(gpu(0), {7: 51, 9: 22})], late) == [(7, "co_tenant", "warning")]


def test_small_growth_is_not_sent() -> None:
    """A tenth of a very small headroom is not enough."""
    host, there = Host(), run(7, "GPU-0", left=0.01)
    host.poll([shared_by(gpu(0), {7: 51, 9: 10})], there)
    assert host.poll([shared_by(gpu(0), {7: 51, 9: 10 + (MIN_GROWTH_BYTES - 1) / GIB})], there) == []
    assert host.poll([shared_by(gpu(0), {7: 51, 9: 10 + MIN_GROWTH_BYTES / GIB})], there) == [
        (7, "co_tenant", "warning")
    ]


@pytest.mark.parametrize(
    ("left", "by_others", "own"),
    [
        (50.0, 5.0, 40.0),  # a tenth for a co-tenant; its own: to a tenth of 100
        (5.0, 0.5, 5 - 0.05 * 55),  # warning: on to critical
        (4.0, 4 - 0.05 * 50 / 0.95, 4 - 0.05 * 54),  # the same, shortly after advice on a co-tenant
        (1.0, NO_LIMIT, NO_LIMIT),
    ],
)
def test_limits_of_the_next_advice(left: float, by_others: float, own: float) -> None:
    """Limits are what others, or the run itself, may allocate until advice is due."""
    host, there = Host(), run(7, "GPU-0", left=left)
    if left in (1.0, 4.0):
        host.advisor._states[there.peer.run_id] = DeliveryState(co_tenant_at=0.0)
    host.poll([shared_by(gpu(0), {7: 51})], there)
    assert host.advice.gpu_limits["GPU-0"] == pytest.approx((30 + by_others) * GIB)
    assert host.advice.run_limits["7-1"]["GPU-0"] == pytest.approx((50 + own) * GIB)


def test_limits_are_the_lowest_of_all_runs() -> None:
    """The run with the lowest limit decides; without any limit only the GPU's answer is checked."""
    host, gpus = Host(), [shared_by(gpu(n), {7: 51}) for n in range(3)]
    host.poll(gpus, run(7, "GPU-0"), run(8, "GPU-0", left=20), run(5, "GPU-1", left=None))
    assert host.advice.gpu_limits == {"GPU-0": pytest.approx(32 * GIB), "GPU-1": NO_LIMIT}


@pytest.mark.parametrize("alerting", [True, False])
def test_limits_of_runs_that_do_not_read(alerting: bool) -> None:  # noqa: FBT001 - pytest's
    """Limits apply if alerts are sent, without those for co-tenants; the run itself receives nothing."""
    host, there = Host(alerting=alerting), run(7, "GPU-0")
    not_reading = replace(there, hello=replace(there.hello, hears=False))
    assert host.poll([shared_by(gpu(0), {7: 51})], not_reading) == []
    at_warning = 50 - 0.1 * 50 / 0.9
    assert host.advice.gpu_limits == ({"GPU-0": pytest.approx((30 + at_warning) * GIB)} if alerting else {})
    assert host.advice.run_limits == ({"7-1": {"GPU-0": pytest.approx(90 * GIB)}} if alerting else {})


def test_co_tenant_that_keeps_growing_causes_no_early_polls() -> None:
    """Growth of a co-tenant that was sent does not count before a level changes."""
    host, there = Host(), run(7, "GPU-0")
    host.poll([shared_by(gpu(0), {7: 51, 9: 1})], there)
    host.poll([shared_by(gpu(0), {7: 51, 9: 21})], there)
    for more in range(3):
        host.poll([shared_by(gpu(0), {7: 51, 9: 22 + more})], there, seconds=REST_SECONDS * 0.9)
        assert host.advice.gpu_limits["GPU-0"] == pytest.approx((30 + 50 - 0.1 * 50 / 0.9) * GIB)


def test_faults_are_events_of_every_run() -> None:
    """XIDs that need a reset, and losses, are one event each in every run, read or not."""
    host, unreachable = Host(), run(8, "GPU-0")
    not_reading = replace(run(7, "GPU-0"), hello=replace(unreachable.hello, hears=False))
    host.queue_has_room = False
    faulty = replace(gpu(0), xids={48: EventCount(1, STARTED + 1)})
    for _ in range(3):
        assert host.poll([faulty], not_reading, unreachable) == []
    for _ in range(3):
        assert host.poll([replace(down(0), xids=faulty.xids)], not_reading) == []
    sent = [(pid, kind, text.partition(":")[0]) for pid, kind, text in host.events]
    assert sent == [
        (7, "event", "GPU 0 reported XID 48"),
        (8, "event", "GPU 0 reported XID 48"),
        (7, "event", "GPU 0 no longer answers the driver"),
    ]
    assert host.levels == ["critical"] * 3
    assert host.advice.gpu_limits == {}  # no run reads advice: no early poll


def test_pressure_is_an_event_of_every_run() -> None:
    """Each change of a memory or thermal level is one event, whether the run reads advice or not."""
    host, not_reading = Host(), replace(run(7, "GPU-0"), hello=Hello("not-reading", "none", {}))
    near = replace(not_reading, headroom={"GPU-0": GIB})
    hot = replace(gpu(0), readings={**gpu(0).readings, GpuReadings.temperature_margin_celsius: 2.0})
    for each, seconds in (
        (not_reading, 1.0),
        (near, 1.0),
        (near, 1.0),
        (not_reading, 1.0),
        (not_reading, 3600.0),
        (not_reading, 1.0),
    ):
        assert host.poll([gpu(0)], each, seconds=seconds) == []
    for _ in range(2):
        host.poll([hot], not_reading)
    assert [(pid, kind, text.partition(":")[0]) for pid, kind, text in host.events] == [
        (7, "pressure", "GPU 0 is almost out of memory"),
        (7, "pressure", "GPU 0 is no longer low on memory"),
        (7, "pressure", "GPU 0 is hot"),
    ]
    assert host.levels == ["critical", None, "warning"]


def test_co_tenant_is_an_event() -> None:
    """A co-tenant is one event of the run, once the message was sent."""
    host, there = Host(), run(7, "GPU-0")
    host.poll([shared_by(gpu(0), {7: 51, 9: 1})], there)
    host.queue_has_room = False
    host.poll([shared_by(gpu(0), {7: 51, 9: 21})], there)
    assert host.events == []
    host.queue_has_room = True
    for _ in range(3):
        host.poll([shared_by(gpu(0), {7: 51, 9: 21})], there)
    ((pid, kind, text),) = host.events
    assert (pid, kind) == (7, "co_tenant")
    assert host.levels == ["warning"]
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
    """The text has the reason: low headroom, or an OOM forecast."""
    host, there = Host(), run(7, "GPU-0", left=left)
    growth = Leak(1.0, GIB, TimeLeft(seconds, 0.0, None))
    host.poll([gpu(0)], replace(there, leaks={"GPU-0": growth}))
    assert host.sent[-1][1].text.startswith(f"GPU 0 (GPU-0) {expected}")
    assert host.events[-1][2].startswith(f"GPU 0 {expected}")
