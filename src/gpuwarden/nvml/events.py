"""Listener for the driver's XID events and operational events, on its own thread: a hanging wait affects nothing else.

On Linux NVML returns each event of a set once, in order. The kernel log (xid/kernel_messages.py) has those it omits.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal, cast

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
    XID_EVENT,
)
from gpuwarden.nvml.interface import EventData, EventSet, Nvml, WaitedEvent, handle_key
from gpuwarden.nvml.return_codes import DRIVER_GONE, NO_EVENT, UNSUPPORTED, NVMLError, code_of, error_name
from gpuwarden.nvml.session import DriverVersions

log = logging.getLogger(__name__)

MAX_FAILURES = 3  # failed waits in a row before the set is dropped: the XID of a lost GPU may still come after the loss
WAIT_SECONDS = 2.0  # timeout of a wait, after which the thread checks for a stop; runtime suspend waits 3 s for that
RETRY_SECONDS = 5.0  # before a failed event set is created again, or a GPU registered again
HUNG_SECONDS = 10.0  # without a wait that returned, after which the wait counts as hung
MAX_PENDING = 1024  # events received but not drained; beyond, they stay in the driver
MAX_CONTEXTS = 32  # of an operational event, searched for its XID
_SECOND_MICROSECONDS = 1e6
_MAX_CLOCK_ERROR_SECONDS = 2.0  # of the driver's time of an event; one that is further off is replaced

# An operational event has the XID of its fault as well. The kernel log reports a lost GPU twice: as an XID, and as a
# sentence.
XidSource = Literal["nvml", "operational", "kernel_log", "kernel_log_text"]


@dataclass(frozen=True, slots=True)
class XidReport:
    """An XID as one source reports it. It occurred between `earliest` and `latest` (monotonic).

    `time` is Unix time, from older drivers' events the time of the report. `gpu` is a UUID, or a PCI address until its
    GPU is known. `fatal` is the driver's flag, None if the source has none; `part` is the part of the GPU (GPC and TPC)
    that it names.
    """

    source: XidSource
    gpu: str
    code: int
    earliest: float
    latest: float
    time: float
    fatal: bool | None = None
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


class XidEvents:
    """Listener for all GPUs that support events, on a thread that exists only while there are such GPUs.

    Used by one event loop. To shut the driver down, call `stop` and wait until it is `idle`.
    """

    name = "the wait for XID events"

    def __init__(self, nvml: Nvml) -> None:
        self.on_xid: Callable[[], object] = _ignore  # called on the thread for each XID
        self.unknown = 0  # events of GPUs that could not be identified
        self._nvml = nvml
        self._up: AbstractSet[str] = frozenset()  # by UUID
        self._gpus: AbstractSet[str] = frozenset()  # all that were up at any time
        self._driver: DriverVersions | None = None
        self._round = 0  # number of registrations: a GPU reset and a new driver session lose them
        self._without_events = 0  # the round in which no GPU supported events
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._returned_at: float | None = None  # when a wait last returned; None without an event set
        self._failures = 0  # waits in a row
        self._pending: deque[XidReport] = deque()
        self._operational_pending: deque[OperationalEvent] = deque()
        self._is_operational = False  # whether a GPU reports operational events to the set
        self._group: tuple[str, int] | None = None  # GPU and group of the last operational event, and its XIDs so far
        self._group_xids: set[int] = set()

    @property
    def listening(self) -> bool:
        """True if events are received: there is an event set, and the wait for it does not hang."""
        returned_at = self._returned_at
        return returned_at is not None and time.monotonic() - returned_at < HUNG_SECONDS

    def follow(self, up: AbstractSet[str], driver: DriverVersions | None) -> None:
        """Listen to the GPUs that answered a poll, by UUID; register those that came back again. Does not block."""
        came, self._up, self._gpus = up - self._up, up, self._gpus | up
        if driver is None or not self._gpus:
            return
        if came or self._driver is not driver:
            self._driver = driver
            self._round += 1
        if self._round == self._without_events or not self.idle:
            return
        self._stop = threading.Event()
        # A daemon thread: one that hangs in the driver cannot be ended and must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, args=(self._stop,), name="driver events", daemon=True)
        self._thread.start()

    def drain(self) -> list[XidReport]:
        """Return the events since the last call, in order."""
        return [self._pending.popleft() for _ in range(len(self._pending))]

    def drain_operational(self) -> list[OperationalEvent]:
        """Return the operational events since the last call, in order."""
        return [self._operational_pending.popleft() for _ in range(len(self._operational_pending))]

    def stop(self) -> None:
        """End the wait and free the event set, within about two seconds; events not drained are kept."""
        self._stop.set()

    @property
    def idle(self) -> bool:
        """True if no wait is in progress and the set is freed, so that the driver can be shut down."""
        return self._thread is None or not self._thread.is_alive()

    # On the thread.

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            number = self._round
            try:
                supported = self._listen(number, stop)
            except NVMLError as error:
                log.debug("restarting XID event listener error=%s", error_name(error))
                stop.wait(RETRY_SECONDS)
                continue
            except Exception:
                log.exception("XID event listener failed")
                supported = False
            finally:
                self._returned_at = None
            if not supported:
                self._without_events = number
                return

    def _listen(self, number: int, stop: threading.Event) -> bool:
        """Listen until the set of GPUs changes; return False if no GPU supports events. Raises NVMLError."""
        driver = self._driver
        try:
            events = self._nvml.nvmlEventSetCreate()
        except NVMLError as error:
            if code_of(error) in UNSUPPORTED:
                return False
            raise
        gone = False
        try:
            return self._keep_listening(number, events, stop)
        except NVMLError as error:
            gone = code_of(error) in DRIVER_GONE
            raise
        finally:
            # A driver that went away has freed its sets; they must not be used.
            if not gone and self._driver is driver:
                with contextlib.suppress(NVMLError):
                    self._nvml.nvmlEventSetFree(events)

    def _keep_listening(self, number: int, events: EventSet, stop: threading.Event) -> bool:
        known: dict[Hashable, str] = {}
        self._is_operational = False
        missing = set(self._gpus)
        ask_at, empty_at, self._failures = 0.0, time.monotonic(), 0
        while not stop.is_set():
            if missing and time.monotonic() >= ask_at:
                missing -= self._register(events, missing & self._up, known)
                ask_at = time.monotonic() + RETRY_SECONDS
            if known:
                before, empty_at = empty_at, self._wait(events, known, empty_at, stop)
                if empty_at == before:
                    continue  # there was an event: more may follow, and would be lost with the set
            elif missing:
                stop.wait(WAIT_SECONDS)
            else:
                return False
            if self._round != number:
                break
        return True

    def _register(self, events: EventSet, uuids: Iterable[str], known: dict[Hashable, str]) -> set[str]:
        """Register the GPUs; return those that need no further attempt. Raises NVMLError if the driver went away."""
        settled: set[str] = set()
        for uuid in uuids:
            try:
                handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
                self._nvml.nvmlDeviceRegisterEvents(handle, XID_EVENT, events)
            except NVMLError as error:
                if code_of(error) in DRIVER_GONE:
                    raise
                if code_of(error) in UNSUPPORTED:
                    settled.add(uuid)
                continue
            known[handle_key(handle)] = uuid
            settled.add(uuid)
            self._register_operational(events, uuid)
        return settled

    def _register_operational(self, events: EventSet, uuid: str) -> None:
        try:
            self._nvml.nvmlEventSetRegisterGpuOperationalEvents_v1(events, uuid)
        except NVMLError as error:
            if code_of(error) in DRIVER_GONE:
                raise
            log.debug("no operational events gpu=%s error=%s", uuid, error_name(error))
        else:
            self._is_operational = True

    def _wait(self, events: EventSet, known: dict[Hashable, str], empty_at: float, stop: threading.Event) -> float:
        """Wait for one event. `empty_at` is when the set was last empty; return the new such time. Raises NVMLError.

        NVML gives an event no time: it occurred after the last wait that found none.
        """
        began = time.monotonic()
        waited: WaitedEvent | EventData
        try:
            if self._is_operational:
                waited = self._nvml.nvmlEventSetWait_v3(events, round(WAIT_SECONDS * 1000))
            else:
                waited = self._nvml.nvmlEventSetWait_v2(events, round(WAIT_SECONDS * 1000))
        except NVMLError as error:
            if code_of(error) == NO_EVENT:
                self._returned_at, self._failures = time.monotonic(), 0
            else:
                self._failures += 1
                if self._failures >= MAX_FAILURES or code_of(error) in DRIVER_GONE:
                    raise
            empty_at = time.monotonic()
            stop.wait(began + WAIT_SECONDS - empty_at)  # it may return early, and must not spin
            return empty_at
        self._returned_at, self._failures = time.monotonic(), 0
        if self._is_operational:
            self._record_waited(events, cast("WaitedEvent", waited), empty_at)
        else:
            self._record(cast("EventData", waited), known, empty_at)
        while max(len(self._pending), len(self._operational_pending)) >= MAX_PENDING and not stop.is_set():
            stop.wait(WAIT_SECONDS)
        return empty_at

    def _record(self, event: EventData, known: dict[Hashable, str], empty_at: float) -> None:
        uuid = known.get(handle_key(event.device))
        if uuid is None:
            try:
                uuid = self._nvml.nvmlDeviceGetUUID(event.device)
            except NVMLError:
                self.unknown += 1
                return
        if event.eventType & XID_EVENT:
            self._add_xid(XidReport("nvml", uuid, event.eventData, empty_at, time.monotonic(), time.time()))

    def _add_xid(self, report: XidReport) -> None:
        self._pending.append(report)
        self.on_xid()

    def _record_waited(self, events: EventSet, event: WaitedEvent, empty_at: float) -> None:
        """Record an event of nvmlEventSetWait_v3; of an operational one also its XIDs, each once for a group.

        The driver's time is used where it lies between the last empty wait and now.
        """
        uuid = event.uuid.decode(errors="replace")
        if not uuid:
            self.unknown += 1
            return
        now, wall = time.monotonic(), time.time()
        ago = wall - event.timestampUsec / _SECOND_MICROSECONDS
        is_plausible = -_MAX_CLOCK_ERROR_SECONDS <= ago <= now - empty_at + _MAX_CLOCK_ERROR_SECONDS
        at = wall - ago if is_plausible else wall
        if event.dataType != OPERATIONAL_EVENT:
            if event.eventType & XID_EVENT:
                self._add_xid(XidReport("nvml", uuid, event.eventData, empty_at, now, at))
            return
        found = _operational_event(event, uuid, at, self._legacy_xids(events))
        self._operational_pending.append(found)
        if self._group != (uuid, event.groupCursor):
            self._group, self._group_xids = (uuid, event.groupCursor), set()
        if event.groupAttributes & (OPERATIONAL_GROUP_PREVIOUS | OPERATIONAL_GROUP_SIMULATED):
            return  # a fault before the last start of the driver, or none
        for code in set(found.xids) - self._group_xids:
            self._group_xids.add(code)
            fatal = True if found.severity == "fatal" else None
            self._add_xid(XidReport("operational", uuid, code, empty_at, now, at, fatal))

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


def _ignore() -> None:
    """Do nothing."""
