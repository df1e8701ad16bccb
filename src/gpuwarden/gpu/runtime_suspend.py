"""GPUs that the kernel suspends while they are not in use (runtime D3), by its record of their power in /sys.

A question to the driver wakes a GPU, and a GPU whose device file is open does not fall asleep. Reading /sys does
neither (Linux, Documentation/ABI/testing/sysfs-devices-power).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

DEVICES = Path("/sys/bus/pci/drivers/nvidia")  # a folder a GPU
IDLE_SECONDS = 60.0  # without a process on any GPU, after which polls pause
RELEASED_SECONDS = 30.0  # that they pause, so that GPUs may fall asleep; then GPUs are polled once


class SuspendMonitor:
    """Which GPUs sleep, by their PCI address, and whether the box rests. `update` begins a poll."""

    def __init__(self, devices: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._devices = devices or DEVICES
        self._clock = clock
        self._asleep: dict[str, bool] = {}
        self._can_sleep = False
        self._busy_at = clock()
        self._released_until = 0.0

    @property
    def asleep_count(self) -> int:
        """Number of GPUs that sleep."""
        return sum(self._asleep.values())

    @property
    def wants_release(self) -> bool:
        """True where no GPU is to be polled: all sleep, or none has had a process for long and some may fall asleep."""
        now = self._clock()
        idle = self._can_sleep and now - self._busy_at >= IDLE_SECONDS and now < self._released_until
        return idle or (bool(self._asleep) and all(self._asleep.values()))

    def update(self) -> None:
        """Read the state of all GPUs. One that woke counts as used."""
        folders = sorted(self._devices.glob("*:*:*"))
        asleep = {each.name: _read(each / "power/runtime_status") in ("suspended", "suspending") for each in folders}
        if any(self._asleep.get(address) and not sleeps for address, sleeps in asleep.items()):
            self._busy_at = self._clock()
        self._asleep = asleep
        self._can_sleep = any(_read(each / "power/control") == "auto" for each in folders)

    def is_asleep(self, pci_bus_id: str) -> bool:
        """Return whether this GPU sleeps. NVML writes the domain with eight digits, the kernel with four."""
        return self._asleep.get(pci_bus_id.lower()[-len("0000:00:00.0") :], False)

    def may_be_asleep(self, index: int, count: int) -> bool:
        """Return whether the GPU of that index may sleep, of so many that NVML lists in order of address."""
        if count == len(self._asleep):
            return list(self._asleep.values())[index]
        return self.asleep_count > 0

    def record_poll(self, *, busy: bool) -> None:
        """Note that GPUs were polled, and whether one is in use."""
        self._released_until = self._clock() + RELEASED_SECONDS
        if busy:
            self._busy_at = self._clock()


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
