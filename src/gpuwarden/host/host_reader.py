"""Reader of the host's state, as far as it explains a training run; not a replacement for node_exporter.

Reads /proc and /dev/shm, through psutil where possible; nothing here blocks. A value the kernel does not provide is
None.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

from gpuwarden.metrics.model import Labels

T = TypeVar("T")
_PAGE = os.sysconf("SC_PAGE_SIZE")  # psutil assumes 4 KiB for swap traffic; Grace has 64 KiB pages
_SHM = "/dev/shm"  # noqa: S108 - its fill level is read, nothing is written
_PRESSURE = Path("/proc/pressure")


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes installed, and bytes that can be allocated without swapping. A GPU without own memory allocates from it."""

    size: int
    available: int


@dataclass(frozen=True, slots=True)
class HostSpace:
    """Size and bytes in use."""

    size: int
    used: int


@dataclass(frozen=True, slots=True)
class Host:
    """One sample of the machine. Bytes and seconds; `cpu_seconds` by mode, `stalled_seconds` by resource and share."""

    memory_size: int | None = None
    memory_available: int | None = None
    swap: HostSpace | None = None
    swapped_in: int | None = None
    swapped_out: int | None = None
    shm: HostSpace | None = None
    cpus: int | None = None
    cpu_seconds: Mapping[Labels, float] = field(default_factory=dict)
    oom_kills: int | None = None
    stalled_seconds: Mapping[Labels, float] = field(default_factory=dict)


class HostReader:
    """Reader of the machine. It keeps the CPU counters, as the kernel's may decrease."""

    def __init__(self) -> None:
        self._cpu: Mapping[Labels, float] = {}

    def read(self) -> Host:
        """Take one sample. Raises nothing; takes about 0.25 ms."""
        memory = try_read_host_memory()
        events = _or_none(_events) or {}
        self._cpu = {mode: max(now, self._cpu.get(mode, 0.0)) for mode, now in (_or_none(_cpu_seconds) or {}).items()}
        return Host(
            memory_size=memory.size if memory else None,
            memory_available=memory.available if memory else None,
            swap=_or_none(_swap),
            swapped_in=_bytes(events.get(b"pswpin")),
            swapped_out=_bytes(events.get(b"pswpout")),
            shm=_or_none(_shm),
            cpus=_or_none(psutil.cpu_count),
            cpu_seconds=self._cpu,
            oom_kills=events.get(b"oom_kill"),
            stalled_seconds=dict(_stalled()),
        )


def read_host_memory() -> HostMemory:
    """Read /proc/meminfo; takes about 50 µs. Raises what `try_read_host_memory` catches."""
    memory = psutil.virtual_memory()
    return HostMemory(memory.total, memory.available)


def try_read_host_memory() -> HostMemory | None:
    """Read the machine's memory; None where the kernel hides it."""
    return _or_none(read_host_memory)


def _or_none(read: Callable[[], T]) -> T | None:
    """Return a value; None where the kernel lacks or hides it, or psutil cannot parse it."""
    try:
        return read()
    except (OSError, ValueError, KeyError, IndexError, AttributeError, RuntimeError, psutil.Error):
        return None


def _swap() -> HostSpace:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # psutil warns where /proc/vmstat lacks the traffic, which is not read through it
        swap = psutil.swap_memory()
    return HostSpace(swap.total, swap.used)


def _shm() -> HostSpace:
    found = os.statvfs(_SHM)
    return HostSpace(found.f_blocks * found.f_frsize, (found.f_blocks - found.f_bfree) * found.f_frsize)


def _cpu_seconds() -> dict[Labels, float]:
    """Sum the kernel's modes into four that make up all time; user and nice include guest time.

    iowait may decrease (Linux, Documentation/filesystems/proc.rst), and so may idle while a CPU is offline.
    """
    times = psutil.cpu_times()
    busy = times.user + times.nice + times.system + times.irq + times.softirq
    return {("busy",): busy, ("iowait",): times.iowait, ("idle",): times.idle, ("steal",): times.steal}


def _events() -> dict[bytes, int]:
    lines = Path("/proc/vmstat").read_bytes().splitlines()
    pairs = (line.split() for line in lines if line.startswith((b"pswp", b"oom_kill ")))
    return {name: int(count) for name, count in pairs}


def _bytes(pages: int | None) -> int | None:
    return None if pages is None else pages * _PAGE


def _stalled() -> Iterator[tuple[Labels, float]]:
    """Return pressure stall totals (Linux, Documentation/accounting/psi.rst); a CPU never stalls a whole machine."""
    for resource in ("cpu", "memory", "io"):
        for line in (_or_none((_PRESSURE / resource).read_text) or "").splitlines():
            share, _, rest = line.partition(" ")
            total = rest.rpartition("total=")[2]
            if total.isdecimal() and (resource, share) != ("cpu", "full"):
                yield (resource, share), int(total) / 1e6
