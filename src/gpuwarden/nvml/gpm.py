"""Activity of a GPU's units by NVML's GPM, on Hopper and newer. It compares two samples of counters."""

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
_MAX_ROUNDED_SHARE = 1.01  # that is 1 but for the driver's rounding


@dataclass(eq=False, slots=True)
class _Pair:
    """Two buffers that are filled in turn; `taken` is the time of `newer`, None while it is invalid."""

    older: GpmSample
    newer: GpmSample
    taken: float | None = None
    comparable: bool = False  # `older` holds a sample of the same subject too

    def sample(self, fill: Callable[[GpmSample], object], now: float) -> None:
        """Take a sample, unless the last one is too recent. After a failure earlier samples are not used."""
        if self.taken is not None and now - self.taken < MIN_SAMPLE_SECONDS:
            return
        before, self.taken, self.comparable = self.taken, None, False
        fill(self.older)
        self.older, self.newer = self.newer, self.older
        self.taken, self.comparable = now, before is not None


class Gpm:
    """GPM samples of one GPU, or of its MIG instances by the id of the GPU instance; None is the undivided GPU.

    A value is the mean since the previous reading, so rare readings miss no time, and the first reading has none. It
    belongs to the slow tier: each sample of a GPU or GPU instance is a driver call, at a cost that NVIDIA does not
    document.

    Only the GPU's reader uses the samples: two threads that used one at once have caused kernel panics
    (plazonic/nvidia_gpu_prometheus_exporter, pull request 7). `release` does not free them while they are in use, even
    if that call never returns.
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
        """Start a reading: drop the values of the last one."""
        self._shares.clear()

    def relearn(self) -> None:
        """Try unsupported calls again."""
        self._supported = None
        self._lacks.clear()

    def read_metric(
        self, handle: Handle, metric: int, gpu_instance: int | None = None, divided: Callable[[], bool] = lambda: False
    ) -> float | None:
        """Return one metric as a ratio, traffic in bytes per second; None if unsupported or not known yet.

        `handle` is the whole GPU's, which is not sampled while it is `divided`. Blocks as long as the driver does.
        Raises NVMLError; for a call that all metrics share, only at the first of them.
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
        """Free the samples of a subject that is gone, or whose id is reused."""
        self._lacks.discard(gpu_instance)
        with self._using:
            self._free(gpu_instance)

    def release(self) -> bool:
        """Free all samples, before a shutdown of the driver or after a new initialization; drop what was learned.

        Blocks like a driver call, but not while a sample is in use: then it returns False, and frees nothing.
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
            with suppress(NVMLError):  # a driver that went away has freed them
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
    """Return the value of one metric, or its error."""
    if answer.nvmlReturn:
        return None if answer.nvmlReturn in UNSUPPORTED else nvml_error(answer.nvmlReturn)
    if answer.metricId not in _SHARES:
        return answer.value * 2**20
    share = answer.value / 100
    return round(min(1.0, share) if share <= _MAX_ROUNDED_SHARE else share, 6)
