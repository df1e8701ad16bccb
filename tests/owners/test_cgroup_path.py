"""Owners of a process from the names of its cgroups."""

from __future__ import annotations

import pytest
from offenders import check_each

from gpuwarden.owners.cgroup_path import CgroupOwner, Container, parse

ID = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4
POD = "1a2b3c4d-0000-1111-2222-123456789abc"
SLICE = f"kubepods-burstable-pod{POD.replace('-', '_')}.slice"
USER = "/user.slice/user-1000.slice/user@1000.service"
STATIC = "81e09ae0" * 4


@check_each(
    [
        (f"/system.slice/docker-{ID}.scope", CgroupOwner(Container(ID, "docker"))),
        (f"/docker/{ID}", CgroupOwner(Container(ID, "docker"))),
        (f"/docker/{ID}/system.slice/cron.service", CgroupOwner(Container(ID, "docker"))),
        (f"/machine.slice/libpod-{ID}.scope/container", CgroupOwner(Container(ID, "podman"))),
        (f"/libpod_parent/{ID}", CgroupOwner(Container(ID, "podman"))),
        (f"/system.slice/nerdctl-{ID}.scope", CgroupOwner(Container(ID, "containerd"))),
        (f"/default/{ID}", CgroupOwner(Container(ID, ""))),
        (f"/docker/{OTHER}/docker/{ID}", CgroupOwner(Container(ID, "docker"))),
        (
            f"/system.slice/train.service/libpod-payload-{ID}",
            CgroupOwner(Container(ID, "podman"), "", "", "train.service"),
        ),
        (f"{USER}/user.slice/libpod-{ID}.scope/container", CgroupOwner(Container(ID, "podman", 1000))),
        (
            f"{USER}/app.slice/q.service/libpod-payload-{ID}",
            CgroupOwner(Container(ID, "podman", 1000), "", "", "q.service"),
        ),
        ("/lxc.payload.box/system.slice/a.service", CgroupOwner(Container("box", "lxc"))),
        ("/lxc/101/ns/system.slice/a.service", CgroupOwner(Container("101", "lxc"))),
        (f"/kubepods.slice/{SLICE}/cri-containerd-{ID}.scope", CgroupOwner(Container(ID, "containerd"), POD)),
        (f"/kubepods.slice/{SLICE}/crio-{ID}.scope", CgroupOwner(Container(ID, "cri-o"), POD)),
        (f"/kubepods/burstable/pod{POD}/{ID}", CgroupOwner(Container(ID, ""), POD)),
        (f"/kubepods/besteffort/pod{STATIC}/{ID}", CgroupOwner(Container(ID, ""), STATIC)),
        (
            f"/system.slice/containerd.service/{SLICE}:cri-containerd:{ID}",
            CgroupOwner(Container(ID, "containerd"), POD),
        ),
        (
            f"/docker/{OTHER}/kubelet.slice/kubelet-kubepods.slice/kubelet-{SLICE}/cri-containerd-{ID}.scope",
            CgroupOwner(Container(ID, "containerd"), POD),
        ),
        ("/slurm/uid_1000/job_123/step_0/task_0", CgroupOwner(slurm_job="123")),
        ("/slurm_node7/uid_1000/job_123/step_batch", CgroupOwner(slurm_job="123")),
        ("/system.slice/slurmstepd.scope/job_123/step_0/user/task_0", CgroupOwner(slurm_job="123")),
        ("/system.slice/node7_slurmstepd.scope/job_123/step_extern", CgroupOwner(slurm_job="123")),
        # Slurm 26.05; the names are of Slurm's documentation and of its own test.
        ("/system.slice/slurmstepd.scope/s5K1KKYAYG5D00/step_0/user/task_0", CgroupOwner(slurm_job="s5K1KKYAYG5D00")),
        ("/system.slice/node7_slurmstepd.scope/sBR1JB8J1YM400/step_extern", CgroupOwner(slurm_job="sBR1JB8J1YM400")),
        (
            f"/system.slice/slurmstepd.scope/s5K1KKYAYG5D00/step_0/user/task_0/docker-{ID}.scope",
            CgroupOwner(Container(ID, "docker"), slurm_job="s5K1KKYAYG5D00"),
        ),
        ("/system.slice/slurmstepd.scope/system", CgroupOwner()),
        ("/system.slice/slurmstepd.scope/sometimes/step_0", CgroupOwner()),
        (
            f"/system.slice/slurmstepd.scope/job_123/step_0/user/task_0/docker-{ID}.scope",
            CgroupOwner(Container(ID, "docker"), slurm_job="123"),
        ),
        ("/system.slice/train.service", CgroupOwner(systemd_unit="train.service")),
        ("/system.slice/a.service/b/c", CgroupOwner(systemd_unit="a.service")),
        (r"/system.slice/system-x.slice/train@a\x2db.service", CgroupOwner(systemd_unit=r"train@a\x2db.service")),
        (f"{USER}/app.slice/jupyter.service", CgroupOwner(systemd_unit="jupyter.service")),
        (f"{USER}/app.slice", CgroupOwner()),
        ("/user.slice/user-1000.slice/session-3.scope", CgroupOwner(systemd_unit="session-3.scope")),
        ("/system.slice/gone.service (deleted)", CgroupOwner(systemd_unit="gone.service")),
        (f"/../../kubepods.slice/{SLICE}/crio-{ID}.scope", CgroupOwner(Container(ID, "cri-o"), POD)),
        ("/", CgroupOwner()),
        # Groups below a user's manager are named by that user, so they cannot assign another owner.
        (f"{USER}/slurm/uid_0/job_1", CgroupOwner()),
        (f"{USER}/kubepods/pod{POD}/{ID}", CgroupOwner(Container(ID, "", 1000))),
        (f"{USER}/docker-{ID}.scope", CgroupOwner(Container(ID, "docker", 1000))),
        # Names that are only similar.
        (f"/system.slice/docker-{ID[:-1]}.scope", CgroupOwner(systemd_unit=f"docker-{ID[:-1]}.scope")),
        (f"/system.slice/libpod-conmon-{ID}.scope", CgroupOwner(systemd_unit=f"libpod-conmon-{ID}.scope")),
        ("/job_123", CgroupOwner()),
        ("/slurm/uid_1000/job_abc", CgroupOwner()),
        ("/slurm/s5K1KKYAYG5D00", CgroupOwner()),  # version 1 has numbers
        ("/system.slice/slurmstepd.scope/s5K1KKYAYG5D0U", CgroupOwner()),  # invalid digit
        ("/system.slice/slurmstepd.scope/step_0/s5K1KKYAYG5D00", CgroupOwner()),
        (f"{USER}/slurmstepd.scope/s5K1KKYAYG5D00/step_0", CgroupOwner()),
    ],
)
def test_place(path: str, place: CgroupOwner) -> None:
    """A path identifies a container, a pod, a job or a unit, in the file of either version."""
    assert parse(f"0::{path}\n") == place
    assert parse(f"12:memory:{path}\n1:name=systemd:{path}\n0::/\n") == place


def test_version_1_jobs_under_systemd() -> None:
    """Slurm's version 1 groups are in some hierarchies; systemd's only names the service that started the job."""
    text = (
        "11:freezer:/slurm/uid_1000/job_9/step_0\n4:cpu,cpuacct:/\n1:name=systemd:/system.slice/slurmd.service\n0::/\n"
    )
    assert parse(text) == CgroupOwner(slurm_job="9")


def test_version_1_containers_under_systemd() -> None:
    """A container of Docker's cgroupfs driver of version 1 is found, and its parent's unit is ignored."""
    text = f"5:memory:/docker/{ID}\n1:name=systemd:/docker/{ID}\n0::/system.slice/containerd.service\n"
    assert parse(text) == CgroupOwner(Container(ID, "docker"))


@pytest.mark.parametrize("end", ["\x0b", "\x0c", "\x1c", "\u0085", "\u2028"])
def test_line_ends_in_names_start_no_new_line(end: str) -> None:
    """Only a line feed ends a line: with any other line end a user could add a second line."""
    text = f"0::{USER}/x{end}0::docker-{ID}.scope\n"
    assert parse(text).container is None


@pytest.mark.parametrize("text", ["", "\n", "0::", "garbage", "a:b", "0::\n0::\n", ":::", "0::" + "/x" * 30000])
def test_paths_without_owner(text: str) -> None:
    """Parsing raises nothing, for any content of the file."""
    assert parse(text) == CgroupOwner()
