"""Listener for the events of one source, on its own thread: a hanging wait affects nothing else."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any, Generic

from gpuwarden.nvml.events.event_sources import E, EventSource
from gpuwarden.nvml.return_codes import UNSUPPORTED, NVMLError, code_of, error_name
from gpuwarden.nvml.session import DriverVersions

log = logging.getLogger(__name__)

WAIT_SECONDS = 2.0  # timeout of a wait, after which the thread checks for a stop; runtime suspend waits 3 s for that
RETRY_SECONDS = 5.0  # before a failed event set is created again, or a GPU registered again
HUNG_SECONDS = 10.0  # without a wait that returned, after which the wait counts as hung
MAX_PENDING = 1024  # events received but not drained; beyond, they stay in the driver


class EventListener(Generic[E]):
    """Listener for the events of one source, on a thread that exists only while there is something to wait for.

    Used by one event loop. To shut the driver down, call `stop` and wait until it is `idle`.
    """

    def __init__(self, source: EventSource[E, Any]) -> None:
        self.name = f"the wait for {source.name}"
        self.on_event: Callable[[E], object] = _ignore  # called on the thread
        self._source = source  # used by the thread only
        self._up: AbstractSet[str] = frozenset()  # by UUID
        self._gpus: AbstractSet[str] = frozenset()  # all that were up at any time
        self._driver: DriverVersions | None = None
        self._round = 0  # number of registrations: a GPU reset and a new driver session lose them
        self._without_events = 0  # the round in which there was nothing to wait for
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._returned_at: float | None = None  # when a wait last returned; None without something to wait for
        self._pending: deque[E] = deque()

    @property
    def listening(self) -> bool:
        """True if events are received: there is something to wait for, and the wait does not hang."""
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
        self._thread = threading.Thread(target=self._run, args=(self._stop,), name=self._source.name, daemon=True)
        self._thread.start()

    def drain(self) -> list[E]:
        """Return the events since the last call, in order."""
        return [self._pending.popleft() for _ in range(len(self._pending))]

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
                log.debug("restarting %s error=%s", self.name, error_name(error))
                stop.wait(RETRY_SECONDS)
                continue
            except Exception:
                log.exception("%s failed", self.name)
                supported = False
            finally:
                self._returned_at = None
            if not supported:
                self._without_events = number
                return

    def _listen(self, number: int, stop: threading.Event) -> bool:
        """Listen until the set of GPUs changes; return False if there is nothing to wait for. Raises NVMLError."""
        driver = self._driver
        try:
            try:
                self._source.open()
            except NVMLError as error:
                if code_of(error) in UNSUPPORTED:
                    return False
                raise
            return self._receive(number, stop)
        finally:
            # A new session of the driver has freed the sets of the old one; they must not be used.
            if self._driver is driver:
                with contextlib.suppress(NVMLError):
                    self._source.close()

    def _receive(self, number: int, stop: threading.Event) -> bool:
        source = self._source
        missing, retry_at = set(self._gpus), 0.0
        while not stop.is_set():
            if missing and time.monotonic() >= retry_at:
                missing -= {uuid for uuid in missing & self._up if source.register(uuid)}
                retry_at = time.monotonic() + RETRY_SECONDS
            if not source.active and not missing:
                return False
            received = self._wait(stop)
            if source.active:
                self._returned_at = time.monotonic()
            if not received and self._round != number:  # after an event more may follow, and would be lost with the set
                break
        return True

    def _wait(self, stop: threading.Event) -> bool:
        """Wait for an event; return whether there was one. Raises NVMLError."""
        began = time.monotonic()
        found = self._source.wait(WAIT_SECONDS) if self._source.active else None
        for event in found or ():
            self._pending.append(event)
            self.on_event(event)
        if found is None:
            stop.wait(began + WAIT_SECONDS - time.monotonic())  # a wait may return early, and must not spin
        while len(self._pending) >= MAX_PENDING and not stop.is_set():
            stop.wait(WAIT_SECONDS)
        return found is not None


def _ignore(_event: object) -> None:
    """Do nothing."""
