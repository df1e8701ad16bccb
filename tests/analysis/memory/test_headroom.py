"""Headroom in every allocator mode, and the reason where it is unknown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from services import ROOT

from gpuwarden.analysis.memory.device_memory import sum_held_by_others
from gpuwarden.analysis.memory.headroom import HEADROOM_UNKNOWN, DeviceSpace, Overhead, compute_headroom
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu, GpuProcess, Snapshot
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.host.process_tree import HostUsage, PresentProcesses
from gpuwarden.protocol.messages import STEP_BUCKETS, Allocation, DeviceMemory, Error, Hello, Report
from gpuwarden.runs.metrics import RunReadings
from gpuwarden.runs.registry import RunRegistry
from gpuwarden.runs.run_snapshot import RunSnapshot
from snapshots import GIB, divided, gpu, snapshot

MIB = 2**20
GUESS = 512 * MIB
ALICE, BOB = ProcessKey(pid=7, uid=1000, start=1), ProcessKey(pid=8, uid=1001, start=2)
SILENT = Report("train", 5, 1.5, (0,) * (len(STEP_BUCKETS) + 1), {})


class Box:
    """A daemon's registry, which a run reports to and which polls; a second passes with each."""

    def __init__(self, devices: Mapping[str, str | None] | None = None) -> None:
        self.runs = RunRegistry(limit=10, expiry=60.0, overhead=GUESS)
        self.now = 0.0
        self.join(ALICE, {"GPU:0": "GPU-0"} if devices is None else devices)

    def join(self, peer: ProcessKey, devices: Mapping[str, str | None]) -> None:
        """Have a run say hello."""
        self.runs.receive(peer, Hello("resnet", "torch", devices), self.now)

    def report(self, peer: ProcessKey = ALICE, **memory: DeviceMemory) -> None:
        """Have a run report; `GPU0` stands for "GPU:0"."""
        self.now += 0.5
        by_device = {name.replace("U", "U:"): each for name, each in memory.items()}
        self.runs.receive(peer, replace(SILENT, memory=by_device), self.now)

    def poll(self, *gpus: Gpu, usages: Mapping[ProcessKey, HostUsage] | None = None) -> RunSnapshot:
        """Poll the GPUs, and return the first run."""
        return self.poll_all(*gpus, usages=usages)[0]

    def poll_all(self, *gpus: Gpu, usages: Mapping[ProcessKey, HostUsage] | None = None) -> list[RunSnapshot]:
        """Poll the GPUs, and return the runs."""
        self.now += 0.5
        return list(self.runs.update(snapshot(*gpus), self.now, usages or {}))


def told(**figures: int) -> DeviceMemory:
    """Make an allocator's figures, whose peak is what is in use unless said."""
    return DeviceMemory(**{"peak": figures["current"], **figures})


def test_preallocation() -> None:
    """A pool that fills the device: the slack inside the pool is the headroom, though the device shows 97 % used."""
    box = Box()
    box.report(GPU0=told(current=20 * GIB, peak=30 * GIB))
    run = box.poll(gpu(0, free=0, held={7: 78 * GIB}))
    assert run.headroom == {"GPU-0": 58 * GIB - GUESS}
    assert run.headroom_at_peak == {"GPU-0": 48 * GIB - GUESS}


def test_memory_growth() -> None:
    """A pool no larger than its use: the device's free memory is the headroom."""
    box = Box()
    box.report(GPU0=told(current=20 * GIB))
    assert box.poll(gpu(0, free=50 * GIB, held={7: 20 * GIB + GUESS})).headroom == {"GPU-0": 50 * GIB}


def test_overhead_that_was_guessed_too_large() -> None:
    """A context smaller than the guess takes nothing from the device's free memory."""
    box = Box()
    box.report(GPU0=told(current=20 * GIB))
    assert box.poll(gpu(0, free=50 * GIB, held={7: 20 * GIB + GUESS // 2})).headroom == {"GPU-0": 50 * GIB}


def test_several_processes_on_a_gpu() -> None:
    """Each run has its own slack and the free memory that all share; what others hold is no one's headroom."""
    box = Box()
    box.join(BOB, {"GPU:0": "GPU-0"})
    box.report(GPU0=told(current=20 * GIB))
    box.report(BOB, GPU0=told(current=5 * GIB))
    alice, bob = box.poll_all(gpu(0, free=4 * GIB, held={7: 30 * GIB + GUESS, 8: 5 * GIB + GUESS, 99: 40 * GIB}))
    assert alice.headroom == {"GPU-0": 14 * GIB}
    assert bob.headroom == {"GPU-0": 4 * GIB}


def test_several_gpus_in_a_run() -> None:
    """Each GPU has a headroom of its own; one that the run does not use has none, and needs no reason."""
    box = Box({f"GPU:{index}": f"GPU-{index}" for index in range(3)})
    box.report(GPU0=told(current=20 * GIB), GPU1=told(current=GIB))
    gpus = [gpu(index, free=(index + 1) * GIB, held={7: 20 * GIB + GUESS}) for index in range(3)]
    run = box.poll(*gpus)
    assert run.headroom == {"GPU-0": GIB, "GPU-1": 21 * GIB}
    assert run.headroom_unknown == {}


def test_mig() -> None:
    """On an instance all is the instance's; what a process of that pid holds on another one is not the run's."""
    box = Box({"GPU:0": "MIG-0-1"})
    box.report(GPU0=told(current=GIB // 4))
    assert box.poll(divided(0, free=(9 * GIB, 3 * GIB), held={7: 1})).headroom == {"MIG-0-1": 3 * GIB + GIB // 4}
    assert box.poll(divided(0, free=(9 * GIB, 3 * GIB), held={7: 0})).headroom_unknown == {
        "MIG-0-1": "process_unlisted"
    }


def test_mig_of_a_driver_that_names_no_instance() -> None:
    """Drivers before R450 list processes without their instance: it is taken to be the run's."""
    box = Box({"GPU:0": "MIG-0-1"})
    box.report(GPU0=told(current=GIB))
    on_any = replace(divided(0, free=(9 * GIB, 3 * GIB)), processes=(GpuProcess(7, "compute", 2 * GIB),))
    assert box.poll(on_any).headroom == {"MIG-0-1": 4 * GIB - GUESS}


def test_children_that_hold_device_memory() -> None:
    """A data loader's worker with a context of its own: neither the run's slack nor somebody else's memory."""
    box = Box()
    box.report(GPU0=told(current=20 * GIB))
    crowded = gpu(0, free=4 * GIB, held={7: 21 * GIB + GUESS, 71: 2 * GIB, 99: 3 * GIB})
    usage = HostUsage(0.0, None, None, PresentProcesses(0, 2, "running", None, None, pids=(7, 71)))
    assert box.poll(crowded, usages={ALICE: usage}).headroom == {"GPU-0": 5 * GIB}
    box.report(GPU0=told(current=20 * GIB))  # the first came before its device was resolved
    run = box.poll(crowded, usages={ALICE: usage})
    assert run.memory_windows["GPU-0"][-1].others == 3 * GIB
    assert sum_held_by_others((7,), "GPU-0", snapshot(crowded)) == 5 * GIB


def test_cuda_malloc_async_in_tensorflow() -> None:
    """Without statistics there is no headroom; with statistics whose limit is 0 there is no limit."""
    box = Box()
    box.report()
    pool = gpu(0, free=50 * GIB, held={7: 24 * GIB + GUESS})
    assert box.poll(pool).headroom_unknown == {"GPU-0": "no_allocator_figures"}
    box.report(GPU0=told(current=20 * GIB, limit=0))
    run = box.poll(pool)
    assert (run.headroom, run.headroom_unknown) == ({"GPU-0": 54 * GIB}, {})


def test_cuda_malloc_async_in_torch() -> None:
    """A pool that says less of itself than it has handed out is not believed: the guess stands in."""
    box = Box()
    for _ in range(3):
        box.report(GPU0=told(current=20 * GIB, reserved=0))
        run = box.poll(gpu(0, free=50 * GIB, held={7: 24 * GIB + GUESS}))
    assert run.headroom == {"GPU-0": 54 * GIB}


def test_pool_that_tells_its_size_measures_the_overhead() -> None:
    """Torch and JAX say what they hold: what their process holds beside it is measured, and no guess any more."""
    box = Box()
    device = gpu(0, free=50 * GIB, held={7: 24 * GIB + 758 * MIB})
    box.report(GPU0=told(current=20 * GIB, reserved=24 * GIB))
    assert box.poll(device).headroom == {"GPU-0": 54 * GIB + 758 * MIB - GUESS}
    box.report(GPU0=told(current=21 * GIB, reserved=24 * GIB))
    assert box.poll(device).headroom == {"GPU-0": 53 * GIB}


def test_overhead_that_grows_is_measured_anew() -> None:
    """A library that is loaded later takes device memory too, which is no slack of the pool."""
    box = Box()
    for beside in (610 * MIB, 758 * MIB):
        for _ in range(2):
            box.report(GPU0=told(current=20 * GIB, reserved=24 * GIB))
            run = box.poll(gpu(0, free=50 * GIB, held={7: 24 * GIB + beside}))
        assert run.headroom == {"GPU-0": 54 * GIB}


def test_pool_that_grows_within_a_long_step() -> None:
    """While no report comes, what the process takes is the pool's, and measures no overhead."""
    box = Box()
    for _ in range(2):
        box.report(GPU0=told(current=20 * GIB, reserved=20 * GIB))
        box.poll(gpu(0, free=50 * GIB, held={7: 20 * GIB + 600 * MIB}))
    for _ in range(3):
        run = box.poll(gpu(0, free=40 * GIB, held={7: 30 * GIB + 600 * MIB}))
    assert run.headroom == {"GPU-0": 50 * GIB}


def test_jax_with_its_limit() -> None:
    """Of a device that has more, JAX takes no more than its share."""
    box = Box()
    box.report(GPU0=told(current=20 * GIB, reserved=30 * GIB, limit=60 * GIB))
    assert box.poll(gpu(0, free=49 * GIB, held={7: 30 * GIB + GUESS})).headroom == {"GPU-0": 40 * GIB}


def test_neighbour_takes_the_rest() -> None:
    """A limit promises nothing that a neighbour holds: free memory decides."""
    box = Box()
    box.report(GPU0=told(current=20 * GIB, reserved=20 * GIB, limit=60 * GIB))
    assert box.poll(gpu(0, free=GIB, held={7: 20 * GIB + GUESS, 9: 58 * GIB})).headroom == {"GPU-0": GIB}


def test_process_memory_untold() -> None:
    """Where the driver has no number for the process, the pool's own stands in; without one there is the reason."""
    box = Box()
    untold = gpu(0, free=50 * GIB, held={7: None})
    box.report(GPU0=told(current=20 * GIB, reserved=24 * GIB))
    assert box.poll(untold).headroom == {"GPU-0": 54 * GIB}
    box.report(GPU0=told(current=20 * GIB))
    run = box.poll(untold)
    assert (run.headroom, run.headroom_at_peak) == ({}, {})
    assert run.headroom_unknown == {"GPU-0": "process_memory_untold"}


def test_process_unlisted() -> None:
    """A process of another pid namespace: the pool's own figure does, or the limit; else there is a reason."""
    box = Box()
    foreign = gpu(0, free=50 * GIB, held={4711: 24 * GIB})
    box.report(GPU0=told(current=20 * GIB, reserved=24 * GIB))
    assert box.poll(foreign).headroom == {"GPU-0": 54 * GIB}
    box.report(GPU0=told(current=20 * GIB, limit=30 * GIB))
    assert box.poll(foreign).headroom == {"GPU-0": 10 * GIB}
    box.report(GPU0=told(current=20 * GIB))
    assert box.poll(foreign).headroom_unknown == {"GPU-0": "process_unlisted"}


def test_free_memory_untold() -> None:
    """A device that does not tell its free memory has a headroom only up to a limit."""
    box = Box()
    dark = replace(gpu(0, held={7: 30 * GIB}), readings={})
    box.report(GPU0=told(current=20 * GIB, reserved=24 * GIB))
    assert box.poll(dark).headroom_unknown == {"GPU-0": "free_memory_untold"}
    box.report(GPU0=told(current=20 * GIB, limit=30 * GIB))
    assert box.poll(dark).headroom == {"GPU-0": 10 * GIB}


def test_run_without_a_report() -> None:
    """Before its first report, and after its last has expired, a run says nothing of its use."""
    box = Box()
    device = gpu(0, free=50 * GIB, held={7: 30 * GIB})
    assert box.poll(device).headroom_unknown == {"GPU-0": "no_report"}
    box.report(GPU0=told(current=20 * GIB))
    box.now += 61
    run = box.poll(device)
    assert (run.headroom, run.headroom_unknown) == ({}, {"GPU-0": "report_expired"})


def test_ended_run_has_neither() -> None:
    """A run that is over can allocate nothing, and nobody asks why."""
    box = Box()
    box.report(GPU0=told(current=20 * GIB))
    box.poll(gpu(0, held={7: 30 * GIB}))
    box.runs.exited(ALICE, box.now)
    run = box.poll(gpu(0))
    assert (run.headroom, run.headroom_unknown) == ({}, {})


@pytest.mark.parametrize("gone", [(Gpu(gpu(0).identity, fault="gpu_is_lost"),), ()], ids=["lost", "not listed"])
def test_gpu_down(gone: tuple[Gpu, ...]) -> None:
    """A GPU that does not answer, or is not there any more, gives nothing, whatever the limit; it is still that GPU."""
    box = Box()
    box.report(GPU0=told(current=20 * GIB, limit=30 * GIB))
    box.poll(gpu(0, held={7: 30 * GIB}))
    run = box.poll(*gone)
    assert (run.headroom, run.headroom_unknown) == ({}, {"GPU-0": "gpu_down"})


def test_device_unresolved() -> None:
    """Which GPU it is, is not known: the reason has no UUID."""
    box = Box({"GPU:0": "GPU-of-another-box"})
    box.report(GPU0=told(current=20 * GIB))
    run = box.poll(gpu(0))
    assert run.headroom_unknown == {"": "device_unresolved"}
    assert RunReadings.memory_headroom_unknown_info.read(run) == {("", "device_unresolved"): 1}


def test_reasons_are_documented() -> None:
    """The page says of each reason what to do."""
    page = (ROOT / "docs/understand/headroom.md").read_text()
    for reason in HEADROOM_UNKNOWN:
        assert f"| `{reason}` |" in page


def oom(current: int, peak: int) -> Error:
    """Make an out-of-memory of 1 GiB with what the allocator said afterwards."""
    return Error(
        "device_oom", "OOM", "", "train", 5, (Allocation(GIB, device="GPU:0"),), {"GPU:0": DeviceMemory(current, peak)}
    )


@pytest.mark.parametrize(
    ("error", "left", "least"),
    [
        (oom(20 * GIB, 20 * GIB), 10 * GIB, 10 * GIB),
        (oom(29 * GIB, 29 * GIB), GIB, GIB),
        (oom(20 * GIB, 28 * GIB), 10 * GIB, 2 * GIB),
        (oom(5 * GIB, 20 * GIB), 10 * GIB, 10 * GIB),
        (oom(45 * GIB, 50 * GIB), 0, 0),
    ],
    ids=["still", "grown", "a peak within the step", "given back", "grown beyond what was known"],
)
def test_headroom_at_an_oom(error: Error, left: int, least: int) -> None:
    """What the run took since the last poll is no headroom any more when an allocation fails."""
    box = Box()
    box.report(GPU0=told(current=20 * GIB))
    device = gpu(0, free=10 * GIB, held={7: 20 * GIB + GUESS})
    assert box.poll(device).headroom == {"GPU-0": 10 * GIB}
    box.report(GPU0=told(current=25 * GIB))  # polled by nobody
    box.runs.receive(ALICE, error, box.now)
    run = box.poll(device)
    assert run.errors[0].headroom == {"GPU-0": left}
    (failed,) = run.ooms.values()
    assert (failed.requested, failed.headroom, failed.least) == (GIB, left, least)


def test_measuring_needs_the_same_before_and_after_a_report() -> None:
    """Only a report between two equal answers of the driver's is of the same pool as they."""
    overhead = Overhead(GUESS)
    for held, reserved, heard in ((None, 5, 1.0), (9, None, 2.0), (8, 5, 3.0), (9, 5, 4.0), (9, 6, 4.0)):
        overhead.update(held, reserved, heard)
        assert overhead.bytes == GUESS
    overhead.update(9, 6, 5.0)
    assert overhead.bytes == 3


def test_nothing_known() -> None:
    """Without a pool and without a limit there is no headroom to state."""
    assert compute_headroom(DeviceSpace(5, 10), None, None, 3) is None
    assert compute_headroom(DeviceSpace(5, 10), None, 0, 3) is None
    assert compute_headroom(DeviceSpace(None, 10), 5, None, 3) is None


amounts = st.integers(0, 2**40)
pools = st.integers(-(2**30), 2**40)  # below 0 where the overhead was guessed larger than what the process holds
limits = st.none() | amounts


@given(free=amounts, size=amounts, pool=pools, limit=limits, in_use=amounts)
def test_bounds(free: int, size: int, pool: int, limit: int | None, in_use: int) -> None:
    """Headroom is never negative, and never above the device's size or the allocator's limit less what is in use."""
    left = compute_headroom(DeviceSpace(free, size), pool, limit, in_use)
    assert left is not None
    assert 0 <= left <= max(0, size - in_use)
    assert not limit or left <= max(0, limit - in_use)


@given(space=st.tuples(amounts, amounts), pool=pools, limit=st.integers(1, 2**40), in_use=amounts, more=amounts)
def test_monotone(space: tuple[int, int], pool: int, limit: int, in_use: int, more: int) -> None:
    """More free memory, a larger device, pool or limit never make it less; more in use never more."""
    free, size = space
    left = compute_headroom(DeviceSpace(free, size), pool, limit, in_use) or 0
    for larger in (
        compute_headroom(DeviceSpace(free + more, size), pool, limit, in_use),
        compute_headroom(DeviceSpace(free, size + more), pool, limit, in_use),
        compute_headroom(DeviceSpace(free, size), pool + more, limit, in_use),
        compute_headroom(DeviceSpace(free, size), pool, limit + more, in_use),
        compute_headroom(DeviceSpace(free, size), pool, None, in_use),
    ):
        assert larger is not None
        assert larger >= left
    assert (compute_headroom(DeviceSpace(free, size), pool, limit, in_use + more) or 0) <= left


@given(memory=st.builds(DeviceMemory, amounts, amounts, st.none() | amounts, st.none() | amounts), poll=st.data())
def test_every_device_has_a_headroom_or_a_reason(memory: DeviceMemory, poll: st.DataObject) -> None:
    """Whatever driver and run tell, a device has exactly one of the two, and the reason is one that is documented."""
    box = Box()
    box.report(GPU0=memory)
    device = gpu(0, free=poll.draw(amounts), held=poll.draw(st.dictionaries(st.integers(6, 8), st.none() | amounts)))
    if poll.draw(st.booleans()):
        device = replace(device, readings={GpuReadings.memory_size_bytes: 80 * GIB})
    run = box.poll(device)
    assert len(run.headroom) + len(run.headroom_unknown) == 1
    assert run.headroom.keys() == run.headroom_at_peak.keys()
    assert set(run.headroom_unknown.values()) <= set(HEADROOM_UNKNOWN)
    assert all(0 <= left <= 80 * GIB for left in run.headroom.values())


def test_snapshot_without_gpus() -> None:
    """With the driver gone nothing is said, and nothing fails."""
    box = Box()
    box.report(GPU0=told(current=GIB))
    runs = box.runs.update(Snapshot(1.0, 0.0, "driver_not_loaded"), box.now)
    assert [run.headroom for run in runs] == [{}]
