"""Look at memory alone between the polls, so that a peak of a tenth of a second is seen."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from gpuwarden.nvml.binding import NOT_AVAILABLE_LONG, MemoryInfo

NO_LIMIT = float("inf")  # bytes in use that no GPU has
_MAX_SAMPLES = 1024  # between two readings of a GPU
_MAX_SLEEP_SECONDS = 0.5  # seconds until a thread sees that it is to end


class MemoryProbe:
    """Sampling state of one GPU's memory; nothing is sampled before `read` is set.

    The thread that looks writes `asked` and `seen`, the one that reads the GPU empties `seen`: neither waits.

    Armed, it rings once: when more than `limit` bytes are in use, or when the GPU ceases to answer. That is for the
    event loop to look into, which arms it again.
    """

    __slots__ = ("answers", "asked", "limit", "read", "ring", "seen")

    def __init__(self) -> None:
        self.limit = NO_LIMIT
        self.ring: Callable[[], object] | None = None
        self.answers = False
        self.read: Callable[[], MemoryInfo] | None = None  # blocks; raises what the driver answers with
        self.seen: deque[int] = deque(maxlen=_MAX_SAMPLES)  # bytes in use
        self.asked: float | None = None  # since when a read has been under way, by the monotonic clock

    def under_way_since(self, moment: float) -> bool:
        """Return whether a read has been under way since before that moment. Another thread may be looking."""
        asked = self.asked
        return asked is not None and asked < moment

    def highest(self) -> float:
        """Return the highest since the last call, 0 where nothing was seen. Another thread may be looking."""
        seen = [self.seen.popleft() for _ in range(len(self.seen))]
        if seen:
            self.answers = True
        return max((used for used in seen if used != NOT_AVAILABLE_LONG), default=0)

    def forget(self) -> None:
        """Drop what was seen since. For the thread that reads the GPU; another one may be looking."""
        self.seen.clear()

    def arm(self, limit: float, ring: Callable[[], object]) -> None:
        """Have `ring` called on the thread that looks; it must not block. Another thread may be looking."""
        self.ring, self.limit = ring, limit

    def disarm(self) -> None:
        """Ring no more. Another thread may be looking."""
        self.ring, self.limit = None, NO_LIMIT

    def sample(self) -> None:
        """Read once. For the thread that looks; blocks as long as the driver does."""
        if self.read is None:
            return
        self.asked = time.monotonic()
        try:
            self._take(self.read().used)
        except Exception:  # noqa: BLE001 - the next poll finds out what is wrong, and reports it
            self._miss()
        self.asked = None

    def _take(self, used: int) -> None:
        self.seen.append(used)
        if used > self.limit and used != NOT_AVAILABLE_LONG:
            self.limit = NO_LIMIT
            self._ring()

    def _miss(self) -> None:
        """Ring, unless the GPU has not answered since the last miss."""
        if self.answers:
            self.answers = False
            self._ring()

    def _ring(self) -> None:
        ring, self.ring = self.ring, None
        if ring is not None:
            ring()


class MemorySampler:
    """Looks at all GPUs from one thread, every `interval` seconds; used by one event loop.

    A look that hangs is left behind with its thread, and another thread goes on with the other GPUs. The thread lasts
    while there is something to look at.
    """

    name = "a look at a GPU's memory"

    def __init__(self, interval: float, patience: float) -> None:
        self._interval = interval
        self._patience = patience
        self._thread: _Thread | None = None
        self._ending: list[_Thread] = []

    @property
    def idle(self) -> bool:
        """True where no look is under way, nor will one begin before the next `watch`."""
        return self._thread is None and not any(thread.is_alive() for thread in self._ending)

    def watch(self, looks: Iterable[MemoryProbe]) -> None:
        """Look at these from now on, except for those under way for longer than `patience` seconds."""
        late = time.monotonic() - self._patience
        if self._thread and self._thread.hangs_since(late):
            self.stop()
        watched = tuple(look for look in looks if not look.under_way_since(late))
        if self._thread:
            self._thread.looks = watched
        elif watched:
            self._thread = _Thread(self._interval, watched)
            self._thread.start()
        if not watched:
            self.stop()

    def stop(self) -> None:
        """Look no more; a look under way comes to its end."""
        if self._thread:
            self._thread.end()
            self._ending = [*(thread for thread in self._ending if thread.is_alive()), self._thread]
            self._thread = None


class _Thread(threading.Thread):
    def __init__(self, interval: float, looks: tuple[MemoryProbe, ...]) -> None:
        # A daemon thread: one that hangs in the driver cannot be ended and must not keep the process from ending.
        super().__init__(name="memory", daemon=True)
        self.looks = looks
        self._interval = interval
        self._going = True
        self._look: MemoryProbe | None = None  # the one under way, or the last one

    def end(self) -> None:
        """Have it end soon, or when the look under way comes back."""
        self._going = False

    def hangs_since(self, moment: float) -> bool:
        """Return whether a look has been under way since before that moment (monotonic)."""
        look = self._look
        return look is not None and look.under_way_since(moment)

    def run(self) -> None:
        due = time.monotonic() + self._interval
        while self._going:
            now = time.monotonic()
            if now < due:
                time.sleep(min(due - now, _MAX_SLEEP_SECONDS))
                continue
            for look in self.looks:
                if self._going:
                    self._look = look
                    look.sample()
            due = max(due + self._interval, now)  # after a slow look: no burst to catch up
