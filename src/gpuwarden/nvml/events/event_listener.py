"""Listener for the driver's events, on its own thread: a hanging wait affects nothing else."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import TypeVar

from gpuwarden.nvml.events.event_sources import EventSource, OperationalSource, SystemSource, UnknownGpuError, XidSource
from gpuwarden.nvml.events.model import DriverBinding, DriverEvent, OperationalEvent, XidReport
from gpuwarden.nvml.interface import EventSet, Nvml
from gpuwarden.nvml.return_codes import DRIVER_GONE, UNSUPPORTED, NVMLError, code_of, error_name
from gpuwarden.nvml.session import DriverVersions

log = logging.getLogger(__name__)

WAIT_SECONDS = 2.0  # timeout of a wait, after which the thread checks for a stop; runtime suspend waits 3 s for that
_SHORT_WAIT_SECONDS = 0.001  # timeout of all waits of a round but the last
RETRY_SECONDS = 5.0  # before a failed event set is created again, or a GPU registered again
HUNG_SECONDS = 10.0  # without a wait that returned, after which the wait counts as hung
MAX_PENDING = 1024  # events received but not drained; beyond, they stay in the driver

E = TypeVar("E", XidReport, OperationalEvent, DriverBinding)


class EventListener:
    """Listener for the events of all GPUs, on a thread that exists only while there is something to wait for.

    Used by one event loop. To shut the driver down, call `stop` and wait until it is `idle`.
    """

    name = "the wait for driver events"

    def __init__(self, nvml: Nvml) -> None:
        self.on_event: Callable[[DriverEvent], object] = _ignore  # called on the thread
        self.unknown = 0  # events of GPUs that could not be identified
        self._nvml = nvml
        self._up: AbstractSet[str] = frozenset()  # by UUID
        self._gpus: AbstractSet[str] = frozenset()  # all that were up at any time
        self._driver: DriverVersions | None = None
        self._round = 0  # number of registrations: a GPU reset and a new driver session lose them
        self._without_events = 0  # the round in which there was nothing to wait for
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._returned_at: float | None = None  # when a wait for XIDs last returned; None without an event set
        self._pending: dict[type, deque[DriverEvent]] = {
            kind: deque() for kind in (XidReport, OperationalEvent, DriverBinding)
        }
        self._groups: dict[str, tuple[int, set[int]]] = {}

    @property
    def listening(self) -> bool:
        """True if XIDs are received: there is an event set, and the wait for it does not hang."""
        returned_at = self._returned_at
        return returned_at is not None and time.monotonic() - returned_at < HUNG_SECONDS

    def follow(self, up: AbstractSet[str], driver: DriverVersions | None) -> None:
        """Listen to the GPUs that answered a poll, by UUID; register those that came back again. Does not block."""
        came, self._up, self._gpus = up - self._up, up, self._gpus | up
        if driver is None:
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

    def drain(self, kind: type[E]) -> list[E]:
        """Return the events of a kind since the last call, in order."""
        pending = self._pending[kind]
        taken = [pending.popleft() for _ in range(len(pending))]
        return [event for event in taken if isinstance(event, kind)]

    def stop(self) -> None:
        """End the wait and free the event sets, within about two seconds; events not drained are kept."""
        self._stop.set()

    @property
    def idle(self) -> bool:
        """True if no wait is in progress and the sets are freed, so that the driver can be shut down."""
        return self._thread is None or not self._thread.is_alive()

    # On the thread.

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            number = self._round
            try:
                supported = self._listen(number, stop)
            except NVMLError as error:
                log.debug("restarting event listener error=%s", error_name(error))
                stop.wait(RETRY_SECONDS)
                continue
            except Exception:
                log.exception("event listener failed")
                supported = False
            finally:
                self._returned_at = None
            if not supported:
                self._without_events = number
                return

    def _listen(self, number: int, stop: threading.Event) -> bool:
        """Listen until the set of GPUs changes; return False if there is nothing to wait for. Raises NVMLError."""
        driver, gone = self._driver, False
        try:
            events = self._nvml.nvmlEventSetCreate()
        except NVMLError as error:
            if code_of(error) in UNSUPPORTED:
                return False
            raise
        system = SystemSource(self._nvml)
        try:
            system.open()
            return self._keep_listening(number, events, system, stop)
        except NVMLError as error:
            gone = code_of(error) in DRIVER_GONE
            raise
        finally:
            # A driver that went away has freed its sets; they must not be used.
            if not gone and self._driver is driver:
                for free in (system.close, partial(self._nvml.nvmlEventSetFree, events)):
                    with contextlib.suppress(NVMLError):
                        free()

    def _keep_listening(self, number: int, events: EventSet, system: SystemSource, stop: threading.Event) -> bool:
        xids, operational = XidSource(self._nvml, events), OperationalSource(self._nvml, events, self._groups)
        missing, retry_at = set(self._gpus), 0.0
        while not stop.is_set():
            if missing and time.monotonic() >= retry_at:
                missing -= {uuid for uuid in missing & self._up if _register(uuid, xids, operational)}
                retry_at = time.monotonic() + RETRY_SECONDS
            # XIDs come last: only the last source has the long wait.
            sources = [each for each in (system, operational if operational.active else xids) if each.active]
            if not sources and not missing:
                return False
            received = self._wait(sources, stop)
            if xids.active:
                self._returned_at = time.monotonic()
            if not received and self._round != number:  # after an event more may follow, and would be lost with the set
                break
        return True

    def _wait(self, sources: Sequence[EventSource], stop: threading.Event) -> bool:
        """Wait for an event of each source, long for the last one's; return whether there was any. Raises NVMLError."""
        began, received = time.monotonic(), False
        for source in sources:
            try:
                found = source.wait(WAIT_SECONDS if source is sources[-1] else _SHORT_WAIT_SECONDS)
            except UnknownGpuError:
                self.unknown += 1
                found, received = (), True
            for event in found:
                received = True
                self._pending[type(event)].append(event)
                self.on_event(event)
        if not received:
            stop.wait(began + WAIT_SECONDS - time.monotonic())  # a wait may return early, and must not spin
        while max(map(len, self._pending.values())) >= MAX_PENDING and not stop.is_set():
            stop.wait(WAIT_SECONDS)
        return received


def _register(uuid: str, xids: XidSource, operational: OperationalSource) -> bool:
    """Register a GPU for events; return False if that has to be retried. Raises NVMLError if the driver went away."""
    try:
        xids.register(uuid)
    except NVMLError as error:
        if code_of(error) in DRIVER_GONE:
            raise
        return code_of(error) in UNSUPPORTED
    operational.register(uuid)
    return True


def _ignore(_event: DriverEvent) -> None:
    """Do nothing."""
