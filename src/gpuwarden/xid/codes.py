"""XID codes of NVIDIA's driver: the meaning, action and severity of each.

Meanings are in our own words. Actions follow the column "immediate action" of NVIDIA's catalogue
(docs.nvidia.com/deploy/xid-errors); where that names a workflow, or a code is older than the catalogue, they follow its
text and NVIDIA's notes on memory errors. `gpuwarden reference xid` writes docs/reference/xids.md from this table, the log names an
XID by it, and a test holds the alert rules to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

# As of alerts. critical: the GPU is out of service until an operator acts; warning: act today; info: a program's fault.
Severity = Literal["critical", "warning", "info"]


class Action(Enum):
    """Action on an XID, as a sentence for people."""

    REBOOT_MACHINE = "Restart the machine; if it comes back, have the GPU and its slot and power checked."
    RESET_GPU = "Stop what runs on the GPU and reset it (nvidia-smi --gpu-reset)."
    RESTART_VM = "Restart the virtual machine."
    CHECK_NVLINK = "Look at the NVLink errors of this GPU and of its peers; reset the GPU if links stay down."
    RESET_WHEN_IDLE = "Reset the GPU when its work has ended; until then it goes on."
    CHECK_POWER = "Check that the GPU's power cables are plugged in."
    UPDATE_DRIVER = "Bring the driver and the host's software to versions that fit each other."
    RESTART_APPLICATION = "Restart the program that used the GPU; if it comes back, look for the fault in the program."
    FOLLOW_OTHER = "Act on the other XID beside it."
    CONTACT_SUPPORT = "Look at the kernel log around it; if it comes back, ask the vendor."
    IGNORE = "Nothing to do."

    @property
    def slug(self) -> str:
        """Its name as a label or a cell."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Xid:
    """One code."""

    code: int
    meaning: str
    action: Action
    severity: Severity


def _engines(codes: Iterable[int], meaning: str, action: Action, severity: Severity) -> Iterator[Xid]:
    """Make a row for each of a family of engines, which the driver numbers in the order it got them."""
    return (Xid(code, meaning, action, severity) for code in codes)


# fmt: off
_ROWS = (
    Xid(8, "A channel's work did not end in time.", Action.RESTART_APPLICATION, "info"),
    Xid(11, "A program's command stream is invalid or damaged.", Action.RESTART_APPLICATION, "info"),
    Xid(13, "A kernel did something invalid, such as an access out of bounds.", Action.RESTART_APPLICATION, "info"),
    Xid(25, "A program's command stream is invalid.", Action.RESTART_APPLICATION, "info"),
    Xid(31, "A program touched an address that is not mapped on the GPU.", Action.RESTART_APPLICATION, "info"),
    Xid(32, "The fetching of a program's command stream failed.", Action.RESTART_APPLICATION, "info"),
    Xid(37, "The context switching firmware got a request it does not know.", Action.IGNORE, "info"),
    Xid(38, "The context switching firmware was slow.", Action.IGNORE, "info"),
    *_engines((39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)),
              "A copy engine met an error in a program's work.", Action.RESTART_APPLICATION, "info"),
    Xid(43, "A program's work was ended after a fault of its own; the GPU is sound.", Action.IGNORE, "info"),
    Xid(44, "A fault while the GPU switched from one program to another.", Action.IGNORE, "info"),
    Xid(45, "A program's channels were taken down: it ended or was killed, or another XID came before.", Action.FOLLOW_OTHER, "info"),
    Xid(46, "The GPU stopped working on what it was given.", Action.RESET_GPU, "critical"),
    *_engines((47, 65, 73, 142), "A video encoder met an error.", Action.CONTACT_SUPPORT, "warning"),
    Xid(48, "A memory error that ECC cannot correct: data of a program is lost.", Action.RESET_GPU, "critical"),
    Xid(54, "The board's auxiliary power is not connected.", Action.CHECK_POWER, "warning"),
    Xid(56, "The display engine met an error.", Action.CONTACT_SUPPORT, "warning"),
    Xid(57, "The link to the GPU's memory could not be trained.", Action.CONTACT_SUPPORT, "warning"),
    Xid(58, "The interface of the GPU's memory met an error.", Action.CONTACT_SUPPORT, "warning"),
    Xid(59, "The power management controller met an error.", Action.CONTACT_SUPPORT, "warning"),
    Xid(60, "A security or video processor met an error in a program's work.", Action.RESTART_APPLICATION, "info"),
    Xid(61, "The power management controller stopped at a breakpoint.", Action.CONTACT_SUPPORT, "warning"),
    Xid(62, "The power management controller halted.", Action.RESET_GPU, "critical"),
    Xid(63, "A bad row or page of memory is to be replaced by a spare one, at the next reset.", Action.RESET_WHEN_IDLE, "warning"),
    Xid(64, "A bad row or page of memory could not be replaced by a spare one.", Action.RESET_GPU, "critical"),
    *_engines((66, 67), "The driver made an access that the context switching firmware refused.", Action.IGNORE, "info"),
    *_engines((68, 83, 84, 88, 89, 96, 97, 98), "A video decoder met an error in a program's work.",
              Action.RESTART_APPLICATION, "info"),
    Xid(69, "A program sent a command that this kind of engine does not have.", Action.RESTART_APPLICATION, "info"),
    Xid(74, "An NVLink to another GPU or to the switch met an error.", Action.CHECK_NVLINK, "critical"),
    Xid(78, "A virtual GPU could not be started.", Action.UPDATE_DRIVER, "warning"),
    Xid(79, "The GPU has fallen off the bus: it does not answer over PCIe any more.", Action.REBOOT_MACHINE, "critical"),
    Xid(80, "A program's command stream arrived damaged.", Action.RESTART_APPLICATION, "info"),
    Xid(81, "The VGA part met an error.", Action.CONTACT_SUPPORT, "warning"),
    *_engines((82, *range(99, 106)), "A JPEG engine met an error in a program's work.",
              Action.RESTART_APPLICATION, "info"),
    *_engines((86, 139), "The optical flow engine met an error in a program's work.", Action.RESTART_APPLICATION, "info"),
    Xid(90, "The GPU's level 2 cache met an error.", Action.CONTACT_SUPPORT, "warning"),
    Xid(92, "Corrected memory errors come at a high rate.", Action.CONTACT_SUPPORT, "warning"),
    Xid(93, "The InfoROM was written more often than it is meant to be.", Action.IGNORE, "info"),
    Xid(94, "An uncorrectable memory error that could be kept to the program that met it.", Action.RESTART_APPLICATION, "warning"),
    Xid(95, "An uncorrectable memory error that may have spoiled any program's data.", Action.RESET_GPU, "critical"),
    *_engines((106, 107), "A test message of the board's management interface.", Action.IGNORE, "info"),
    Xid(108, "A remote GPU asked over NVLink for an address that is not mapped.", Action.IGNORE, "info"),
    Xid(109, "The GPU could not switch from one program to another in time.", Action.RESET_GPU, "critical"),
    Xid(110, "The GPU's security met a fault.", Action.RESET_GPU, "critical"),
    Xid(119, "The GPU's system processor did not answer the driver in time.", Action.RESET_GPU, "critical"),
    Xid(120, "The GPU's system processor met an error.", Action.RESET_GPU, "critical"),
    Xid(121, "The link between chips met an error and recovered.", Action.IGNORE, "info"),
    *_engines((122, 123, 124), "The GPU's flash memory could not be read, written or erased.", Action.CONTACT_SUPPORT, "warning"),
    Xid(125, "The file system of the InfoROM is damaged.", Action.CONTACT_SUPPORT, "warning"),
    Xid(136, "An NVLink could not be trained.", Action.RESET_GPU, "critical"),
    Xid(137, "An access over NVLink was refused, mostly one of a faulty program on another GPU.", Action.IGNORE, "info"),
    Xid(140, "A memory error that ECC cannot correct got past the containment.", Action.RESET_GPU, "critical"),
    Xid(141, "CUDA's fast path met an error.", Action.IGNORE, "info"),
    Xid(143, "The GPU could not be initialised.", Action.RESET_GPU, "critical"),
    *_engines(range(144, 151), "An NVLink of the fifth generation met an error, whose kind the kernel log names.",
              Action.CHECK_NVLINK, "warning"),
    Xid(151, "The rotation of the encryption keys failed.", Action.RESTART_VM, "critical"),
    *_engines((152, 153), "The deep learning accelerator met an error.", Action.IGNORE, "info"),
    Xid(154, "The driver now asks for another recovery of the GPU, which the kernel log names.", Action.FOLLOW_OTHER, "warning"),
    Xid(155, "Software declared an NVLink faulty.", Action.RESET_GPU, "critical"),
    Xid(156, "A faulty part of the GPU is taken out of use at the next reset.", Action.RESET_GPU, "critical"),
    Xid(157, "A faulty part of the GPU could not be taken out of use.", Action.CONTACT_SUPPORT, "warning"),
    Xid(158, "The GPU did not end something vital in time.", Action.RESET_GPU, "critical"),
    Xid(159, "A transfer between CPU and GPU memory failed.", Action.CONTACT_SUPPORT, "warning"),
    Xid(160, "A memory channel was taken out of use.", Action.IGNORE, "info"),
    Xid(161, "A memory channel could not be taken out of use.", Action.IGNORE, "info"),
    *_engines((162, 163), "The smoothing of the power draw was switched on or off.", Action.IGNORE, "info"),
    *_engines((164, 165), "The circuits that smooth the power draw are worn.", Action.CONTACT_SUPPORT, "warning"),
    *_engines((166, 170), "An encrypted NVLink met an error.", Action.CONTACT_SUPPORT, "warning"),
    Xid(167, "A transfer over PCIe did not end in time.", Action.CONTACT_SUPPORT, "warning"),
    Xid(168, "Faults have made the GPU's memory smaller.", Action.CONTACT_SUPPORT, "warning"),
    Xid(169, "The GPU's security processor halted.", Action.CONTACT_SUPPORT, "warning"),
    *_engines((171, 172), "Details on a memory error that ECC cannot correct, told beside XID 48.", Action.FOLLOW_OTHER, "warning"),
)
# fmt: on

XIDS: Mapping[int, Xid] = {row.code: row for row in sorted(_ROWS, key=lambda row: row.code)}


def explain(code: int) -> Xid:
    """Return what is known of a code; one that is not in the table is worth a look, whatever it means."""
    return XIDS.get(code) or Xid(
        code, "A fault that this version of gpuwarden has no name for.", Action.CONTACT_SUPPORT, "warning"
    )


def codes(severity: Severity) -> list[int]:
    """Return the codes of that severity, in ascending order."""
    return [row.code for row in XIDS.values() if row.severity == severity]
