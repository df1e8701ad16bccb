"""Event sources: one NVML event set for each kind of event, and the wait for its next event.

On Linux NVML returns each event of a set once, in order. The kernel log (xid/kernel_messages.py) has those it omits.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

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
from gpuwarden.nvml.events.model import DriverBinding, GpuEvent, OperationalEvent, XidReport
from gpuwarden.nvml.interface import EventSet, Nvml, SystemEventSet, WaitedEvent, handle_key
from gpuwarden.nvml.return_codes import (
    DRIVER_GONE,
    NO_EVENT,
    UNSUPPORTED,
    NVMLError,
    code_of,
    error_name,
    nvml_error,
)

log = logging.getLogger(__name__)

MAX_FAILURES = 3  # failed waits in a row before a set is dropped: the XID of a lost GPU may still come after the loss
MAX_CONTEXTS = 32  # of an operational event, searched for its XID
_SECOND_MICROSECONDS = 1e6
_MAX_CLOCK_ERROR_SECONDS = 2.0  # of the driver's time of an event; one that is further off is replaced

E = TypeVar("E")  # events
S = TypeVar("S")  # their set


class EventSource(ABC, Generic[E, S]):
    """Source of the events of one kind, with their event set; `active` while it can report any. Its calls block."""

    name: str  # of its events, for messages

    def __init__(self, nvml: Nvml) -> None:
        self.active = False
        self._nvml = nvml
        self._events: S | None = None
        self._empty_at = 0.0  # when there last was no event (monotonic)
        self._failures = 0  # waits in a row

    def open(self) -> None:
        """Create the set. Raises NVMLError."""
        self.active, self._events = False, None
        self._empty_at, self._failures = time.monotonic(), 0
        self._events = self._create()

    def close(self) -> None:
        """Free the set, if there is one. Raises NVMLError."""
        if self._events is not None:
            self._free(self._events)

    @abstractmethod
    def register(self, uuid: str) -> bool:
        """Receive the events of a GPU; return False if that has to be retried. Raises NVMLError: the driver is gone."""

    def wait(self, seconds: float) -> Sequence[E] | None:
        """Return what the next event reports, None without an event. Raises NVMLError."""
        try:
            assert self._events is not None
            found = self._wait(self._events, round(seconds * 1000))
        except NVMLError as error:
            self._empty_at = time.monotonic()
            self._failures = 0 if code_of(error) == NO_EVENT else self._failures + 1
            if self._failures >= MAX_FAILURES or code_of(error) in DRIVER_GONE:
                raise
            return None
        self._failures = 0
        return found

    @abstractmethod
    def _create(self) -> S: ...

    @abstractmethod
    def _free(self, events: S) -> None: ...

    @abstractmethod
    def _wait(self, events: S, milliseconds: int) -> Sequence[E]: ...


class GpuEventSource(EventSource[GpuEvent, EventSet]):
    """Source of XIDs, and of operational events where the driver has them: an XID counts once for a group of these.

    Older drivers give an event no time: it occurred after the last wait that found none. The time of newer ones is used
    where it lies between that wait and now.
    """

    name = "GPU events"

    def __init__(self, nvml: Nvml) -> None:
        super().__init__(nvml)
        self.unknown = 0  # events of GPUs that could not be identified
        self._known: dict[Hashable, str] = {}
        self._operational = False  # whether the set has operational events
        self._groups: dict[str, tuple[int, set[int]]] = {}  # last group of each GPU, with its XIDs so far

    def open(self) -> None:
        """Create the set. Raises NVMLError."""
        super().open()
        self._known = {}
        self._operational = False

    def register(self, uuid: str) -> bool:
        """Receive the events of a GPU; return False if that has to be retried. Raises NVMLError: the driver is gone."""
        assert self._events is not None
        try:
            handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            self._nvml.nvmlDeviceRegisterEvents(handle, XID_EVENT, self._events)
        except NVMLError as error:
            if code_of(error) in DRIVER_GONE:
                raise
            return code_of(error) in UNSUPPORTED
        self._known[handle_key(handle)] = uuid
        self.active = True
        try:
            self._nvml.nvmlEventSetRegisterGpuOperationalEvents_v1(self._events, uuid)
            self._operational = True
        except NVMLError as error:
            log.debug("no operational events gpu=%s error=%s", uuid, error_name(error))
        return True

    def _create(self) -> EventSet:
        return self._nvml.nvmlEventSetCreate()

    def _free(self, events: EventSet) -> None:
        self._nvml.nvmlEventSetFree(events)

    def _wait(self, events: EventSet, milliseconds: int) -> Sequence[GpuEvent]:
        wait = self._wait_for_any if self._operational else self._wait_for_xid
        return wait(events, milliseconds)

    def _wait_for_xid(self, events: EventSet, milliseconds: int) -> Sequence[XidReport]:
        event = self._nvml.nvmlEventSetWait_v2(events, milliseconds)
        uuid = self._known.get(handle_key(event.device))
        try:
            uuid = uuid or self._nvml.nvmlDeviceGetUUID(event.device)
        except NVMLError:
            self.unknown += 1
            return ()
        if not event.eventType & XID_EVENT:
            return ()
        return [XidReport("nvml", uuid, event.eventData, self._empty_at, time.monotonic(), time.time())]

    def _wait_for_any(self, events: EventSet, milliseconds: int) -> Sequence[GpuEvent]:
        event = self._nvml.nvmlEventSetWait_v3(events, milliseconds)
        uuid = event.uuid.decode(errors="replace")
        if not uuid:
            self.unknown += 1
            return ()
        now, wall = time.monotonic(), time.time()
        ago = wall - event.timestampUsec / _SECOND_MICROSECONDS
        is_plausible = -_MAX_CLOCK_ERROR_SECONDS <= ago <= now - self._empty_at + _MAX_CLOCK_ERROR_SECONDS
        at = wall - ago if is_plausible else wall
        if event.dataType == OPERATIONAL_EVENT:
            found = _operational_event(event, uuid, at, self._legacy_xids(events))
            case = "fatal" if found.severity == "fatal" else ""
            codes = self._new_xids(event, found)
            return found, *(XidReport("operational", uuid, code, self._empty_at, now, at, case) for code in codes)
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

    def _legacy_xids(self, events: EventSet) -> tuple[int, ...]:
        """Return the XIDs in the contexts of the last event; empty if they cannot be read."""
        nvml = self._nvml
        try:
            contexts = range(min(nvml.nvmlEventSetGetContextCount_v1(events), MAX_CONTEXTS))
            found = [n for n in contexts if nvml.nvmlEventSetGetContextInfo_v1(events, n) == LEGACY_XID_CONTEXT]
            return tuple(nvml.nvmlEventSetGetGpuOperationalEventContextLegacyXid_v1(events, n) for n in found)
        except NVMLError as error:
            log.debug("cannot read contexts of operational event error=%s", error_name(error))
            return ()


class SystemEventSource(EventSource[DriverBinding, SystemEventSet]):
    """Source of bindings of GPUs to the driver, and of unbindings."""

    name = "system events"

    def open(self) -> None:
        """Create the set, for all GPUs. Raises NVMLError."""
        super().open()
        assert self._events is not None
        self._nvml.nvmlSystemRegisterEvents(SYSTEM_BIND | SYSTEM_UNBIND, self._events)
        self.active = True

    def register(self, _uuid: str) -> bool:
        """Return True: the set is for all GPUs."""
        return True

    def _create(self) -> SystemEventSet:
        return self._nvml.nvmlSystemEventSetCreate()

    def _free(self, events: SystemEventSet) -> None:
        self._nvml.nvmlSystemEventSetFree(events)

    def _wait(self, events: SystemEventSet, milliseconds: int) -> Sequence[DriverBinding]:
        found = self._nvml.nvmlSystemEventSetWait(events, milliseconds)
        if not found:
            raise nvml_error(NO_EVENT)
        return [
            DriverBinding(_pci_address(gpu_id), kind == SYSTEM_BIND, time.time())
            for kind, gpu_id in found
            if kind in (SYSTEM_BIND, SYSTEM_UNBIND)
        ]


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
