"""Identities of the processes on the GPUs: user, command and control group, read once a process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import psutil

from gpuwarden.host import pid_namespace
from gpuwarden.metrics.labels import sanitize_label
from gpuwarden.owners import cgroup_path
from gpuwarden.owners.cgroup_path import NO_OWNER, CgroupOwner

MAX_LOOKUPS = 256  # a call, about 40 ms: thousands of new processes must not hold up a poll
CGROUP_BYTES = 64 * 1024
COMM_BYTES = 64  # the longest are those of the kernel's own threads
ACCESS_SECONDS = 10.0  # between looks at whether others' processes may be read


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """User id, command name and place of a process; None or empty where the system hides them."""

    uid: int | None
    comm: str
    cgroup: CgroupOwner = NO_OWNER


class ProcessIdentifier:
    """Remembers who the present processes are; forgets each with its end, so that a reused pid is asked anew."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, ProcessIdentity]] = {}
        self._must_be_proven = pid_namespace.needs_proof()
        self._sees_others = _can_see_others()
        self._looked = time.monotonic()

    def identify(self, pids: Iterable[int]) -> Mapping[int, ProcessIdentity]:
        """Return those of `pids` that are alive in this pid namespace. Reads /proc; does not block.

        Of very many new ones, some are told at the next call only.
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

    def can_see_others(self, clock: Callable[[], float] = time.monotonic) -> bool:
        """Tell whether all processes of the machine may be read: not with hidepid=, nor in a pid namespace."""
        now = clock()
        if now - self._looked > ACCESS_SECONDS:
            self._sees_others, self._looked = _can_see_others(), now
        return self._sees_others

    def _look_up(self, pid: int, inode: int) -> ProcessIdentity | None:
        if self._must_be_proven and not pid_namespace.has_device_open(pid):
            return None
        identity = _look_up(pid)
        # Had the process ended in between, parts of this could be another's, which took over its pid.
        return identity if _inode(pid) == inode else None


def _inode(pid: int) -> int | None:
    """Return the inode of the process's folder: /proc makes one anew for each process, so a reused pid has another.

    The kernel may also drop and remake it when memory is short; then a process is only looked up once more. Asking so
    costs a tenth of reading the start time, which psutil's is_running does.
    """
    try:
        return os.stat(f"/proc/{pid}").st_ino  # noqa: PTH116 - a Path would cost more than the call
    except (OSError, ValueError):
        return None


def _look_up(pid: int) -> ProcessIdentity | None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            return ProcessIdentity(_uid(process), _read_comm(pid), _read_cgroup(pid))
    except (psutil.NoSuchProcess, ValueError, OSError):
        return None  # ValueError: psutil refuses a pid of 0 or out of range; OSError: no file descriptor is left


def _uid(process: psutil.Process) -> int | None:
    try:
        return int(process.uids().real)
    except psutil.AccessDenied:
        return None


def _read_comm(pid: int) -> str:
    """Return the kernel's name of the process, which it cuts at 15 bytes.

    psutil completes a long one by the command line. That lies in memory of the process, which may call gigabytes its
    command line (prctl(2), PR_SET_MM_MAP), and which nobody can read while a call of it hangs in a driver's mmap.
    """
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:  # noqa: PTH123 - as fast as can be
            return sanitize_label(file.read(COMM_BYTES).removesuffix(b"\n").decode(errors="surrogateescape"))
    except PermissionError:
        return ""


def _read_cgroup(pid: int) -> CgroupOwner:
    try:
        with open(f"/proc/{pid}/cgroup", "rb") as file:  # noqa: PTH123 - as fast as can be
            return cgroup_path.parse(file.read(CGROUP_BYTES).decode(errors="surrogateescape"))
    except PermissionError:
        return NO_OWNER


def _can_see_others() -> bool:
    """Tell whether another's process can be read: the first one is always there, and never the daemon's own user's."""
    try:
        with open("/proc/1/cgroup", "rb") as file:  # noqa: PTH123 - as fast as can be
            file.read(1)
    except OSError:
        return False
    return pid_namespace.is_initial()
