"""Identities of the processes on the GPUs: user, command and cgroup, read once per process."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import psutil

from gpuwarden.host import pid_namespace
from gpuwarden.host.cgroup_limits import CgroupReader
from gpuwarden.metrics.labels import sanitize_label
from gpuwarden.owners import cgroup_path
from gpuwarden.owners.cgroup_path import NO_OWNER, CgroupOwner

MAX_LOOKUPS = 256  # per call, about 40 ms: thousands of new processes must not delay a poll
MAX_CGROUP_DEPTH = 16  # a user may make deeper ones: limits for other users are above
CGROUP_BYTES = 64 * 1024
COMM_BYTES = 64  # the longest are those of kernel threads
ACCESS_SECONDS = 10.0  # between checks whether others' processes may be read

# Control daemon and server of CUDA MPS, as the kernel cuts the name. The driver need not list the server's clients
# (CUDA Multi-Process Service, 2.3).
MPS_COMM = "nvidia-cuda-mps"


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """User id, command name and cgroup of a process; None or empty where hidden.

    `folders` are those of its version 2 cgroup and of that's parents, innermost first.
    """

    uid: int | None
    comm: str
    cgroup: CgroupOwner = NO_OWNER
    folders: tuple[str, ...] = ()


class ProcessIdentifier:
    """Cache of the identities of live processes. An ended process is dropped, so a reused pid is read again."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, ProcessIdentity]] = {}
        self._cgroups = CgroupReader()
        self._cgroups.begin()
        self._must_be_proven = pid_namespace.needs_proof()
        self._sees_others = _can_see_others()
        self._looked = time.monotonic()

    def identify(self, pids: Iterable[int]) -> Mapping[int, ProcessIdentity]:
        """Return the identities of those `pids` that are alive in this pid namespace. Reads /proc; does not block.

        Of more than MAX_LOOKUPS new ones, the rest follow in later calls.
        """
        known, self._known = self._known, {}
        found: dict[int, ProcessIdentity] = {}
        left = MAX_LOOKUPS
        for pid in dict.fromkeys(pids):
            inode = _inode(pid)
            if inode is None:
                continue
            old = known.get(pid)
            if old is not None and old[0] == inode:
                self._known[pid] = old
                found[pid] = old[1]
            elif left:
                left -= 1
                identity = self._look_up(pid, inode)
                if identity:
                    self._known[pid] = inode, identity
                    found[pid] = identity
        return found

    def can_see_others(self) -> bool:
        """Return whether all processes of the machine are readable: not with hidepid=, nor in a pid namespace."""
        now = time.monotonic()
        if now - self._looked > ACCESS_SECONDS:
            self._sees_others, self._looked = _can_see_others(), now
        return self._sees_others

    def _look_up(self, pid: int, inode: int) -> ProcessIdentity | None:
        if self._must_be_proven and not pid_namespace.has_device_open(pid):
            return None
        identity = _look_up(pid, self._cgroups)
        # If the process ended in between, parts of this could be of another process with its pid.
        return identity if _inode(pid) == inode else None


def _inode(pid: int) -> int | None:
    """Return the inode of the process's folder in /proc: a reused pid has another inode.

    Under memory pressure the kernel may replace it, and the process is read once more. This takes a tenth of the time
    that reading the start time takes, as psutil's is_running does.
    """
    try:
        return os.stat(f"/proc/{pid}").st_ino  # noqa: PTH116 - a Path would take longer than the call
    except (OSError, ValueError):
        return None


def _look_up(pid: int, cgroups: CgroupReader) -> ProcessIdentity | None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            comm, membership = _read_comm(pid), _read_membership(pid)
            owner = cgroup_path.parse(membership) if membership else NO_OWNER
            return ProcessIdentity(_uid(process), comm, owner, cgroups.list_folders(membership)[-MAX_CGROUP_DEPTH:])
    except (psutil.NoSuchProcess, ValueError, OSError):
        return None  # ValueError: psutil refuses a pid of 0 or out of range; OSError: no free file descriptor


def _uid(process: psutil.Process) -> int | None:
    try:
        return int(process.uids().real)
    except psutil.AccessDenied:
        return None


def _read_comm(pid: int) -> str:
    """Return the kernel's name of the process, at most 15 bytes.

    psutil completes a long name from the command line. That is in the memory of the process, may be gigabytes long
    (prctl(2), PR_SET_MM_MAP), and cannot be read while a call of the process hangs in a driver's mmap.
    """
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:  # noqa: PTH123 - as fast as can be
            return sanitize_label(file.read(COMM_BYTES).removesuffix(b"\n").decode(errors="surrogateescape"))
    except PermissionError:
        return ""


def _read_membership(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cgroup", "rb") as file:  # noqa: PTH123 - as fast as can be
            return file.read(CGROUP_BYTES).decode(errors="surrogateescape")
    except PermissionError:
        return ""


def _can_see_others() -> bool:
    """Return whether others' processes are readable: pid 1 always exists, and is not the daemon's user's."""
    try:
        with open("/proc/1/cgroup", "rb") as file:  # noqa: PTH123 - as fast as can be
            file.read(1)
    except OSError:
        return False
    return pid_namespace.is_initial()
