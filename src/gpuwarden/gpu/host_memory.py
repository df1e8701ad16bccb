"""The machine's own memory: what a GPU without memory of its own allocates from."""

from __future__ import annotations

from typing import NamedTuple

import psutil


class HostMemory(NamedTuple):
    """Bytes installed, and bytes that can be allocated without swapping."""

    size: int
    available: int


def host_memory() -> HostMemory:
    """Read /proc/meminfo."""
    memory = psutil.virtual_memory()
    return HostMemory(memory.total, memory.available)
