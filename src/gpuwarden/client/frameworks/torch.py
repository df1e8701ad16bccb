"""torch's CUDA devices and the memory that its caching allocator reports.

Use it only after torch has set up CUDA: nothing here does that. Peaks are never reset: the user may read them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from gpuwarden.client.frameworks import Framework, cuda_devices
from gpuwarden.protocol.messages import DeviceMemory


class Torch(Framework):
    """torch as a source of device memory; a device is named by torch's index, which is CUDA's in this process."""

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
        """Read the allocator, about 20 µs; None for a GPU that this process has not used: other ranks may.

        Raises ValueError, KeyError, RuntimeError or AssertionError if it has no statistics.
        """
        kind, _, number = device.partition(":")
        if kind != "GPU":
            raise ValueError(f"torch has no memory statistics for {device}")
        index = int(number)
        # The allocator's own nested form: memory_stats() flattens it, which takes five times as long.
        statistics = self._cuda.memory_stats_as_nested_dict(index)
        allocated = statistics["allocated_bytes"]["all"]
        reserved = statistics["reserved_bytes"]["all"]
        if device not in self._used:
            if not (allocated["peak"] or reserved["peak"]):
                return None
            self._used.add(device)
        return DeviceMemory(allocated["current"], allocated["peak"], self._read_limit(index), reserved["current"])

    def _read_limit(self, index: int) -> int | None:
        """Return the allocator's limit in bytes; None unless set_per_process_memory_fraction has set one."""
        get_fraction = getattr(self._cuda, "get_per_process_memory_fraction", None)
        fraction = 1.0 if get_fraction is None else get_fraction(index)
        if fraction >= 1:
            return None
        return int(self._cuda.get_device_properties(index).total_memory * fraction)

    def _read_uuid(self, index: int) -> str | None:
        """Read a UUID from torch (2.4 and later), which omits the prefix "GPU-"."""
        uuid = getattr(self._cuda.get_device_properties(index), "uuid", None)
        return None if uuid is None else f"GPU-{uuid}"
