"""Check whether a pid that the driver lists is the process of that pid in this daemon's /proc.

NVIDIA's drivers return the pids of the host, some also inside a container (HAMi-core#112), where the same number may be
another process. On the host, and without NVIDIA's devices, no check is needed.
"""

from __future__ import annotations

import os
from pathlib import Path

_DEVICES = "/dev/nvidia"
_INITIAL = 0xEFFFFFFC  # inode of the machine's own pid namespace (PROC_PID_INIT_INO, include/linux/proc_ns.h)


def is_initial() -> bool:
    """Return whether this process is in the machine's initial pid namespace. Reads /proc."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _INITIAL  # noqa: PTH116 - one of many in a poll
    except OSError:
        return False


def is_contained(pid: int) -> bool | None:
    """Return whether a process is in a child pid namespace (proc(5), NSpid); None if it is gone or hidden."""
    if pid == 0:  # outside this pid namespace, and so in another one
        return True
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    pids = next((line for line in status.splitlines() if line.startswith("NSpid:")), "").split()
    return len(pids) > 2  # noqa: PLR2004 - the name, and the pid here


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
