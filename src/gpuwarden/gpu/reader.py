"""Reader of one GPU: each metric of the table in its tier, and the processes. An error affects only its metric."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

from gpuwarden.formatting import format_fields
from gpuwarden.gpu.memory_limits import MemoryLimitReader
from gpuwarden.gpu.memory_sampler import MemoryProbe
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.mig_reader import MigReader
from gpuwarden.gpu.process_reader import ProcessReader
from gpuwarden.gpu.snapshot import GpuAnswers
from gpuwarden.host.host_reader import HostMemory, read_host_memory
from gpuwarden.metrics.model import Metric, Reading, Tier
from gpuwarden.metrics.reading_gate import IMPLAUSIBLE, ReadingGate
from gpuwarden.metrics.window_peaks import WindowPeaks
from gpuwarden.nvml.constants import MEMORY_V2
from gpuwarden.nvml.device import Device, NoValueError
from gpuwarden.nvml.gpm import OPTION as GPM_OPTION
from gpuwarden.nvml.gpm import Gpm
from gpuwarden.nvml.interface import Handle, Nvml
from gpuwarden.nvml.return_codes import GPU_GONE, UNSUPPORTED, NVMLError, code_of, error_name

log = logging.getLogger(__name__)

INTERNAL = "internal"  # counted with NVML's errors: a bug of ours, or an answer that NVML does not document
RELEARN_SECONDS = 60.0  # after which a metric that the device lacks is tried again


class GpuGoneError(Exception):
    """The GPU does not answer; `name` is NVML's error name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers(GpuAnswers):
    """Answers, with the errors of calls that cost single readings, by name.

    `time` is the Unix time at the start of the reading, so that a late answer does not pass for a new one.
    """

    time: float = field(compare=False)
    errors: Counter[str]


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan of a reader: seconds between readings of the slow tier, and the options that are enabled.

    `phase`, from 0 to 1, shifts the slow tier, so that not all GPUs read it in the same poll.
    """

    slow_interval: float = 15.0
    opted_in: frozenset[str] = frozenset({GPM_OPTION})
    phase: float = 0.0


DEFAULT_PLAN = Plan()


class GpuReader:
    """Reader of one GPU, with what it keeps between readings. Used by one thread at a time."""

    def __init__(
        self,
        nvml: Nvml,
        handle: Handle,
        plan: Plan = DEFAULT_PLAN,
        host_memory: Callable[[], HostMemory] = read_host_memory,
        clock: Callable[[], float] = time.monotonic,
        *,
        wall: Callable[[], float] = time.time,
        cgroups: Callable[[], Sequence[str]] = tuple,
        uuid: str | None = None,
    ) -> None:
        self._uuid = uuid  # for the log
        self._memory_probe = MemoryProbe()
        self._probed: tuple[Handle, bool] | None = None  # the handle, and whether it needs version 1 of the memory call
        self._device = Device(nvml, handle, host_memory, WindowPeaks(clock), Gpm(nvml, clock))
        self._plan = plan
        self._clock = clock
        self._wall = wall
        self._last: float | None = None  # start of the last reading, unless it failed
        self._slow_taken = 0.0
        self._tier_seconds: dict[Tier, float] = {}  # of this reading
        self._gate = ReadingGate(clock, uuid)
        self._size: Reading = math.inf  # device memory in the last reading
        self._processes = ProcessReader()
        self._limits = MemoryLimitReader(cgroups)
        self._mig = MigReader(self._device, plan.opted_in, self._gate)
        self._reported: set[Metric[Device]] = set()  # rows that failed otherwise than by an error of NVML
        self.attach(handle)

    def attach(self, handle: Handle) -> None:
        """Use a new handle, after the driver was initialized again or the GPU reset; drop what was learned."""
        self.mark_gap()
        self._device.handle = handle
        self._device.gpm.release()
        self._mig.clear()
        self._gate.clear()
        self.reset()

    def reset(self) -> None:
        """Make the next reading like the first one: all tiers, nothing learned. GPM samples stay."""
        self._device.attach(self._device.handle)
        self._kept: dict[Metric[Device], Reading] = {}  # static and slow tier, until the next slow reading
        self._static: dict[Metric[Device], Reading] = {}
        self._static_known = False
        self._doubts_constants = False  # some were refused: the next answer may be right
        self._slow_due = -float("inf")
        self._relearn()

    def mark_gap(self) -> None:
        """Leave the time until the next reading out of integrated rates, and drop memory samples from before it.

        For a time without polls. Another thread may be reading.
        """
        self._last = None

    def release(self) -> bool:
        """Release the driver's resources for this reader before a shutdown; use `attach` afterwards.

        Blocks like a driver call. May be called from any thread: it returns False, and releases nothing, while a call
        uses these resources.
        """
        self.mark_gap()
        return self._device.gpm.release()

    @property
    def handle(self) -> Handle:
        """NVML handle of the GPU."""
        return self._device.handle

    def read(self) -> Answers:
        """Read what is due. Blocks as long as the driver does; raises GpuGoneError."""
        now, last = self._clock(), self._last
        self._last = None  # a reading that fails leaves a gap, over which no rate is integrated
        if now >= self._relearn_due:
            self._relearn()
        slow = now >= self._slow_due
        self._device.begin(0.0 if last is None else now - last, slow=slow)
        self._tier_seconds = {}
        errors: Counter[str] = Counter()
        began = self._wall()
        if last is None:
            self._memory_probe.clear()  # samples from before the gap would get the time of now
        size = {GpuReadings.memory_size_bytes: self._size}
        refused: Counter[str] = Counter()  # apart from errors, which may be the reason why the GPU is gone
        is_plausible = partial(self._gate.admits, GpuReadings.memory_used_bytes, earlier=size, errors=refused)
        samples = tuple(each for each in self._memory_probe.pop_samples() if is_plausible(each[1]))
        self._device.peaks.add(max((used for _, used in samples), default=0))
        quick = self._read_tier("poll", errors)
        self._size = size[GpuReadings.memory_size_bytes] = quick.get(GpuReadings.memory_size_bytes, self._size)
        if not self._device.answered:
            if errors:
                # Answers of slow rows must not count here: a new handle reads them, so a failing GPU would be up in
                # every other poll, and no alert would last.
                raise GpuGoneError(next(iter(errors)))
            slow = True  # a GPU may support slow rows only; it must be up in every poll
        if slow:
            self._read_slowly(now, errors)
        if not self._device.answered:
            # An invalid handle gets the error that also means "not supported": it must not pass for a working GPU.
            raise GpuGoneError(next(iter(errors), "no_reading"))
        mig = self._mig.read(errors, slow=slow) if slow or self._mig.has_instances else ()
        processes, types = self._processes.read(
            self._device,
            quick.get(GpuReadings.memory_used_bytes),
            lambda error: _count_error(error, errors),
            self._mig.instances_by_ids if mig else {},
            is_plausible,
            all_types=slow,
        )
        limits = {} if mig else self._limits.read(self._device, lambda error: _count_error(error, errors), slow=slow)
        limits = {folder: each for folder, each in limits.items() if is_plausible(each.used)}
        errors.update(refused)
        self._update_probe()
        self._last = now
        return Answers(
            time=began,
            errors=errors,
            readings=self._kept | quick,
            processes=processes,
            process_lists=types,
            mig=mig,
            memory_limits=limits,
            taken=now,
            slow_taken=self._slow_taken,
            memory_samples=samples,
            tier_seconds=self._tier_seconds,
        )

    def _read_slowly(self, now: float, errors: Counter[str]) -> None:
        refused = errors[IMPLAUSIBLE]
        slowly = self._read_tier("slow", errors)
        self._slow_taken = now
        phase = self._plan.phase if self._slow_due < 0 else 0.0
        self._slow_due = now + self._plan.slow_interval * (1 - phase)
        if not self._static_known:
            failures: Counter[str] = Counter()
            self._static = self._read_tier("static", failures)
            self._static_known = not failures.total() - failures[IMPLAUSIBLE]
            errors.update(failures)
        self._doubts_constants |= errors[IMPLAUSIBLE] > refused
        self._kept = self._static | slowly

    def _update_probe(self) -> None:
        """Let the memory probe use the version of the call that works for the table's rows."""
        device = self._device
        old = device.lacks(device.nvml.nvmlDeviceGetMemoryInfo, MEMORY_V2)
        if self._probed != (device.handle, old):
            self._probed = device.handle, old
            version = () if old else (MEMORY_V2,)
            self._memory_probe.read = partial(device.nvml.nvmlDeviceGetMemoryInfo, device.handle, *version)

    @property
    def memory_probe(self) -> MemoryProbe | None:
        """Sampling of memory between readings; None for a device without memory of its own."""
        return None if self._device.lacks(self._device.nvml.nvmlDeviceGetMemoryInfo) else self._memory_probe

    def _read_tier(self, tier: Tier, errors: Counter[str]) -> dict[Metric[Device], Reading]:
        """Read the rows of a tier; an error affects its row only."""
        readings: dict[Metric[Device], Reading] = {}
        device, rows, began = self._device, self._rows[tier], self._clock()
        device.enter(tier, readings)
        lacking: list[Metric[Device]] = []
        for row in rows:
            try:
                readings[row] = self._gate.filter(row, row.read(device), readings, errors)
            except NoValueError:
                continue
            except NVMLError as error:
                _count_error(error, errors)
                if code_of(error) in UNSUPPORTED:
                    lacking.append(row)
            except Exception as error:  # noqa: BLE001 - an answer that NVML does not document affects its row only
                errors[INTERNAL] += 1
                self._report(row, error)
        for row in lacking:
            rows.remove(row)
        if device.failures:
            for failure in device.failures:
                _count_error(failure, errors)
            device.failures.clear()
        self._tier_seconds[tier] = self._clock() - began
        return readings

    def _report(self, row: Metric[Device], error: Exception) -> None:
        if row not in self._reported:
            self._reported.add(row)
            fields = format_fields(gpu=self._uuid, metric=row.name)
            log.error("cannot read metric; further failures are only counted %s", fields, exc_info=error)

    def _relearn(self) -> None:
        self._relearn_due = self._clock() + RELEARN_SECONDS
        self._device.relearn()
        if self._doubts_constants:
            self._device.forget_constants()
            self._static_known = self._doubts_constants = False
        self._rows: dict[Tier, list[Metric[Any]]] = {tier: [] for tier in get_args(Tier)}
        for row in GpuReadings.rows:
            if not row.opt_in or row.opt_in in self._plan.opted_in:
                self._rows["poll" if row.tier == "memory" else row.tier].append(row)


def _count_error(error: Exception, errors: Counter[str]) -> None:
    if code_of(error) in GPU_GONE:
        raise GpuGoneError(error_name(error)) from None
    if code_of(error) not in UNSUPPORTED:
        errors[error_name(error)] += 1
