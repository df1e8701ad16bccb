"""Parser of XIDs in the kernel log and in texts. The driver logs all of them in the kernel log; NVML omits some."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from gpuwarden.host.kernel_log import KernelRecord
from gpuwarden.nvml.constants import RECOVERY_ACTIONS
from gpuwarden.nvml.events.model import XidReport, XidSource
from gpuwarden.xid.codes import XIDS, Xid, find_xid

PREFIXES = (b"NVRM: ",)

# The driver prints (open-gpu-kernel-modules, kernel_rc.c) the address without its function, on a MIG GPU the instances,
# and mostly pid= and name=, which a user can choose, so they are not read. Drivers before R300 omit "PCI:".
_ADDRESS = rb"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})(?:\.[0-7])?"
_XID = re.compile(rb"NVRM: Xid \((?:PCI:)?" + _ADDRESS + rb"[^)]{0,40}\): (\d{1,9})\b", re.IGNORECASE)
# Logged next to XID 79, or alone if the GPU is lost before it is initialized (NVIDIA/NVSentinel#155).
_OFF_THE_BUS = re.compile(
    rb"NVRM: (?:The NVIDIA )?GPU (?:at )?(?:PCI:)?" + _ADDRESS + rb".{0,200}?fallen off the bus", re.IGNORECASE
)
_TEXT_XID = re.compile(rb"\bXid(?: ?\([^)]{1,60}\))?(?: errors?)?[:=]? ?(\d{1,4})\b", re.IGNORECASE)
FALLEN_OFF_THE_BUS = 79
# Each pattern is longer than a process's name, which has 15 bytes at most and may contain anything.
_PROCESS = rb"(?:, pid=[^,]{1,20}(?:, name=.{0,16}?)?)?, "
_FLAGGED = re.compile(_PROCESS + rb"\w{1,32} (Non-?)?fatal XC ?\d i ?\d Link ", re.IGNORECASE)  # NVLink, 144 to 150
# 154. The text in parentheses differs between drivers: 0x2 is "Node Reboot Required" or "OS Reboot".
_TARGET = re.compile(_PROCESS + rb"GPU recovery action changed from .{1,60} to (0x[0-9a-f]{1,8})\b", re.IGNORECASE)
_TARGETS = {number: name for name, number in RECOVERY_ACTIONS.items()}
_PARTS = (
    re.compile(_PROCESS + rb"Graphics SM \w+ Exception on \(GPC (\d{1,2}), TPC (\d{1,2})\b"),  # 13
    re.compile(
        _PROCESS + rb"Ch \w+, intr \w+\. MMU Fault: ENGINE GRAPHICS GPC(\d{1,2}) GPCCLIENT_T1_(\d{1,2})\b"
    ),  # 31
)


def normalize_pci_address(text: str) -> str | None:
    """Return an address of NVML or the kernel with four digits of domain and without function; None if it is none."""
    match = re.fullmatch(_ADDRESS, text.encode(), re.IGNORECASE)
    return _address(match) if match else None


def _address(match: re.Match[bytes]) -> str:
    domain, bus, device = (int(match[number], 16) for number in (1, 2, 3))
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def parse_xids(records: Iterable[KernelRecord]) -> Iterator[XidReport]:
    """Return the XIDs among the records, by PCI address."""
    for record in records:
        source: XidSource = "kernel_log"
        match = _XID.match(record.message)
        code = int(match[4]) if match else FALLEN_OFF_THE_BUS
        if match is None:
            match, source = _OFF_THE_BUS.match(record.message), "kernel_log_text"
        if match:
            case, part = _details(record.message[match.end() :]) if source == "kernel_log" else ("", "")
            yield XidReport(source, _address(match), code, record.earliest, record.latest, record.time, case, part)


def find_text_xid(text: str) -> Xid | None:
    """Return the XID that a line of any text has, also one that names no GPU or only refers to it; None if none."""
    message = text.encode(errors="replace")
    for found in [*_TEXT_XID.finditer(message)][::-1]:  # "45, ... caused by previous Xid 149"
        if (code := int(found[1])) in XIDS or b"NVRM: " in message:
            return find_xid(code, _details(message[found.end() :])[0])
    return find_xid(FALLEN_OFF_THE_BUS) if b"fallen off the bus" in message else None


def _details(text: bytes) -> tuple[str, str]:
    """Return the case of an XID by the rest of its line, "" for none, and the part of the GPU that it names."""
    parts = (pattern.match(text) for pattern in _PARTS)
    part = next((f"GPC {int(found[1])}, TPC {int(found[2])}" for found in parts if found), "")
    if flagged := _FLAGGED.match(text):
        return "fatal" if flagged[1] is None else "nonfatal", part
    target = _TARGET.match(text)
    return _TARGETS.get(int(target[1], 16), "") if target else "", part
