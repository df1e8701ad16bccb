"""Poller of one GPU: finds and reads it on a thread, and keeps its health from poll to poll."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from gpuwarden.gpu.call_pool import CallPool, RepeatedCall
from gpuwarden.gpu.memory_sampler import MemoryProbe
from gpuwarden.gpu.reader import INTERNAL, Answers, GpuGoneError, GpuReader
from gpuwarden.gpu.snapshot import HUNG, Gpu
from gpuwarden.log_limiter import LogLimiter
from gpuwarden.nvml.identity import GpuIdentity, identify
from gpuwarden.nvml.interface import Handle, Nvml
from gpuwarden.nvml.return_codes import NVMLError, error_name

log = logging.getLogger(__name__)


class PolledGpu:
    """One GPU: how it is read, and its health so far. Known by its index until it is identified."""

    def __init__(self, nvml: Nvml, index: int, threads: CallPool, new_reader: Callable[[Handle], GpuReader]) -> None:
        self._nvml = nvml
        self._index = index
        self._new_reader = new_reader
        self._reader: GpuReader | None = None
        self._handle: Handle | None = None
        self._errors: Counter[str] = Counter()
        self._identifying = RepeatedCall(threads, self._find)
        self.reading = RepeatedCall(threads, self._read)
        self._was_up = True
        self._log_limiter = LogLimiter()
        self._identity: GpuIdentity | None = None
        self._last_success: float | None = None

    @property
    def identity(self) -> GpuIdentity:
        """Identity of the GPU; known once `identify` has come back."""
        assert self._identity is not None
        return self._identity

    @property
    def memory_probe(self) -> MemoryProbe | None:
        """Sampling of its memory between polls; None where it cannot be sampled, or did not answer."""
        return self._reader.memory_probe if self._reader and self._was_up else None

    @property
    def is_open(self) -> bool:
        """True if the driver has been asked for it, and has its device open."""
        return self._handle is not None

    @property
    def is_down(self) -> bool:
        """True if it did not answer when last asked."""
        return not self._was_up

    @property
    def last_success(self) -> float:
        """When it last answered, in Unix time; 0 for never."""
        return self._last_success or 0.0

    @property
    def current_call(self) -> str:
        """Say which GPU this is if a call to it is under way, else nothing."""
        probe = self._reader.memory_probe if self._reader else None
        sampling = probe is not None and probe.reading_since is not None
        if not (sampling or self.reading.under_way or self._identifying.under_way):
            return ""
        return f"GPU {self._index}" + (f" ({self._identity.uuid})" if self._identity else "")

    def release(self) -> None:
        """Give back what the driver holds for it, and forget its handle; with no call under way."""
        self._identifying.discard()
        self.reading.discard()
        self._handle = None
        if self._reader:
            self._reader.release()

    def copy_identity(self, other: PolledGpu) -> None:
        """Take what the driver says of it now: its index may be another after GPUs came and went."""
        self._handle, self._identity, self._index = other._handle, other._identity, other._index

    def log_unidentified(self, fault: str) -> None:
        """Say once that it does not tell who it is."""
        if self._was_up:
            log.error(
                "the GPU of index %d does not say who it is: %s; it has no series until it does", self._index, fault
            )
        self._was_up = False

    async def identify(self, timeout: float) -> None:
        """Ask who this is. Raises NVMLError or TimeoutError."""
        self._handle, self._identity = await self._identifying.run(timeout)

    def _find(self) -> tuple[Handle, GpuIdentity]:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(self._index)
        return handle, identify(self._nvml, handle, self._index)

    def collect(self) -> Gpu:
        """Return what the `reading` begun has found; whatever happened is told in it."""
        self._log_limiter.flush()
        try:
            answers = self.reading.collect()
        except GpuGoneError as error:
            return self._down(error.name)
        except TimeoutError:
            return self._down(HUNG)
        except Exception as error:  # noqa: BLE001 - a fault of our own, or of the binding's, costs this GPU alone
            return self._down(INTERNAL, error)
        if answers.errors:
            self._errors += answers.errors
        self._last_success = answers.time
        if not self._was_up:
            self._log(logging.WARNING, "answers again")
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
            taken=answers.taken,
            slow_taken=answers.slow_taken,
        )

    def skip(self) -> Gpu:
        """Tell what is known of it without asking."""
        if self._reader:
            self._reader.mark_gap()
        return Gpu(self.identity, fault=None, asked=False, last_success=self._last_success, errors=dict(self._errors))

    def drop_handle(self) -> None:
        """Forget the handle: those of another session are worth nothing."""
        self._handle = None

    def _read(self) -> Answers:
        """Read, on a thread. After a failure the handle is looked up anew: a reset invalidates old ones."""
        handle = self._handle
        if handle is None:
            try:
                handle = self._handle = self._nvml.nvmlDeviceGetHandleByUUID(self.identity.uuid)
            except NVMLError as error:
                raise GpuGoneError(error_name(error)) from None
        try:
            if self._reader is None:
                self._reader = self._new_reader(handle)
            elif self._reader.handle is not handle:
                self._reader.attach(handle)
            if self.reading.discarded:
                self._reader.mark_gap()  # as long as it hung nobody knows what it did
            return self._reader.read()
        except Exception:
            self._handle = None
            raise

    def _log(self, level: int, what: str, error: Exception | None = None) -> None:
        self._log_limiter.log(level, f"gpu={self.identity.uuid} index={self.identity.index} {what}", error)

    def _down(self, fault: str, error: Exception | None = None) -> Gpu:
        self._errors[fault] += 1
        if self._was_up:
            hint = " (if it is only slow, raise poll.interval)" if fault == HUNG else ""
            self._log(logging.ERROR, f"does not answer: {fault}{hint}", error)
        self._was_up = False
        return Gpu(self.identity, fault=fault, last_success=self._last_success, errors=dict(self._errors))
