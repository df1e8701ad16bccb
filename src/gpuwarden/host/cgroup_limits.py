"""Limits of a process's cgroup: containers and batch jobs are killed by these, not by the host's.

Both versions of cgroups (Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1). A limit at any level above a
process applies to it, so all levels are read. Reads /proc and the cgroup file system; nothing here blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_NO_LIMIT = 2**62  # version 1 writes "none" as the largest number of whole pages


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """Memory limit of a cgroup in bytes, and the bytes in use that the kernel cannot reclaim."""

    limit: int
    used: int


@dataclass(frozen=True, slots=True)
class CgroupLimits:
    """Limits of one process: the memory limit with the least room left, and the lowest CPU quota.

    `oom_kills` counts kills by the kernel's OOM killer in its own cgroup.
    """

    memory: CgroupMemory | None = None
    cpus: float | None = None
    oom_kills: OomKillCounter | None = None


@dataclass(frozen=True, slots=True)
class OomKillCounter:
    """Counter of the OOM killer's kills in one cgroup, at one time."""

    file: str
    count: int

    def since(self) -> int:
        """Return the number of kills since then; 0 if the cgroup is gone. Does not block."""
        return max((_oom_kills(self.file) or 0) - self.count, 0)


@dataclass(frozen=True, slots=True)
class _Version:
    """Files of one cgroup version; `dropped` are the lines of memory.stat with page cache."""

    limit: str
    used: str
    dropped: tuple[bytes, ...]


_V2 = _Version("memory.max", "memory.current", (b"active_file", b"inactive_file"))
_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", (b"total_active_file", b"total_inactive_file"))


class CgroupReader:
    """Reader of processes' limits, which reads each cgroup once per sample; `begin` starts one."""

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._mounts: dict[str, tuple[str, str]] = {}
        self._found: dict[bytes, CgroupLimits] = {}

    def begin(self) -> None:
        """Start a sample: drop the limits of the last one."""
        self._found.clear()
        if not self._mounts:
            self._mounts = dict(_mounts(_content(f"{self._proc}/self/mountinfo")))

    def limits(self, pid: int) -> CgroupLimits:
        """Return the limits of a process; empty if it, or its cgroup, is hidden. Raises nothing."""
        membership = _content(f"{self._proc}/{pid}/cgroup")
        if membership not in self._found:
            self._found[membership] = self._read_limits(membership.decode(errors="surrogateescape"))
        return self._found[membership]

    def list_folders(self, membership: str) -> tuple[str, ...]:
        """Return the folders of a process's version 2 cgroup and of its parents, by its /proc/PID/cgroup."""
        return tuple(self._levels(parse_memberships(membership), ""))

    def _read_limits(self, membership: str) -> CgroupLimits:
        paths = parse_memberships(membership)
        controller, version = ("memory", _V1) if "memory" in self._mounts else ("", _V2)
        limited = [found for level in self._levels(paths, controller) if (found := _memory(level, version))]
        own = next(self._levels(paths, controller), None)
        levels = self._levels(paths, "cpu" if "cpu" in self._mounts else "")
        quotas = [quota for level in levels if (quota := _quota(level))]
        return CgroupLimits(
            memory=min(limited, key=lambda each: each.limit - each.used, default=None),
            cpus=min(quotas, default=None),
            oom_kills=_counter(own) if own else None,
        )

    def _levels(self, paths: dict[str, str], controller: str) -> Iterator[str]:
        """Return the folders of a process's cgroup and its parents, as far as they are mounted here."""
        mount, root = self._mounts.get(controller, ("", ""))
        path = paths.get(controller, "")
        if root != "/":  # in a container only a part is mounted
            if not f"{path}/".startswith(f"{root}/"):
                return
            path = path[len(root) :]
        if not mount or ".." in path.split("/"):  # outside of the mounted part
            return
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            yield "/".join([mount, *parts[:depth]])


def _mounts(mountinfo: bytes) -> Iterator[tuple[str, tuple[str, str]]]:
    """Return mount point and root cgroup of each controller; version 2 has the name ""."""
    for line in mountinfo.decode(errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.partition(" ")
        place = before.split(" ")[4:2:-1]
        if kind == "cgroup2":
            yield "", (place[0], place[1])
        elif kind == "cgroup":
            for controller in {"memory", "cpu"} & set(options.rpartition(" ")[2].split(",")):
                yield controller, (place[0], place[1])


def parse_memberships(text: str) -> dict[str, str]:
    """Return the path of a process's cgroup by controller, from /proc/PID/cgroup (cgroups(7)).

    Version 2 has the name "", systemd's own hierarchy of version 1 "name=systemd".
    """
    found: dict[str, str] = {}
    for line in text.split("\n"):  # not splitlines(): names may contain other line ends
        _, separator, rest = line.partition(":")
        controllers, second, path = rest.partition(":")
        if separator and second:
            found |= dict.fromkeys(controllers.split(","), path)
    return found


def _memory(folder: str, version: _Version) -> CgroupMemory | None:
    limit = _number(_content(f"{folder}/{version.limit}"))
    used = _number(_content(f"{folder}/{version.used}")) if limit is not None and limit < _NO_LIMIT else None
    if limit is None or used is None:
        return None
    lines = (line.partition(b" ") for line in _content(f"{folder}/memory.stat").splitlines())
    cache = sum(_number(count) or 0 for name, _, count in lines if name in version.dropped)
    return CgroupMemory(limit, max(used - cache, 0))


def _counter(folder: str) -> OomKillCounter | None:
    """Find the counter. Kernels before 5.2 have only memory.events, which includes child cgroups."""
    for name in ("memory.events.local", "memory.events", "memory.oom_control"):
        file = f"{folder}/{name}"
        count = _oom_kills(file)
        if count is not None:
            return OomKillCounter(file, count)
    return None


def _oom_kills(file: str) -> int | None:
    lines = (line.partition(b" ") for line in _content(file).splitlines())
    return next((_number(count) for name, _, count in lines if name == b"oom_kill"), None)


def _quota(folder: str) -> float | None:
    quota, _, period = _content(f"{folder}/cpu.max").partition(b" ")
    if not quota:
        quota, period = _content(f"{folder}/cpu.cfs_quota_us"), _content(f"{folder}/cpu.cfs_period_us")
    allowed, of = _number(quota), _number(period)
    return allowed / of if allowed and of else None


def _content(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a Path would cost more than the reading
            return file.readall()
    except OSError:
        return b""


def _number(text: bytes) -> int | None:
    """Return a whole number; None for "max" and -1, which mean no limit, and for empty text."""
    text = text.strip()
    return int(text) if text.isdigit() else None
