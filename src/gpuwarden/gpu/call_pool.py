"""Blocking calls on threads that stand in for each other, so that one that hangs holds up no other."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")

HUNG_AFTER_TIMEOUTS = 3  # timeouts after which a call that has not come back hangs
IDLE_BEFORE_JOIN_SECONDS = 0.01  # that jobs wait while none begins, before another thread joins


class PooledCall(Generic[T]):
    """A blocking job; once `done`, its `outcome` is what it returned or raised."""

    __slots__ = ("_work", "done", "outcome")

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self.done = False
        self.outcome: T | Exception | None = None

    def run(self) -> None:
        """Do it, on a thread; once."""
        self.outcome = run_and_catch(self._work)
        self.done = True


class CallPool:
    """Threads that share blocking jobs: one does all, and another joins whenever none gets to the jobs that wait.

    Not a thread for each GPU, and no word to the event loop after each job: threads that wake while others run fight
    for the interpreter at every call, which doubles a poll's CPU time. So there are never more than jobs under way, and
    one that finds no more to do while another waits already ends. Used by one event loop.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[PooledCall[Any]] = queue.SimpleQueue()
        self._open: list[PooledCall[Any]] = []
        self._waiting: dict[asyncio.Future[None], list[PooledCall[Any]]] = {}  # who waits, for which jobs
        self._workers: list[int] = []  # by the kernel's thread id
        self._count = 0
        self._turn = threading.Lock()  # held by the one thread that waits for jobs with nothing else to do
        self._watch: asyncio.TimerHandle | None = None  # set while jobs are under way

    @property
    def uninterruptible(self) -> bool:
        """True if a call sleeps in the kernel where not even SIGKILL ends it (proc(5), state D)."""
        return any(map(_sleeps_uninterruptibly, self._workers))

    def submit(self, work: Callable[[], T]) -> PooledCall[T]:
        """Have it done as soon as a thread is free."""
        job = PooledCall(work)
        self._open.append(job)
        self._jobs.put(job)
        if self._count == 0:
            self._add()
        if self._watch is None:
            self._schedule_check()
        return job

    async def wait(self, jobs: Iterable[PooledCall[Any]], timeout: float) -> None:
        """Wait for jobs together, not longer than `timeout` seconds; a job under way is not cancelled.

        One future for all, as asyncio.wait takes three turns of the loop where this takes one.
        """
        pending = [job for job in jobs if not job.done]
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
                job = self._jobs.get()
            finally:
                self._turn.release()
            job.run()
            if self._jobs.empty():  # else the next job may hang, and the watch delivers
                self._call(loop, self._deliver)
        self._workers.remove(own)
        self._call(loop, self._worker_ended)

    @staticmethod
    def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(function)

    def _worker_ended(self) -> None:
        self._count -= 1

    def _deliver(self) -> None:
        self._open = [job for job in self._open if not job.done]
        for waiter, jobs in self._waiting.items():
            if all(job.done for job in jobs):
                _wake(waiter)
        if not self._open and self._watch:
            self._watch.cancel()  # or it would wake the process once a poll for nothing
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


def run_and_catch(job: Callable[[], T]) -> T | Exception:
    """Do a job; what it raises is its result."""
    try:
        return job()
    except Exception as error:  # noqa: BLE001 - whatever the job raises belongs to who asked
        return error


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class RepeatedCall(Generic[T]):
    """Has one blocking job done, again and again, one at a time: `start` it, `wait_for_all` of them, then `collect`.

    A slow driver's answer comes late, but it comes: the next `start` goes on with it, and one that came between two of
    them counts. A job under way for longer than LATE timeouts hangs: it is not waited for, and what it says in the end
    is old and thrown away.
    """

    def __init__(self, threads: CallPool, work: Callable[[], T]) -> None:
        self._threads = threads
        self._work = work
        self._current: PooledCall[T] | None = None
        self._began = 0.0
        self.awaited: PooledCall[T] | None = None
        self.discarded = False  # whether what the job said before the one under way was thrown away

    def start(self, timeout: float) -> None:
        """Begin the job, unless it is under way; it is then `awaited`, unless it hangs."""
        now = time.monotonic()
        old = now - self._began > HUNG_AFTER_TIMEOUTS * timeout
        if self._current is None or (old and self._current.done):
            self.discarded = self._current is not None
            self._current, self._began = self._threads.submit(self._work), now
        elif old:
            self.awaited = None
            return
        self.awaited = self._current

    def collect(self) -> T:
        """Return the answer, once; raises what the job raised, or TimeoutError while there is none."""
        awaited, self.awaited = self.awaited, None
        if awaited is None or not awaited.done:
            raise TimeoutError
        self._current = None
        if isinstance(awaited.outcome, Exception):
            raise awaited.outcome
        return cast("T", awaited.outcome)

    @property
    def under_way(self) -> bool:
        """True while the job is under way."""
        return self._current is not None and not self._current.done

    def discard(self) -> None:
        """Throw an answer away that nobody has taken."""
        if not self.under_way:
            self._current = self.awaited = None

    async def run(self, timeout: float) -> T:
        """Have it done alone: raises as `collect` does."""
        self.start(timeout)
        await wait_for_all(self._threads, [self], timeout)
        return self.collect()


async def wait_for_all(threads: CallPool, lines: Iterable[RepeatedCall[Any]], timeout: float) -> None:
    """Wait for the jobs begun, together: a wait for each would cost as much as reading a GPU does."""
    await threads.wait([line.awaited for line in lines if line.awaited], timeout)
