"""Memory of the machine, which a GPU without memory of its own allocates from."""

from __future__ import annotations

from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes installed, and bytes that can be allocated without swapping."""

    size: int
    available: int


def host_memory() -> HostMemory:
    """Read /proc/meminfo."""
    memory = psutil.virtual_memory()
    return HostMemory(memory.total, memory.available)
