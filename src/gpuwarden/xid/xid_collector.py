"""XIDs of all GPUs, from NVML's events and from the kernel log, each fault once and with what it means in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpuwarden.gpu.snapshot import Gpu, Snapshot
from gpuwarden.host.kernel_log import KernelRecord
from gpuwarden.nvml.events import XidEvents, XidReport
from gpuwarden.nvml.identity import GpuIdentity
from gpuwarden.nvml.interface import Nvml
from gpuwarden.xid.codes import Severity, explain
from gpuwarden.xid.deduplicator import XidDeduplicator
from gpuwarden.xid.kernel_messages import normalize_pci_address, parse_xids

log = logging.getLogger(__name__)

LOG_SECONDS = 60.0  # in which a GPU's XIDs of one code are logged once,
MAX_LINES = 20  # and this many lines altogether
MAX_UNRESOLVED = 256  # XIDs kept until their GPU is known
# In which a GPU says who it is, if it does: mostly in the first poll, but a call may hang or the driver be loaded anew.
IDENTIFY_SECONDS = 60.0
REMEMBER_SECONDS = 3600.0  # that a fault waits for the other source's report: a driver may hang for long

_LEVELS: Mapping[Severity, int] = {"critical": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO}


@dataclass(slots=True)
class _UnresolvedXid:
    """Report by PCI address that waits for its GPU since that monotonic time; once `logged` it counts as dropped."""

    report: XidReport
    since: float
    logged: bool = False


class XidCollector:
    """Collects XIDs from poll to poll. One event loop uses it."""

    def __init__(self, nvml: Nvml) -> None:
        self.events = XidEvents(nvml)
        self._counts = XidDeduplicator()
        self._unresolved: list[_UnresolvedXid] = []
        self._unresolved_counts = (
            XidDeduplicator()
        )  # of what was told while unresolved, by address: the kernel tells of a loss twice
        self._unresolved_dropped = 0
        self._gpus: list[tuple[GpuIdentity, bool]] = []  # when homes were last looked for
        self._logged: dict[tuple[str, int], float] = {}  # when each was logged last

    @property
    def dropped(self) -> dict[str, int]:
        """XIDs that are not counted, by reason."""
        return {
            "unknown_gpu": self._unresolved_dropped + self.events.unknown,
            "codes": self._counts.dropped + self._unresolved_counts.dropped,
        }

    def follow(self, snapshot: Snapshot) -> None:
        """Listen for events of the GPUs that a poll found, unless it left the driver alone; does not block."""
        if snapshot.asked:
            self.events.follow({gpu.identity.uuid for gpu in snapshot.gpus if gpu.up}, snapshot.driver)

    def attach(self, snapshot: Snapshot, records: Sequence[KernelRecord] = ()) -> Snapshot:
        """Take what the events and the kernel log's new records tell; add to each GPU its XIDs. Does not block."""
        now = time.monotonic()
        news = [_UnresolvedXid(xid, now) for xid in parse_xids(records)]
        self._unresolved += news
        for report in (*self._resolve(snapshot, news=bool(news)), *self.events.drain()):
            if self._counts.add(report):
                self._log_report(report, snapshot.gpu(report.gpu))
        self._drop_overdue(now)
        for ledger in (self._counts, self._unresolved_counts):
            ledger.expire(now - REMEMBER_SECONDS)
        if self._counts.empty:
            return snapshot
        self._counts.clamp_times(time.time())
        gpus = tuple(
            replace(gpu, xids=known) if (known := self._counts.of_gpu(gpu.identity.uuid)) else gpu
            for gpu in snapshot.gpus
        )
        return replace(snapshot, gpus=gpus)

    def _resolve(self, snapshot: Snapshot, *, news: bool) -> list[XidReport]:
        """Return the kernel's XIDs of GPUs that are known; the others wait until theirs says who it is."""
        if not self._unresolved:
            return []
        gpus = [(gpu.identity, gpu.up) for gpu in snapshot.gpus]
        if not news and gpus == self._gpus:
            return []
        self._gpus = gpus
        uuids = _uuids(snapshot)
        reports, unresolved = [], list[_UnresolvedXid]()
        for each in self._unresolved:
            uuid = uuids.get(each.report.gpu)
            if uuid:
                reports.append(replace(each.report, gpu=uuid))
            else:
                unresolved.append(each)
        self._unresolved = unresolved
        return reports

    def _drop_overdue(self, now: float) -> None:
        """Log and count what waits for too long, as for a GPU that was lost before the start, or is one too many.

        What has waited too long goes on waiting. As a counter must not fall, it is counted only then, when few are
        still to find their GPU; those that do are in its series as well, and no less dropped for so long.
        """
        beyond = len(self._unresolved) - MAX_UNRESOLVED
        for number, each in enumerate(self._unresolved):
            if not each.logged and (number < beyond or now - each.since >= IDENTIFY_SECONDS):
                each.logged = True
                if self._unresolved_counts.add(each.report):
                    self._unresolved_dropped += 1
                    self._log(
                        each.report, f"pci={each.report.gpu}", " No GPU of that address has answered: no series has it."
                    )
        del self._unresolved[: max(beyond, 0)]

    def _log_report(self, report: XidReport, gpu: Gpu | None) -> None:
        self._log(report, f"gpu={report.gpu}" + (f" index={gpu.identity.index}" if gpu else ""))

    def _log(self, report: XidReport, who: str, note: str = "") -> None:
        now = time.monotonic()
        self._logged = {key: moment for key, moment in self._logged.items() if now - moment < LOG_SECONDS}
        key = report.gpu, report.code
        if key in self._logged or len(self._logged) >= MAX_LINES:
            return
        self._logged[key] = now
        xid = explain(report.code)
        log.log(
            _LEVELS[xid.severity],
            "%s XID %d, %.0f s ago: %s %s%s",
            who,
            report.code,
            max(0.0, time.time() - report.time),
            xid.meaning,
            xid.action.value,
            note,
        )


def _uuids(snapshot: Snapshot) -> dict[str, str]:
    """Map addresses to GPUs; of two that had the same one, the GPU that answers has it now."""
    found = {}
    for gpu in sorted(snapshot.gpus, key=lambda gpu: gpu.up):
        address = normalize_pci_address(gpu.identity.pci_bus_id)
        if address:
            found[address] = gpu.identity.uuid
    return found
