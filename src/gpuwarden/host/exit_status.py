"""Exit status of a process that is not a child of the daemon, as wait(2) returns it to the parent."""

from __future__ import annotations

import fcntl
import os
import struct

from gpuwarden.host import procfs

# PIDFD_GET_INFO of include/uapi/linux/pidfd.h, in the size of its first version (Linux 6.13); the exit status is new in
# 6.15. Older kernels fail, or leave the status out.
_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
_EXIT = 1 << 3  # PIDFD_INFO_EXIT
_STATUS_AT = 60  # bytes into struct pidfd_info


def read_exit_status(pidfd: int | None, pid: int, start: int) -> int | None:
    """Return the exit status of an ended process; None if it is not known yet, or hidden.

    The kernel reports it once the parent has waited for the process. For a zombie, /proc shows it to a user who may
    trace it. `start` distinguishes a reused pid. Without a pidfd, only that of a zombie is
    known. Does not block and raises nothing.
    """
    status = _read_reaped(pidfd)
    if status is None:
        status = _read_zombie(pid, start)
    return _read_reaped(pidfd) if status is None else status  # its parent may have waited in between


def _read_reaped(pidfd: int | None) -> int | None:
    if pidfd is None:
        return None
    info = bytearray(64)
    struct.pack_into("=Q", info, 0, _EXIT)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError:
        return None
    (available,) = struct.unpack_from("=Q", info, 0)
    return int(struct.unpack_from("=i", info, _STATUS_AT)[0]) if available & _EXIT else None


def _read_zombie(pid: int, start: int) -> int | None:
    """Read the status of a zombie, if permitted: otherwise the kernel shows 0 (fs/proc/array.c), a false success."""
    stat = procfs.read_stat(pid)
    if stat is None or stat.state not in (b"Z", b"X") or stat.start != start:
        return None
    return stat.exit_code if stat.exit_code or _may_trace(pid) else None


def _may_trace(pid: int) -> bool:
    """Return whether this process may trace another: reading this link requires the same permission as the status."""
    try:
        os.readlink(f"/proc/{pid}/ns/user")  # noqa: PTH115 - called at each run's end
    except OSError:
        return False
    return True
