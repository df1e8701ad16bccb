"""Collector of XIDs and operational events of all GPUs. Each fault counts once, whichever sources report it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from gpuwarden.fairness.log_limiter import LogLimiter
from gpuwarden.formatting import format_fields
from gpuwarden.gpu.snapshot import EventCount, Gpu, OperationalKind, Snapshot
from gpuwarden.host.kernel_log import KernelRecord
from gpuwarden.nvml.events.event_listener import EventListener
from gpuwarden.nvml.events.event_sources import GpuEventSource
from gpuwarden.nvml.events.model import OperationalEvent, XidReport
from gpuwarden.nvml.identity import GpuIdentity
from gpuwarden.nvml.interface import Nvml
from gpuwarden.severity import Severity
from gpuwarden.xid.codes import find_xid
from gpuwarden.xid.deduplicator import XidDeduplicator
from gpuwarden.xid.kernel_messages import normalize_pci_address, parse_xids
from gpuwarden.xid.repeats import RepeatTracker

log = logging.getLogger(__name__)

MAX_LINES = 20  # a minute; of one GPU and code one
MAX_UNRESOLVED = 256  # XIDs kept until their GPU is known
# In which a GPU is identified, if ever: mostly in the first poll, but a call may hang or the driver be reloaded.
IDENTIFY_SECONDS = 60.0
REMEMBER_SECONDS = 3600.0  # for which a fault waits for the other source's report: a driver may hang for long

MAX_KINDS = 64  # of operational events of a GPU, by severity, category and role; further ones are "other"
_OPERATIONAL_LEVELS = {"fatal": logging.ERROR, "recoverable": logging.WARNING}
_LEVELS: Mapping[Severity, int] = {"critical": logging.ERROR, "warning": logging.WARNING, "info": logging.INFO}


@dataclass(slots=True)
class _UnresolvedXid:
    """Report by PCI address that waits for its GPU since that monotonic time; once `logged` it counts as dropped."""

    report: XidReport
    since: float
    logged: bool = False


class XidCollector:
    """Collector of XIDs from poll to poll. Used by one event loop."""

    def __init__(self, nvml: Nvml) -> None:
        self._source = GpuEventSource(nvml)
        self.events = EventListener(self._source)
        self._counts = XidDeduplicator()
        self._unresolved: list[_UnresolvedXid] = []
        # Those logged while unresolved, by address: the kernel reports the loss of a GPU twice.
        self._unresolved_counts = XidDeduplicator()
        self._unresolved_dropped = 0
        self._gpus: list[tuple[GpuIdentity, bool]] = []  # at the last attempt to resolve
        self._repeats = RepeatTracker()
        self._operational: dict[str, dict[OperationalKind, EventCount]] = {}  # by GPU
        self._lines = LogLimiter(MAX_LINES)

    @property
    def dropped(self) -> dict[str, int]:
        """XIDs not counted, by reason."""
        return {
            "unknown_gpu": self._unresolved_dropped + self._source.unknown,
            "codes": self._counts.dropped + self._unresolved_counts.dropped,
        }

    def follow(self, snapshot: Snapshot) -> None:
        """Listen for events of the GPUs that a poll found. Does not block."""
        self.events.follow({gpu.identity.uuid for gpu in snapshot.gpus if gpu.up}, snapshot.driver)

    def attach(self, snapshot: Snapshot, records: Sequence[KernelRecord] = ()) -> Snapshot:
        """Return the snapshot with the XIDs of each GPU, new events and kernel log records included. Does not block."""
        now = time.monotonic()
        news = [_UnresolvedXid(xid, now) for xid in parse_xids(records)]
        self._unresolved += news
        for event in (*self._resolve(snapshot, news=bool(news)), *self.events.drain()):
            if isinstance(event, OperationalEvent):
                self._add_operational(event)
            else:
                self._add_report(event, snapshot.gpu(event.gpu))
        self._drop_overdue(now)
        for counts in (self._counts, self._unresolved_counts):
            counts.expire(now - REMEMBER_SECONDS)
        if self._counts.empty and not self._operational:
            return snapshot
        self._counts.clamp_times(time.time())
        gpus = []
        for gpu in snapshot.gpus:
            xids, operational = self._counts.counts(gpu.identity.uuid), self._operational.get(gpu.identity.uuid, {})
            gpus.append(replace(gpu, xids=xids, operational=dict(operational)) if xids or operational else gpu)
        return replace(snapshot, gpus=tuple(gpus))

    def _add_operational(self, event: OperationalEvent) -> None:
        """Count an operational event by severity, category and role, and log it; a test's is logged only."""
        kind = event.severity, event.category, event.role
        if not event.simulated:
            kinds = self._operational.setdefault(event.gpu, {})
            if kind not in kinds and len(kinds) >= MAX_KINDS:
                kind = "other", "other", "other"
            old = kinds.get(kind, EventCount(0, 0.0))
            kinds[kind] = EventCount(old.count + 1, max(old.last, event.time))
        if self._lines.allow((*kind, event.gpu, event.module, event.code), time.monotonic()):
            fields = format_fields(
                gpu=event.gpu,
                severity=event.severity,
                category=event.category,
                role=event.role,
                module=event.module,
                code=event.code,
                xids=",".join(map(str, event.xids)) or None,
                simulated=event.simulated or None,
                events_lost=event.lost or None,
            )
            log.log(_OPERATIONAL_LEVELS.get(event.severity, logging.INFO), "operational event %s", fields)

    def _resolve(self, snapshot: Snapshot, *, news: bool) -> list[XidReport]:
        """Return the kernel's XIDs of known GPUs; the others wait until their GPU is identified."""
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
        """Log XIDs that wait too long for their GPU, and count them as dropped; drop the oldest above the limit.

        An overdue XID still waits: its GPU may be identified later, and then counts it too. A counter cannot take the
        drop back, hence the delay.
        """
        beyond = len(self._unresolved) - MAX_UNRESOLVED
        for number, each in enumerate(self._unresolved):
            if not each.logged and (number < beyond or now - each.since >= IDENTIFY_SECONDS):
                each.logged = True
                if self._unresolved_counts.add(each.report):
                    self._unresolved_dropped += 1
                    self._log(each.report, "XID of an unknown GPU, not counted", pci=each.report.gpu)
        del self._unresolved[: max(beyond, 0)]

    def _add_report(self, report: XidReport, gpu: Gpu | None) -> None:
        """Count an XID, and log it, unless another source has reported it."""
        report = self._repeats.rate(report)
        if self._counts.add(report):
            index = gpu.identity.index if gpu else None
            self._log(report, "XID reported", gpu=report.gpu, index=index, part=report.part or None)

    def _log(self, report: XidReport, event: str, **gpu: object) -> None:
        xid = find_xid(report.code, report.case)
        if not self._lines.allow((report.gpu, report.code, xid.severity), time.monotonic()):
            return
        fields = format_fields(
            **gpu,
            xid=report.code,
            seconds_ago=round(max(0.0, time.time() - report.time)),
            meaning=xid.meaning,
            action=xid.action.value,
        )
        log.log(_LEVELS[xid.severity], "%s %s", event, fields)


def _uuids(snapshot: Snapshot) -> dict[str, str]:
    """Map PCI addresses to UUIDs; of two GPUs that had the same address, the one that answers has it now."""
    found = {}
    for gpu in sorted(snapshot.gpus, key=lambda gpu: gpu.up):
        address = normalize_pci_address(gpu.identity.pci_bus_id)
        if address and not gpu.identity.is_provisional:  # its XIDs wait until it has a UUID
            found[address] = gpu.identity.uuid
    return found
