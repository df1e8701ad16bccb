"""Check whether a pid that the driver lists is the process of that pid in this daemon's /proc.

NVIDIA's drivers return the pids of the host, some also inside a container (HAMi-core#112), where the same number may be
another process. On the host, and without NVIDIA's devices, no check is needed.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from gpuwarden.host.process_key import open_pidfd
from gpuwarden.protocol.socket_trust import read_credentials

_DEVICES = "/dev/nvidia"
_INITIAL = 0xEFFFFFFC  # inode of the machine's own pid namespace (PROC_PID_INIT_INO, include/linux/proc_ns.h)


def is_initial() -> bool:
    """Return whether this process is in the machine's initial pid namespace. Reads /proc."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _INITIAL  # noqa: PTH116 - one of many in a poll
    except OSError:
        return False


def is_contained(connection: socket.socket) -> bool:
    """Return whether the process that connected is outside this pid namespace or in a child of it, or is gone.

    A process that is gone may have left the connection to another one. By its pidfd, as /proc may hide it: NSpid in
    proc_pid_fdinfo(5).
    """
    pid, _uid = read_credentials(connection)
    pidfd = open_pidfd(connection, pid)
    if pidfd is None:
        return True
    try:
        lines = Path(f"/proc/self/fdinfo/{pidfd}").read_bytes().splitlines()
    except OSError:
        return True
    finally:
        os.close(pidfd)
    # The pid is 0 outside; the line has -1 if it is gone, and a second number in a child.
    return pid == 0 or b"NSpid:\t%d" % pid not in lines


def has_device_open(pid: int) -> bool:
    """Return whether the process has one of NVIDIA's devices open; False without permission to check.

    Every process with a context has. Reads /proc.
    """
    folder = f"/proc/{pid}/fd"
    try:
        return any(_target(f"{folder}/{name}").startswith(_DEVICES) for name in os.listdir(folder))  # noqa: PTH208 - speed
    except OSError:
        return False


def needs_proof() -> bool:
    """Return whether a listed pid may be another process here, and can be checked."""
    return not is_initial() and os.path.exists(f"{_DEVICES}ctl")  # noqa: PTH110 - speed


def _target(link: str) -> str:
    try:
        return os.readlink(link)  # noqa: PTH115 - speed
    except OSError:
        return ""
