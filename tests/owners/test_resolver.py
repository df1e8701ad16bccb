"""Owners of the memory of each GPU."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from services import wait_until

from gpuwarden.gpu.snapshot import Gpu, MemoryLimit
from gpuwarden.owners.cgroup_path import NO_OWNER, CgroupOwner, Container
from gpuwarden.owners.containers import ContainerNames
from gpuwarden.owners.kinds import NAMES
from gpuwarden.owners.processes import ProcessIdentity
from gpuwarden.owners.resolver import OTHER, OwnerResolver, Owners
from gpuwarden.owners.slurm import SlurmJobMaps
from gpuwarden.owners.users import UserNames
from snapshots import GIB, gpu, mig_gpu, snapshot

ROOT = Path(__file__).parents[2]

ID = "0123456789abcdef" * 4
POD = "1a2b3c4d-0000-1111-2222-123456789abc"
USERS = {1000: "ada", 1001: "grace"}


class ResolverBench:
    """An owner resolver with made-up users, and no container runtime."""

    def __init__(self, limit: int = 32, job_map: Path | None = None, gpustat: Path | None = None) -> None:
        names = ContainerNames(None, None, None, Path("/nonexistent"))
        users = UserNames(USERS.__getitem__)
        wait_until(lambda: [users.name(uid) for uid in USERS] == [*USERS.values()], "the names")
        self.identities: Mapping[int, ProcessIdentity] = {}
        self.book = OwnerResolver(
            limit,
            self.identify,
            containers=names,
            users=users,
            maps=SlurmJobMaps(job_map, gpustat),
        )

    def identify(self, pids: Iterable[int]) -> Mapping[int, ProcessIdentity]:
        """Return the identities of the processes."""
        return {pid: self.identities[pid] for pid in pids if pid in self.identities}

    def join(
        self, identities: Mapping[int, ProcessIdentity], *gpus: Gpu, runs: Mapping[int, str] | None = None
    ) -> Owners:
        """Return the owners of one poll."""
        self.identities = identities

        async def poll() -> Owners:
            return self.book.resolve(snapshot(*gpus), runs or {})

        return asyncio.run(poll())


def identity(uid: int | None = 1000, place: CgroupOwner = NO_OWNER) -> ProcessIdentity:
    """Return a process of a user."""
    return ProcessIdentity(uid, "python", place)


def test_each_kind_sums_up_all_memory() -> None:
    """A process counts once in each kind of owner that it has, and an owner's processes are summed."""
    everything = CgroupOwner(Container(ID, "docker"), POD, "4711", "train.service")
    owners = ResolverBench().join(
        {1: identity(1000, everything), 2: identity(1000), 3: identity(1001)},
        gpu(0, held={1: 100, 2: 20, 3: 3}),
        gpu(1, held={1: 5, 4: None}),
        runs={1: "1-99"},
    )
    assert owners.memory == {
        ("GPU-0", "user", "ada"): 120,
        ("GPU-0", "user", "grace"): 3,
        ("GPU-0", "container", ID[:12]): 100,
        ("GPU-0", "pod", POD): 100,
        ("GPU-0", "slurm_job", "4711"): 100,
        ("GPU-0", "systemd_unit", "train.service"): 100,
        ("GPU-0", "run", "1-99"): 100,
        ("GPU-1", "user", "ada"): 5,
        ("GPU-1", "container", ID[:12]): 5,
        ("GPU-1", "pod", POD): 5,
        ("GPU-1", "slurm_job", "4711"): 5,
        ("GPU-1", "systemd_unit", "train.service"): 5,
        ("GPU-1", "run", "1-99"): 5,
    }
    assert owners.jobs == {("GPU-0", "4711"): 1, ("GPU-1", "4711"): 1}
    assert owners.dropped == 0
    assert owners.by_pid[1] == {
        "user": "ada",
        "container": ID[:12],
        "pod": POD,
        "slurm_job": "4711",
        "systemd_unit": "train.service",
        "run": "1-99",
    }


CGROUPS = "/sys/fs/cgroup"
LIMITED = f"{CGROUPS}/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/cri-containerd-{ID}.scope"


def test_limits_of_cgroups() -> None:
    """A limit belongs to the owner whose cgroup has it, on each GPU; of several of one owner the lowest counts."""
    levels = tuple(LIMITED.rsplit("/", n)[0] for n in range(3))
    in_pod = replace(identity(1000, CgroupOwner(Container(ID, "containerd"), POD)), folders=(f"{LIMITED}/in", *levels))
    in_slice = replace(
        identity(1001), folders=(f"{CGROUPS}/user.slice/user-1001.slice", f"{CGROUPS}/user.slice", CGROUPS)
    )
    as_root = replace(identity(0), folders=in_slice.folders)  # by sudo: the slice is not root's
    limits = {
        f"{LIMITED}/in": MemoryLimit(7, 0, 2),
        LIMITED: MemoryLimit(5, 3, 4),
        levels[1]: MemoryLimit(None, 2, 6),
        levels[2]: MemoryLimit(100, 0, 90),
        in_slice.folders[0]: MemoryLimit(8, 0, 1),
        f"{CGROUPS}/another": MemoryLimit(1, 1, 1),
    }
    box = (replace(gpu(0, held={1: 4, 3: None, 4: None}), memory_limits=limits), gpu(1, held={1: 1}))
    owners = ResolverBench().join({1: in_pod, 3: in_slice, 4: as_root}, *box, runs={1: "1-99", 5: "5-99"})
    assert owners.limits == {
        ("GPU-0", "container", ID[:12], "hard"): 5,
        ("GPU-0", "container", ID[:12], "soft"): 3,
        ("GPU-0", "pod", POD, "soft"): 2,
        ("GPU-0", "user", "grace", "hard"): 8,
        ("GPU-0", "run", "1-99", "hard"): 5,
        ("GPU-0", "run", "1-99", "soft"): 3,
    }
    assert owners.charged == {
        ("GPU-0", "container", ID[:12]): 4,
        ("GPU-0", "pod", POD): 6,
        ("GPU-0", "user", "grace"): 1,
        ("GPU-0", "run", "1-99"): 4,
    }
    assert set(owners.folders) == {*in_pod.folders, *in_slice.folders}


def test_limits_of_many_cgroups_are_bounded() -> None:
    """A user who makes a cgroup for each process gets as many limits as owners."""
    units = {pid: f"{CGROUPS}/x-{pid}.service" for pid in range(1, 9)}
    processes = {
        pid: replace(identity(1000, CgroupOwner(systemd_unit=unit.rpartition("/")[2])), folders=(unit,))
        for pid, unit in units.items()
    }
    box = replace(
        gpu(0, held=dict.fromkeys(units, 1)), memory_limits=dict.fromkeys(units.values(), MemoryLimit(9, 0, 1))
    )
    assert len(ResolverBench(limit=2).join(processes, box).limits) == 2


def test_hidden_processes_are_unknown() -> None:
    """A hidden process has the user unknown; unknown memory has no owner."""
    owners = ResolverBench().join({2: identity(None)}, gpu(0, held={1: 10, 2: 5, 3: None}))
    assert owners.memory == {("GPU-0", "user", "unknown"): 15}
    assert set(owners.by_pid) == {1, 2, 3}


def test_a_user_s_own_container_includes_the_user_name() -> None:
    """A container of a user's own runtime includes the user in its name, so it cannot imitate another name."""
    owners = ResolverBench().join({1: identity(1001, CgroupOwner(Container(ID, "podman", 1001)))}, gpu(0, held={1: 1}))
    assert owners.by_pid[1]["container"] == f"grace/{ID[:12]}"


def test_owners_beyond_the_limit_are_summed_up() -> None:
    """For each GPU and kind the largest owners have series; the others are summed up and counted."""
    jobs = {pid: identity(1000, CgroupOwner(slurm_job=str(pid))) for pid in range(1, 6)}
    owners = ResolverBench(limit=2).join(jobs, gpu(0, held={1: 1, 2: 20, 3: 3, 4: 40, 5: 5}), gpu(1, held={1: 7}))
    assert owners.memory == {
        ("GPU-0", "user", "ada"): 69,
        ("GPU-0", "slurm_job", "4"): 40,
        ("GPU-0", "slurm_job", "2"): 20,
        ("GPU-0", "slurm_job", OTHER): 9,
        ("GPU-1", "user", "ada"): 7,
        ("GPU-1", "slurm_job", "1"): 7,
    }
    assert owners.dropped == 3 + 3  # owners, and infos of jobs


def test_owner_with_a_series_keeps_it() -> None:
    """Two owners with about equal memory do not take turns; one with twice as much gets the series."""
    bench = ResolverBench(limit=1)
    jobs = {pid: identity(None, CgroupOwner(slurm_job=str(pid))) for pid in (1, 2)}

    def shown(first: int, second: int) -> set[str]:
        memory = bench.join(jobs, gpu(0, held={1: first, 2: second})).memory
        return {owner for _uuid, kind, owner in memory if kind == "slurm_job"} - {OTHER}

    assert [shown(10, 9), shown(9, 10), shown(10, 19), shown(9, 19), shown(10, 19), shown(0, 0)] == [
        {"1"}, {"1"}, {"1"}, {"2"}, {"2"}, {"2"},
    ]  # fmt: skip


def test_sums_do_not_depend_on_the_limit() -> None:
    """Within a kind the sum over owners is the same with any limit."""
    people = {pid: identity(pid % 7, CgroupOwner(slurm_job=str(pid % 50))) for pid in range(500)}
    box = gpu(0, held={pid: pid for pid in range(500)})
    for limit in (1, 3, 1000):
        memory = ResolverBench(limit).join(people, box).memory
        for kind in ("user", "slurm_job"):
            owned = [held for (_uuid, of, _owner), held in memory.items() if of == kind]
            assert sum(owned) == sum(range(500))
            assert len(owned) <= limit + 1


@pytest.mark.parametrize("hidden", [False, True])
def test_job_map_gives_a_process_its_job(tmp_path: Path, *, hidden: bool) -> None:
    """A process without a Slurm group belongs to the only job on its GPU, hidden or not."""
    (tmp_path / "0").write_text("4711\n")
    (tmp_path / "1").write_text("1\n2\n")
    owners = ResolverBench(job_map=tmp_path).join(
        {} if hidden else {1: identity(), 2: identity()},
        gpu(0, held={1: 10}),
        gpu(1, held={2: 5}),
        gpu(2, held={1: 3}),
    )
    assert {key: held for key, held in owners.memory.items() if key[1] == "slurm_job"} == {
        ("GPU-0", "slurm_job", "4711"): 10
    }
    assert owners.jobs == {("GPU-0", "4711"): 1, ("GPU-1", "1"): 1, ("GPU-1", "2"): 1}
    assert owners.by_pid[1].get("slurm_job", "") == "4711"


def test_job_of_a_mig_instance(tmp_path: Path) -> None:
    """A file of a MIG instance gives its job the processes on that instance only."""
    (tmp_path / "0.0").write_text("100\n")
    bench, box = ResolverBench(job_map=tmp_path), mig_gpu(0, free=[1, 1], held={1: 0, 2: 1})
    people = {1: identity(), 2: identity()}
    owners = bench.join(people, box)
    assert [owners.by_pid[pid].get("slurm_job", "") for pid in (1, 2)] == ["100", ""]
    (tmp_path / "0.1").write_text("200\n")
    owners = bench.join(people, box, runs={2: "2-99"})
    assert [owners.by_pid[pid].get("slurm_job", "") for pid in (1, 2)] == ["100", "200"]
    assert owners.by_pid[2]["run"] == "2-99"
    assert {key[2]: held for key, held in owners.memory.items() if key[1] == "slurm_job"} == {"100": GIB, "200": GIB}
    assert owners.jobs == {("GPU-0", "100"): 1, ("GPU-0", "200"): 1}


def test_group_takes_precedence_over_the_map(tmp_path: Path) -> None:
    """The kernel's group takes precedence over a prolog's file; the GPU is assigned to both."""
    (tmp_path / "0").write_text("4711\n")
    owners = ResolverBench(job_map=tmp_path).join({1: identity(1000, CgroupOwner(slurm_job="9"))}, gpu(0, held={1: 10}))
    assert owners.by_pid[1].get("slurm_job", "") == "9"
    assert set(owners.jobs) == {("GPU-0", "4711"), ("GPU-0", "9")}


def test_another_user_s_process_does_not_belong_to_the_job(tmp_path: Path) -> None:
    """If the map has the job's user, another user's display server on its GPU does not belong to the job."""
    (tmp_path / "0").write_text("4711 1000\n")
    owners = ResolverBench(gpustat=tmp_path).join({1: identity(1000), 2: identity(0)}, gpu(0, held={1: 10, 2: 1}))
    assert (owners.by_pid[1].get("slurm_job", ""), owners.by_pid[2].get("slurm_job", "")) == ("4711", "")


def test_gpu_of_a_job_without_a_process(tmp_path: Path) -> None:
    """A job that leaves its GPU idle is visible."""
    (tmp_path / "GPU-1").write_text("4711 1000\n")
    owners = ResolverBench(gpustat=tmp_path).join({}, gpu(0), gpu(1))
    assert owners.jobs == {("GPU-1", "4711"): 1}
    assert owners.memory == {}


def test_changes_take_effect_in_the_next_poll(tmp_path: Path) -> None:
    """Changed processes, runs, job files and names take effect in the next poll."""
    bench = ResolverBench(gpustat=tmp_path)
    box = gpu(0, held={1: 1})
    assert bench.join({1: identity(1000)}, box).by_pid[1]["user"] == "ada"
    (tmp_path / "0").write_text("4711 1001")
    second = bench.join({1: identity(1001)}, box, runs={1: "r"}).by_pid[1]
    assert second == {"user": "grace", "slurm_job": "4711", "run": "r"}
    (tmp_path / "0").unlink()
    bench.book._users._names[1001] = ("hopper", bench.book._users._clock())
    third = bench.join({1: identity(1001)}, gpu(0, held={1: 1, 2: 2}))
    assert third.by_pid[1] == {"user": "hopper"}
    assert third.by_pid[2]["user"] == "unknown"
    assert not third.jobs


def test_kinds() -> None:
    """The kinds are label values of a released metric."""
    assert NAMES == ("user", "container", "pod", "slurm_job", "systemd_unit", "run")


def test_docs_list_each_kind() -> None:
    """The documentation lists all kinds."""
    docs = (ROOT / "docs/understand/owners.md").read_text(encoding="utf-8").split("\n## ")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", docs, re.MULTILINE)) == ("owner_kind", *NAMES)
