"""Sources of events: the ways to wait for them, by what the driver has.

On Linux NVML returns each event of a set once, in order. The kernel log (xid/kernel_messages.py) has those it omits.
"""

from __future__ import annotations

import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence

from gpuwarden.nvml.constants import (
    LEGACY_XID_CONTEXT,
    OPERATIONAL_CATEGORIES,
    OPERATIONAL_EVENT,
    OPERATIONAL_GROUP_PREVIOUS,
    OPERATIONAL_GROUP_SIMULATED,
    OPERATIONAL_OVERFLOW,
    OPERATIONAL_PRIMARY,
    OPERATIONAL_PROPAGATED,
    OPERATIONAL_SEVERITIES,
    SYSTEM_BIND,
    SYSTEM_UNBIND,
    XID_EVENT,
)
from gpuwarden.nvml.events.model import DriverBinding, DriverEvent, OperationalEvent, XidReport
from gpuwarden.nvml.interface import EventSet, Nvml, SystemEventSet, WaitedEvent, handle_key
from gpuwarden.nvml.return_codes import DRIVER_GONE, NO_EVENT, NVMLError, code_of, error_name, nvml_error

log = logging.getLogger(__name__)

MAX_FAILURES = 3  # failed waits in a row before a set is dropped: the XID of a lost GPU may still come after the loss
MAX_CONTEXTS = 32  # of an operational event, searched for its XID
_SECOND_MICROSECONDS = 1e6
_MAX_CLOCK_ERROR_SECONDS = 2.0  # of the driver's time of an event; one that is further off is replaced


class UnknownGpuError(Exception):
    """The GPU of an event cannot be identified."""


class EventSource(ABC):
    """One kind of wait for events; `active` once there is something to wait for. Its calls block."""

    def __init__(self, nvml: Nvml) -> None:
        self.active = False
        self._nvml = nvml
        self._empty_at = time.monotonic()  # when there last was no event
        self._failures = 0  # waits in a row

    def wait(self, seconds: float) -> Sequence[DriverEvent]:
        """Return what the next event reports; nothing if there is none. Raises NVMLError and UnknownGpuError."""
        try:
            found = self._wait(round(seconds * 1000))
        except NVMLError as error:
            self._empty_at = time.monotonic()
            self._failures = 0 if code_of(error) == NO_EVENT else self._failures + 1
            if self._failures >= MAX_FAILURES or code_of(error) in DRIVER_GONE:
                raise
            return ()
        self._failures = 0
        return found

    @abstractmethod
    def _wait(self, milliseconds: int) -> Sequence[DriverEvent]: ...


class XidSource(EventSource):
    """XIDs, of any driver. NVML gives an event no time: it occurred after the last wait that found none."""

    def __init__(self, nvml: Nvml, events: EventSet) -> None:
        super().__init__(nvml)
        self._events = events
        self._known: dict[Hashable, str] = {}

    def register(self, uuid: str) -> None:
        """Receive the XIDs of a GPU. Raises NVMLError."""
        handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._nvml.nvmlDeviceRegisterEvents(handle, XID_EVENT, self._events)
        self._known[handle_key(handle)] = uuid
        self.active = True

    def _wait(self, milliseconds: int) -> Sequence[DriverEvent]:
        event = self._nvml.nvmlEventSetWait_v2(self._events, milliseconds)
        uuid = self._known.get(handle_key(event.device))
        try:
            uuid = uuid or self._nvml.nvmlDeviceGetUUID(event.device)
        except NVMLError:
            raise UnknownGpuError from None
        if not event.eventType & XID_EVENT:
            return ()
        return [XidReport("nvml", uuid, event.eventData, self._empty_at, time.monotonic(), time.time())]


class OperationalSource(EventSource):
    """Operational events, and the XIDs of the same event set: an XID counts once for a group of operational events.

    The driver's time is used where it lies between the last empty wait and now.
    """

    def __init__(self, nvml: Nvml, events: EventSet, groups: dict[str, tuple[int, set[int]]]) -> None:
        super().__init__(nvml)
        self._events = events
        self._groups = groups  # last group of each GPU, with its XIDs so far

    def register(self, uuid: str) -> None:
        """Receive the operational events of a GPU, if it has them. Raises NVMLError if the driver went away."""
        with _tolerate(f"no operational events gpu={uuid}"):
            self._nvml.nvmlEventSetRegisterGpuOperationalEvents_v1(self._events, uuid)
            self.active = True

    def _wait(self, milliseconds: int) -> Sequence[DriverEvent]:
        event = self._nvml.nvmlEventSetWait_v3(self._events, milliseconds)
        uuid = event.uuid.decode(errors="replace")
        if not uuid:
            raise UnknownGpuError
        now, wall = time.monotonic(), time.time()
        ago = wall - event.timestampUsec / _SECOND_MICROSECONDS
        is_plausible = -_MAX_CLOCK_ERROR_SECONDS <= ago <= now - self._empty_at + _MAX_CLOCK_ERROR_SECONDS
        at = wall - ago if is_plausible else wall
        if event.dataType == OPERATIONAL_EVENT:
            found = _operational_event(event, uuid, at, self._legacy_xids())
            fatal = True if found.severity == "fatal" else None
            codes = self._new_xids(event, found)
            return found, *(XidReport("operational", uuid, code, self._empty_at, now, at, fatal) for code in codes)
        if event.eventType & XID_EVENT:
            return [XidReport("nvml", uuid, event.eventData, self._empty_at, now, at)]
        return ()

    def _new_xids(self, event: WaitedEvent, found: OperationalEvent) -> set[int]:
        """Return the XIDs of an event that its group has not had; none of a fault before the driver's last start."""
        group, counted = self._groups.get(found.gpu, (None, set()))
        if group != event.groupCursor:
            counted = set[int]()
            self._groups[found.gpu] = event.groupCursor, counted
        if event.groupAttributes & (OPERATIONAL_GROUP_PREVIOUS | OPERATIONAL_GROUP_SIMULATED):
            return set()
        new = set(found.xids) - counted
        counted |= new
        return new

    def _legacy_xids(self) -> tuple[int, ...]:
        """Return the XIDs in the contexts of the last event; empty if they cannot be read."""
        nvml, events = self._nvml, self._events
        try:
            contexts = range(min(nvml.nvmlEventSetGetContextCount_v1(events), MAX_CONTEXTS))
            found = [n for n in contexts if nvml.nvmlEventSetGetContextInfo_v1(events, n) == LEGACY_XID_CONTEXT]
            return tuple(nvml.nvmlEventSetGetGpuOperationalEventContextLegacyXid_v1(events, n) for n in found)
        except NVMLError as error:
            log.debug("cannot read contexts of operational event error=%s", error_name(error))
            return ()


class SystemSource(EventSource):
    """Bindings of GPUs to the driver, from an event set of their own. An error of it costs these events only."""

    def __init__(self, nvml: Nvml) -> None:
        super().__init__(nvml)
        self._events: SystemEventSet | None = None

    def open(self) -> None:
        """Create the set, if the driver has such events. Raises NVMLError if it went away."""
        with _tolerate("no system events"):
            self._events = self._nvml.nvmlSystemEventSetCreate()
            self._nvml.nvmlSystemRegisterEvents(SYSTEM_BIND | SYSTEM_UNBIND, self._events)
            self.active = True

    def close(self) -> None:
        """Free the set. Raises NVMLError."""
        if self._events is not None:
            self._nvml.nvmlSystemEventSetFree(self._events)

    def wait(self, seconds: float) -> Sequence[DriverEvent]:
        """Return the next events; if the wait fails permanently, log that and become inactive."""
        self.active = False
        found: Sequence[DriverEvent] = ()
        with _tolerate("cannot wait for system events"):
            found = super().wait(seconds)
            self.active = True
        return found

    def _wait(self, milliseconds: int) -> Sequence[DriverEvent]:
        assert self._events is not None
        found = self._nvml.nvmlSystemEventSetWait(self._events, milliseconds)
        if not found:
            raise nvml_error(NO_EVENT)
        return [
            DriverBinding(_pci_address(gpu_id), kind == SYSTEM_BIND, time.time())
            for kind, gpu_id in found
            if kind in (SYSTEM_BIND, SYSTEM_UNBIND)
        ]


@contextlib.contextmanager
def _tolerate(failure: str) -> Iterator[None]:
    """Log an NVMLError instead of raising it, unless the driver went away."""
    try:
        yield
    except NVMLError as error:
        if code_of(error) in DRIVER_GONE:
            raise
        log.debug("%s error=%s", failure, error_name(error))


def _pci_address(gpu_id: int) -> str:
    """Return the address in an id of the driver's (open-gpu-kernel-modules, gpuGenerate32BitId)."""
    return f"{gpu_id >> 16:04x}:{gpu_id >> 8 & 0xFF:02x}:{gpu_id & 0xFF:02x}.0"


def _operational_event(event: WaitedEvent, uuid: str, at: float, xids: tuple[int, ...]) -> OperationalEvent:
    """Return an operational event with names for its numbers; a number unknown to this version stays one."""
    primary, propagated = event.attributes & OPERATIONAL_PRIMARY, event.attributes & OPERATIONAL_PROPAGATED
    return OperationalEvent(
        gpu=uuid,
        severity=OPERATIONAL_SEVERITIES.get(event.severity, f"severity_{event.severity}"),
        category=OPERATIONAL_CATEGORIES.get(event.categoryId, f"category_{event.categoryId}"),
        role="primary" if primary else "propagated" if propagated else "other",
        module=event.sourceModule.decode(errors="replace"),
        code=event.moduleEventCode,
        time=at,
        xids=xids,
        simulated=bool(event.groupAttributes & OPERATIONAL_GROUP_SIMULATED),
        lost=bool(event.attributes & OPERATIONAL_OVERFLOW),
    )
