"""Sampler of device memory between polls, which catches peaks of a tenth of a second."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from gpuwarden.gpu.snapshot import MemorySample
from gpuwarden.nvml.constants import NOT_AVAILABLE_LONG
from gpuwarden.nvml.interface import MemoryInfo

NO_LIMIT = float("inf")  # bytes in use that no GPU reaches
_MAX_SAMPLES = 1024  # between two readings of a GPU
_MAX_SLEEP_SECONDS = 0.5  # until a thread notices that it should end


class MemoryProbe:
    """Sampling state of one GPU's memory; nothing is sampled before `read` is set.

    The sampling thread writes `reading_since` and `samples`, the thread that reads the GPU empties `samples`; neither
    waits. When armed it notifies once: if more than `limit` bytes are in use, or if the GPU stops answering. The event
    loop arms it again.
    """

    __slots__ = ("answers", "limit", "notify", "read", "reading_since", "samples")

    def __init__(self) -> None:
        self.limit = NO_LIMIT
        self.notify: Callable[[], object] | None = None
        self.answers = False
        self.read: Callable[[], MemoryInfo] | None = None  # blocks; raises NVMLError
        self.samples: deque[MemorySample] = deque(maxlen=_MAX_SAMPLES)
        self.reading_since: float | None = None  # start of the read in progress (monotonic)

    def is_reading_since(self, moment: float) -> bool:
        """Return whether a read in progress started before that moment. Another thread may be sampling."""
        since = self.reading_since
        return since is not None and since < moment

    def pop_samples(self) -> tuple[MemorySample, ...]:
        """Return the samples since the last call. Another thread may be sampling."""
        samples = [self.samples.popleft() for _ in range(len(self.samples))]
        if samples:
            self.answers = True
        return tuple(sample for sample in samples if sample[1] != NOT_AVAILABLE_LONG)

    def clear(self) -> None:
        """Drop the samples. For the thread that reads the GPU; another thread may be sampling."""
        self.samples.clear()

    def arm(self, limit: float, notify: Callable[[], object]) -> None:
        """Call `notify` on the sampling thread; it must not block. Another thread may be sampling."""
        self.notify, self.limit = notify, limit

    def disarm(self) -> None:
        """Stop notifying. Another thread may be sampling."""
        self.notify, self.limit = None, NO_LIMIT

    def sample(self) -> None:
        """Read once. For the sampling thread; blocks as long as the driver does."""
        if self.read is None:
            return
        self.reading_since = time.monotonic()
        try:
            self._record(self.read().used)
        except Exception:  # noqa: BLE001 - the next poll finds the error and reports it
            self._record_failure()
        self.reading_since = None

    def _record(self, used: int) -> None:
        self.samples.append((time.monotonic(), used))
        if used > self.limit and used != NOT_AVAILABLE_LONG:
            self.limit = NO_LIMIT
            self._notify()

    def _record_failure(self) -> None:
        """Notify if the GPU has answered since the last failure."""
        if self.answers:
            self.answers = False
            self._notify()

    def _notify(self) -> None:
        notify, self.notify = self.notify, None
        if notify is not None:
            notify()


class MemorySampler:
    """Sampler of the memory of all GPUs on one thread, every `interval` seconds. Used by one event loop.

    If a sample hangs, its thread is abandoned, and a new thread continues with the other GPUs. The thread exists only
    while there is something to sample.
    """

    name = "a memory sample"

    def __init__(self, interval: float, patience: float) -> None:
        self._interval = interval
        self._patience = patience
        self._thread: _Thread | None = None
        self._ending: list[_Thread] = []

    @property
    def idle(self) -> bool:
        """True if no sample is in progress, and none will start before the next `watch`."""
        return self._thread is None and not any(thread.is_alive() for thread in self._ending)

    def watch(self, probes: Iterable[MemoryProbe]) -> None:
        """Sample these from now on, except those whose sample takes longer than `patience` seconds."""
        late = time.monotonic() - self._patience
        if self._thread and self._thread.is_hung_since(late):
            self.stop()
        watched = tuple(probe for probe in probes if not probe.is_reading_since(late))
        if self._thread:
            self._thread.probes = watched
        elif watched:
            self._thread = _Thread(self._interval, watched)
            self._thread.start()
        if not watched:
            self.stop()

    def stop(self) -> None:
        """Stop sampling; a sample in progress ends on its own."""
        if self._thread:
            self._thread.end()
            self._ending = [*(thread for thread in self._ending if thread.is_alive()), self._thread]
            self._thread = None


class _Thread(threading.Thread):
    def __init__(self, interval: float, probes: tuple[MemoryProbe, ...]) -> None:
        # A daemon thread: one that hangs in the driver cannot be ended and must not keep the process from ending.
        super().__init__(name="memory", daemon=True)
        self.probes = probes
        self._interval = interval
        self._going = True
        self._probe: MemoryProbe | None = None  # of the sample in progress, or the last one

    def end(self) -> None:
        """End soon, or when the sample in progress returns."""
        self._going = False

    def is_hung_since(self, moment: float) -> bool:
        """Return whether a sample in progress started before that moment (monotonic)."""
        probe = self._probe
        return probe is not None and probe.is_reading_since(moment)

    def run(self) -> None:
        due = time.monotonic() + self._interval
        while self._going:
            now = time.monotonic()
            if now < due:
                time.sleep(min(due - now, _MAX_SLEEP_SECONDS))
                continue
            for probe in self.probes:
                if self._going:
                    self._probe = probe
                    probe.sample()
            due = max(due + self._interval, now)  # after a slow sample: no burst to catch up
