"""XIDs of all GPUs, from NVML's events and from the kernel log, each fault once and with what it means in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpuwarden.gpu.events import XidEvents
from gpuwarden.gpu.kernel_xid import KernelXid, PciAddress, pci_address, xids
from gpuwarden.gpu.nvml import Nvml
from gpuwarden.gpu.snapshot import Gpu, Identity, Snapshot
from gpuwarden.gpu.xid import Severity, explain
from gpuwarden.gpu.xid_ledger import XidLedger, XidReport
from gpuwarden.kernel_log import Record

log = logging.getLogger(__name__)

TELL_SECONDS = 60.0  # in which a GPU's XIDs of one code are logged once,
MAX_LINES = 20  # and this many lines altogether
MAX_HOMELESS = 256  # XIDs kept until their GPU is known
REMEMBER_SECONDS = 3600.0  # that a fault waits for the other source's report: a driver may hang for long

_LEVELS: Mapping[Severity, int] = {"page": logging.ERROR, "warn": logging.WARNING, "info": logging.INFO}


class XidWatch:
    """Collects XIDs from poll to poll. One event loop uses it."""

    def __init__(self, nvml: Nvml) -> None:
        self.events = XidEvents(nvml)
        self._ledger = XidLedger()
        self._homeless: list[KernelXid] = []
        self._homeless_dropped = 0
        self._gpus: list[tuple[Identity, bool]] = []  # when homes were last looked for
        self._told: dict[tuple[str, int], float] = {}  # when each was logged last

    @property
    def dropped(self) -> dict[str, int]:
        """XIDs that are not counted, by reason."""
        return {"unknown_gpu": self._homeless_dropped + self.events.unknown, "codes": self._ledger.dropped}

    def attach(self, snapshot: Snapshot, records: Sequence[Record] = ()) -> Snapshot:
        """Take what the events and the kernel log's new records tell; add to each GPU its XIDs. Does not block."""
        news = list(xids(records))
        self._homeless += news
        for report in (*self._at_home(snapshot, news=bool(news)), *self._of_events()):
            if self._ledger.add(report):
                self._tell(report, snapshot.gpu(report.uuid))
        self._ledger.forget(time.monotonic() - REMEMBER_SECONDS)
        if self._ledger.empty:
            return snapshot
        self._ledger.set_back(time.time())
        gpus = tuple(
            replace(gpu, xids=known) if (known := self._ledger.of(gpu.identity.uuid)) else gpu for gpu in snapshot.gpus
        )
        return replace(snapshot, gpus=gpus)

    def _of_events(self) -> list[XidReport]:
        return [
            XidReport("nvml", each.uuid, each.code, each.earliest, each.latest, each.time)
            for each in self.events.take()
        ]

    def _at_home(self, snapshot: Snapshot, *, news: bool) -> list[XidReport]:
        """Return the kernel's XIDs of GPUs that are known; the others wait until theirs says who it is."""
        if not self._homeless:
            return []
        gpus = [(gpu.identity, gpu.up) for gpu in snapshot.gpus]
        if not news and gpus == self._gpus:
            return []
        self._gpus = gpus
        uuids = _uuids(snapshot)
        reports, homeless = [], list[KernelXid]()
        for each in self._homeless:
            uuid = uuids.get(each.pci)
            if uuid:
                reports.append(XidReport(each.told, uuid, each.code, each.earliest, each.latest, each.time))
            else:
                homeless.append(each)
        self._homeless = homeless[-MAX_HOMELESS:]
        self._homeless_dropped += len(homeless) - len(self._homeless)
        return reports

    def _tell(self, report: XidReport, gpu: Gpu | None) -> None:
        now = time.monotonic()
        self._told = {key: moment for key, moment in self._told.items() if now - moment < TELL_SECONDS}
        key = report.uuid, report.code
        if key in self._told or len(self._told) >= MAX_LINES:
            return
        self._told[key] = now
        xid = explain(report.code)
        log.log(
            _LEVELS[xid.severity],
            "gpu=%s%s XID %d, %.0f s ago: %s %s",
            report.uuid,
            f" index={gpu.identity.index}" if gpu else "",
            report.code,
            max(0.0, time.time() - report.time),
            xid.meaning,
            xid.action.value,
        )


def _uuids(snapshot: Snapshot) -> dict[PciAddress, str]:
    """Map addresses to GPUs; of two that had the same one, the GPU that answers has it now."""
    found = {}
    for gpu in sorted(snapshot.gpus, key=lambda gpu: gpu.up):
        address = pci_address(gpu.identity.pci_bus_id)
        if address:
            found[address] = gpu.identity.uuid
    return found
