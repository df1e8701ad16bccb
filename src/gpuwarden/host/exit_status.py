"""Exit status of a process that is no child of ours, as wait(2) would return it to its parent."""

from __future__ import annotations

import fcntl
import os
import struct

from gpuwarden.host import procfs

# PIDFD_GET_INFO of include/uapi/linux/pidfd.h, in the size of its first version (Linux 6.13); the exit status came with
# 6.15. An older kernel knows neither, and its errors or its silence stand for that.
_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
_EXIT = 1 << 3  # PIDFD_INFO_EXIT
_STATUS_AT = 60  # bytes into struct pidfd_info


def read_exit_status(pidfd: int, pid: int, start: int) -> int | None:
    """Return the status of a process that has ended; None where it is not known yet, or to others only.

    The kernel tells it of a process that its parent has waited for. Of one that still waits for that, /proc tells it to
    whoever may trace it. `start` tells a reused pid apart. Does not block and raises nothing.
    """
    status = _read_reaped(pidfd)
    if status is None:
        status = _read_zombie(pid, start)
    return _read_reaped(pidfd) if status is None else status  # its parent may have come in between


def _read_reaped(pidfd: int) -> int | None:
    info = bytearray(64)
    struct.pack_into("=Q", info, 0, _EXIT)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError:
        return None
    (told,) = struct.unpack_from("=Q", info, 0)
    return int(struct.unpack_from("=i", info, _STATUS_AT)[0]) if told & _EXIT else None


def _read_zombie(pid: int, start: int) -> int | None:
    """Read the status where it is ours to read: to others the kernel shows 0 (fs/proc/array.c), a wrong success."""
    stat = procfs.read_stat(pid)
    if stat is None or stat.state not in (b"Z", b"X") or stat.start != start:
        return None
    return stat.exit_code if stat.exit_code or _may_trace(pid) else None


def _may_trace(pid: int) -> bool:
    """Tell whether the kernel lets us look into a process: this link asks for the same right as the status."""
    try:
        os.readlink(f"/proc/{pid}/ns/user")  # noqa: PTH115 - on the way of each run's end
    except OSError:
        return False
    return True
