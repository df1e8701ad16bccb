"""Reader of a process in /proc (proc(5)): its parent, state, and resource usage.

Nothing here blocks or raises: a process that ends during the read, or is hidden, is None.
"""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

_MAX_DEPTH = 64  # ancestors of a process that are read


class ProcStat(NamedTuple):
    """Fields of /proc/PID/stat; CPU times in clock ticks, `start` in clock ticks since boot.

    `children_cpu` is that of children it has waited for. `exit_code` is valid for a zombie, and only for a reader that
    may trace it: others get 0; None where the kernel has no such field.
    """

    state: bytes
    parent: int
    cpu: int
    children_cpu: int
    start: int
    pages: int
    exit_code: int | None


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """Counters of processes: CPU in clock ticks, bytes from and to storage."""

    cpu: int = 0
    read: int = 0
    written: int = 0

    def __add__(self, other: ResourceUse) -> ResourceUse:
        return ResourceUse(self.cpu + other.cpu, self.read + other.read, self.written + other.written)

    def beyond(self, other: ResourceUse) -> ResourceUse:
        """Return the difference of each counter, 0 where the other is larger."""
        return ResourceUse(
            max(self.cpu - other.cpu, 0), max(self.read - other.read, 0), max(self.written - other.written, 0)
        )


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """Process of the machine: its folder's inode in /proc, parent, and start in clock ticks since boot."""

    inode: int
    parent: int
    start: int


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """Sample of a process. `total` is its own usage and that of children it has waited for.

    `inherited` is the part that may come from them: the kernel separates CPU time, but not bytes.
    """

    start: int
    parent: int
    state: bytes
    pages: int
    total: ResourceUse
    inherited: ResourceUse
    io_seen: bool


def list_processes(known: Mapping[int, ProcessEntry]) -> Iterator[tuple[int, ProcessEntry]]:
    """Return all processes of the machine. Only new ones are read: each process has its own folder inode in /proc.

    A changed parent is not noticed, as it cannot move a process into another run's tree.
    """
    try:
        with os.scandir("/proc") as entries:
            for entry in entries:
                if not entry.name.isdecimal():
                    continue
                pid, inode = int(entry.name), entry.inode()
                found = known.get(pid)
                if found is None or found.inode != inode:
                    stat = read_stat(pid)
                    found = ProcessEntry(inode, stat.parent, stat.start) if stat else None
                if found:
                    yield pid, found
    except OSError:
        return  # no free file descriptor


def read_process(pid: int, start: int, before: ProcessSample | None) -> ProcessSample | None:
    """Read one process; None if it is gone, or did not start at `start`."""
    io = _io(pid)  # first, as the start time read below proves whose it is
    stat = read_stat(pid)
    if stat is None or stat.start != start:
        return None
    fetched, written = io or ((before.total.read, before.total.written) if before else (0, 0))
    return ProcessSample(
        start=start,
        parent=stat.parent,
        state=stat.state,
        pages=stat.pages,
        total=ResourceUse(stat.cpu + stat.children_cpu, fetched, written),
        inherited=ResourceUse(stat.children_cpu, fetched, written),
        io_seen=io is not None,
    )


def read_stat(pid: int) -> ProcStat | None:
    """Read /proc/PID/stat; None where the process is gone or hidden."""
    fields = _stat_fields(pid)
    if len(fields) <= 21:  # noqa: PLR2004 - the last one that every kernel has
        return None
    return ProcStat(
        state=fields[0],
        parent=int(fields[1]),
        cpu=int(fields[11]) + int(fields[12]),
        children_cpu=int(fields[13]) + int(fields[14]),
        start=int(fields[19]),
        pages=int(fields[21]),
        exit_code=int(fields[49]) if len(fields) > 49 else None,  # noqa: PLR2004 - since Linux 3.5
    )


def read_ignored_signals(pid: int) -> set[int]:
    """Return the signals that a process ignores, real-time ones left out; none where it is gone or hidden."""
    fields = _stat_fields(pid)
    mask = int(fields[30]) if len(fields) > 30 else 0  # noqa: PLR2004 - sigignore
    return {number for number in range(1, 32) if mask >> (number - 1) & 1}


def find_nearest_ancestor(pid: int, tops: Collection[int]) -> int:
    """Return the process itself or its nearest ancestor among `tops`; 0 if there is none, or it is hidden."""
    for _ in range(_MAX_DEPTH):
        if pid in tops:
            return pid
        stat = read_stat(pid)
        if stat is None:
            break
        pid = stat.parent
    return 0


def is_alive(pid: int, start: int) -> bool:
    """Return whether a process is alive; `start` is in clock ticks since boot, 0 if unknown.

    A zombie is not. A process that /proc hides is identified by its pid alone.
    """
    stat = read_stat(pid)
    if stat and start not in (0, stat.start):
        return False
    try:
        pidfd = os.pidfd_open(pid)
    except OverflowError:
        return False
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):  # /proc cannot be read either
            return True
        there = error.errno not in (errno.ESRCH, errno.EINVAL, errno.ENOENT)  # or a thread of another process
        return there and stat is not None and stat.state not in (b"Z", b"X")
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return not poll.poll(
            0
        )  # readable once the last thread has ended: the main thread may end earlier, with state Z
    finally:
        os.close(pidfd)


def _stat_fields(pid: int) -> list[bytes]:
    """Return the fields from the third one on: the second is the name, which may contain brackets and blanks."""
    return _content(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def _io(pid: int) -> tuple[int, int] | None:
    """Return the bytes read from and written to storage; the file requires permission to trace the process."""
    words = _content(f"/proc/{pid}/io").split()
    counts = dict(zip(words[::2], words[1::2], strict=False))
    try:
        return int(counts[b"read_bytes:"]), int(counts[b"write_bytes:"])
    except KeyError:
        return None


def _content(path: str) -> bytes:
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(file, 4096)  # more than either file has
    except OSError:
        return b""
    finally:
        os.close(file)


def read_boot_id() -> str | None:
    """Return the id of this boot of the host, which containers share; None if it cannot be read."""
    return _content("/proc/sys/kernel/random/boot_id").decode().strip() or None
