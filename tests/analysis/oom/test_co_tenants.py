"""Co-tenants of a run: their recent memory growth, and diagnoses that name them."""

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
from snapshots import GIB, gpu, mig_gpu, snapshot

OWNERS = Owners(
    by_pid={8: {"user": "bob", "container": "jupyter-bob", "run": "8-77"}, 9: {"user": "unknown"}},
    identities={8: ProcessIdentity(1001, "python")},
)


def shared_gpu(**held: float) -> Snapshot:
    """Return a GPU of 80 GiB with processes p8=GiB and so on."""
    pids = {int(name[1:]): round(size * GIB) for name, size in held.items()}
    return snapshot(gpu(0, free=80 * GIB - sum(pids.values()), held=pids))


def test_growth_since() -> None:
    """Growth since a time has the process, its bytes and its start; a process that shrank or stayed has none."""
    tracker = CoTenantTracker()
    for at, polled in (
        (0.0, shared_gpu(p7=10, p8=5, p9=3, p10=2)),
        (1.0, shared_gpu(p7=10, p8=5, p9=3, p10=2)),
        (2.0, shared_gpu(p7=12, p8=20, p9=1, p10=2)),
        (3.0, shared_gpu(p7=12, p8=25, p9=1, p10=2, p11=4)),
    ):
        found = tracker.add_poll(polled, OWNERS, at)
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


def test_processes_of_the_first_poll() -> None:
    """A process in the first poll did not grow; one that appears in a later poll did."""
    tracker = CoTenantTracker()
    found = tracker.add_poll(shared_gpu(p8=60), OWNERS, 100.0)
    assert found.taken("GPU-0", (), 50.0, now=101.0) == ()
    found = tracker.add_poll(shared_gpu(), OWNERS, 101.0)
    found = tracker.add_poll(shared_gpu(p8=60), OWNERS, 102.0)
    assert [each.grown for each in found.taken("GPU-0", (), 50.0, now=103.0)] == [60 * GIB]


def test_bounds() -> None:
    """State is bounded for any number of processes and changes, and keeps the first and last values."""
    tracker = CoTenantTracker()
    for each in range(1000):
        found = tracker.add_poll(shared_gpu(p8=1 + each / 100), OWNERS, float(each))
    (taken,) = found.taken("GPU-0", (), 0.0, now=1000.0)
    assert taken.grown == pytest.approx(9.99 * GIB)
    (process,) = found.devices["GPU-0"].values()
    assert len(process.changes) <= MAX_CHANGES
    found = tracker.add_poll(shared_gpu(**{f"p{each}": each / 1e4 for each in range(1, 1000)}), OWNERS, 1001.0)
    assert len(found.devices["GPU-0"]) == MAX_PROCESSES


def test_instances() -> None:
    """A MIG instance has its own co-tenants; a GPU that does not answer has no new ones."""
    tracker = CoTenantTracker()
    found = tracker.add_poll(snapshot(mig_gpu(0, free=[5 * GIB, 5 * GIB])), OWNERS, 0.0)
    shared = snapshot(mig_gpu(0, free=[4 * GIB, 5 * GIB], held={8: 0}))
    found = tracker.add_poll(shared, OWNERS, 1.0)
    assert [each.pid for each in found.taken("MIG-0-0", (), 0.5, now=2.0)] == [8]
    assert found.taken("MIG-0-1", (), 0.5, now=2.0) == ()
    assert found.taken("GPU-0", (), 0.5, now=2.0) == ()
    found = tracker.add_poll(snapshot(replace(shared.gpus[0], fault="timeout", processes=())), OWNERS, 3.0)
    assert [each.pid for each in found.taken("MIG-0-0", (), 0.5, now=4.0)] == [8]


ALICE = ProcessKey(pid=7, uid=1000, start=1)
ALLOCATION = Allocation(6 * GIB, "1000,1610612", "float", "wide/Relu", "GPU:0", "GPU_0_bfc")
OOM = Error("device_oom", "ResourceExhaustedError", "{{node wide}}", "train", 20, (ALLOCATION,))


class RunWithPolls:
    """A run on a GPU with memory growth that needs 10 GiB on top of its base of 2 in each step, and its polls."""

    def __init__(self, peer: ProcessKey) -> None:
        self.peer = peer
        self.registry = RunRegistry(limit=10, expiry=60.0, overhead=GIB)
        self._tracker = CoTenantTracker()
        self.now = 0.0
        self.registry.receive(self.peer, Hello("resnet", "tensorflow 2.21.0", {"GPU:0": "GPU-0"}), 0.0)

    def poll(self, **held: float) -> RunSnapshot:
        """Poll once."""
        self.now += 0.5
        polled = shared_gpu(**held)
        (run,) = self.registry.add_poll(polled, self.now, co_tenants=self._tracker.add_poll(polled, OWNERS, self.now))
        return run

    def report(self, steps: int, current: float = 2, peak: float = 12) -> None:
        """Send a report, in GiB."""
        memory = {"GPU:0": DeviceMemory(round(current * GIB), round(peak * GIB))}
        buckets = (0,) * (len(STEP_BUCKETS) + 1)
        self.registry.receive(self.peer, Report("train", steps, 1.0, buckets, memory), self.now)

    def fail(self, current: float = 2, peak: float = 12, requested: float = 6, steps: int = 20) -> None:
        """Report its out-of-memory, in GiB."""
        memory = {"GPU:0": DeviceMemory(round(current * GIB), round(peak * GIB))}
        allocations = (replace(ALLOCATION, requested=round(requested * GIB)),)
        self.registry.receive(self.peer, replace(OOM, memory=memory, allocations=allocations, steps=steps), self.now)


def train_with_co_tenant(peer: ProcessKey = ALICE) -> RunWithPolls:
    """Run 20 steps next to a co-tenant with a constant 20 GiB."""
    simulated = RunWithPolls(peer)
    simulated.poll(p7=1, p8=20)
    for steps in (0, 5, 10, 15, 20):
        simulated.report(steps)
        run = simulated.poll(p7=13, p8=20)
    assert run.diagnosis is None
    return simulated


def test_co_tenant_that_grew_before_the_poll() -> None:
    """A co-tenant whose growth was polled is named at once."""
    simulated = train_with_co_tenant()
    simulated.poll(p7=5, p8=75)
    simulated.fail()
    run = simulated.poll(p7=5, p8=75)
    assert run.diagnosis is not None
    assert run.diagnosis.cause == "co_tenant"
    assert run.diagnosis.evidence == (
        "The run needed 10.0 GiB on top of 2.00 GiB, but only 2.00 GiB was left: python process 8 of bob (run 8-77, "
        "container jupyter-bob) allocated 55.0 GiB on the device just before and now uses 75.0 GiB."
    )


def test_co_tenant_that_grew_after_the_poll(caplog: pytest.LogCaptureFixture) -> None:
    """The next poll, which sees the co-tenant, updates the diagnosis in the log and the run record."""
    simulated = train_with_co_tenant()
    simulated.fail()
    assert " cause=co_tenant " not in caplog.text
    run = simulated.poll(p7=5, p8=75)
    assert run.diagnosis is not None
    assert (run.diagnosis.cause, run.errors[0].diagnosis) == ("co_tenant", run.diagnosis)
    assert 'diagnosis updated run=7-1 name=resnet cause=co_tenant evidence="The run needed 10.0 GiB' in caplog.text
    diagnosis, run = run.diagnosis, simulated.poll(p7=5, p8=20)
    assert run.diagnosis == diagnosis  # unchanged


def test_co_tenant_that_did_not_grow() -> None:
    """A co-tenant with its memory from before the run's last allocation is not the cause."""
    simulated = train_with_co_tenant()
    simulated.fail()
    run = simulated.poll(p7=13, p8=20)
    assert run.diagnosis is not None
    assert run.diagnosis.cause != "co_tenant"


def test_run_in_another_pid_namespace() -> None:
    """No co-tenant is the cause if the run's own process cannot be identified."""
    simulated = train_with_co_tenant(ProcessKey(pid=0, uid=1000, start=0))
    simulated.poll(p5=75)
    simulated.fail()
    run = simulated.poll(p5=75)
    assert run.diagnosis is not None
    assert run.diagnosis.cause != "co_tenant"


def fail_unlisted(pid: int, peer: ProcessKey = ALICE, *, requested: float = 60) -> RunSnapshot:
    """Fail a run of 20 GiB in a pool of 76; the driver lists it by another PID than the daemon's."""
    simulated = RunWithPolls(peer)
    simulated.poll()
    for held in (30, 76):
        simulated.report(0, current=20, peak=20)
        simulated.poll(**{f"p{pid}": held})
    simulated.fail(current=20, peak=20, requested=requested, steps=0)
    return simulated.poll(**{f"p{pid}": 76})


@pytest.mark.parametrize("pid", [0, 4711])
@pytest.mark.parametrize("peer", [ALICE, ProcessKey(pid=0, uid=1000, start=0)])
def test_run_that_is_listed_by_another_pid(pid: int, peer: ProcessKey) -> None:
    """The run's own memory is not a co-tenant's if the daemon is in a PID namespace, or under MPS."""
    run = fail_unlisted(pid, peer)
    assert run.diagnosis is not None
    assert run.diagnosis.cause == "batch_too_large"
    assert "did not fit: 20.0 GiB of 80.0 GiB were in use" in run.diagnosis.evidence
    assert not re.search("process|smaller model", f"{run.diagnosis.evidence} {run.diagnosis.next_step}")
    assert {window.others for window in run.memory_windows["GPU-0"]} == {None}
    assert run.headroom == {}


def test_unlisted_run_has_no_known_pool() -> None:
    """Without a known pool the diagnosis is not fragmentation."""
    run = fail_unlisted(4711, requested=25)
    assert run.diagnosis is not None
    assert run.diagnosis.cause != "fragmentation"


def test_run_that_is_no_longer_listed() -> None:
    """A run that is killed frees its memory before its end is detected: the diagnosis from before stays."""
    simulated = train_with_co_tenant()
    simulated.poll(p7=5, p8=75)
    simulated.fail()
    diagnosis = simulated.poll(p8=75).diagnosis
    assert diagnosis is not None
    assert diagnosis.cause == "co_tenant"
    assert "only 2.00 GiB was left" in diagnosis.evidence


def test_run_that_ended_before_the_first_poll() -> None:
    """All listed memory is that of others once the process has ended."""
    simulated = RunWithPolls(ALICE)
    simulated.fail()
    simulated.registry.exited(ALICE, simulated.now, 1)
    diagnosis = simulated.poll(p8=75).diagnosis
    assert diagnosis is not None
    assert diagnosis.cause == "co_tenant"


def test_run_that_was_silent_for_long() -> None:
    """After a first step that takes minutes, the error is diagnosed by the last poll, although no report is current."""
    simulated = RunWithPolls(ALICE)
    simulated.poll(p7=1, p8=20)
    simulated.report(0, current=0, peak=0)
    simulated.poll(p7=1, p8=20)
    simulated.now += 120
    simulated.poll(p7=5, p8=75)
    simulated.fail(current=2, peak=4, requested=6, steps=0)
    simulated.registry.exited(ALICE, simulated.now, 1)
    diagnosis = simulated.poll(p8=75).diagnosis
    assert diagnosis is not None
    assert diagnosis.cause == "co_tenant"
    assert "process 8 of bob" in diagnosis.evidence


def test_available_memory_is_at_least_the_memory_in_use(caplog: pytest.LogCaptureFixture) -> None:
    """Memory that a co-tenant freed and the run allocated since the poll was available."""
    simulated = RunWithPolls(ALICE)
    simulated.poll(p7=1, p8=75)
    simulated.report(0, current=2, peak=2)
    simulated.poll(p7=3, p8=75)
    simulated.fail(current=20, peak=20, requested=70, steps=0)
    assert "Only 20.0 GiB was available to the run, because python process 8 of bob" in caplog.text
