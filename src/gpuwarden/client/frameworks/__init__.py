"""One small adapter for each framework: its devices, and what its allocators say of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from gpuwarden.protocol import DeviceMemory


class Framework(Protocol):
    """What a run wants to know of the framework that it computes with; asked in the run's own thread, between steps.

    An adapter is made once the framework has made its devices: asking earlier would make them, and freeze their
    options.
    """

    @property
    def name(self) -> str:
        """What it is called, such as "tensorflow"."""

    @property
    def version(self) -> str:
        """Its version as it writes it."""

    def devices(self) -> Mapping[str, str | None]:
        """Name the GPUs the run may use, "GPU:0" and so on, each with its UUID where the process can tell."""

    def memory(self, device: str) -> DeviceMemory:
        """Ask the device's allocator; raises any exception where it has no statistics."""
