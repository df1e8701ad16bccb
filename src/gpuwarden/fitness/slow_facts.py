"""Reader of the facts that take longer than a poll may: disks, the loaded library, past failures."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path

from gpuwarden.fitness.model import SlowFacts

MAX_WAIT_SECONDS = 10.0  # for a file system's answer
_MAPS = Path("/proc/self/maps")


class SlowFactsReader:
    """Reader that keeps the latest facts. Used by one event loop; `now` is monotonic.

    `interval` is the time between two refreshes in seconds. `list_incidents` returns the outlines of the incidents.
    """

    def __init__(self, interval: float, paths: Iterable[Path], list_incidents: Callable[[], Awaitable[bytes]]) -> None:
        self._interval = interval
        self._list_incidents = list_incidents
        self._losses: Mapping[str, Sequence[float]] = {}
        self._is_library_replaced = False
        self._task: asyncio.Task[None] | None = None
        self._due = 0.0
        self.watch(paths)

    def watch(self, paths: Iterable[Path]) -> None:
        """Read the file systems of these paths from now on."""
        self._disks = [_Disk(str(path)) for path in paths]

    def update(self, now: float) -> None:
        """Start a refresh if it is due."""
        if now < self._due:
            return
        self._due = now + self._interval
        for disk in self._disks:
            disk.update(now)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._refresh())

    def facts(self, now: float) -> SlowFacts:
        """Return the facts as last read."""
        free = {disk.path: disk.free(now) for disk in self._disks if disk.is_known(now)}
        return SlowFacts(free, self._is_library_replaced, self._losses)

    async def _refresh(self) -> None:
        self._is_library_replaced = await asyncio.to_thread(is_library_replaced)
        self._losses = losses_from_incidents(json.loads(await self._list_incidents())["incidents"])


class _Disk:
    """Free space for users on the file system of a path, read on its own thread: a network file system may hang."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._free: int | None = None
        self._asked = 0.0
        self._is_reading = False

    def update(self, now: float) -> None:
        """Start to read, unless that hangs."""
        if not self._is_reading:
            self._asked, self._is_reading = now, True
            # A daemon thread, for which the end of the process does not wait.
            threading.Thread(target=self._read, name="disk", daemon=True).start()

    def is_known(self, now: float) -> bool:
        """Return whether the path exists, or its file system hangs."""
        return self._free is not None or self._hangs(now)

    def free(self, now: float) -> int | None:
        """Return the free space in bytes; None while the file system does not answer."""
        return None if self._hangs(now) else self._free

    def _hangs(self, now: float) -> bool:
        return self._is_reading and now - self._asked > MAX_WAIT_SECONDS

    def _read(self) -> None:
        try:
            space = os.statvfs(self.path)
        except OSError:
            self._free = None
        else:
            self._free = space.f_bavail * space.f_frsize
        self._is_reading = False


def losses_from_incidents(outlines: Iterable[Mapping[str, object]]) -> Mapping[str, Sequence[float]]:
    """Return the times at which each GPU failed, by UUID."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for outline in outlines:
        subject, at = outline.get("subject"), outline.get("at_timestamp_seconds")
        is_failure = outline.get("kind") == "gpu_lost" or (
            outline.get("kind") == "xid" and outline.get("severity") == "critical"
        )
        if is_failure and isinstance(subject, Mapping) and isinstance(at, (int, float)):
            found[str(subject.get("uuid", ""))].append(at)
    return found


def is_library_replaced(maps: Path = _MAPS) -> bool:
    """Return whether the NVML library that this process has loaded was deleted or replaced on disk."""
    lines = maps.read_text(errors="replace").splitlines()
    return any("libnvidia-ml.so" in line and line.endswith(" (deleted)") for line in lines)
