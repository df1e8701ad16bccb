"""XIDs in the kernel log, where the driver writes all of them: NVML tells of some neither then nor later."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from gpuwarden.host.kernel_log import KernelRecord

PREFIXES = (b"NVRM: ",)

# What the driver prints (open-gpu-kernel-modules, kernel_rc.c): the address without its function, on a MIG GPU the
# instances, and mostly pid= and name=, which are a user's to choose and so are not looked at. Drivers before R300
# leave out "PCI:".
_ADDRESS = rb"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})(?:\.[0-7])?"
_XID = re.compile(rb"NVRM: Xid \((?:PCI:)?" + _ADDRESS + rb"[^)]{0,40}\): (\d{1,9})\b", re.IGNORECASE)
# Told beside XID 79, or, where the GPU is gone before it is initialised, without one (NVIDIA/NVSentinel#155).
_OFF_THE_BUS = re.compile(
    rb"NVRM: (?:The NVIDIA )?GPU (?:at )?(?:PCI:)?" + _ADDRESS + rb".{0,200}?fallen off the bus", re.IGNORECASE
)
FALLEN_OFF_THE_BUS = 79

PciAddress: TypeAlias = tuple[int, int, int]  # domain, bus, device
Told: TypeAlias = Literal["kernel_log", "kernel_log_text"]


@dataclass(frozen=True, slots=True)
class KernelXid:
    """An XID as the kernel log tells it; it came between `earliest` and `latest` (monotonic), at Unix time `time`."""

    pci: PciAddress
    code: int
    told: Told
    earliest: float
    latest: float
    time: float


def parse_pci_address(text: str) -> PciAddress | None:
    """Read an address as NVML or the kernel writes it, with any number of zeros in the domain; None if it is none."""
    match = re.fullmatch(_ADDRESS, text.encode(), re.IGNORECASE)
    return _address(match) if match else None


def _address(match: re.Match[bytes]) -> PciAddress:
    return int(match[1], 16), int(match[2], 16), int(match[3], 16)


def parse_xids(records: Iterable[KernelRecord]) -> Iterator[KernelXid]:
    """Return the XIDs among the records."""
    for record in records:
        told: Told = "kernel_log"
        match = _XID.match(record.message)
        code = int(match[4]) if match else FALLEN_OFF_THE_BUS
        if match is None:
            match, told = _OFF_THE_BUS.match(record.message), "kernel_log_text"
        if match:
            yield KernelXid(_address(match), code, told, record.earliest, record.latest, record.time)
