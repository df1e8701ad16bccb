"""Reader of the facts that take longer than a poll may: disks, the loaded library, past failures."""

from __future__ import annotations

import asyncio
import json
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from gpuwarden.fitness.model import SlowFacts
from gpuwarden.gpu.call_pool import CallPool, RepeatedCall, wait_for_all

DISK_TIMEOUT_SECONDS = 10.0  # wait of a refresh for all file systems
_MAPS = Path("/proc/self/maps")


class SlowFactsReader:
    """Reader that keeps the latest `facts`. Used by one event loop.

    `interval` is the time between two refreshes in seconds. `list_incidents` returns the outlines of the incidents.
    """

    def __init__(self, interval: float, paths: Iterable[Path], list_incidents: Callable[[], Awaitable[bytes]]) -> None:
        self.facts = SlowFacts()
        self._interval = interval
        self._list_incidents = list_incidents
        self._threads = CallPool()
        self._task: asyncio.Task[None] | None = None
        self._due = 0.0  # monotonic
        self.watch(paths)

    def watch(self, paths: Iterable[Path]) -> None:
        """Read the file systems of these paths from now on."""
        self._disks = {str(path): RepeatedCall(self._threads, partial(_read_free, str(path))) for path in paths}

    def refresh_if_due(self, now: float) -> None:
        """Start a refresh if it is due."""
        if now >= self._due and (self._task is None or self._task.done()):
            self._due = now + self._interval
            self._task = asyncio.get_running_loop().create_task(self._refresh())

    async def _refresh(self) -> None:
        is_replaced = await asyncio.to_thread(is_library_replaced)
        losses = losses_from_incidents(json.loads(await self._list_incidents())["incidents"])
        self.facts = SlowFacts(await self._read_disks(), is_replaced, losses)

    async def _read_disks(self) -> Mapping[str, int | str]:
        disks = self._disks
        for each in disks.values():
            each.start(DISK_TIMEOUT_SECONDS)
        await wait_for_all(self._threads, disks.values(), DISK_TIMEOUT_SECONDS)
        free: dict[str, int | str] = {}
        for path, each in disks.items():
            try:
                free[path] = each.collect()
            except TimeoutError:
                free[path] = "does not answer"
            except OSError as error:
                free[path] = f"cannot be read: {error.strerror}"
        return free


def _read_free(path: str) -> int:
    """Return the bytes that users can still write at a path. A network file system may hang. Raises OSError."""
    space = os.statvfs(path)
    return space.f_bavail * space.f_frsize


def losses_from_incidents(outlines: Iterable[Mapping[str, object]]) -> Mapping[str, Sequence[float]]:
    """Return the times at which each GPU failed, by UUID."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for outline in outlines:
        subject, at = outline.get("subject"), outline.get("at_timestamp_seconds")
        if (
            outline.get("kind") in ("GpuDown", "GpuXidCritical")
            and isinstance(subject, Mapping)
            and isinstance(at, (int, float))
        ):
            found[str(subject.get("uuid", ""))].append(at)
    return found


def is_library_replaced(maps: Path = _MAPS) -> bool:
    """Return whether the NVML library that this process has loaded was deleted or replaced on disk."""
    lines = maps.read_text(errors="replace").splitlines()
    return any("libnvidia-ml.so" in line and line.endswith(" (deleted)") for line in lines)
