"""One polled GPU: looks it up and reads it on a thread, and keeps its health from poll to poll."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import fields

from gpuwarden.fairness.log_limiter import ChangeLog
from gpuwarden.formatting import format_fields
from gpuwarden.gpu.call_pool import CallPool, RepeatedCall
from gpuwarden.gpu.memory_sampler import MemoryProbe
from gpuwarden.gpu.reader import INTERNAL, Answers, GpuGoneError, GpuReader
from gpuwarden.gpu.snapshot import HUNG, UNBOUND, Gpu, GpuAnswers
from gpuwarden.nvml.identity import GpuIdentity, identify
from gpuwarden.nvml.interface import Handle, Nvml
from gpuwarden.nvml.return_codes import NVMLError, error_name

log = logging.getLogger(__name__)


class PolledGpu:
    """One GPU: its reader, and its health so far. Known by its index until it is identified; `wall` is Unix time."""

    def __init__(
        self,
        nvml: Nvml,
        index: int,
        threads: CallPool,
        new_reader: Callable[[Handle, str], GpuReader],
        wall: Callable[[], float],
    ) -> None:
        self._nvml = nvml
        self._wall = wall
        self._index = index
        self._new_reader = new_reader
        self._reader: GpuReader | None = None
        self._handle: Handle | None = None
        self._errors: Counter[str] = Counter()
        self._identifying = RepeatedCall(threads, self._find)
        self.reading = RepeatedCall(threads, self._read)
        self.unbound = False  # whether the driver was unbound from it, and it has not come back since
        self._was_up = True
        self._changes = ChangeLog()
        self._identity: GpuIdentity | None = None
        self._last_success: float | None = None

    @property
    def identity(self) -> GpuIdentity:
        """Identity of the GPU; available once `identify` has returned."""
        assert self._identity is not None
        return self._identity

    @property
    def memory_probe(self) -> MemoryProbe | None:
        """Sampling of its memory between polls; None if the GPU does not support it, or did not answer."""
        return self._reader.memory_probe if self._reader and self._was_up else None

    @property
    def is_open(self) -> bool:
        """True if the driver may have its device open, as gpuwarden has a handle."""
        return self._handle is not None

    @property
    def is_down(self) -> bool:
        """True if it did not answer its last poll."""
        return not self._was_up

    @property
    def is_newly_lost(self) -> bool:
        """True if the `reading` in progress found it gone, for the first time and for no known reason."""
        reading = self.reading.awaited
        is_lost = reading is not None and reading.done() and isinstance(reading.exception(), GpuGoneError)
        return is_lost and self._was_up and not self.unbound

    @property
    def last_success(self) -> float | None:
        """Unix time of its last answer, if any; lowered if the clock was set back, to be never in the future."""
        if self._last_success is not None:
            self._last_success = min(self._last_success, self._wall())
        return self._last_success

    @property
    def current_call(self) -> str:
        """Name of the GPU if a driver call to it is in progress, else empty."""
        probe = self._reader.memory_probe if self._reader else None
        sampling = probe is not None and probe.reading_since is not None
        if not (sampling or self.reading.under_way or self._identifying.under_way):
            return ""
        return f"GPU {self._index}" + (f" ({self._identity.uuid})" if self._identity else "")

    def release(self) -> None:
        """Release the driver's resources for it, and drop its handle; not while a call is in progress."""
        self._identifying.discard()
        self.reading.discard()
        self._handle = None
        if self._reader:
            self._reader.release()

    def copy_identity(self, other: PolledGpu) -> None:
        """Take over handle, identity and index: the index may change after GPUs come and go."""
        self._handle, self._identity, self._index = other._handle, other._identity, other._index

    def collect_unidentified(self, identity: GpuIdentity, fault: str, detail: str) -> Gpu:
        """Return it as down, with its provisional identity; log that once."""
        if self._was_up:
            fields = format_fields(gpu=identity.uuid, index=self._index, error=fault, detail=detail or None)
            log.error("GPU not responding since daemon start, not identified %s", fields)
        self._was_up = False
        self._errors[fault] += 1
        return Gpu(identity, fault=fault, errors=dict(self._errors))

    async def identify(self, timeout: float) -> None:
        """Look up handle and identity. Raises NVMLError or TimeoutError."""
        self._handle, self._identity = await self._identifying.run(timeout)

    def _find(self) -> tuple[Handle, GpuIdentity]:
        handle = self._nvml.nvmlDeviceGetHandleByIndex(self._index)
        return handle, identify(self._nvml, handle, self._index)

    def collect(self) -> Gpu:
        """Return the result of the `reading` in progress; a failure becomes the GPU's fault."""
        self._changes.flush()
        try:
            answers = self.reading.collect()
        except GpuGoneError as error:
            return self._down(UNBOUND if self.unbound else error.name)
        except TimeoutError:
            return self._down(HUNG)
        except Exception as error:  # noqa: BLE001 - a fault of ours or of the binding affects this GPU only
            return self._down(INTERNAL, error)
        if answers.errors:
            self._errors += answers.errors
        self._last_success = answers.time
        if not self._was_up:
            self._log(logging.WARNING, "GPU answers again")
            self.unbound = False  # only now: while the driver is being unbound, the GPU may still answer
        self._was_up = True
        found = {each.name: getattr(answers, each.name) for each in fields(GpuAnswers)}
        return Gpu(self.identity, None, last_success=self._last_success, errors=dict(self._errors), **found)

    def skip(self) -> Gpu:
        """Return its identity and counters without a driver call."""
        if self._reader:
            self._reader.mark_gap()
        return Gpu(self.identity, fault=None, asked=False, last_success=self.last_success, errors=dict(self._errors))

    def drop_handle(self) -> None:
        """Drop the handle: it belongs to an earlier initialization of the driver."""
        self._handle = None

    def _read(self) -> Answers:
        """Read, on a thread. After a failure the handle is looked up again: a GPU reset invalidates it."""
        handle = self._handle
        if handle is None:
            try:
                handle = self._handle = self._nvml.nvmlDeviceGetHandleByUUID(self.identity.uuid)
            except NVMLError as error:
                raise GpuGoneError(error_name(error)) from None
        try:
            if self._reader is None:
                self._reader = self._new_reader(handle, self.identity.uuid)
            elif self._reader.handle is not handle:
                self._reader.attach(handle)
            if self.reading.discarded:
                self._reader.mark_gap()  # what happened while it hung is unknown
            return self._reader.read()
        except Exception:
            self._handle = None
            raise

    def _log(self, level: int, event: str, cause: Exception | None = None, **fields: object) -> None:
        fields = {"gpu": self.identity.uuid, "index": self.identity.index, **fields}
        self._changes.log(level, f"{event} {format_fields(**fields)}", cause)

    def _down(self, fault: str, error: Exception | None = None) -> Gpu:
        self._errors[fault] += 1
        if self._was_up and fault != UNBOUND:  # the unbinding has been logged
            hint = " (if only slow, raise poll.interval)" if fault == HUNG else ""
            self._log(logging.ERROR, f"GPU not responding{hint}", error, error=fault)
        self._was_up = False
        return Gpu(self.identity, fault=fault, last_success=self.last_success, errors=dict(self._errors))
