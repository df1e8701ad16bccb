"""Events as the driver reports them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

# An operational event has the XID of its fault as well. The kernel log reports a lost GPU twice: as an XID, and as a
# sentence.
XidSource = Literal["nvml", "operational", "kernel_log", "kernel_log_text"]


@dataclass(frozen=True, slots=True)
class XidReport:
    """An XID as one source reports it. It occurred between `earliest` and `latest` (monotonic).

    `time` is Unix time, from older drivers' events the time of the report. `gpu` is a UUID, or a PCI address until its
    GPU is known. `case` is what the source says of the event beyond its code (xid/codes.py), "" for nothing; `part` is
    the part of the GPU (GPC and TPC) that it names.
    """

    source: XidSource
    gpu: str
    code: int
    earliest: float
    latest: float
    time: float
    case: str = ""
    part: str = ""


@dataclass(frozen=True, slots=True)
class OperationalEvent:
    """GPU Operational Event of R615 and newer; `time` is Unix time.

    `role` is "primary" for the origin of a fault, "propagated" for what followed from it, else "other". `code` is
    `module`'s own number. `lost`: the driver dropped earlier events.
    """

    gpu: str
    severity: str
    category: str
    role: str
    module: str
    code: int
    time: float
    xids: tuple[int, ...] = ()
    simulated: bool = False
    lost: bool = False


@dataclass(frozen=True, slots=True)
class DriverBinding:
    """The driver was bound to a GPU, or is being unbound from it; `time` is Unix time.

    `pci` is the GPU's address in the kernel's form, such as 0000:3b:00.0.
    """

    pci: str
    bound: bool
    time: float


GpuEvent: TypeAlias = "XidReport | OperationalEvent"
