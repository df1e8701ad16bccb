"""XID codes of NVIDIA's driver: meaning, action and severity of each.

Meanings are in our own words. Actions follow the column "immediate action" of NVIDIA's catalog
(docs.nvidia.com/deploy/xid-errors); where that names a workflow, or a code is older than the catalog, they follow its
text and NVIDIA's notes on memory errors. docs/reference/xids.md, the log and the alert rules use this table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from gpuwarden.gpu.snapshot import EventCount
from gpuwarden.severity import SEVERITY_RANK, Severity


class Action(Enum):
    """Action on an XID, as a sentence for people."""

    REBOOT_MACHINE = "Restart the machine; if it happens again, have the GPU, its slot and its power checked."
    RESET_GPU = "Stop the processes on the GPU and reset it (nvidia-smi --gpu-reset)."
    RESTART_VM = "Restart the virtual machine."
    CHECK_NVLINK = "Check the NVLink errors of this GPU and its peers; reset the GPU if links stay down."
    RECOVER = "Do what the driver requires of this GPU: `nvidia-smi -q` has it as GPU Recovery Action."
    STOP_P2P = "Stop the programs that exchange data with other GPUs; give the GPU no new ones."
    RESET_WHEN_IDLE = "Reset the GPU when its work is done; it can be used until then."
    CHECK_POWER = "Check that the GPU's power cables are connected."
    UPDATE_DRIVER = "Install compatible versions of the driver and the host's software."
    RESTART_APPLICATION = "Restart the program that used the GPU; if it happens again, look for a bug in the program."
    FOLLOW_OTHER = "Act on the other XID reported at that time."
    CONTACT_SUPPORT = "Check the kernel log of that time; if it happens again, contact the vendor."
    IGNORE = "No action needed."

    @property
    def slug(self) -> str:
        """Name for labels and tables."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Xid:
    """One code, or with a `case` those of its events that mean something else."""

    code: int
    meaning: str
    action: Action
    severity: Severity
    ends: int = 0  # code of the condition that it ends
    case: str = ""

    @property
    def explanation(self) -> str:
        """Meaning and action in sentences."""
        return f"{self.meaning} {self.action.value}"


def _engines(codes: Iterable[int], meaning: str, action: Action, severity: Severity, case: str = "") -> Iterator[Xid]:
    """Return a row for each code of a family, such as the engines of one kind."""
    return (Xid(code, meaning, action, severity, case=case) for code in codes)


_FLAGGED = range(144, 151)  # with the driver's flag fatal or nonfatal
_REPEATED = (13, 31)
# fmt: off
_ROWS = (
    Xid(8, "Work on a channel timed out.", Action.RESTART_APPLICATION, "info"),
    Xid(11, "A program sent an invalid or corrupted command stream.", Action.RESTART_APPLICATION, "info"),
    Xid(13, "A kernel did something invalid, such as an out-of-bounds access.", Action.RESTART_APPLICATION, "info"),
    Xid(25, "A program sent an invalid command stream.", Action.RESTART_APPLICATION, "info"),
    Xid(31, "A program accessed an address that is not mapped on the GPU.", Action.RESTART_APPLICATION, "info"),
    Xid(32, "A program's command stream could not be fetched.", Action.RESTART_APPLICATION, "info"),
    Xid(37, "The context switching firmware received an unknown request.", Action.IGNORE, "info"),
    Xid(38, "The context switching firmware was slow.", Action.IGNORE, "info"),
    *_engines((39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)),
              "A copy engine had an error in a program's work.", Action.RESTART_APPLICATION, "info"),
    Xid(43, "A program's work was stopped after an error of its own; the GPU is OK.", Action.IGNORE, "info"),
    Xid(44, "The GPU failed to switch from one program to another.", Action.IGNORE, "info"),
    Xid(45, "A program's channels were removed: it ended, was killed, or had another XID before.", Action.FOLLOW_OTHER, "info"),
    Xid(46, "The GPU stopped processing work.", Action.RESET_GPU, "critical"),
    *_engines((47, 65, 73, 142), "A video encoder had an error.", Action.CONTACT_SUPPORT, "warning"),
    Xid(48, "A memory error that ECC cannot correct: a program lost data.", Action.RESET_GPU, "critical"),
    Xid(54, "The board's auxiliary power is not connected.", Action.CHECK_POWER, "warning"),
    Xid(56, "The display engine had an error.", Action.CONTACT_SUPPORT, "warning"),
    Xid(57, "The link to the GPU's memory could not be trained.", Action.CONTACT_SUPPORT, "warning"),
    Xid(58, "The memory interface of the GPU had an error.", Action.CONTACT_SUPPORT, "warning"),
    Xid(59, "The power management controller had an error.", Action.CONTACT_SUPPORT, "warning"),
    Xid(60, "A security or video processor had an error in a program's work.", Action.RESTART_APPLICATION, "info"),
    Xid(61, "The power management controller stopped at a breakpoint.", Action.CONTACT_SUPPORT, "warning"),
    Xid(62, "The power management controller halted.", Action.RESET_GPU, "critical"),
    Xid(63, "A bad row or page of memory will be replaced with a spare one at the next reset.", Action.RESET_WHEN_IDLE, "warning"),
    Xid(64, "A bad row or page of memory could not be replaced with a spare one.", Action.RESET_GPU, "critical"),
    *_engines((66, 67), "The context switching firmware refused an access by the driver.", Action.IGNORE, "info"),
    *_engines((68, 83, 84, 88, 89, 96, 97, 98), "A video decoder had an error in a program's work.",
              Action.RESTART_APPLICATION, "info"),
    Xid(69, "A program sent a command that this kind of engine does not support.", Action.RESTART_APPLICATION, "info"),
    Xid(74, "An NVLink to another GPU or the switch had an error.", Action.CHECK_NVLINK, "critical"),
    Xid(78, "A virtual GPU could not be started.", Action.UPDATE_DRIVER, "warning"),
    Xid(79, "The GPU has fallen off the bus: it no longer answers over PCIe.", Action.REBOOT_MACHINE, "critical"),
    Xid(80, "A program's command stream arrived corrupted.", Action.RESTART_APPLICATION, "info"),
    Xid(81, "The VGA unit had an error.", Action.CONTACT_SUPPORT, "warning"),
    *_engines((82, *range(99, 106)), "A JPEG engine had an error in a program's work.",
              Action.RESTART_APPLICATION, "info"),
    *_engines((86, 139), "The optical flow engine had an error in a program's work.", Action.RESTART_APPLICATION, "info"),
    Xid(90, "The GPU's L2 cache had an error.", Action.CONTACT_SUPPORT, "warning"),
    Xid(92, "The rate of corrected memory errors is high.", Action.CONTACT_SUPPORT, "warning"),
    Xid(93, "The InfoROM was written more often than intended.", Action.IGNORE, "info"),
    Xid(94, "An uncorrectable memory error, contained to the program that had it.", Action.RESTART_APPLICATION, "warning"),
    Xid(95, "An uncorrectable memory error, not contained: any program's data may be corrupted.", Action.RESET_GPU, "critical"),
    *_engines((106, 107), "A test message of the board's management interface.", Action.IGNORE, "info"),
    Xid(108, "A remote GPU accessed an unmapped address over NVLink.", Action.IGNORE, "info"),
    Xid(109, "A switch from one program to another timed out.", Action.RESET_GPU, "critical"),
    Xid(110, "The GPU had a security fault.", Action.RESET_GPU, "critical"),
    Xid(119, "The GPU's system processor (GSP) did not answer the driver in time.", Action.RESET_GPU, "critical"),
    Xid(120, "The GPU's system processor (GSP) had an error.", Action.RESET_GPU, "critical"),
    Xid(121, "The link between chips (C2C) had an error and recovered.", Action.IGNORE, "info"),
    *_engines((122, 123, 124), "The GPU's flash memory could not be read, written or erased.", Action.CONTACT_SUPPORT, "warning"),
    Xid(125, "The file system of the InfoROM is corrupted.", Action.CONTACT_SUPPORT, "warning"),
    Xid(136, "An NVLink could not be trained.", Action.RESET_GPU, "critical"),
    Xid(137, "An access over NVLink was refused, mostly due to a bug of a program on another GPU.", Action.IGNORE, "info"),
    Xid(140, "A memory error that ECC cannot correct, and that was not contained.", Action.RESET_GPU, "critical"),
    Xid(141, "CUDA's fast path had an error.", Action.IGNORE, "info"),
    Xid(143, "The GPU could not be initialized.", Action.RESET_GPU, "critical"),
    *_engines(_FLAGGED, "A fifth-generation NVLink had an error; the kernel log has its kind.",
              Action.CHECK_NVLINK, "warning"),
    Xid(151, "The rotation of the encryption keys failed.", Action.RESTART_VM, "critical"),
    *_engines((152, 153), "The deep learning accelerator had an error.", Action.IGNORE, "info"),
    Xid(154, "After another fault the GPU needs a recovery; the kernel log has its kind.", Action.RECOVER, "warning"),
    Xid(155, "Software declared an NVLink faulty.", Action.RESET_GPU, "critical"),
    Xid(156, "A faulty part of the GPU will be disabled at the next reset.", Action.RESET_GPU, "critical"),
    Xid(157, "A faulty part of the GPU could not be disabled.", Action.CONTACT_SUPPORT, "warning"),
    Xid(158, "A critical operation of the GPU timed out.", Action.RESET_GPU, "critical"),
    Xid(159, "A transfer between CPU and GPU memory failed.", Action.CONTACT_SUPPORT, "warning"),
    Xid(160, "A memory channel was disabled.", Action.IGNORE, "info"),
    Xid(161, "A memory channel could not be disabled.", Action.IGNORE, "info"),
    Xid(162, "Power smoothing was switched on again.", Action.IGNORE, "info", ends=163),
    Xid(163, "Power smoothing was switched off, by heat or a timeout; 162 ends this.", Action.RESET_WHEN_IDLE, "warning"),
    *_engines((164, 165), "The power smoothing circuits are worn.", Action.CONTACT_SUPPORT, "warning"),
    *_engines((166, 170), "An encrypted NVLink had an error.", Action.CONTACT_SUPPORT, "warning"),
    Xid(167, "A PCIe transfer timed out.", Action.CONTACT_SUPPORT, "warning"),
    Xid(168, "The GPU has less memory because of faults.", Action.CONTACT_SUPPORT, "warning"),
    Xid(169, "The GPU's security processor halted.", Action.CONTACT_SUPPORT, "warning"),
    *_engines((171, 172), "Details of a memory error that ECC cannot correct; reported with XID 48.", Action.FOLLOW_OTHER, "warning"),
    Xid(185, "Spare parts of the GPU's memory or units changed their state, such as one that came into use.", Action.CONTACT_SUPPORT, "warning"),
)
# Events that mean something else than their code. The cases of 154 are RECOVERY_ACTIONS of nvml/constants.py.
_CASE_ROWS = (
    *_engines(_REPEATED, "Three in a row in one part of the GPU (GPC and TPC): the hardware may be faulty.",
              Action.CONTACT_SUPPORT, "warning", "repeated"),
    *_engines(_FLAGGED, "A fifth-generation NVLink had an error that the driver calls fatal.", Action.RESET_GPU, "critical", "fatal"),
    *_engines(_FLAGGED, "A fifth-generation NVLink had an error that the driver calls nonfatal.", Action.IGNORE, "info", "nonfatal"),
    Xid(154, "The GPU recovered: the driver requires no action any longer.", Action.IGNORE, "info", ends=154, case="none"),
    Xid(154, "After another fault the GPU needs a reset.", Action.RESET_GPU, "critical", case="gpu_reset"),
    Xid(154, "After another fault the GPU needs a restart of the machine.", Action.REBOOT_MACHINE, "critical", case="node_reboot"),
    Xid(154, "After another fault the GPU may not exchange data with other GPUs.", Action.STOP_P2P, "warning", case="drain_p2p"),
    Xid(154, "After another fault the GPU works with reduced resources until its next reset.", Action.RESET_WHEN_IDLE, "warning",
        case="drain_and_reset"),
    Xid(154, "After another fault the NVLink domain of the GPU needs a recovery (IMEX).", Action.RECOVER, "critical",
        case="recover_imex_domain"),
    Xid(154, "After another fault the GPU needs a reset of its PCIe bus.", Action.RECOVER, "critical", case="bus_reset"),
    Xid(154, "After another fault the machine needs a restart.", Action.REBOOT_MACHINE, "critical", case="system_reboot"),
    Xid(163, "Power smoothing was switched off, and is on again.", Action.IGNORE, "info", case="ended"),
)
# fmt: on

XIDS: Mapping[int, Xid] = {row.code: row for row in sorted(_ROWS, key=lambda row: row.code)}
CASES: Mapping[tuple[int, str], Xid] = {(row.code, row.case): row for row in _CASE_ROWS}


def find_xid(code: int, case: str = "") -> Xid:
    """Return the row of an event; a code that is not in the table is a warning."""
    unknown = Xid(code, "A code that this version of gpuwarden does not know.", Action.CONTACT_SUPPORT, "warning")
    return CASES.get((code, case)) or XIDS.get(code) or unknown


def explain(code: int, severity: str | None = None) -> Xid:
    """Return the row of a code, for events of that severity if all of them mean the same."""
    row = find_xid(code)
    rows = [each for each in CASES.values() if each.code == code and each.severity == severity != row.severity]
    return rows[0] if len(rows) == 1 else row


def codes(severity: Severity) -> list[int]:
    """Return the codes of events that may have that severity, in ascending order."""
    rows = (*XIDS.values(), *CASES.values())
    return sorted({row.code for row in rows if row.severity == severity})


def times_by_severity(code: int, seen: EventCount) -> Mapping[str, float]:
    """Return the Unix time of the last event of each severity."""
    return seen.by_severity or {explain(code).severity: seen.last}


def worst_severity(code: int, seen: EventCount, since: float) -> str:
    """Return the gravest severity of events after that time; that of the last event if there are none."""
    times = times_by_severity(code, seen)
    recent = [severity for severity, at in times.items() if at > since]
    return min(recent, key=SEVERITY_RANK.__getitem__) if recent else max(times, key=lambda severity: times[severity])
