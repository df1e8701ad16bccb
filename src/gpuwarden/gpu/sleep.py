"""GPUs that may sleep (runtime D3): which do, by the kernel's word, and which to leave alone so that they can.

A question to the driver wakes a GPU, and a GPU whose device file is open does not fall asleep. What is read here, the
kernel's record of the device's power, does neither (Linux, Documentation/ABI/testing/sysfs-devices-power).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")
IDLE_SECONDS = 60.0  # without a process, after which a GPU is left alone
REST_SECONDS = 30.0  # that it is left alone, so that it may fall asleep; then it is asked once
_SCAN_SECONDS = 60.0  # between scans of the bus for GPUs
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # the vendor, and the class of display controllers


@dataclass(slots=True)
class _Watched:
    """What is known of one GPU; times are of the monotonic clock."""

    busy_at: float
    rests_until: float = 0.0
    asleep: bool = False
    wanted: bool = True


class SleepWatch:
    """Knows GPUs by their PCI address. `look` begins a poll; what is said of the GPUs then holds until the next one."""

    def __init__(self, devices: Path | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._devices = devices or PCI_DEVICES
        self._clock = clock
        self._gpus: dict[str, _Watched] = {}
        self._scan_at = -float("inf")

    @property
    def asleep(self) -> int:
        """How many of the machine's GPUs sleep."""
        return sum(gpu.asleep for gpu in self._gpus.values())

    @property
    def all_left_alone(self) -> bool:
        """Whether there is a GPU, and none to be asked."""
        return bool(self._gpus) and not any(gpu.wanted for gpu in self._gpus.values())

    def look(self) -> None:
        """Read the state of all GPUs from /sys."""
        now = self._clock()
        if now >= self._scan_at:
            self._scan_at = now + _SCAN_SECONDS
            self._gpus = {address: self._gpus.get(address) or _Watched(busy_at=now) for address in self._scan()}
        for address, gpu in self._gpus.items():
            slept, gpu.asleep = gpu.asleep, self._sleeps(address)
            if slept and not gpu.asleep:
                gpu.busy_at = now  # somebody woke it to use it
            idle = now - gpu.busy_at >= IDLE_SECONDS and self._may_sleep(address)
            gpu.wanted = not gpu.asleep and not (idle and now < gpu.rests_until)

    def wants(self, pci_bus_id: str) -> bool:
        """Tell whether the driver may be asked about this GPU; yes for one that /sys does not show."""
        gpu = self._gpus.get(_short(pci_bus_id))
        return gpu is None or gpu.wanted

    def sleeps(self, pci_bus_id: str) -> bool:
        """Tell whether this GPU sleeps."""
        gpu = self._gpus.get(_short(pci_bus_id))
        return gpu is not None and gpu.asleep

    def wants_index(self, index: int, count: int) -> bool:
        """Tell whether the GPU of that index may be looked up, of so many that the driver lists.

        NVML lists GPUs in the order of their addresses. Where it does not list those that /sys shows, one cannot be
        told from another, and all are left alone until none sleeps.
        """
        if count == len(self._gpus):
            return self._gpus[sorted(self._gpus)[index]].wanted
        return not self.asleep

    def answered(self, pci_bus_id: str, *, busy: bool) -> None:
        """Note that the GPU was asked, and whether there is a reason to go on asking."""
        gpu, now = self._gpus.get(_short(pci_bus_id)), self._clock()
        if gpu is not None:
            gpu.rests_until = now + REST_SECONDS
            if busy:
                gpu.busy_at = now

    def _scan(self) -> Iterator[str]:
        try:
            devices = sorted(self._devices.iterdir())
        except OSError:
            return
        for device in devices:
            if _read(device / "vendor") == _NVIDIA and _read(device / "class").startswith(_DISPLAY):
                yield device.name

    def _sleeps(self, address: str) -> bool:
        status = _read(self._devices / address / "power/runtime_status")
        if status in ("suspended", "suspending"):
            return True
        # Where the kernel does not manage the device, its power state still tells.
        return status != "active" and _read(self._devices / address / "power_state") in ("D3hot", "D3cold")

    def _may_sleep(self, address: str) -> bool:
        """Tell whether the kernel is allowed to suspend it: else there is no use in leaving it alone."""
        return _read(self._devices / address / "power/control") == "auto"


def _short(pci_bus_id: str) -> str:
    """Write NVML's address as the kernel does: 00000000:17:00.0 is 0000:17:00.0."""
    domain, colon, rest = pci_bus_id.lower().partition(":")
    try:
        return f"{int(domain, 16):04x}{colon}{rest}"
    except ValueError:
        return pci_bus_id


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
