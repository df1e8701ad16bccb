"""Limits of cgroups: files of both versions, and a real limit if this machine permits one."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from control_groups import make_limited_group

from gpuwarden.host.cgroup_limits import CgroupLimits, CgroupMemory, CgroupReader, OomKillCounter

GIB, MIB = 2**30, 2**20
PID = 7


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write files, and the folders they are in."""
    for name, text in files.items():
        path = folder / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def limits(folder: Path, membership: str, *mounts: str) -> CgroupLimits:
    """Return the limits of a process in a made-up /proc; a mount is `root mount-point - type - options`."""
    lines = "".join(
        f"3{number} 25 0:2{number} {root} {folder}{point} rw,relatime shared:9 - {kind} cgroup rw,{options}\n"
        for number, (root, point, kind, options) in enumerate(mount.split() for mount in mounts)
    )
    write(
        folder,
        {"proc/self/mountinfo": f"22 27 0:21 / /proc rw - proc proc rw\n{lines}", f"proc/{PID}/cgroup": membership},
    )
    cgroups = CgroupReader(str(folder / "proc"))
    cgroups.begin()
    return cgroups.limits(PID)


def test_version_2(tmp_path: Path) -> None:
    """The limit with the least room counts, at any level; page cache is not in use."""
    write(
        tmp_path,
        {
            "cg/job/memory.max": f"{8 * GIB}\n",
            "cg/job/memory.current": f"{7 * GIB}\n",
            "cg/job/memory.stat": f"anon 1\nfile 3\nactive_file {GIB}\ninactive_file {2 * GIB}\nfile_mapped 9\n",
            "cg/job/step/memory.max": f"{10 * GIB}\n",
            "cg/job/step/memory.current": f"{5 * GIB}\n",
            "cg/job/step/memory.stat": "active_file 0\n",
            "cg/job/step/task/memory.max": "max\n",
            "cg/job/step/task/memory.current": "1\n",
            "cg/job/cpu.max": "250000 100000\n",
            "cg/job/step/cpu.max": "max 100000\n",
        },
    )
    found = limits(tmp_path, "0::/job/step/task\n", "/ /cg cgroup2 nsdelegate")
    assert found == CgroupLimits(CgroupMemory(8 * GIB, 4 * GIB), 2.5)


def test_version_1(tmp_path: Path) -> None:
    """Each controller has a separate mount, and the largest number means no limit."""
    write(
        tmp_path,
        {
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
            "memory/memory.usage_in_bytes": "1\n",
            "memory/a/memory.limit_in_bytes": f"{4 * GIB}\n",
            "memory/a/memory.usage_in_bytes": f"{GIB}\n",
            "memory/a/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB // 4}\ntotal_active_file {GIB // 4}\n",
            "cpu/b/cpu.cfs_quota_us": "50000\n",
            "cpu/b/cpu.cfs_period_us": "100000\n",
            "cpu/cpu.cfs_quota_us": "-1\n",
            "cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    mounts = ("/ /memory cgroup memory", "/ /cpu cgroup cpu,cpuacct", "/ /unified cgroup2 nsdelegate")
    found = limits(tmp_path, "4:memory:/a\n3:cpu,cpuacct:/b\n1:name=systemd:/\n0::/\n", *mounts)
    assert found == CgroupLimits(CgroupMemory(4 * GIB, 512 * MIB), 0.5)


def test_partial_mount(tmp_path: Path) -> None:
    """A container may mount a part only: a cgroup inside is found, one outside is not."""
    files = {"memory.max": f"{GIB}\n", "memory.current": "5\n"}
    write(tmp_path, {f"cg/{name}": text for name, text in files.items()})
    write(tmp_path, {f"cg/in/{name}": text for name, text in files.items()})
    mount = "/box/one /cg cgroup2 x"
    for path in ("/box/one", "/box/one/in"):
        assert limits(tmp_path, f"0::{path}\n", mount).memory == CgroupMemory(GIB, 5)
    for path in ("/box/one-more", "/box", "/", "/../in"):
        assert limits(tmp_path, f"0::{path}\n", mount) == CgroupLimits()


def test_hidden_cgroup_has_no_limits(tmp_path: Path) -> None:
    """A cgroup that is gone or outside of the mount has no limits; a process that is gone neither."""
    write(tmp_path, {"cg/x/cgroup.procs": "", "other/memory.max": "5\n", "other/memory.current": "5\n"})
    for membership in ("", "0::/gone\n", "0::/../other\n", "nonsense\n", "5:memory:/x\n"):
        assert limits(tmp_path, membership, "/ /cg cgroup2 x") == CgroupLimits(), membership
    assert CgroupReader(str(tmp_path / "nowhere")).limits(1) == CgroupLimits()


def test_cgroup_is_read_once_per_reading(tmp_path: Path) -> None:
    """Runs of one job share one reading of their cgroup, until the next reading."""
    write(tmp_path, {"cg/a/memory.max": f"{GIB}\n", "cg/a/memory.current": "5\n", "proc/8/cgroup": "0::/a\n"})
    limits(tmp_path, "0::/a\n", "/ /cg cgroup2 x")
    cgroups = CgroupReader(str(tmp_path / "proc"))
    cgroups.begin()
    first = cgroups.limits(PID)
    write(tmp_path, {"cg/a/memory.current": "6\n"})
    assert cgroups.limits(8) == first == CgroupLimits(CgroupMemory(GIB, 5))
    cgroups.begin()
    assert cgroups.limits(8) == CgroupLimits(CgroupMemory(GIB, 6))


def test_oom_kills_are_those_of_its_own_cgroup(tmp_path: Path) -> None:
    """The OOM kill counter of a process's cgroup is found, and its later increase."""
    write(
        tmp_path,
        {
            "cg/memory.events": "oom_kill 90\n",
            "cg/a/memory.events": "oom_kill 7\n",
            "cg/a/memory.events.local": "low 0\noom 5\noom_kill 2\noom_group_kill 1\n",
        },
    )
    found = limits(tmp_path, "0::/a\n", "/ /cg cgroup2 x").oom_kills
    assert found is not None
    assert (found.count, found.since()) == (2, 0)
    write(tmp_path, {"cg/a/memory.events.local": "oom_kill 5\n"})
    assert found.since() == 3
    (tmp_path / "cg/a/memory.events.local").unlink()
    assert found.since() == 0


def test_oom_kills_of_older_kernels(tmp_path: Path) -> None:
    """Without memory.events.local the counter that includes the cgroups below is read; version 1 has another file."""
    write(tmp_path, {"cg/a/memory.events": "oom_kill 7\n", "v1/b/memory.oom_control": "under_oom 0\noom_kill 4\n"})
    assert limits(tmp_path, "0::/a\n", "/ /cg cgroup2 x").oom_kills == OomKillCounter(
        f"{tmp_path}/cg/a/memory.events", 7
    )
    found = limits(tmp_path, "4:memory:/b\n0::/\n", "/ /v1 cgroup memory").oom_kills
    assert found == OomKillCounter(f"{tmp_path}/v1/b/memory.oom_control", 4)


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """Yield a real cgroup of this test with a limit of 1 GiB; only root can create it."""
    with make_limited_group(GIB) as folder:
        yield folder


def test_real_limit(cgroup: Path) -> None:
    """A process in a limited cgroup has that limit, and its memory counts as in use."""
    script = "import sys; sys.stdin.readline(); held = b'x' * (64 << 20); print(flush=True); sys.stdin.readline()"
    with subprocess.Popen(["python3", "-S", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        cgroups = CgroupReader()
        cgroups.begin()
        without = cgroups.limits(process.pid).memory
        (cgroup / "cgroup.procs").write_text(str(process.pid))
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        cgroups.begin()
        found = cgroups.limits(process.pid).memory
        process.stdin.close()
    assert without is None or without.limit != GIB
    assert found
    assert found.limit == GIB
    assert 64 * MIB <= found.used < 256 * MIB
