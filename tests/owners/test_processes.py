"""Identities of processes, read from this machine's /proc."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import control_groups
import psutil
import pytest
from services import wait_until

from gpuwarden.host import pid_namespace
from gpuwarden.owners import processes
from gpuwarden.owners.cgroup_path import NO_OWNER, CgroupOwner, Container
from gpuwarden.owners.processes import ProcessIdentifier, ProcessIdentity
from system_parts import require

ME = os.getpid()
COMM = Path("/proc/self/comm").read_text().strip()
NOBODY = pwd.getpwnam("nobody").pw_uid
ID = "0123456789abcdef" * 4

# Prints the identities that a reader with these rights, in this namespace, finds for the pids in its arguments.
READER = """
import json, os, sys
from gpuwarden.host import pid_namespace
from gpuwarden.owners.processes import ProcessIdentifier
pid_namespace._DEVICES = os.environ.get("DEVICES", "/nonexistent/nvidia")
if "AS_NOBODY" in os.environ:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
names = ProcessIdentifier()
found = names.identify(map(int, sys.argv[1:]))
print(json.dumps([names.can_see_others(), {str(pid): [who.uid, who.comm] for pid, who in found.items()}]))
"""


@contextlib.contextmanager
def sleeping(**how: Any) -> Iterator[int]:
    """Run a process that does nothing, and yield its pid."""
    with subprocess.Popen(["sleep", "600"], **how) as process:
        try:
            yield process.pid
        finally:
            process.kill()


def read(*before: str, pids: list[int], **env: str) -> tuple[bool, dict[str, list[object]]]:
    """Read the identities of `pids` in a program started by the command `before`."""
    command = [*before, sys.executable, "-c", READER, *map(str, pids)]
    done = subprocess.run(command, env={**os.environ, **env}, stdout=subprocess.PIPE, check=True)
    can_see_others, found = json.loads(done.stdout)
    return can_see_others, found


@pytest.fixture(autouse=True)
def no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide this machine's devices: in a container that has some, the tests' processes would have to open them."""
    monkeypatch.setattr(pid_namespace, "_DEVICES", "/nonexistent/nvidia")


def needs_root() -> None:
    """Skip if other users and namespaces cannot be used."""
    can = (
        os.geteuid() == 0
        and not subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], check=False).returncode
    )
    require(can, "only root can make users' processes and namespaces: run this as root")


def test_living_process_has_a_user_and_a_command() -> None:
    """A process has a user and a command."""
    (who,) = ProcessIdentifier().identify([ME, ME]).values()
    assert who.uid == os.getuid()
    assert who.comm == COMM


def test_command_line_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command line is the process's memory, maybe gigabytes of it: a long name is the kernel's, cut off."""
    monkeypatch.setattr(psutil.Process, "cmdline", lambda _process: pytest.fail("was read"))
    program = tmp_path / "a-name-of-over-fifteen-letters"
    shutil.copy(shutil.which("sleep") or "", program)
    with subprocess.Popen([program, "600"]) as process:
        try:
            (who,) = ProcessIdentifier().identify([process.pid]).values()
        finally:
            process.kill()
    assert who.comm == "a-name-of-over-"


def test_name_that_would_control_a_terminal(tmp_path: Path) -> None:
    """A process that names itself with escape sequences and a reversed writing direction has a printable name."""
    name = tmp_path / "\x1b[2J\N{RIGHT-TO-LEFT OVERRIDE}trap"
    shutil.copy(shutil.which("sleep") or "", name)
    with subprocess.Popen([name, "600"]) as process:
        try:
            (who,) = ProcessIdentifier().identify([process.pid]).values()
        finally:
            process.kill()
    assert who.comm.startswith("\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}trap~")
    assert who.comm.isprintable()


def test_process_of_another_user() -> None:
    """Another user's process is identified without privileges."""
    needs_root()
    with sleeping(user=NOBODY) as pid:
        wait_until(lambda: psutil.Process(pid).uids().real == NOBODY, "the process runs as that user")
        assert read(pids=[pid], AS_NOBODY="1")[1] == {str(pid): [NOBODY, "sleep"]}
        assert ProcessIdentifier().identify([pid])[pid].uid == NOBODY
    with sleeping() as pid:
        assert read(pids=[pid], AS_NOBODY="1")[1] == {str(pid): [0, "sleep"]}


def test_dead_process_has_no_identity() -> None:
    """A pid that the driver still lists after its end, or that does not exist here, is left out."""
    with subprocess.Popen(["true"]) as ended:
        pass
    assert ProcessIdentifier().identify([ended.pid, 0, 2**40, 4294967295, -1]) == {}


def test_zombie_is_its_user_s() -> None:
    """A zombie may still hold device memory, so it keeps its user and name."""
    names = ProcessIdentifier()
    with subprocess.Popen(["sleep", "600"]) as process:
        alive = names.identify([process.pid])
        process.kill()
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE, "it is a zombie")
        assert names.identify([process.pid]) == alive
        unknown_before = ProcessIdentifier().identify([process.pid])[process.pid]
        assert (unknown_before.uid, unknown_before.comm) == (os.getuid(), "sleep")
    assert names.identify([process.pid]) == {}


def test_process_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An identity is cached as long as the process is requested."""
    names = ProcessIdentifier()
    first = names.identify([ME])
    monkeypatch.setattr(processes, "_look_up", lambda *_: None)
    assert names.identify([ME]) == first
    assert names.identify([]) == {}
    assert names.identify([ME]) == {}


def test_reused_pid_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process with the same pid has another folder in /proc, and does not inherit a name."""
    names = ProcessIdentifier()
    names.identify([ME])
    inode = processes._inode(ME)
    assert inode is not None
    monkeypatch.setattr(processes, "_inode", lambda _pid: inode + 1)
    monkeypatch.setattr(processes, "_look_up", lambda *_: ProcessIdentity(7, "else"))
    assert names.identify([ME]) == {ME: ProcessIdentity(7, "else")}


def test_pid_reused_during_lookup_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """An identity mixed from two processes with one pid is discarded."""
    inodes = iter([1, 2, 2, 2])
    monkeypatch.setattr(processes, "_inode", lambda _pid: next(inodes))
    names = ProcessIdentifier()
    assert names.identify([ME]) == {}
    assert set(names.identify([ME])) == {ME}


@pytest.mark.parametrize("step", ["__init__", "oneshot", "uids", "_read_comm", "_read_membership"])
def test_process_that_ends_during_lookup_is_left_out(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends at any step of the lookup is left out, and nothing is raised."""
    with sleeping() as pid:

        def ending(proceed: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(proceed)
            def end(*arguments: Any) -> Any:
                os.kill(pid, 9)
                os.waitpid(pid, 0)
                monkeypatch.undo()
                return proceed(*arguments)

            return end

        target: Any = processes if step in ("_read_comm", "_read_membership") else psutil.Process
        monkeypatch.setattr(target, step, ending(getattr(target, step)))
        assert ProcessIdentifier().identify([pid]) == {}
        assert not psutil.pid_exists(pid)


def test_hidden_process_has_an_empty_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden parts of an identity are empty; the memory still has an owner."""

    @functools.wraps(psutil.Process.uids)
    def denied(_process: psutil.Process) -> str:
        raise psutil.AccessDenied

    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(psutil.Process, "uids", denied)
    monkeypatch.setattr(processes, "open", refused, raising=False)
    (who,) = ProcessIdentifier().identify([ME]).values()
    assert (who.uid, who.comm) == (None, "")


@pytest.mark.parametrize("hidepid", ["1", "2"])
def test_hidepid_hides_others_and_is_reported(hidepid: str) -> None:
    """If /proc hides other users' processes, only the daemon's own are identified, and access shows it."""
    needs_root()
    mount = f'mount -t proc -o hidepid={hidepid} proc /proc && exec "$@"'
    hiding = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    with sleeping() as pid, sleeping(user=NOBODY, group=65534, extra_groups=[]) as own:
        can_see_others, found = read(*hiding, pids=[pid, own], AS_NOBODY="1")
        assert not can_see_others
        assert found[str(own)] == [NOBODY, "sleep"]
        assert found.get(str(pid), [None, ""]) == [None, ""]
        assert read(*hiding, pids=[pid])[1] == {str(pid): [0, "sleep"]}  # root has the capability


def test_a_pid_namespace_has_processes_of_its_own(tmp_path: Path) -> None:
    """A pid from outside is unknown in a pid namespace, and the reader reports that it cannot see all processes."""
    needs_root()
    with sleeping() as pid:
        can_see_others, found = read("unshare", "--pid", "--fork", "--mount-proc", pids=[pid])
    assert (can_see_others, found) == (False, {})


@pytest.mark.parametrize("holds", [True, False])
def test_in_a_pid_namespace_a_pid_must_be_proven(tmp_path: Path, *, holds: bool) -> None:
    """In a namespace the driver's pid may be the host's: only a process that has an NVIDIA device open is accepted."""
    needs_root()
    device = tmp_path / "nvidiactl"
    device.touch()
    inside = f'sleep 600 <{device if holds else "/dev/null"} & exec "$@" $!'
    namespace = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c", inside, "sh"]
    _, found = read(*namespace, pids=[], DEVICES=str(tmp_path / "nvidia"))
    assert [who[1] for who in found.values()] == (["sleep"] if holds else [])


def test_on_the_host_nothing_must_be_proven() -> None:
    """On the host pids need no proof, whatever devices there are."""
    if pid_namespace.is_initial():
        assert not pid_namespace.needs_proof()


def test_lookups_of_new_processes_per_poll_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll looks up a limited number of new processes, and the next polls the others."""
    monkeypatch.setattr(processes, "MAX_LOOKUPS", 4)
    with contextlib.ExitStack() as stack:
        pids = [stack.enter_context(sleeping()) for _ in range(10)]
        names = ProcessIdentifier()
        assert [len(names.identify(pids)) for _ in range(4)] == [4, 8, 10, 10]


@pytest.mark.parametrize(
    ("path", "place"),
    [
        (b"/slurm/uid_1000/job_77/step_0/task_0", CgroupOwner(slurm_job="77")),
        (b"/system.slice/slurmstepd.scope/job_77/step_0/user/task_0", CgroupOwner(slurm_job="77")),
        (b"/system.slice/docker-%b.scope" % ID.encode(), CgroupOwner(Container(ID, "docker"))),
        (b"/system.slice/train.service", CgroupOwner(systemd_unit="train.service")),
        (b"/%b.service" % (b"x" * 247), CgroupOwner(systemd_unit="x" * 247 + ".service")),
        (b"/tr\xff\xfe\x0cin.service", CgroupOwner(systemd_unit=os.fsdecode(b"tr\xff\xfe\x0cin.service"))),
    ],
)
def test_control_groups_of_the_kernel(path: bytes, place: CgroupOwner) -> None:
    """A process in a real group of either version has its owner from the group's name, whatever bytes are in it."""
    for root in control_groups.find_writable_roots():
        with sleeping() as pid, control_groups.move_to_group(pid, root, path):
            assert ProcessIdentifier().identify([pid])[pid].cgroup == place


def test_group_removed_under_a_zombie() -> None:
    """The kernel marks a removed group of a zombie; the zombie still belongs to it."""
    with sleeping() as pid:
        with control_groups.move_to_group(pid, control_groups.find_writable_roots()[-1], b"/train.service"):
            pass
        assert ProcessIdentifier().identify([pid])[pid].cgroup in (CgroupOwner(systemd_unit="train.service"), NO_OWNER)
