"""Look at memory alone between the polls, so that a peak of a tenth of a second is seen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from gpuwarden.gpu.nvml import NOT_AVAILABLE_LONG


def _nothing() -> int:
    return 0


class Look:
    """How one GPU's memory is looked at; before the first `aim` there is nothing to see.

    Taken ten times a second with cold caches, a look costs by what it touches: it keeps the highest and no more.
    """

    __slots__ = ("_highest", "_lock", "_meter", "asked")

    def __init__(self) -> None:
        self._meter: Callable[[], int] = _nothing
        self._lock = threading.Lock()
        self._highest = 0.0
        self.asked: float | None = None  # since when a read has been under way, by the monotonic clock

    def aim(self, meter: Callable[[], int]) -> None:
        """Ask `meter` for the bytes in use from now on (nvml.memory_meter)."""
        self._meter = meter

    def take(self, now: float) -> None:
        """Look once. Blocks as long as the driver does."""
        self.asked = now
        try:
            used = self._meter()
        except Exception:  # noqa: BLE001 - the next poll finds out what is wrong, and says so; the other GPUs go on
            used = 0
        self.asked = None
        if used > self._highest and used != NOT_AVAILABLE_LONG:
            with self._lock:
                self._highest = max(used, self._highest)

    def highest(self) -> float:
        """Return the highest since the last call, 0 where nothing was seen. Another thread may be looking."""
        with self._lock:
            highest, self._highest = self._highest, 0.0
        return highest


class Sampler:
    """Looks at all GPUs from one thread, every `interval` seconds; used by one event loop.

    A look that hangs is left behind with its thread, and another thread goes on with the other GPUs. The thread lasts
    while there is something to look at.
    """

    name = "a look at a GPU's memory"

    def __init__(self, interval: float, patience: float) -> None:
        self._interval = interval
        self._patience = patience
        self._looks: tuple[Look, ...] = ()
        self._thread: _Thread | None = None
        self._ending: list[_Thread] = []

    @property
    def idle(self) -> bool:
        """Whether no look is under way, nor will one begin before the next `watch`."""
        return self._thread is None and not any(thread.is_alive() for thread in self._ending)

    def watch(self, looks: Iterable[Look]) -> None:
        """Look at these from now on, except for those under way for longer than `patience` seconds."""
        late = time.monotonic() - self._patience
        if self._thread and any(look.asked and look.asked < late for look in self._thread.looks):
            self.stop()
        self._looks = tuple(look for look in looks if look.asked is None or look.asked >= late)
        if self._thread:
            self._thread.looks = self._looks
        elif self._looks:
            self._thread = _Thread(self._interval, self._looks)
            self._thread.start()
        if not self._looks:
            self.stop()

    def stop(self) -> None:
        """Look no more; a look under way comes to its end."""
        if self._thread:
            self._thread.end()
            self._ending = [*(thread for thread in self._ending if thread.is_alive()), self._thread]
            self._thread = None


class _Thread(threading.Thread):
    def __init__(self, interval: float, looks: tuple[Look, ...]) -> None:
        # A daemon thread: one that hangs in the driver cannot be ended and must not keep the process from ending.
        super().__init__(name="memory", daemon=True)
        self.looks = looks
        self._interval = interval
        self._going = threading.Lock()  # held until the end: waiting for it is a sleep that can be cut short
        self._going.acquire()

    def end(self) -> None:
        """Have it end now, or when the look under way comes back. Once."""
        self._going.release()

    def run(self) -> None:
        due = time.monotonic()
        while True:
            now = time.monotonic()
            due = max(due + self._interval, now)  # after a slow look: no burst to catch up
            if self._going.acquire(timeout=due - now):
                return
            for look in self.looks:
                if not self._going.locked():
                    return
                look.take(due)
