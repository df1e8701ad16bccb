"""Control groups of the kernel that tests make for processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
from services import wait_until

from system_parts import require


def find_writable_roots() -> list[Path]:
    """Return the roots for new groups: version 2's, and systemd's of version 1; skip if there is none."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    roots = [Path(m[1]) for m in mounts if m[2] == "cgroup2" or (m[2] == "cgroup" and "name=systemd" in m[3])]
    found = [root for root in roots if os.access(root, os.W_OK) and (root / "cgroup.procs").exists()]
    require(bool(found), "no control group can be made here: run this as root where /sys/fs/cgroup is writable")
    return found


@contextlib.contextmanager
def move_to_group(pid: int, root: Path, path: bytes) -> Iterator[None]:
    """Put a child of this process into a group; in the end kill it, and remove the group."""
    made = [os.fsencode(root / f"gpuwarden-test-{os.getpid()}-{pid}")]
    for part in path.strip(b"/").split(b"/"):
        made.append(made[-1] + b"/" + part)
    try:
        for folder in made:
            os.mkdir(folder)  # noqa: PTH102 - a name that is no UTF-8
        Path(os.fsdecode(made[-1]), "cgroup.procs").write_text(str(pid))
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(pid) or _is_zombie(pid), "the process has left its group")
        for folder in filter(os.path.isdir, reversed(made)):
            os.rmdir(folder)  # noqa: PTH106 - likewise


def _is_zombie(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@contextlib.contextmanager
def make_limited_group(memory: int) -> Iterator[Path]:
    """Make a group with a memory limit in bytes; its processes have to be gone in the end. Skip if that fails."""
    version_1 = Path("/sys/fs/cgroup/memory")
    parent, limit = (version_1, "memory.limit_in_bytes") if version_1.is_dir() else (version_1.parent, "memory.max")
    folder = parent / f"gpuwarden-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(memory))
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        require(False, f"no memory cgroup can be made here: {error}")
    if (folder / "memory.swap.max").exists():
        (folder / "memory.swap.max").write_text("0")
    yield folder
    wait_until(lambda: not (folder / "cgroup.procs").read_text(), "the group is empty")
    folder.rmdir()
