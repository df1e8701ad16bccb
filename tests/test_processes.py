"""Who the processes on the GPUs are, by this machine's own /proc."""

from __future__ import annotations

import os
import pwd
import subprocess
from pathlib import Path

import psutil
import pytest

from gpuwarden.gpu import processes
from gpuwarden.gpu.processes import ProcessIdentity, ProcessNames

ME = os.getpid()
COMM = Path("/proc/self/comm").read_text().strip()


def test_living_process_has_a_user_and_a_command() -> None:
    """A process is known by its user's name and its command."""
    (who,) = ProcessNames().identify([ME, ME]).values()
    assert who.user == pwd.getpwuid(os.getuid()).pw_name
    assert who.comm.startswith(COMM)  # psutil has the whole of a name that the kernel cuts at 15 characters


def test_dead_process_has_no_identity() -> None:
    """A pid that the driver still lists after its end, or that is none here, is left out."""
    with subprocess.Popen(["true"]) as ended:
        pass
    assert ProcessNames().identify([ended.pid, 0, 2**40]) == {}


def test_process_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found out of a process is kept for as long as it is asked for."""
    names = ProcessNames()
    first = names.identify([ME])
    monkeypatch.setattr(processes, "_look_up", lambda _pid: None)
    assert names.identify([ME]) == first
    assert names.identify([]) == {}
    assert names.identify([ME]) == {}


def test_reused_pid_is_looked_up_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process under the same pid has another folder in /proc, and does not inherit a name."""
    names = ProcessNames()
    names.identify([ME])
    inode = processes._inode(ME)
    assert inode is not None
    monkeypatch.setattr(processes, "_inode", lambda _pid: inode + 1)
    monkeypatch.setattr(processes, "_look_up", lambda _pid: ProcessIdentity("somebody", "else"))
    assert names.identify([ME]) == {ME: ProcessIdentity("somebody", "else")}


def test_hidden_process_has_an_empty_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system does not tell of a process is empty; its memory still has a series."""

    def denied(_process: psutil.Process) -> str:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "username", denied)
    monkeypatch.setattr(psutil.Process, "name", denied)
    assert ProcessNames().identify([ME]) == {ME: ProcessIdentity("", "")}
