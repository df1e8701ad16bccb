"""Thread pool for blocking driver calls, in which a call that hangs does not block the others."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar

from gpuwarden.host.call_thread import complete

T = TypeVar("T")

HUNG_AFTER_TIMEOUTS = 3  # timeouts after which a call that has not returned counts as hung
IDLE_BEFORE_JOIN_SECONDS = 0.01  # for which jobs wait while none starts, before another thread is added


class CallPool:
    """Thread pool in which one thread runs all jobs, and another is added whenever waiting jobs make no progress.

    One thread per GPU, or a wake-up of the event loop after each job, would double a poll's CPU time: threads that wake
    up compete for the interpreter at every call. So there are never more threads than jobs in progress, and a thread
    without work ends if another one already waits. Used by one event loop.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._open: list[Future[Any]] = []
        self._waiting: dict[asyncio.Future[None], list[Future[Any]]] = {}  # waiters, with the jobs that each waits for
        self._workers: list[int] = []  # thread ids of the kernel
        self._count = 0
        self._turn = threading.Lock()  # held by the one idle thread that waits for jobs
        self._watch: asyncio.TimerHandle | None = None  # set while jobs are in progress

    @property
    def pending(self) -> int:
        """Number of jobs that have not ended."""
        return sum(not job.done() for job in self._open)

    @property
    def uninterruptible(self) -> bool:
        """True if a call hangs in the kernel where not even SIGKILL ends it (proc(5), state D)."""
        return any(map(_sleeps_uninterruptibly, self._workers))

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run a job as soon as a thread is free."""
        job: Future[T] = Future()
        self._open.append(job)
        self._jobs.put((job, work))
        if self._count == 0:
            self._add()
        if self._watch is None:
            self._schedule_check()
        return job

    async def wait(self, jobs: Iterable[Future[Any]], timeout: float) -> None:
        """Wait for all jobs, at most `timeout` seconds; a job in progress is not cancelled.

        One future for all jobs: asyncio.wait would take three iterations of the loop instead of one.
        """
        pending = [job for job in jobs if not job.done()]
        if not pending:
            return
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting[waiter] = pending
        late = loop.call_later(timeout, _wake, waiter)
        try:
            await waiter
        finally:
            late.cancel()
            del self._waiting[waiter]

    def _add(self) -> None:
        self._count += 1
        # A daemon thread: one that hangs in the driver cannot be ended and must not keep the process from ending.
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._work, args=(loop,), name="driver", daemon=True).start()

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        own = threading.get_native_id()
        self._workers.append(own)
        while self._turn.acquire(blocking=False):
            try:
                job, work = self._jobs.get()
            finally:
                self._turn.release()
            complete(job, work)
            if self._jobs.empty():  # otherwise the check delivers: the next job may hang
                self._call(loop, self._deliver)
        self._workers.remove(own)
        self._call(loop, self._worker_ended)

    @staticmethod
    def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, nothing waits
            loop.call_soon_threadsafe(function)

    def _worker_ended(self) -> None:
        self._count -= 1

    def _deliver(self) -> None:
        self._open = [job for job in self._open if not job.done()]
        for waiter, jobs in self._waiting.items():
            if all(job.done() for job in jobs):
                _wake(waiter)
        if not self._open and self._watch:
            self._watch.cancel()  # it would wake the process once a poll for nothing
            self._watch = None

    def _schedule_check(self) -> None:
        self._watch = asyncio.get_running_loop().call_later(IDLE_BEFORE_JOIN_SECONDS, self._check, self._jobs.qsize())

    def _check(self, waiting: int) -> None:
        self._watch = None
        self._deliver()
        if self._jobs.empty():
            return
        if self._jobs.qsize() >= waiting and self._count < len(self._open):
            self._add()
        self._schedule_check()


def _sleeps_uninterruptibly(thread: int) -> bool:
    try:
        return Path(f"/proc/self/task/{thread}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"D"
    except OSError:
        return False


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class RepeatedCall(Generic[T]):
    """Blocking job that is repeated, one at a time: `start` it, `wait_for_all` jobs, then `collect` the result.

    A late result still counts: the next `start` continues with a job in progress, and uses a result that arrived in
    between. A job in progress for longer than HUNG_AFTER_TIMEOUTS timeouts is hung: nothing waits for it, and its
    result, when it arrives, is outdated and discarded.
    """

    def __init__(self, threads: CallPool, work: Callable[[], T]) -> None:
        self._threads = threads
        self._work = work
        self._current: Future[T] | None = None
        self._began = 0.0
        self.awaited: Future[T] | None = None
        self.discarded = False  # whether the result before the job in progress was discarded

    def start(self, timeout: float) -> None:
        """Start the job, unless it is in progress; it is then `awaited`, unless it hangs."""
        if self.is_hung(timeout):
            self.awaited = None
            return
        if self._current is None or self._is_old(timeout):
            self.discarded = self._current is not None
            self._current, self._began = self._threads.submit(self._work), time.monotonic()
        self.awaited = self._current

    def collect(self) -> T:
        """Return the result, once. Raises what the job raised, or TimeoutError while there is no result."""
        awaited, self.awaited = self.awaited, None
        if awaited is None or not awaited.done():
            raise TimeoutError
        self._current = None
        return awaited.result()

    @property
    def under_way(self) -> bool:
        """True while the job is in progress."""
        return self._current is not None and not self._current.done()

    def is_hung(self, timeout: float) -> bool:
        """Return whether the job has been in progress for more than HUNG_AFTER_TIMEOUTS times `timeout` (seconds)."""
        return self.under_way and self._is_old(timeout)

    def _is_old(self, timeout: float) -> bool:
        return time.monotonic() - self._began > HUNG_AFTER_TIMEOUTS * timeout

    def discard(self) -> None:
        """Discard a result that was not collected."""
        if not self.under_way:
            self._current = self.awaited = None

    async def run(self, timeout: float) -> T:
        """Start the job, wait for it and return its result. Raises as `collect` does."""
        self.start(timeout)
        await wait_for_all(self._threads, [self], timeout)
        return self.collect()


async def wait_for_all(threads: CallPool, calls: Iterable[RepeatedCall[Any]], timeout: float) -> None:
    """Wait for all started jobs together: a separate wait for each costs as much as reading a GPU."""
    await threads.wait([call.awaited for call in calls if call.awaited], timeout)
