"""Headroom in every mode of a framework's allocator, and the reason where it is unknown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from services import ROOT

from gpuwarden.analysis.memory.device_memory import sum_held_by_others
from gpuwarden.analysis.memory.headroom import (
    DeviceSpace,
    HeadroomUnknown,
    Overhead,
    RunLimits,
    compute_headroom,
)
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu, GpuProcess, MemoryLimit, Snapshot
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.host.process_tree import HostUsage, PresentProcesses
from gpuwarden.protocol.messages import STEP_BUCKETS, Allocation, DeviceMemory, Error, Hello, Report
from gpuwarden.runs.metrics import RunReadings
from gpuwarden.runs.registry import RunRegistry
from gpuwarden.runs.run_snapshot import RunSnapshot
from snapshots import GIB, gpu, mig_gpu, snapshot

MIB = 2**20
GUESS = 512 * MIB
HEADROOM_UNKNOWN = get_args(HeadroomUnknown)
ALICE, BOB = ProcessKey(pid=7, uid=1000, start=1), ProcessKey(pid=8, uid=1001, start=2)
EMPTY_REPORT = Report("train", 5, 1.5, (0,) * (len(STEP_BUCKETS) + 1), {})


class Host:
    """A host's run registry; a second passes between polls, half of it before each report."""

    def __init__(self, devices: Mapping[str, str | None] | None = None) -> None:
        self.runs = RunRegistry(limit=10, expiry=60.0, overhead=GUESS)
        self.now = 0.0
        self.join(ALICE, {"GPU:0": "GPU-0"} if devices is None else devices)

    def join(self, peer: ProcessKey, devices: Mapping[str, str | None]) -> None:
        """Connect a run."""
        self.runs.receive(peer, Hello("resnet", "torch", devices), self.now)

    def report(self, peer: ProcessKey = ALICE, **memory: DeviceMemory) -> None:
        """Send a run's report; `GPU0` stands for "GPU:0"."""
        self.now += 0.5
        by_device = {name.replace("U", "U:"): each for name, each in memory.items()}
        self.runs.receive(peer, replace(EMPTY_REPORT, memory=by_device), self.now)

    def poll(self, *gpus: Gpu, usages: Mapping[ProcessKey, HostUsage] | None = None) -> RunSnapshot:
        """Poll the GPUs, and return the first run."""
        return self.poll_all(*gpus, usages=usages)[0]

    def poll_all(self, *gpus: Gpu, usages: Mapping[ProcessKey, HostUsage] | None = None) -> list[RunSnapshot]:
        """Poll the GPUs, and return the runs."""
        self.now += 0.5
        return list(self.runs.add_poll(snapshot(*gpus), self.now, usages or {}))


def allocator(**figures: int) -> DeviceMemory:
    """Return an allocator's figures; the peak is what is in use unless given."""
    return DeviceMemory(**{"peak": figures["current"], **figures})


def test_preallocation() -> None:
    """The headroom of a pool that fills the device is the pool's free part, though the device is 97 % used."""
    host = Host()
    host.report(GPU0=allocator(current=20 * GIB, peak=30 * GIB))
    run = host.poll(gpu(0, free=0, held={7: 78 * GIB}))
    assert run.headroom == {"GPU-0": 58 * GIB - GUESS}
    assert run.headroom_at_peak == {"GPU-0": 48 * GIB - GUESS}


def test_memory_growth() -> None:
    """The headroom of a full pool is the device's free memory."""
    host = Host()
    host.report(GPU0=allocator(current=20 * GIB))
    assert host.poll(gpu(0, free=50 * GIB, held={7: 20 * GIB + GUESS})).headroom == {"GPU-0": 50 * GIB}


def test_overestimated_overhead() -> None:
    """A context smaller than the estimate does not reduce the device's free memory."""
    host = Host()
    host.report(GPU0=allocator(current=20 * GIB))
    assert host.poll(gpu(0, free=50 * GIB, held={7: 20 * GIB + GUESS // 2})).headroom == {"GPU-0": 50 * GIB}


def test_several_processes_on_a_gpu() -> None:
    """Each run has its pool's free part plus the shared free memory, and none of the memory of others."""
    host = Host()
    host.join(BOB, {"GPU:0": "GPU-0"})
    host.report(GPU0=allocator(current=20 * GIB))
    host.report(BOB, GPU0=allocator(current=5 * GIB))
    alice, bob = host.poll_all(gpu(0, free=4 * GIB, held={7: 30 * GIB + GUESS, 8: 5 * GIB + GUESS, 99: 40 * GIB}))
    assert alice.headroom == {"GPU-0": 14 * GIB}
    assert bob.headroom == {"GPU-0": 4 * GIB}


def test_several_gpus_in_a_run() -> None:
    """Each GPU has its own headroom; a GPU that the run does not use has none, and needs no reason."""
    host = Host({f"GPU:{index}": f"GPU-{index}" for index in range(3)})
    host.report(GPU0=allocator(current=20 * GIB), GPU1=allocator(current=GIB))
    gpus = [gpu(index, free=(index + 1) * GIB, held={7: 20 * GIB + GUESS}) for index in range(3)]
    run = host.poll(*gpus)
    assert run.headroom == {"GPU-0": GIB, "GPU-1": 21 * GIB}
    assert run.headroom_unknown == {}


def test_mig() -> None:
    """Headroom is that of the instance; the same process on another instance is not the run's."""
    host = Host({"GPU:0": "MIG-0-1"})
    host.report(GPU0=allocator(current=GIB // 4))
    assert host.poll(mig_gpu(0, free=(9 * GIB, 3 * GIB), held={7: 1})).headroom == {"MIG-0-1": 3 * GIB + GIB // 4}
    assert host.poll(mig_gpu(0, free=(9 * GIB, 3 * GIB), held={7: 0})).headroom_unknown == {
        "MIG-0-1": "process_unlisted"
    }


def test_mig_of_a_driver_that_names_no_instance() -> None:
    """Drivers before R450 list processes without an instance: the run's instance is assumed."""
    host = Host({"GPU:0": "MIG-0-1"})
    host.report(GPU0=allocator(current=GIB))
    on_any = replace(mig_gpu(0, free=(9 * GIB, 3 * GIB)), processes=(GpuProcess(7, "compute", 2 * GIB),))
    assert host.poll(on_any).headroom == {"MIG-0-1": 4 * GIB - GUESS}


def test_children_that_hold_device_memory() -> None:
    """Memory of a data loader's worker is neither the run's free pool nor memory of others."""
    host = Host()
    host.report(GPU0=allocator(current=20 * GIB))
    crowded = gpu(0, free=4 * GIB, held={7: 21 * GIB + GUESS, 71: 2 * GIB, 99: 3 * GIB})
    usage = HostUsage(0.0, None, None, PresentProcesses(0, 2, "running", None, None, pids=(7, 71)))
    assert host.poll(crowded, usages={ALICE: usage}).headroom == {"GPU-0": 5 * GIB}
    host.report(GPU0=allocator(current=20 * GIB))  # the first one came before its device was resolved
    run = host.poll(crowded, usages={ALICE: usage})
    assert run.memory_windows["GPU-0"][-1].others == 3 * GIB
    assert sum_held_by_others((7,), "GPU-0", snapshot(crowded)) == 5 * GIB


def test_cuda_malloc_async_in_tensorflow() -> None:
    """Without statistics headroom is unknown; a limit of 0 in them means no limit."""
    host = Host()
    host.report()
    pool = gpu(0, free=50 * GIB, held={7: 24 * GIB + GUESS})
    assert host.poll(pool).headroom_unknown == {"GPU-0": "no_allocator_figures"}
    host.report(GPU0=allocator(current=20 * GIB, limit=0))
    run = host.poll(pool)
    assert (run.headroom, run.headroom_unknown) == ({"GPU-0": 54 * GIB}, {})


def test_cuda_malloc_async_in_torch() -> None:
    """A pool reported as smaller than the memory in use is ignored, and the estimated overhead applies."""
    host = Host()
    for _ in range(3):
        host.report(GPU0=allocator(current=20 * GIB, reserved=0))
        run = host.poll(gpu(0, free=50 * GIB, held={7: 24 * GIB + GUESS}))
    assert run.headroom == {"GPU-0": 54 * GIB}


def test_reported_pool_measures_the_overhead() -> None:
    """PyTorch and JAX report their pool, so the process's overhead is measured, not estimated."""
    host = Host()
    device = gpu(0, free=50 * GIB, held={7: 24 * GIB + 758 * MIB})
    host.report(GPU0=allocator(current=20 * GIB, reserved=24 * GIB))
    assert host.poll(device).headroom == {"GPU-0": 54 * GIB + 758 * MIB - GUESS}
    host.report(GPU0=allocator(current=21 * GIB, reserved=24 * GIB))
    assert host.poll(device).headroom == {"GPU-0": 53 * GIB}


def test_overhead_that_grows_is_measured_again() -> None:
    """Device memory of a library that is loaded later is overhead, not free pool."""
    host = Host()
    for overhead in (610 * MIB, 758 * MIB):
        for _ in range(2):
            host.report(GPU0=allocator(current=20 * GIB, reserved=24 * GIB))
            run = host.poll(gpu(0, free=50 * GIB, held={7: 24 * GIB + overhead}))
        assert run.headroom == {"GPU-0": 54 * GIB}


def test_pool_that_grows_within_a_long_step() -> None:
    """Without a new report, growth of the process counts as its pool, not as overhead."""
    host = Host()
    for _ in range(2):
        host.report(GPU0=allocator(current=20 * GIB, reserved=20 * GIB))
        host.poll(gpu(0, free=50 * GIB, held={7: 20 * GIB + 600 * MIB}))
    for _ in range(3):
        run = host.poll(gpu(0, free=40 * GIB, held={7: 30 * GIB + 600 * MIB}))
    assert run.headroom == {"GPU-0": 50 * GIB}


def test_jax_with_its_limit() -> None:
    """JAX allocates at most its share of a larger device."""
    host = Host()
    host.report(GPU0=allocator(current=20 * GIB, reserved=30 * GIB, limit=60 * GIB))
    assert host.poll(gpu(0, free=49 * GIB, held={7: 30 * GIB + GUESS})).headroom == {"GPU-0": 40 * GIB}


def test_co_tenant_uses_the_rest() -> None:
    """Free memory bounds the headroom where a co-tenant uses part of the run's limit."""
    host = Host()
    host.report(GPU0=allocator(current=20 * GIB, reserved=20 * GIB, limit=60 * GIB))
    assert host.poll(gpu(0, free=GIB, held={7: 20 * GIB + GUESS, 9: 58 * GIB})).headroom == {"GPU-0": GIB}


def test_process_memory_unknown() -> None:
    """Without the driver's figure for the process, the reported pool is used; without a pool there is a reason."""
    host = Host()
    unsized = gpu(0, free=50 * GIB, held={7: None})
    host.report(GPU0=allocator(current=20 * GIB, reserved=24 * GIB))
    assert host.poll(unsized).headroom == {"GPU-0": 54 * GIB}
    host.report(GPU0=allocator(current=20 * GIB))
    run = host.poll(unsized)
    assert (run.headroom, run.headroom_at_peak) == ({}, {})
    assert run.headroom_unknown == {"GPU-0": "process_memory_unreported"}


def test_process_unlisted() -> None:
    """A process in another PID namespace has headroom from its pool or its limit, else a reason."""
    host = Host()
    foreign = gpu(0, free=50 * GIB, held={4711: 24 * GIB})
    host.report(GPU0=allocator(current=20 * GIB, reserved=24 * GIB))
    assert host.poll(foreign).headroom == {"GPU-0": 54 * GIB}
    host.report(GPU0=allocator(current=20 * GIB, limit=30 * GIB))
    assert host.poll(foreign).headroom == {"GPU-0": 10 * GIB}
    host.report(GPU0=allocator(current=20 * GIB))
    assert host.poll(foreign).headroom_unknown == {"GPU-0": "process_unlisted"}


def test_free_memory_unknown() -> None:
    """Without the device's free memory there is headroom only up to a limit."""
    host = Host()
    dark = replace(gpu(0, held={7: 30 * GIB}), readings={})
    host.report(GPU0=allocator(current=20 * GIB, reserved=24 * GIB))
    assert host.poll(dark).headroom_unknown == {"GPU-0": "free_memory_unreported"}
    host.report(GPU0=allocator(current=20 * GIB, limit=30 * GIB))
    assert host.poll(dark).headroom == {"GPU-0": 10 * GIB}


def test_run_without_a_report() -> None:
    """Before the first report, and after the last one expired, headroom is unknown."""
    host = Host()
    device = gpu(0, free=50 * GIB, held={7: 30 * GIB})
    assert host.poll(device).headroom_unknown == {"GPU-0": "no_report"}
    host.report(GPU0=allocator(current=20 * GIB))
    host.now += 61
    run = host.poll(device)
    assert (run.headroom, run.headroom_unknown) == ({}, {"GPU-0": "report_expired"})


def test_ended_run_has_neither() -> None:
    """An ended run has neither headroom nor a reason."""
    host = Host()
    host.report(GPU0=allocator(current=20 * GIB))
    host.poll(gpu(0, held={7: 30 * GIB}))
    host.runs.exited(ALICE, host.now)
    run = host.poll(gpu(0))
    assert (run.headroom, run.headroom_unknown) == ({}, {})


@pytest.mark.parametrize("gone", [(Gpu(gpu(0).identity, fault="gpu_is_lost"),), ()], ids=["lost", "not listed"])
def test_gpu_down(gone: tuple[Gpu, ...]) -> None:
    """A GPU that does not answer or is not listed has no headroom, whatever the limit; its UUID stays."""
    host = Host()
    host.report(GPU0=allocator(current=20 * GIB, limit=30 * GIB))
    host.poll(gpu(0, held={7: 30 * GIB}))
    run = host.poll(*gone)
    assert (run.headroom, run.headroom_unknown) == ({}, {"GPU-0": "gpu_down"})


def test_device_unresolved() -> None:
    """The reason has no UUID where the GPU is not identified."""
    host = Host({"GPU:0": "GPU-of-another-host"})
    host.report(GPU0=allocator(current=20 * GIB))
    run = host.poll(gpu(0))
    assert run.headroom_unknown == {"": "device_unresolved"}
    assert RunReadings.memory_headroom_unknown_info.read(run) == {("", "device_unresolved"): 1}


def test_reasons_are_documented() -> None:
    """The headroom page documents each reason."""
    page = (ROOT / "docs/understand/headroom.md").read_text()
    for reason in HEADROOM_UNKNOWN:
        assert f"| `{reason}` |" in page


def oom(current: int, peak: int) -> Error:
    """Make a failed allocation of 1 GiB with the allocator's figures after it."""
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
    ids=["unchanged", "grown", "a peak within the step", "freed", "grown beyond the known headroom"],
)
def test_headroom_at_an_oom(error: Error, left: int, least: int) -> None:
    """Memory that the run allocated since the last poll is not headroom at the failure."""
    host = Host()
    host.report(GPU0=allocator(current=20 * GIB))
    device = gpu(0, free=10 * GIB, held={7: 20 * GIB + GUESS})
    assert host.poll(device).headroom == {"GPU-0": 10 * GIB}
    host.report(GPU0=allocator(current=25 * GIB))  # not polled
    host.runs.receive(ALICE, error, host.now)
    run = host.poll(device)
    assert run.errors[0].headroom == {"GPU-0": left}
    (failed,) = run.ooms.values()
    assert (failed.requested, failed.headroom, failed.least) == (GIB, left, least)


def test_overhead_is_measured_between_equal_readings() -> None:
    """A report measures the overhead only if the driver's readings before and after it are equal."""
    overhead = Overhead(GUESS)
    for process_memory, reserved, received in ((None, 5, 1.0), (9, None, 2.0), (8, 5, 3.0), (9, 5, 4.0), (9, 6, 4.0)):
        overhead.add_reading(process_memory, reserved, received)
        assert overhead.bytes == GUESS
    overhead.add_reading(9, 6, 5.0)
    assert overhead.bytes == 3


def test_no_pool_and_no_limit() -> None:
    """Headroom is unknown without a pool and a limit."""
    assert compute_headroom(DeviceSpace(5, 10), None, RunLimits(), 3) is None
    assert compute_headroom(DeviceSpace(5, 10), None, RunLimits(0, cgroup=MemoryLimit(None, 5, 5)), 3) is None
    assert compute_headroom(DeviceSpace(None, 10), 5, RunLimits(), 3) is None


amounts = st.integers(0, 2**40)
pools = st.integers(-(2**30), 2**40)  # below 0 where the estimated overhead exceeds the process's memory
limits = st.none() | amounts
cgroups = st.none() | st.builds(MemoryLimit, limits, amounts, amounts)


def headroom(space: DeviceSpace, pool: float | None, limits: RunLimits, in_use: float) -> float:
    """Return a headroom that is known."""
    found = compute_headroom(space, pool, limits, in_use)
    assert found is not None
    return found[0]


@given(
    space=st.tuples(amounts, amounts),
    pool=pools,
    limits=st.builds(RunLimits, limits, limits, cgroups),
    in_use=amounts,
)
def test_bounds(space: tuple[int, int], pool: int, limits: RunLimits, in_use: int) -> None:
    """Headroom is never negative, and never above what the device and each limit leave."""
    free, size = space
    left = headroom(DeviceSpace(free, size), pool, limits, in_use)
    assert 0 <= left <= max(0, size - in_use)
    assert not limits.allocator or left <= max(0, limits.allocator - in_use)
    assert limits.mps is None or left <= max(0, limits.mps - in_use)
    if limits.cgroup and limits.cgroup.hard is not None:
        assert left <= max(0, limits.cgroup.hard - limits.cgroup.used) + max(0, pool - in_use)


@given(space=st.tuples(amounts, amounts), pool=pools, limit=st.integers(1, 2**40), in_use=amounts, more=amounts)
def test_monotone(space: tuple[int, int], pool: int, limit: int, in_use: int, more: int) -> None:
    """More free memory, a larger device, pool or limit never reduce it; more in use never increases it."""
    free, size = space
    limits = RunLimits(limit, limit, MemoryLimit(limit, 0, in_use))
    left = headroom(DeviceSpace(free, size), pool, limits, in_use)
    for larger in (
        headroom(DeviceSpace(free + more, size), pool, limits, in_use),
        headroom(DeviceSpace(free, size + more), pool, limits, in_use),
        headroom(DeviceSpace(free, size), pool + more, limits, in_use),
        headroom(DeviceSpace(free, size), pool, replace(limits, allocator=limit + more), in_use),
        headroom(DeviceSpace(free, size), pool, replace(limits, mps=limit + more), in_use),
        headroom(DeviceSpace(free, size), pool, replace(limits, cgroup=MemoryLimit(limit + more, 0, in_use)), in_use),
        headroom(DeviceSpace(free, size), pool, RunLimits(), in_use),
    ):
        assert larger >= left
    assert headroom(DeviceSpace(free, size), pool, limits, in_use + more) <= left


FOLDERS = ("/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup")


def limited(device: Gpu, **limits: tuple[int | None, int]) -> Gpu:
    """Return a GPU on which cgroups have hard limits, and memory charged to them."""
    found = {
        f"/sys/fs/cgroup/{name.replace('_', '/')}": MemoryLimit(hard, 0, used) for name, (hard, used) in limits.items()
    }
    return replace(device, memory_limits=found)


@pytest.mark.parametrize(
    ("figures", "device", "left", "end"),
    [
        # Of a pool of 20 GiB with 15 in use; the cgroup has 24 GiB, of which the process has 20.5.
        ({"reserved": 20 * GIB}, {"a_b": (24 * GIB, 20 * GIB + GUESS)}, 8 * GIB + GUESS, "cgroup"),
        # Another process of the cgroup takes 3 GiB more.
        ({"reserved": 20 * GIB}, {"a_b": (24 * GIB, 23 * GIB + GUESS)}, 5 * GIB + GUESS, "cgroup"),
        ({"reserved": 20 * GIB}, {"a_b": (None, 23 * GIB), "a": (24 * GIB, 25 * GIB)}, 5 * GIB, "cgroup"),
        ({"reserved": 20 * GIB}, {"a_b": (60 * GIB, 20 * GIB), "a": (30 * GIB, 21 * GIB)}, 14 * GIB, "cgroup"),
        ({"reserved": 20 * GIB}, {"a_b": (60 * GIB, 20 * GIB), "c": (1, 1)}, 15 * GIB, "device"),
        ({"limit": 16 * GIB}, {"a_b": (24 * GIB, 20 * GIB)}, GIB, "allocator"),
    ],
    ids=["its pool", "others in it", "a parent", "the tighter parent", "another's", "the allocator's"],
)
def test_limits_of_cgroups(
    figures: dict[str, int], device: dict[str, tuple[int | None, int]], left: int, end: str
) -> None:
    """A cgroup's hard limit ends headroom before the device does: what it has left, and the pool's unused part."""
    host = Host()
    host.report(GPU0=allocator(current=15 * GIB, **figures))
    box = limited(gpu(0, free=10 * GIB, held={7: 20 * GIB + GUESS}), **device)
    (run,) = host.runs.add_poll(snapshot(box), host.now, cgroups={7: FOLDERS})
    assert run.headroom == {"GPU-0": left}
    assert RunReadings.memory_headroom_limit_info.read(run) == {("GPU-0", end): 1}
    # The same process in no such cgroup.
    (free,) = host.runs.add_poll(snapshot(box), host.now, cgroups={7: FOLDERS[2:]})
    assert free.headroom == {"GPU-0": GIB if end == "allocator" else 15 * GIB}


def test_limit_of_a_run_that_the_driver_does_not_list() -> None:
    """A client of MPS is listed under its server's pid: its limits give it a headroom all the same."""
    host = Host()
    host.runs.receive(ALICE, Hello("resnet", "tensorflow", {"GPU:0": "GPU-0"}, mps_memory_limit="0=20G,1=1G"), host.now)
    host.report(GPU0=allocator(current=15 * GIB))
    box = gpu(0, free=10 * GIB, held={99: 40 * GIB})
    (run,) = host.runs.add_poll(snapshot(box), host.now)
    assert run.headroom == {"GPU-0": 5 * GIB - GUESS}
    assert run.headroom_limits["GPU-0"].text == " under its MPS limit of 20.0 GiB"
    limited_box = limited(box, a_b=(18 * GIB, 40 * GIB))
    (run,) = host.runs.add_poll(snapshot(limited_box), host.now, cgroups={7: FOLDERS})
    assert run.headroom == {"GPU-0": 3 * GIB - GUESS}
    assert run.headroom_limits["GPU-0"].text == " under its cgroup's limit of 18.0 GiB"


@given(memory=st.builds(DeviceMemory, amounts, amounts, st.none() | amounts, st.none() | amounts), poll=st.data())
def test_every_device_has_a_headroom_or_a_reason(memory: DeviceMemory, poll: st.DataObject) -> None:
    """For any input a device has either a headroom or a documented reason."""
    host = Host()
    host.report(GPU0=memory)
    device = gpu(0, free=poll.draw(amounts), held=poll.draw(st.dictionaries(st.integers(6, 8), st.none() | amounts)))
    if poll.draw(st.booleans()):
        device = replace(device, readings={GpuReadings.memory_size_bytes: 80 * GIB})
    run = host.poll(device)
    assert len(run.headroom) + len(run.headroom_unknown) == 1
    assert run.headroom.keys() == run.headroom_at_peak.keys()
    assert set(run.headroom_unknown.values()) <= set(HEADROOM_UNKNOWN)
    assert all(0 <= left <= 80 * GIB for left in run.headroom.values())


def test_snapshot_without_gpus() -> None:
    """Without a driver headroom is empty, without an error."""
    host = Host()
    host.report(GPU0=allocator(current=GIB))
    runs = host.runs.add_poll(Snapshot(1.0, 0.0, "driver_not_loaded"), host.now)
    assert [run.headroom for run in runs] == [{}]
