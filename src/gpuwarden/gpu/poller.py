"""Poll all GPUs, each on a thread of its own: a driver call that hangs costs its GPU, never another one."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from gpuwarden.gpu import reader
from gpuwarden.gpu.advice import advice, hidden_gpus
from gpuwarden.gpu.nvml import DRIVER_GONE, Handle, Nvml, NVMLError, code_of, error_name
from gpuwarden.gpu.reader import Answers, GpuGoneError
from gpuwarden.gpu.snapshot import HUNG, Driver, Gpu, Identity, Snapshot

T = TypeVar("T")
log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0  # between attempts to initialise a driver that is not there


class HiddenGpusError(Exception):
    """The machine has GPUs that NVML does not list; the text says why."""


class _Thread(Generic[T]):
    """Runs one blocking job at a time; while a job hangs, no further one is taken."""

    def __init__(self, name: str, job: Callable[[], T]) -> None:
        self._job = job
        self._wanted: queue.SimpleQueue[Future[T]] = queue.SimpleQueue()
        self._current: Future[T] | None = None
        # A daemon thread: one that hangs in the driver cannot be ended and must not keep the process from ending.
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while True:
            future = self._wanted.get()
            try:
                result = self._job()
            except Exception as error:  # noqa: BLE001 - whatever the job raises belongs to who asked
                future.set_exception(error)
            else:
                future.set_result(result)

    async def run(self, timeout: float) -> T:
        """Run the job. Raises TimeoutError when it takes longer, or an earlier one still hangs; its result is lost."""
        if self._current is not None and not self._current.done():
            raise TimeoutError
        future: Future[T] = Future()
        self._current = future
        self._wanted.put(future)
        try:
            # shield: a job under way cannot be cancelled, and `_current` must tell when it is over.
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), timeout)
        except asyncio.TimeoutError:  # not the built-in one before Python 3.11
            raise TimeoutError from None


class _GpuThread:
    """One GPU: its identity, the thread that reads it, and its health so far."""

    def __init__(self, nvml: Nvml, identity: Identity, handle: Handle) -> None:
        self._nvml = nvml
        self._handle: Handle | None = handle
        self._errors: Counter[str] = Counter()
        self._thread: _Thread[Answers] = _Thread(f"gpu-{identity.index}", self._read)
        self._was_up = True
        self.identity = identity
        self.last_success: float | None = None

    def _read(self) -> Answers:
        """Read, on the GPU's own thread. After a failure the handle is looked up anew: a reset invalidates old ones."""
        if self._handle is None:
            try:
                self._handle = self._nvml.nvmlDeviceGetHandleByUUID(self.identity.uuid)
            except NVMLError as error:
                raise GpuGoneError(error_name(error)) from None
        try:
            return reader.read(self._nvml, self._handle)
        except Exception:
            self._handle = None
            raise

    async def poll(self, timeout: float) -> Gpu:
        try:
            answers = await self._thread.run(timeout)
        except GpuGoneError as error:
            return self._down(error.name)
        except TimeoutError:
            return self._down(HUNG)
        except Exception:
            log.exception("gpu=%s could not be read", self.identity.uuid)
            return self._down("internal")
        self._errors += answers.errors
        self.last_success = time.time()
        if not self._was_up:
            log.warning("gpu=%s index=%d answers again", self.identity.uuid, self.identity.index)
        self._was_up = True
        return Gpu(
            identity=self.identity,
            fault=None,
            readings=answers.readings,
            processes=answers.processes,
            last_success=self.last_success,
            errors=dict(self._errors),
        )

    def _down(self, fault: str) -> Gpu:
        self._errors[fault] += 1
        if self._was_up:
            log.error("gpu=%s index=%d does not answer: %s", self.identity.uuid, self.identity.index, fault)
        self._was_up = False
        return Gpu(self.identity, fault=fault, last_success=self.last_success, errors=dict(self._errors))


class Poller:
    """Keeps the driver initialised, knows its GPUs and polls them. One event loop uses it, one poll at a time."""

    def __init__(self, nvml: Nvml, interval: float) -> None:
        self._nvml = nvml
        self._interval = interval
        self._driver_thread: _Thread[int] = _Thread("driver", self._discover)
        self._gpus: dict[str, _GpuThread] = {}
        self._found: dict[str, tuple[Identity, Handle]] = {}
        self._driver: Driver | None = None
        self._errors: Counter[str] = Counter()
        self._last_success: float | None = None
        self._initialised = False
        self._listed = -1
        self._retry_at = 0.0
        self._refused: Exception | None = None
        self._fault: str | None = None

    async def poll(self) -> Snapshot:
        """Read everything; takes at most two intervals, however the driver behaves."""
        began, started = time.time(), time.perf_counter()
        enumerated = await self._enumerate(began)
        for uuid, (identity, handle) in list(self._found.items()):
            if uuid not in self._gpus:
                self._gpus[uuid] = _GpuThread(self._nvml, identity, handle)
                log.info("gpu=%s index=%d name=%r found", uuid, identity.index, identity.name)
        # Without a driver there is nobody to ask; the GPUs stay listed, down.
        polls = [gpu.poll(self._interval) for gpu in self._gpus.values()]
        gpus = tuple(await asyncio.gather(*polls))
        return Snapshot(
            time=began,
            duration=time.perf_counter() - started,
            fault=self._fault,
            driver=self._driver,
            enumerated=enumerated,
            gpus=gpus,
            last_success=self._last_success,
            errors=dict(self._errors),
        )

    async def _enumerate(self, now: float) -> int | None:
        """Ask the driver how many GPUs there are; None, with the error counted and told once, when it does not say."""
        try:
            count = await self._driver_thread.run(self._interval)
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

    def _discover(self) -> int:
        """Count the GPUs, and learn who is new. Runs on the driver's thread; raises NVMLError."""
        try:
            self._initialise()
            count = self._nvml.nvmlDeviceGetCount()
            if count != self._listed:
                self._list(count)
            if hidden := hidden_gpus(count):
                raise HiddenGpusError(hidden)
        except NVMLError as error:
            if code_of(error) in DRIVER_GONE:
                self._initialised = False
            raise
        return count

    def _initialise(self) -> None:
        if self._initialised:
            return
        if self._refused and time.monotonic() < self._retry_at:
            raise self._refused
        try:
            self._nvml.nvmlInit()
        except NVMLError as error:
            self._refused, self._retry_at = error, time.monotonic() + RETRY_SECONDS
            raise
        self._initialised, self._refused, self._listed = True, None, -1
        cuda = self._nvml.nvmlSystemGetCudaDriverVersion_v2()
        version = self._nvml.nvmlSystemGetDriverVersion()
        self._driver = Driver(version, f"{cuda // 1000}.{cuda % 1000 // 10}")

    def _list(self, count: int) -> None:
        """Look at every index. One that fails is left for the next poll: the rest must not wait for it."""
        if count == 0:
            log.warning("the driver lists no GPU")
        complete = True
        for index in range(count):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                identity = _identify(self._nvml, handle, index)
            except NVMLError as error:
                if code_of(error) in DRIVER_GONE:
                    raise
                complete = False
            else:
                self._found.setdefault(identity.uuid, (identity, handle))
        self._listed = count if complete else -1


def _identify(nvml: Nvml, handle: Handle, index: int) -> Identity:
    bus = nvml.nvmlDeviceGetPciInfo(handle).busId
    try:
        vbios = nvml.nvmlDeviceGetVbiosVersion(handle)
    except NVMLError:
        vbios = ""
    return Identity(
        uuid=nvml.nvmlDeviceGetUUID(handle),
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        pci_bus_id=(bus.decode() if isinstance(bus, bytes) else bus).lower(),
        vbios_version=vbios,
    )
