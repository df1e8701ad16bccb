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
from typing import Any, TypeVar

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


class _Thread:
    """Runs one blocking job at a time; while a job hangs, no further one is taken."""

    def __init__(self, name: str) -> None:
        self._wanted: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._current: Future[Any] | None = None
        # A daemon thread: one that hangs in the driver cannot be ended and must not keep the process from ending.
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            job, future = wanted
            try:
                result = job()
            except Exception as error:  # noqa: BLE001 - whatever the job raises belongs to who asked
                future.set_exception(error)
            else:
                future.set_result(result)

    async def run(self, job: Callable[[], T], timeout: float) -> T:
        """Run a job. Raises TimeoutError when it takes longer, or an earlier one still hangs; its result is lost."""
        if self._current is not None and not self._current.done():
            raise TimeoutError
        future: Future[T] = Future()
        self._current = future
        self._wanted.put((job, future))
        try:
            # shield: a job under way cannot be cancelled, and `_current` must tell when it is over.
            return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), timeout)
        except asyncio.TimeoutError:  # not the built-in one before Python 3.11
            raise TimeoutError from None

    def end(self) -> None:
        """End the thread once its job is done."""
        self._wanted.put(None)


class _Gpu:
    """One GPU: the thread that reads it, and its health so far. Known by its index until it is identified."""

    def __init__(self, nvml: Nvml, index: int) -> None:
        self._nvml = nvml
        self._index = index
        self._handle: Handle | None = None
        self._errors: Counter[str] = Counter()
        self._thread = _Thread(f"gpu-{index}")
        self._was_up = True
        self._identity: Identity | None = None
        self._last_success: float | None = None

    @property
    def identity(self) -> Identity:
        assert self._identity is not None
        return self._identity

    async def identify(self, timeout: float) -> None:
        """Ask who this is. Raises NVMLError or TimeoutError."""
        self._handle, self._identity = await self._thread.run(self._look_up, timeout)

    def _look_up(self) -> tuple[Handle, Identity]:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(self._index)
        return handle, _identify(self._nvml, handle, self._index)

    def forget(self) -> None:
        """End its thread."""
        self._thread.end()

    async def poll(self, timeout: float) -> Gpu:
        """Read all of it; whatever happens is told in the answer."""
        try:
            answers = await self._thread.run(self._read, timeout)
        except GpuGoneError as error:
            return self._down(error.name)
        except TimeoutError:
            return self._down(HUNG)
        except Exception:
            log.exception("gpu=%s could not be read", self.identity.uuid)
            return self._down("internal")
        self._errors += answers.errors
        self._last_success = time.time()
        if not self._was_up:
            log.warning("gpu=%s index=%d answers again", self.identity.uuid, self.identity.index)
        self._was_up = True
        return Gpu(
            identity=self.identity,
            fault=None,
            readings=answers.readings,
            processes=answers.processes,
            last_success=self._last_success,
            errors=dict(self._errors),
        )

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

    def _down(self, fault: str) -> Gpu:
        self._errors[fault] += 1
        if self._was_up:
            log.error("gpu=%s index=%d does not answer: %s", self.identity.uuid, self.identity.index, fault)
        self._was_up = False
        return Gpu(self.identity, fault=fault, last_success=self._last_success, errors=dict(self._errors))


class Poller:
    """Keeps the driver initialised, knows its GPUs and polls them. One event loop uses it, one poll at a time."""

    def __init__(self, nvml: Nvml, interval: float) -> None:
        self._nvml = nvml
        self._interval = interval
        self._driver_thread = _Thread("driver")
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

    async def poll(self) -> Snapshot:
        """Read everything; takes at most three intervals, however the driver behaves."""
        began, started = time.time(), time.perf_counter()
        count = await self._count(began)
        if count is not None:
            await self._meet(count)
        # Those known are asked even when the driver as a whole is at fault: each answers for itself.
        known = sorted(self._gpus.values(), key=lambda gpu: gpu.identity.index)
        gpus = tuple(await asyncio.gather(*(gpu.poll(self._interval) for gpu in known)))
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

    async def _count(self, now: float) -> int | None:
        """Ask the driver how many GPUs there are; None, with the error counted and told once, when it does not say."""
        try:
            count = await self._driver_thread.run(self._ask_driver, self._interval)
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
        """Initialise if need be, and count the GPUs. Runs on the driver's thread; raises NVMLError."""
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
            cuda = self._nvml.nvmlSystemGetCudaDriverVersion_v2()
            version = self._nvml.nvmlSystemGetDriverVersion()
        except NVMLError as error:
            self._refused, self._retry_at = error, time.monotonic() + RETRY_SECONDS
            raise
        self._driver = Driver(version, f"{cuda // 1000}.{cuda % 1000 // 10}")
        self._initialised, self._refused, self._enumerated = True, None, None

    async def _meet(self, count: int) -> None:
        """Learn who the GPUs are, each on its own thread: one that hangs at the start must not hide the others."""
        if count != self._enumerated:
            self._enumerated = count
            if count == 0:
                log.warning("the driver lists no GPU")
            for index in range(count):
                self._strangers.setdefault(index, _Gpu(self._nvml, index))
        for index in [index for index in self._strangers if index >= count]:
            self._strangers.pop(index).forget()
        outcomes = await asyncio.gather(*map(self._greet, list(self._strangers.items())))
        if outcomes and set(outcomes) == {HUNG} and not self._gpus:
            self._fault = HUNG

    async def _greet(self, stranger: tuple[int, _Gpu]) -> str | None:
        """Identify one GPU; return the error's name when it does not say who it is, to be asked again."""
        index, gpu = stranger
        try:
            await gpu.identify(self._interval)
        except (NVMLError, TimeoutError) as error:
            name = HUNG if isinstance(error, TimeoutError) else error_name(error)
            self._errors[name] += 1
            return name
        del self._strangers[index]
        if gpu.identity.uuid in self._gpus:
            gpu.forget()
        else:
            self._gpus[gpu.identity.uuid] = gpu
            log.info("gpu=%s index=%d name=%r found", gpu.identity.uuid, index, gpu.identity.name)
        return None


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
