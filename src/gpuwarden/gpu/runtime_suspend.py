"""Runtime suspend of GPUs (runtime D3): which GPUs the kernel has suspended, from /sys.

A driver call wakes a GPU, and a GPU whose device file is open is not suspended. Reading /sys has neither effect (Linux,
Documentation/ABI/testing/sysfs-devices-power). In metrics and the API a suspended GPU is "asleep".
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from gpuwarden.nvml.troubleshooting import BOUND_DEVICES

IDLE_SECONDS = 60.0  # without a process on any GPU, after which the driver is released
RELEASED_SECONDS = 30.0  # for which it stays released, so that GPUs can be suspended; then GPUs are polled once


class SuspendMonitor:
    """Monitor of suspended GPUs, by PCI address. Call `refresh` at the start of each poll."""

    def __init__(self, devices: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._devices = devices or BOUND_DEVICES
        self._clock = clock
        self._asleep: dict[str, bool] = {}
        self._can_sleep = False
        self._busy_at = clock()
        self._released_until = 0.0

    @property
    def asleep_count(self) -> int:
        """Number of suspended GPUs."""
        return sum(self._asleep.values())

    @property
    def wants_release(self) -> bool:
        """True if no GPU should be polled: all are suspended, or all have been idle and some can be suspended."""
        now = self._clock()
        idle = self._can_sleep and now - self._busy_at >= IDLE_SECONDS and now < self._released_until
        return idle or (bool(self._asleep) and all(self._asleep.values()))

    def refresh(self) -> None:
        """Read the state of all GPUs. One that woke up counts as in use."""
        folders = sorted(self._devices.glob("*:*:*"))
        asleep = {each.name: _read(each / "power/runtime_status") in ("suspended", "suspending") for each in folders}
        if any(self._asleep.get(address) and not sleeps for address, sleeps in asleep.items()):
            self._busy_at = self._clock()
        self._asleep = asleep
        self._can_sleep = any(_read(each / "power/control") == "auto" for each in folders)

    def is_asleep(self, pci_bus_id: str) -> bool:
        """Return whether this GPU is suspended. NVML writes the PCI domain with eight digits, the kernel with four."""
        return self._asleep.get(pci_bus_id.lower()[-len("0000:00:00.0") :], False)

    def may_be_asleep(self, index: int, count: int) -> bool:
        """Return whether the GPU of that index may be suspended, of `count` GPUs that NVML lists by address."""
        if count == len(self._asleep):
            return list(self._asleep.values())[index]
        return self.asleep_count > 0

    def record_poll(self, *, busy: bool) -> None:
        """Record that GPUs were polled, and whether one is in use."""
        self._released_until = self._clock() + RELEASED_SECONDS
        if busy:
            self._busy_at = self._clock()


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
