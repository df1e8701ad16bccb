"""Growth of processes on a device from poll to poll, and a diagnosis based on it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gpuwarden.analysis.oom.co_tenants import MAX_CHANGES, MAX_PROCESSES, CoTenantTracker
from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.owners.processes import ProcessIdentity
from gpuwarden.owners.resolver import Owners
from gpuwarden.protocol.messages import STEP_BUCKETS, Allocation, DeviceMemory, Error, Hello, Report
from gpuwarden.runs.registry import RunRegistry
from gpuwarden.runs.run_snapshot import RunSnapshot
from snapshots import GIB, divided, gpu, snapshot

OWNERS = Owners(
    by_pid={8: {"user": "bob", "container": "jupyter-bob", "run": "8-77"}, 9: {"user": "unknown"}},
    identities={8: ProcessIdentity(1001, "python")},
)


def box(**held: float) -> Snapshot:
    """Make a GPU of 80 GiB with processes p8=GiB and so on."""
    pids = {int(name[1:]): round(size * GIB) for name, size in held.items()}
    return snapshot(gpu(0, free=80 * GIB - sum(pids.values()), held=pids))


def test_growth_since() -> None:
    """What a process took since a time, when it began to, and who it is; one that shrank or stayed took nothing."""
    tracker = CoTenantTracker()
    for at, seen in (
        (0.0, box(p7=10, p8=5, p9=3, p10=2)),
        (1.0, box(p7=10, p8=5, p9=3, p10=2)),
        (2.0, box(p7=12, p8=20, p9=1, p10=2)),
        (3.0, box(p7=12, p8=25, p9=1, p10=2, p11=4)),
    ):
        found = tracker.update(seen, OWNERS, at)
    most, least = found.taken("GPU-0", {7}, 0.5, now=4.0)
    assert (most.name, most.grown, most.held, most.seconds) == (
        "python process 8 of bob (run 8-77, container jupyter-bob)",
        20 * GIB,
        25 * GIB,
        2.0,
    )
    assert (least.name, least.grown, least.seconds) == ("process 11", 4 * GIB, 1.0)
    assert [each.grown for each in found.taken("GPU-0", {7}, 2.5, now=4.0)] == [5 * GIB, 4 * GIB]
    assert found.taken("GPU-0", {7, 8, 11}, 0.0, now=4.0) == ()
    assert found.taken("GPU-1", {7}, 0.0, now=4.0) == ()


def test_who_was_there_before() -> None:
    """A process that the first poll found took nothing by that; one that comes in a later poll did."""
    tracker = CoTenantTracker()
    found = tracker.update(box(p8=60), OWNERS, 100.0)
    assert found.taken("GPU-0", (), 50.0, now=101.0) == ()
    found = tracker.update(box(), OWNERS, 101.0)
    found = tracker.update(box(p8=60), OWNERS, 102.0)
    assert [each.grown for each in found.taken("GPU-0", (), 50.0, now=103.0)] == [60 * GIB]


def test_bounds() -> None:
    """However many processes come and however often one changes, little is kept, and the first and last are right."""
    tracker = CoTenantTracker()
    for each in range(1000):
        found = tracker.update(box(p8=1 + each / 100), OWNERS, float(each))
    (taken,) = found.taken("GPU-0", (), 0.0, now=1000.0)
    assert taken.grown == pytest.approx(9.99 * GIB)
    (process,) = found.devices["GPU-0"].values()
    assert len(process.changes) <= MAX_CHANGES
    found = tracker.update(box(**{f"p{each}": each / 1e4 for each in range(1, 1000)}), OWNERS, 1001.0)
    assert len(found.devices["GPU-0"]) == MAX_PROCESSES


def test_instances() -> None:
    """A MIG instance has its own neighbours; a GPU that does not answer has none that are new."""
    tracker = CoTenantTracker()
    found = tracker.update(snapshot(divided(0, free=[5 * GIB, 5 * GIB])), OWNERS, 0.0)
    shared = snapshot(divided(0, free=[4 * GIB, 5 * GIB], held={8: 0}))
    found = tracker.update(shared, OWNERS, 1.0)
    assert [each.pid for each in found.taken("MIG-0-0", (), 0.5, now=2.0)] == [8]
    assert found.taken("MIG-0-1", (), 0.5, now=2.0) == ()
    assert found.taken("GPU-0", (), 0.5, now=2.0) == ()
    found = tracker.update(snapshot(replace(shared.gpus[0], fault="timeout", processes=())), OWNERS, 3.0)
    assert [each.pid for each in found.taken("MIG-0-0", (), 0.5, now=4.0)] == [8]


ALICE = ProcessKey(pid=7, uid=1000, start=1)
ASKED = Allocation(6 * GIB, "1000,1610612", "float", "wide/Relu", "GPU:0", "GPU_0_bfc")
OOM = Error("device_oom", "ResourceExhaustedError", "{{node wide}}", "train", 20, (ASKED,))


class Life:
    """A run that needs 10 GiB beside its base of 2 in each step, on a GPU with memory growth, and its polls."""

    def __init__(self, peer: ProcessKey) -> None:
        self.peer = peer
        self.registry = RunRegistry(limit=10, expiry=60.0, overhead=GIB)
        self._tracker = CoTenantTracker()
        self.now = 0.0
        self.registry.receive(self.peer, Hello("resnet", "tensorflow 2.21.0", {"GPU:0": "GPU-0"}), 0.0)

    def poll(self, **held: float) -> RunSnapshot:
        """Take a poll."""
        self.now += 0.5
        seen = box(**held)
        (run,) = self.registry.update(seen, self.now, co_tenants=self._tracker.update(seen, OWNERS, self.now))
        return run

    def report(self, steps: int, current: float = 2, peak: float = 12) -> None:
        """Take a report, in GiB."""
        memory = {"GPU:0": DeviceMemory(round(current * GIB), round(peak * GIB))}
        buckets = (0,) * (len(STEP_BUCKETS) + 1)
        self.registry.receive(self.peer, Report("train", steps, 1.0, buckets, memory), self.now)

    def fail(self, current: float = 2, peak: float = 12, asked: float = 6, steps: int = 20) -> None:
        """Have it tell its out-of-memory, in GiB."""
        memory = {"GPU:0": DeviceMemory(round(current * GIB), round(peak * GIB))}
        allocations = (replace(ASKED, requested=round(asked * GIB)),)
        self.registry.receive(self.peer, replace(OOM, memory=memory, allocations=allocations, steps=steps), self.now)


def trained(peer: ProcessKey = ALICE) -> Life:
    """Let a run make 20 steps beside a neighbour that holds 20 GiB all the while."""
    life = Life(peer)
    life.poll(p7=1, p8=20)
    for steps in (0, 5, 10, 15, 20):
        life.report(steps)
        run = life.poll(p7=13, p8=20)
    assert run.diagnosis is None
    return life


def test_neighbour_that_came_before_the_poll() -> None:
    """A neighbour that a poll has seen to take the device is named at once."""
    life = trained()
    life.poll(p7=5, p8=75)
    life.fail()
    run = life.poll(p7=5, p8=75)
    assert run.diagnosis is not None
    assert run.diagnosis.cause == "neighbour"
    assert run.diagnosis.evidence == (
        "The run needed 10.0 GiB on top of 2.00 GiB, but only 2.00 GiB was left: python process 8 of bob (run 8-77, "
        "container jupyter-bob) allocated 55.0 GiB on the device just before and now uses 75.0 GiB."
    )


def test_neighbour_that_came_after_the_poll(caplog: pytest.LogCaptureFixture) -> None:
    """A verdict is given again by the next poll, which sees the neighbour; log and receipt have the last one."""
    life = trained()
    life.fail()
    assert " cause=neighbour " not in caplog.text
    run = life.poll(p7=5, p8=75)
    assert run.diagnosis is not None
    assert (run.diagnosis.cause, run.errors[0].diagnosis) == ("neighbour", run.diagnosis)
    assert 'diagnosis updated run=7-1 name=resnet cause=neighbour evidence="The run needed 10.0 GiB' in caplog.text
    verdict, run = run.diagnosis, life.poll(p7=5, p8=20)
    assert run.diagnosis == verdict  # it stands


def test_neighbour_that_was_there_all_the_while() -> None:
    """Who held memory before the run could last allocate as much is not to blame."""
    life = trained()
    life.fail()
    run = life.poll(p7=13, p8=20)
    assert run.diagnosis is not None
    assert run.diagnosis.cause != "neighbour"


def test_run_whose_process_is_not_known() -> None:
    """Of a run in another pid namespace nobody can tell which process is its own: so none is blamed."""
    life = trained(ProcessKey(pid=0, uid=1000, start=0))
    life.poll(p5=75)
    life.fail()
    run = life.poll(p5=75)
    assert run.diagnosis is not None
    assert run.diagnosis.cause != "neighbour"


def unlisted(pid: int, peer: ProcessKey = ALICE, *, asked: float = 60) -> RunSnapshot:
    """Let a run of 20 GiB in a pool of 76 be out of memory; the driver knows it by another pid than the daemon."""
    life = Life(peer)
    life.poll()
    for held in (30, 76):
        life.report(0, current=20, peak=20)
        life.poll(**{f"p{pid}": held})
    life.fail(current=20, peak=20, asked=asked, steps=0)
    return life.poll(**{f"p{pid}": 76})


@pytest.mark.parametrize("pid", [0, 4711])
@pytest.mark.parametrize("peer", [ALICE, ProcessKey(pid=0, uid=1000, start=0)])
def test_run_that_is_listed_by_another_pid(pid: int, peer: ProcessKey) -> None:
    """With the daemon in a pid namespace, or under MPS, its own memory is nobody else's, in verdict and story."""
    run = unlisted(pid, peer)
    assert run.diagnosis is not None
    assert run.diagnosis.cause == "batch_too_large"
    assert "did not fit: 20.0 GiB of 80.0 GiB were in use" in run.diagnosis.evidence
    assert not re.search("process|smaller model", f"{run.diagnosis.evidence} {run.diagnosis.next_step}")
    assert {window.others for window in run.memory_windows["GPU-0"]} == {None}
    assert run.headroom == {}


def test_pool_of_a_run_that_is_not_listed_is_not_known() -> None:
    """How much of the device the run could have had, is then said of no piece of it."""
    run = unlisted(4711, asked=25)
    assert run.diagnosis is not None
    assert run.diagnosis.cause != "fragmentation"


def test_run_that_is_no_longer_listed() -> None:
    """Whoever is killed lets go of its memory before its end is seen: what was said while it was listed stands."""
    life = trained()
    life.poll(p7=5, p8=75)
    life.fail()
    verdict = life.poll(p8=75).diagnosis
    assert verdict is not None
    assert verdict.cause == "neighbour"
    assert "only 2.00 GiB was left" in verdict.evidence


def test_run_that_was_gone_before_it_was_seen() -> None:
    """Of a process that has ended, what is listed is others'."""
    life = Life(ALICE)
    life.fail()
    life.registry.exited(ALICE, life.now, 1)
    verdict = life.poll(p8=75).diagnosis
    assert verdict is not None
    assert verdict.cause == "neighbour"


def test_room_is_no_less_than_what_is_in_use(caplog: pytest.LogCaptureFixture) -> None:
    """A run that has taken what a neighbour let go since the poll could have that."""
    life = Life(ALICE)
    life.poll(p7=1, p8=75)
    life.report(0, current=2, peak=2)
    life.poll(p7=3, p8=75)
    life.fail(current=20, peak=20, asked=70, steps=0)
    assert "Only 20.0 GiB was available to the run, because python process 8 of bob" in caplog.text
