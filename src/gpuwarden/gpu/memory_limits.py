"""Reader of the limits that cgroups have on one GPU's memory.

Two sources: the kernel's dmem controller (6.14 and later; Linux, Documentation/admin-guide/cgroup-v2.rst), whose region
of a GPU is `nvidia/PCI ADDRESS/vidmem`, and, without it, the driver's own limits of MPS (CUDA 13.4 and later).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from gpuwarden.gpu.snapshot import MemoryLimit
from gpuwarden.nvml.device import Device
from gpuwarden.nvml.identity import decode_text
from gpuwarden.nvml.return_codes import NO_FUNCTION, NOT_FOUND, NVMLError, code_of

NVML_DEVICE_MEMORY_LIMIT_MAX = 2**64 - 1  # releases of nvidia-ml-py before 13.615 do not name it
_Address: TypeAlias = "tuple[int, ...] | None"  # PCI domain, bus, device and function


class MemoryLimitReader:
    """Reader of the limits of the cgroups in the folders that `cgroups` returns. Used by one thread at a time.

    Each poll reads the cgroups that have a limit and new ones; the slow tier reads all.
    """

    def __init__(self, cgroups: Callable[[], Sequence[str]]) -> None:
        self._cgroups = cgroups
        self._unlimited: set[str] = set()
        self._queries_driver: bool | None = None  # False if unsupported, or the kernel has the limits; None: unknown

    def read(self, device: Device, on_error: Callable[[Exception], None], *, slow: bool) -> Mapping[str, MemoryLimit]:
        """Return the limits by folder, without cgroups that have none; `on_error` gets errors of driver calls."""
        folders = self._cgroups()
        if slow:
            self._unlimited.clear()
            self._queries_driver = None
        if self._queries_driver is None and folders:
            self._queries_driver = not any(Path(folder, "dmem.capacity").exists() for folder in folders)
        found: dict[str, MemoryLimit] = {}
        for folder in folders:
            if folder not in self._unlimited:
                limit = _read_files(folder, device) or self._query_driver(folder, device, on_error)
                if limit is not None and (limit.hard is not None or limit.soft):
                    found[folder] = limit
                else:
                    self._unlimited.add(folder)
        return found

    def _query_driver(self, folder: str, device: Device, on_error: Callable[[Exception], None]) -> MemoryLimit | None:
        if not self._queries_driver:
            return None
        try:
            limits = device.query(device.nvml.nvmlDeviceGetMemoryLimits_v1, folder)
        except NVMLError as error:
            self._queries_driver = code_of(error) not in NO_FUNCTION
            if code_of(error) != NOT_FOUND:  # a cgroup that has ended
                on_error(error)
            return None
        hard = None if limits.hardLimit == NVML_DEVICE_MEMORY_LIMIT_MAX else limits.hardLimit
        return MemoryLimit(hard, limits.softLimit, limits.currentUsed)


def _read_files(folder: str, device: Device) -> MemoryLimit | None:
    """Read a cgroup's files; None if it has none, or none for this GPU."""
    if not (maxima := _read_regions(f"{folder}/dmem.max")):
        return None
    pci = device.query_once(device.nvml.nvmlDeviceGetPciInfo)
    address = None if pci is None else _parse_address(decode_text(pci.busId))
    used = _read_regions(f"{folder}/dmem.current").get(address)
    if used is None:
        return None
    return MemoryLimit(maxima.get(address), _read_regions(f"{folder}/dmem.min").get(address) or 0, used)


def _read_regions(path: str) -> dict[_Address, int | None]:
    """Return the value of each GPU's region by its PCI address; None for "max"."""
    try:
        text = Path(path).read_text(errors="replace")
    except OSError:
        return {}
    found: dict[_Address, int | None] = {}
    for line in text.splitlines():
        region, _, value = line.rpartition(" ")
        vendor, _, rest = region.partition("/")
        address = _parse_address(rest.partition("/")[0])
        if vendor == "nvidia" and address is not None:
            found[address] = int(value) if value.isdecimal() else None
    return found


def _parse_address(text: str) -> _Address:
    """Return domain, bus, device and function: NVML and the kernel write domains of different lengths."""
    try:
        return tuple(int(part, 16) for part in text.replace(".", ":").split(":"))
    except ValueError:
        return None
