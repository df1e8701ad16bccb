"""torch's CUDA devices and the memory that its caching allocator reports.

Only for a process in which torch has set up CUDA: nothing here does. Peaks are never reset: they are the user's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from gpuwarden.client.frameworks import Framework, cuda_devices
from gpuwarden.protocol.messages import DeviceMemory


class Torch(Framework):
    """torch as a source of device memory; a device goes by torch's index, which is CUDA's in this process."""

    name = "torch"

    def __init__(self) -> None:
        self._torch = sys.modules["torch"]
        self._cuda: Any = self._torch.cuda
        self._used: set[str] = set()

    def list_devices(self) -> Mapping[str, str | None]:
        """Return the GPUs, each with its UUID; none unless CUDA is set up."""
        if not self._cuda.is_initialized():
            return {}
        known = cuda_devices.read_uuids() or ()
        indices = range(self._cuda.device_count())
        return {f"GPU:{index}": known[index] if index < len(known) else self._read_uuid(index) for index in indices}

    def read_memory(self, device: str) -> DeviceMemory | None:
        """Read the allocator, some 20 µs; None for a GPU that nothing was put on: other ranks may use it.

        Raises ValueError, KeyError, RuntimeError or AssertionError where it has no statistics.
        """
        kind, _, number = device.partition(":")
        if kind != "GPU":
            raise ValueError(f"torch has no statistics of {device}")
        index = int(number)
        # The nested form is what the allocator gives; memory_stats() makes a flat one of it for five times the time.
        statistics = self._cuda.memory_stats_as_nested_dict(index)
        allocated = statistics["allocated_bytes"]["all"]
        reserved = statistics["reserved_bytes"]["all"]
        if device not in self._used:
            if not (allocated["peak"] or reserved["peak"]):
                return None
            self._used.add(device)
        return DeviceMemory(allocated["current"], allocated["peak"], self._read_limit(index), reserved["current"])

    def _read_limit(self, index: int) -> int | None:
        """Return how much the allocator may take, in bytes, where set_per_process_memory_fraction set it."""
        ask = getattr(self._cuda, "get_per_process_memory_fraction", None)
        fraction = 1.0 if ask is None else ask(index)
        if fraction >= 1:
            return None
        return int(self._cuda.get_device_properties(index).total_memory * fraction)

    def _read_uuid(self, index: int) -> str | None:
        """Read it from torch, whose UUIDs lack the kind in front (from torch 2.4 on)."""
        uuid = getattr(self._cuda.get_device_properties(index), "uuid", None)
        return None if uuid is None else f"GPU-{uuid}"
