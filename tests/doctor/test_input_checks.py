"""Shared memory, CPUs, read speed and host memory, of real mounts, cgroups and files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_machine import Machine

from gpuwarden.doctor.machine.input_checks import MIN_SHM_BYTES
from gpuwarden.doctor.model import CheckResult
from gpuwarden.doctor.runner.checks import run_checks
from system_parts import require

MIB = 1 << 20


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Return a machine on which nothing is wrong, with one GPU."""
    made = Machine(tmp_path)
    made.make_healthy()
    return made


def check_with_shm(machine: Machine, size: str, fill: int = 0, minimum: int = MIN_SHM_BYTES) -> dict[str, str]:
    """Check shared memory of that size, a real mount in a mount namespace, with that many bytes in it.

    Below the `minimum` it is too small. A lower one saves the time of filling a gigabyte.
    """
    folder = machine.root / "dev/shm"
    folder.mkdir()
    program = f"""
import json, sys
from dataclasses import asdict
from pathlib import Path
from gpuwarden.doctor.machine import input_checks
from gpuwarden.doctor.model import Context
from gpuwarden.doctor.runner.checks import run_checks
Path({str(folder)!r}, "left").write_bytes(bytes({fill}))
input_checks.MIN_SHM_BYTES = {minimum}
context = Context(python=Path(sys.executable), environ={{}}, root=Path({str(machine.root)!r}))
print(json.dumps([asdict(each) for each in run_checks(context, ["input.shm"])]))
"""
    script = f'mount -t tmpfs -o size={size} tmpfs {folder} && exec "$0" -c "$1"'
    namespace = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    command = [*namespace, "sh", "-c", script, sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    require(done.returncode == 0, f"no file system can be mounted here: {done.stderr}")
    (result,) = json.loads(done.stdout)
    return dict(result)


def test_shared_memory_of_a_container(machine: Machine) -> None:
    """Docker's default of 64 MiB ends a DataLoader with a bus error."""
    result = check_with_shm(machine, "64m")
    assert result["status"] == "warn"
    assert result["found"].endswith("dev/shm has only 64.0 MiB.")
    assert "--shm-size=8g" in result["fix"]


def test_shared_memory_that_is_full(machine: Machine) -> None:
    """Programs that were killed leave their segments there."""
    result = check_with_shm(machine, "110m", fill=105 * MIB, minimum=100 * MIB)
    assert result["status"] == "warn"
    assert "5.00 MiB of 110 MiB left" in result["found"]


def test_shared_memory_is_missing(machine: Machine) -> None:
    """As in a chroot without it."""
    result = machine.check("input.shm")
    assert (result.status, result.fix) == ("warn", "sudo mount -t tmpfs -o size=50% tmpfs /dev/shm")


def limit_cgroup(machine: Machine, files: dict[str, str]) -> None:
    """Put this process into a control group of version 2 with these files."""
    group = machine.write("cgroup/job/cgroup.procs").parent
    machine.write("proc/self/mountinfo", f"30 23 0:26 / {group.parent} rw,nosuid - cgroup2 cgroup2 rw\n")
    machine.write(f"proc/{os.getpid()}/cgroup", "0::/job\n")
    for name, text in files.items():
        machine.write(f"cgroup/job/{name}", text)


def test_cpus_by_affinity(machine: Machine) -> None:
    """One CPU for a GPU starves it."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        result = machine.check("input.cpus")
    finally:
        os.sched_setaffinity(0, before)
    assert result.status == "warn"
    assert result.found == f"This process may use 1 of {os.cpu_count()} CPUs for 1 GPU."
    machine.fail_driver("unknown")
    assert machine.check("input.cpus").status == "pass"


def test_cpus_by_quota(machine: Machine) -> None:
    """Programs see all CPUs, start a thread for each, and are paused by the kernel."""
    limit_cgroup(machine, {"cpu.max": "20000 100000\n"})
    result = machine.check("input.cpus")
    assert result.status == "warn"
    seen = len(os.sched_getaffinity(0))
    assert result.found == f"The cgroup's quota is 0.2 CPUs, but programs see {seen} for 1 GPU."
    assert "docker run --cpus=N" in result.fix


def test_host_memory(machine: Machine) -> None:
    """The limit of a job is what ends a run, long before the host's memory is full."""
    assert machine.check("memory.host").name == "memory.host"
    limit_cgroup(machine, {"memory.max": f"{100 * MIB}\n", "memory.current": f"{95 * MIB}\n", "memory.stat": ""})
    result = machine.check("memory.host")
    assert result.status == "warn"
    assert "5.00 MiB of 100 MiB of the limit of this cgroup (container or job)" in result.found


def read(machine: Machine, path: Path) -> CheckResult:
    """Check the read speed of a path."""
    context = machine.context
    (result,) = run_checks(type(context)(python=context.python, root=context.root, read_path=path), {"input.read"})
    return result


def test_read_speed(machine: Machine, tmp_path: Path) -> None:
    """One file, a folder of them, and the ways in which a path is of no use."""
    assert machine.check("input.read").status == "skip"
    data = tmp_path / "data"
    for number in range(20):
        machine.write(f"data/{number % 3}/{number}.bin", "x" * MIB)
    folder = read(machine, data)
    assert folder.status in ("pass", "warn")
    assert f"/s from {data} (20 files, " in folder.found
    assert f"/s from {data}/0/0.bin" in read(machine, data / "0/0.bin").found
    missing = read(machine, data / "nothing")
    assert (missing.status, missing.found) == ("fail", f"{data}/nothing cannot be read: No such file or directory.")
    (data / "empty").mkdir()
    assert read(machine, data / "empty").status == "warn"
