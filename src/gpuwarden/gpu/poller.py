"""Poll all GPUs on threads that stand in for each other: a driver call that hangs costs its GPU, never another one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from gpuwarden.gpu.advice import advice, hidden_gpus
from gpuwarden.gpu.host_memory import HostMemory, host_memory
from gpuwarden.gpu.identity import identify, if_supported
from gpuwarden.gpu.nvml import DRIVER_GONE, Handle, Nvml, NVMLError, code_of, error_name
from gpuwarden.gpu.reader import DEFAULT_PLAN, Answers, GpuGoneError, GpuReader, Plan
from gpuwarden.gpu.sampler import Look, Sampler
from gpuwarden.gpu.snapshot import HUNG, Driver, Gpu, Identity, Snapshot

T = TypeVar("T")
log = logging.getLogger(__name__)

LONGEST_CALL_SECONDS = 10.0  # that an answer is waited for, where the interval is not shorter
LATE = 3  # timeouts after which a call that has not come back hangs
TELL_SECONDS = 60.0  # in which a GPU's changes are logged twice at most
RETRY_SECONDS = 5.0  # between attempts to initialise a driver that is not there
_PHASES = 8  # into which the GPUs' slow tiers are dealt
PATIENCE_SECONDS = 0.01  # that jobs wait while none begins, before another thread joins


class HiddenGpusError(Exception):
    """The machine has GPUs that NVML does not list; the text says why."""


class _Threads:
    """Threads that share blocking jobs: one does all, and another joins whenever none gets to the jobs that wait.

    Not a thread for each GPU, and no word to the event loop after each job: threads that wake while others run fight
    for the interpreter at every call, which doubles a poll's CPU time. So there are never more than jobs under way, and
    one that finds no more to do while another waits already ends.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[tuple[asyncio.Future[Any], Any]] = queue.SimpleQueue()
        self._open: list[asyncio.Future[Any]] = []
        self._workers: list[int] = []  # by the kernel's thread id
        self._count = 0
        self._turn = threading.Lock()  # held by the one thread that waits for jobs with nothing else to do
        self._watch: asyncio.TimerHandle | None = None  # set while jobs are under way

    @property
    def uninterruptible(self) -> bool:
        """Whether a call sleeps in the kernel where not even SIGKILL ends it (proc(5), state D)."""
        return any(map(_sleeps_uninterruptibly, self._workers))

    def give(self, job: Callable[[], T]) -> asyncio.Future[T | Exception]:
        """Have a job done as soon as a thread is free, on the running loop; what it raises is its result."""
        future: asyncio.Future[T | Exception] = asyncio.get_running_loop().create_future()
        self._open.append(future)
        self._jobs.put(lambda: self._outcomes.put((future, _outcome(job))))
        if self._count == 0:
            self._add()
        if self._watch is None:
            self._look_after()
        return future

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
            job()
            if self._jobs.empty():  # else the next job may hang, and the watch delivers
                self._call(loop, self._deliver)
        self._workers.remove(own)
        self._call(loop, self._gone)

    @staticmethod
    def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(function)

    def _gone(self) -> None:
        self._count -= 1

    def _deliver(self) -> None:
        while not self._outcomes.empty():
            future, outcome = self._outcomes.get()
            if not future.done():  # a cancelled one
                future.set_result(outcome)
        self._open = [future for future in self._open if not future.done()]
        if not self._open and self._watch:
            self._watch.cancel()  # or it would wake the process once a poll for nothing
            self._watch = None

    def _look_after(self) -> None:
        self._watch = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._check, self._jobs.qsize())

    def _check(self, waiting: int) -> None:
        self._watch = None
        self._deliver()
        if self._jobs.empty():
            return
        if self._jobs.qsize() >= waiting and self._count < len(self._open):
            self._add()
        self._look_after()


def _sleeps_uninterruptibly(thread: int) -> bool:
    try:
        return Path(f"/proc/self/task/{thread}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"D"
    except OSError:
        return False


def _outcome(job: Callable[[], T]) -> T | Exception:
    try:
        return job()
    except Exception as error:  # noqa: BLE001 - whatever the job raises belongs to who asked
        return error


class _Line(Generic[T]):
    """Has one blocking job done, again and again, one at a time: `begin` it, wait for `_all` that were, then `take`.

    A slow driver's answer comes late, but it comes: the next `begin` goes on with it, and one that came between two of
    them counts. A job under way for longer than LATE timeouts hangs: it is not waited for, and what it says in the end
    is old and thrown away.
    """

    def __init__(self, threads: _Threads, job: Callable[[], T]) -> None:
        self._threads = threads
        self._job = job
        self._current: asyncio.Future[T | Exception] | None = None
        self._began = 0.0
        self.awaited: asyncio.Future[T | Exception] | None = None

    def begin(self, timeout: float) -> None:
        """Begin the job, unless it is under way; `awaited` is then its end, or None where it hangs."""
        now = time.monotonic()
        old = now - self._began > LATE * timeout
        if self._current is None or (old and self._current.done()):
            self._current, self._began = self._threads.give(self._job), now
        elif old:
            self.awaited = None
            return
        self.awaited = self._current

    def take(self) -> T:
        """Return the answer, once; raises what the job raised, or TimeoutError while there is none."""
        awaited, self.awaited = self.awaited, None
        if awaited is None or not awaited.done():
            raise TimeoutError
        self._current = None
        outcome = awaited.result()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def run(self, timeout: float) -> T:
        """Have it done alone: raises as `take` does."""
        self.begin(timeout)
        await _all([self], timeout)
        return self.take()


async def _all(lines: Iterable[_Line[Any]], timeout: float) -> None:
    """Wait for the jobs begun, together: a wait for each would cost as much as reading a GPU does."""
    futures = [line.awaited for line in lines if line.awaited]
    if futures:
        await asyncio.wait(futures, timeout=timeout)  # not wait_for: a job under way cannot be cancelled


class _Gpu:
    """One GPU: how it is read, and its health so far. Known by its index until it is identified."""

    def __init__(self, nvml: Nvml, index: int, threads: _Threads, new_reader: Callable[[Handle], GpuReader]) -> None:
        self._nvml = nvml
        self._index = index
        self._new_reader = new_reader
        self._reader: GpuReader | None = None
        self._handle: Handle | None = None
        self._errors: Counter[str] = Counter()
        self._identifying = _Line(threads, self._look_up)
        self.reading = _Line(threads, self._read)
        self._was_up = True
        self._told: list[float] = []  # when the last changes were logged
        self._identity: Identity | None = None
        self._last_success: float | None = None

    @property
    def identity(self) -> Identity:
        """Who this is; known once `identify` has come back."""
        assert self._identity is not None
        return self._identity

    @property
    def look(self) -> Look | None:
        """How its memory is looked at between polls; None where it cannot be, or did not answer."""
        return self._reader.look if self._reader and self._was_up else None

    def met_again(self, stranger: _Gpu) -> None:
        """Take what the driver says of it now: its index may be another after GPUs came and went."""
        self._handle, self._identity = stranger._handle, stranger._identity

    def complain(self, fault: str) -> None:
        """Say once that it does not tell who it is."""
        if self._was_up:
            log.error(
                "the GPU of index %d does not say who it is: %s; it has no series until it does", self._index, fault
            )
        self._was_up = False

    async def identify(self, timeout: float) -> None:
        """Ask who this is. Raises NVMLError or TimeoutError."""
        self._handle, self._identity = await self._identifying.run(timeout)

    def _look_up(self) -> tuple[Handle, Identity]:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(self._index)
        return handle, identify(self._nvml, handle, self._index)

    def result(self) -> Gpu:
        """Return what the `reading` begun has found; whatever happened is told in it."""
        try:
            answers = self.reading.take()
        except GpuGoneError as error:
            return self._down(error.name)
        except TimeoutError:
            return self._down(HUNG)
        except Exception:
            log.exception("gpu=%s could not be read", self.identity.uuid)
            return self._down("internal")
        self._errors += answers.errors
        self._last_success = answers.time
        if not self._was_up:
            self._tell(logging.WARNING, "answers again")
        self._was_up = True
        return Gpu(
            identity=self.identity,
            fault=None,
            readings=answers.readings,
            processes=answers.processes,
            last_success=self._last_success,
            errors=dict(self._errors),
            process_lists=answers.process_lists,
            mig=answers.mig,
        )

    def _read(self) -> Answers:
        """Read, on a thread. After a failure the handle is looked up anew: a reset invalidates old ones."""
        if self._handle is None:
            try:
                self._handle = self._nvml.nvmlDeviceGetHandleByUUID(self.identity.uuid)
            except NVMLError as error:
                raise GpuGoneError(error_name(error)) from None
        try:
            if self._reader is None:
                self._reader = self._new_reader(self._handle)
            elif self._reader.handle is not self._handle:
                self._reader.attach(self._handle)
            return self._reader.read()
        except Exception:
            self._handle = None
            raise

    def _tell(self, level: int, what: str) -> None:
        """Log a change; of a GPU that comes and goes, a slow one say, two changes a minute."""
        now = time.monotonic()
        self._told = [moment for moment in self._told if now - moment < TELL_SECONDS]
        if len(self._told) < 2:  # noqa: PLR2004 - down and up again
            self._told.append(now)
            log.log(level, "gpu=%s index=%d %s", self.identity.uuid, self.identity.index, what)

    def _down(self, fault: str) -> Gpu:
        self._errors[fault] += 1
        if self._was_up:
            hint = " (if it is only slow, raise poll.interval)" if fault == HUNG else ""
            self._tell(logging.ERROR, f"does not answer: {fault}{hint}")
        self._was_up = False
        return Gpu(self.identity, fault=fault, last_success=self._last_success, errors=dict(self._errors))


class Poller:
    """Keeps the driver initialised, knows its GPUs and polls them. One event loop uses it, one poll at a time."""

    def __init__(
        self,
        nvml: Nvml,
        interval: float,
        *,
        plan: Plan = DEFAULT_PLAN,
        memory_interval: float = math.inf,
        host_memory: Callable[[], HostMemory] = host_memory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._nvml = nvml
        self._plan = plan
        self._host_memory = host_memory
        self._clock = clock
        self._timeout = min(interval, LONGEST_CALL_SECONDS)
        self._sampler = Sampler(memory_interval, self._timeout) if memory_interval < interval else None
        self._threads = _Threads()
        self._counting = _Line(self._threads, self._ask_driver)
        self._gpus: dict[str, _Gpu] = {}  # by UUID
        self._strangers: dict[int, _Gpu] = {}  # by index: enumerated and not yet identified
        self._driver: Driver | None = None
        self._errors: Counter[str] = Counter()
        self._last_success: float | None = None
        self._initialised = False
        self._enumerated: int | None = None  # None: every index is to be looked at anew
        self._refused: Exception | None = None
        self._retry_at = 0.0
        self._fault: str | None = None

    @property
    def uninterruptible(self) -> bool:
        """Whether a call hangs beyond the reach of signals, so that this process could not be ended."""
        return self._threads.uninterruptible

    async def poll(self) -> Snapshot:
        """Read everything; takes at most three intervals and 30 s, however the driver behaves."""
        began, started = time.time(), time.perf_counter()
        known = list(self._gpus.values())
        self._counting.begin(self._timeout)
        if self._initialised:
            self._begin(known)  # together with the count: going round the threads twice costs half a poll's time
        await _all([self._counting], self._timeout)
        count = self._count(began)
        if count is not None:
            await self._meet(count)
        # Those known are asked even when the driver as a whole is at fault: each answers for itself.
        self._begin([gpu for gpu in self._gpus.values() if not gpu.reading.awaited])
        known = sorted(self._gpus.values(), key=lambda gpu: gpu.identity.index)
        await _all([gpu.reading for gpu in known], self._timeout)
        gpus = tuple(gpu.result() for gpu in known)
        if self._sampler:
            self._sampler.watch(gpu.look for gpu in known if gpu.look)
        return Snapshot(
            time=began,
            duration=time.perf_counter() - started,
            fault=self._fault,
            driver=self._driver,
            enumerated=count,
            gpus=gpus,
            last_success=self._last_success,
            errors=dict(self._errors),
        )

    def stop(self) -> None:
        """Look at nothing any more; what is under way comes to its end by itself."""
        if self._sampler:
            self._sampler.stop()

    def _begin(self, gpus: Iterable[_Gpu]) -> None:
        for gpu in gpus:
            gpu.reading.begin(self._timeout)

    def _count(self, now: float) -> int | None:
        """Take how many GPUs there are; None, with the error counted and told once, when the driver does not say."""
        try:
            count = self._counting.take()
        except TimeoutError:
            self._complain(HUNG, "the driver's calls hang")
        except HiddenGpusError as error:
            self._complain("gpus_hidden", str(error))
        except Exception as error:  # noqa: BLE001 - the driver's own errors, and a binding that misbehaves
            self._complain(error_name(error), str(error))
        else:
            self._last_success = now
            if self._fault:
                log.warning("the driver answers again: %d GPUs", count)
            self._fault = None
            return count
        return None

    def _complain(self, name: str, text: str) -> None:
        self._errors[name] += 1
        if self._fault != name:
            what_to_do = "; ".join(filter(None, [advice(name), f"trying again every {RETRY_SECONDS:g} s"]))
            log.error("no GPU can be read: %s (%s); %s", text, name, what_to_do)
        self._fault = name

    def _ask_driver(self) -> int:
        """Initialise if need be, and count the GPUs. Runs on a thread; raises NVMLError."""
        try:
            self._initialise()
            count = self._nvml.nvmlDeviceGetCount()
        except NVMLError as error:
            if code_of(error) in DRIVER_GONE:
                self._initialised = False
            raise
        if hidden := hidden_gpus(count):
            raise HiddenGpusError(hidden)
        return count

    def _initialise(self) -> None:
        if self._initialised:
            return
        if self._refused and time.monotonic() < self._retry_at:
            raise self._refused
        try:
            self._nvml.nvmlInit()
            cuda = if_supported(self._nvml.nvmlSystemGetCudaDriverVersion_v2)
            version = self._nvml.nvmlSystemGetDriverVersion()
        except NVMLError as error:
            self._refused, self._retry_at = error, time.monotonic() + RETRY_SECONDS
            raise
        self._driver = Driver(version, "" if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}")
        self._initialised, self._refused, self._enumerated = True, None, None

    async def _meet(self, count: int) -> None:
        """Learn who the GPUs are: one that hangs at the start must not hide the others."""
        if count != self._enumerated:
            self._enumerated = count
            if count == 0:
                log.warning("the driver lists no GPU")
            for index in range(count):
                self._strangers.setdefault(index, self._stranger(index))
        before = set(self._gpus)
        # Those beyond the count are kept: one whose call hangs holds a thread, and made anew it would take another.
        listed = [stranger for stranger in self._strangers.items() if stranger[0] < count]
        outcomes = await asyncio.gather(*map(self._greet, listed))
        found = Counter(gpu.identity.name for uuid, gpu in self._gpus.items() if uuid not in before)
        if found:
            log.info("found %s", ", ".join(f"{count} x {name}" for name, count in found.items()))
        if outcomes and set(outcomes) == {HUNG} and not self._gpus:
            self._fault = HUNG

    def _stranger(self, index: int) -> _Gpu:
        plan = replace(self._plan, phase=index % _PHASES / _PHASES)

        def new_reader(handle: Handle) -> GpuReader:
            return GpuReader(self._nvml, handle, plan, self._host_memory, self._clock)

        return _Gpu(self._nvml, index, self._threads, new_reader)

    async def _greet(self, stranger: tuple[int, _Gpu]) -> str | None:
        """Identify one GPU; return the error's name when it does not say who it is, to be asked again."""
        index, gpu = stranger
        try:
            await gpu.identify(self._timeout)
        except (NVMLError, TimeoutError) as error:
            name = HUNG if isinstance(error, TimeoutError) else error_name(error)
            self._errors[name] += 1
            gpu.complain(name)
            return name
        del self._strangers[index]
        known = self._gpus.setdefault(gpu.identity.uuid, gpu)
        known.met_again(gpu)
        if known is gpu:
            log.debug("gpu=%s index=%d name=%r found", gpu.identity.uuid, index, gpu.identity.name)
        return None
