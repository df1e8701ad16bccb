"""JAX's GPUs and the memory that XLA's allocator reports.

Use it only after JAX has made its devices: listing them would make them, and take 75 % of each GPU's memory.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from gpuwarden.client.frameworks import Framework, cuda_devices
from gpuwarden.protocol.messages import DeviceMemory


class Jax(Framework):
    """JAX as a source of device memory; a GPU is named by its local hardware id, which is CUDA's index."""

    name = "jax"

    def __init__(self) -> None:
        self._jax = sys.modules["jax"]
        self._devices = {_format_name(device): device for device in self._jax.local_devices()}

    def list_devices(self) -> Mapping[str, str | None]:
        """Return this process's GPUs, each with its UUID if known."""
        known = dict(enumerate(cuda_devices.read_uuids() or ()))
        gpus = [device for device in self._devices.values() if _is_gpu(device)]
        return {_format_name(gpu): known.get(gpu.local_hardware_id) for gpu in gpus}

    def read_memory(self, device: str) -> DeviceMemory:
        """Read the allocator; raises LookupError if it has no statistics, as on a CPU.

        JAX first frees arrays that Python has dropped, so call this for a report, not for each step.
        """
        statistics: Mapping[str, int] | None = self._devices[device].memory_stats()
        if statistics is None:
            raise LookupError(f"JAX has no memory statistics for {device}")
        return DeviceMemory(
            current=statistics["bytes_in_use"],
            peak=statistics["peak_bytes_in_use"],
            limit=statistics.get("bytes_limit") or None,
            # One or the other, by allocator; the default one, best-fit, reports 0 for what it does not count.
            reserved=statistics.get("pool_bytes") or statistics.get("bytes_reserved") or None,
        )


def _is_gpu(device: Any) -> bool:
    return device.platform in ("gpu", "cuda")


def _format_name(device: Any) -> str:
    index = device.id if device.local_hardware_id is None else device.local_hardware_id
    return f"{'GPU' if _is_gpu(device) else device.platform.upper()}:{index}"
