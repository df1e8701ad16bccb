"""The driver's library as a file: after an update of the driver, the one in this process's memory is the old one."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

NAME = "libnvidia-ml.so.1"  # by which nvidia-ml-py loads it

# What tells a file from the one that took its place.
Identity: TypeAlias = "tuple[int, int, int, int]"


def loaded_from() -> Path | None:
    """Return the folder that this process has loaded the library from (proc(5), maps); None before it has."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    name = NAME.removesuffix(".1")
    for line in lines:
        path = line.partition("/")[2]
        if f"/{name}" in f"/{path}":
            return Path(f"/{path}").parent
    return None


def on_disk(folder: Path) -> Identity | None:
    """Return what the library in that folder is now; None where there is none."""
    try:
        found = (folder / NAME).stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
