"""Activity of a GPU's units, by counters that the driver reads twice: NVML's GPM, on Hopper and newer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from gpuwarden.nvml.constants import (
    GPM_DRAM_ACTIVE,
    GPM_GRAPHICS_ENGINE,
    GPM_PCIE,
    GPM_PIPES,
    GPM_REQUEST_VERSION,
    GPM_SM_ACTIVE,
    GPM_SM_OCCUPANCY,
    GPM_TENSOR_OPERATIONS,
)
from gpuwarden.nvml.interface import GpmMetric, GpmSample, Handle, Nvml
from gpuwarden.nvml.return_codes import UNSUPPORTED, NVMLError, code_of, if_supported, nvml_error

OPTION = "gpus.gpm"
MIN_SAMPLE_SECONDS = 0.1  # between two samples (NVML's documentation of nvmlGpmMetricsGet)
_SHARES = (
    GPM_GRAPHICS_ENGINE,
    GPM_SM_ACTIVE,
    GPM_SM_OCCUPANCY,
    GPM_DRAM_ACTIVE,
    *GPM_PIPES.values(),
    *GPM_TENSOR_OPERATIONS.values(),
)
_METRICS = (*_SHARES, *GPM_PCIE.values())
_ROUNDED_PERCENT = 101.0  # above which a share is no share but noise
_FASTEST = 2.0**20  # MiB a second that no link moves


@dataclass(eq=False, slots=True)
class _Pair:
    """Two buffers that are filled in turns; `taken` is when `newer` was, None while it holds nothing of use."""

    older: GpmSample
    newer: GpmSample
    taken: float | None = None
    comparable: bool = False  # `older` too holds a sample of the same subject

    def sample(self, fill: Callable[[GpmSample], object], now: float) -> None:
        """Take a sample, unless the last one is too young. Should that fail, none of before is compared with."""
        if self.taken is not None and now - self.taken < MIN_SAMPLE_SECONDS:
            return
        before, self.taken, self.comparable = self.taken, None, False
        fill(self.older)
        self.older, self.newer = self.newer, self.older
        self.taken, self.comparable = now, before is not None


class Gpm:
    """Samples one GPU, or its MIG instances by the id of the GPU instance; None stands for the undivided GPU.

    A share is the mean over the time since the reading before, so no time is missed however seldom it is read, and the
    first reading has none. Hence it is read in the slow tier: a sample enters the driver, at a cost that NVIDIA does
    not state, once for each GPU or GPU instance.

    The samples belong to the GPU's one reader: two threads that used one at once have panicked kernels
    (plazonic/nvidia_gpu_prometheus_exporter, pull request 7). `release` leaves them alone while they are in use, for
    ever if the call hangs.
    """

    def __init__(self, nvml: Nvml, clock: Callable[[], float]) -> None:
        self._nvml = nvml
        self._clock = clock
        self._pairs: dict[int | None, _Pair] = {}
        self._lacks: set[int | None] = set()
        self._supported: bool | None = None
        self._shares: dict[int | None, Mapping[int, float | Exception]] = {}  # of this reading
        self._using = threading.Lock()

    def begin(self) -> None:
        """Begin a reading: what was answered before is old."""
        self._shares.clear()

    def relearn(self) -> None:
        """Forget what the device lacks."""
        self._supported = None
        self._lacks.clear()

    def read_metric(
        self, handle: Handle, metric: int, gpu_instance: int | None = None, divided: Callable[[], bool] = lambda: False
    ) -> float | None:
        """Return one metric as a ratio, traffic in bytes a second; None where it is not supported, or not known yet.

        `handle` is the whole GPU's, which is not sampled while it is `divided`. Blocks as long as the driver does.
        Raises NVMLError, for a call that all metrics come from at the first of them only.
        """
        if gpu_instance not in self._shares:
            self._shares[gpu_instance] = {}
            if divided():
                self.drop(gpu_instance)
                return None
            with self._using:
                self._shares[gpu_instance] = self._read(handle, gpu_instance)
        share = self._shares[gpu_instance].get(metric)
        if isinstance(share, Exception):
            raise share
        return share

    def drop(self, gpu_instance: int | None) -> None:
        """Give the samples of a subject back: it is gone, or another one has its id now."""
        self._lacks.discard(gpu_instance)
        with self._using:
            self._free(gpu_instance)

    def release(self) -> bool:
        """Give all samples back, before the driver is shut down or when it was initialised anew; forget all learnt.

        Blocks like the driver's calls, though not while a sample is in use: then it returns False, and all stays.
        """
        if not self._using.acquire(blocking=False):
            return False
        try:
            for gpu_instance in tuple(self._pairs):
                self._free(gpu_instance)
        finally:
            self._using.release()
        self.relearn()
        return True

    def _free(self, gpu_instance: int | None) -> None:
        pair = self._pairs.pop(gpu_instance, None)
        for sample in (pair.older, pair.newer) if pair else ():
            with suppress(NVMLError):  # a driver that went away took them along
                self._nvml.nvmlGpmSampleFree(sample)

    def _read(self, handle: Handle, gpu_instance: int | None) -> Mapping[int, float | Exception]:
        try:
            if gpu_instance in self._lacks or not self._is_supported(handle):
                return {}
            pair = self._pairs.get(gpu_instance)
            if pair is None:
                pair = self._pairs[gpu_instance] = self._new_pair()
            pair.sample(lambda sample: self._sample(handle, gpu_instance, sample), self._clock())
            return self._between(pair) if pair.comparable else {}
        except NVMLError as error:
            if code_of(error) not in UNSUPPORTED:
                raise
            self._lacks.add(gpu_instance)
            return {}

    def _is_supported(self, handle: Handle) -> bool:
        if self._supported is None:
            support = if_supported(lambda: self._nvml.nvmlGpmQueryDeviceSupport(handle))
            self._supported = support is not None and bool(support.isSupportedDevice)
        return self._supported

    def _new_pair(self) -> _Pair:
        older = self._nvml.nvmlGpmSampleAlloc()
        try:
            return _Pair(older, self._nvml.nvmlGpmSampleAlloc())
        except NVMLError:
            self._nvml.nvmlGpmSampleFree(older)
            raise

    def _sample(self, handle: Handle, gpu_instance: int | None, sample: GpmSample) -> None:
        if gpu_instance is None:
            self._nvml.nvmlGpmSampleGet(handle, sample)
        else:
            self._nvml.nvmlGpmMigSampleGet(handle, gpu_instance, sample)

    def _between(self, pair: _Pair) -> Mapping[int, float | Exception]:
        request = self._nvml.c_nvmlGpmMetricsGet_t()
        request.version, request.numMetrics = GPM_REQUEST_VERSION, len(_METRICS)
        request.sample1, request.sample2 = pair.older, pair.newer
        metrics = request.metrics
        answers = [metrics[position] for position in range(len(_METRICS))]
        for metric, answer in zip(_METRICS, answers, strict=True):
            answer.metricId = metric
        self._nvml.nvmlGpmMetricsGet(request)
        found = ((metric, _value(answer)) for metric, answer in zip(_METRICS, answers, strict=True))
        return {metric: share for metric, share in found if share is not None}


def _value(answer: GpmMetric) -> float | Exception | None:
    """Return what one metric says; what it cannot be, NaN for one, is nothing."""
    if answer.nvmlReturn:
        return None if answer.nvmlReturn in UNSUPPORTED else nvml_error(answer.nvmlReturn)
    if answer.metricId not in _SHARES:
        return answer.value * 2**20 if 0 <= answer.value <= _FASTEST else None
    return round(min(1.0, answer.value / 100), 6) if 0 <= answer.value <= _ROUNDED_PERCENT else None
