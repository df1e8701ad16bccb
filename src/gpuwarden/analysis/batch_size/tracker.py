"""Batch sizes of one run: their memory peaks on each of its devices, and the size that would fit."""

from __future__ import annotations

from collections.abc import Mapping

from gpuwarden.analysis.batch_size.cost_model import BatchSizeAdvice, SizePeak, advise, fit_cost
from gpuwarden.analysis.batch_size.prior_runs import PriorRuns
from gpuwarden.analysis.batch_size.size_peaks import SizePeaks
from gpuwarden.analysis.memory.device_memory import sum_by_gpu
from gpuwarden.analysis.memory.memory_history import MemoryHistory
from gpuwarden.protocol.messages import Error, Hello, Report

EVALUATION_SECONDS = 10.0  # between two evaluations: what fits changes slowly
MIN_RETRAINED_SECONDS = 10.0  # and
MIN_RETRAINED_STEPS = 20  # of training after which a size that ran out of memory counts as fitting again


class BatchSizeTracker:
    """Batch sizes of one run. Used by one event loop. An evaluation takes about 30 µs per device and size."""

    def __init__(self, prior_runs: PriorRuns, uid: int) -> None:
        self._prior_runs = prior_runs
        self._uid = uid
        self._first: Report | None = None
        self._peaks: dict[str, SizePeaks] = {}  # by UUID
        self._failed: int | None = None  # smallest size that ran out of memory and has not trained since
        self._failed_after = 0  # steps
        self._retrained: tuple[float, int] | None = None  # time and steps at which it started to train again
        self._due = 0.0
        self._largest = self._largest_before = 0  # sizes since the last evaluation, and since the one before
        self._advice: BatchSizeAdvice | None = None

    def add_report(self, report: Report, uuids: Mapping[str, str], at: float) -> None:
        """Update with a report of a run whose devices have these UUIDs; `at` is seconds since its first message."""
        if self._first is None:
            self._first = report  # it comes before the first poll, which identifies the devices
        if report.batch_size is None:
            return
        self._largest = max(self._largest, report.batch_size)
        if self._failed is not None:
            self._check_failed_size(report, report.batch_size, self._failed, at)
        for uuid, memory in sum_by_gpu(report.memory, uuids).items():
            known = self._peaks.get(uuid)
            if known is None:
                first = sum_by_gpu(self._first.memory, uuids).get(uuid)
                known = self._peaks[uuid] = SizePeaks(memory.peak if first is None or self._first.steps else first.peak)
            known.add_report(memory, report, at)

    def _check_failed_size(self, report: Report, size: int, failed: int, at: float) -> None:
        """Count a failed size as fitting if it trains again; larger ones still do not."""
        if size < failed:
            self._retrained = None
        elif report.steps > self._failed_after:
            since, steps = self._retrained = self._retrained or (at, report.steps)
            if at - since >= MIN_RETRAINED_SECONDS and report.steps - steps >= MIN_RETRAINED_STEPS:
                self._failed, self._retrained, self._due = size + 1, None, 0.0

    def handle_oom(self, error: Error) -> None:
        """Update with an out-of-memory error on a device."""
        if error.batch_size:
            self._failed = min(error.batch_size, self._failed or error.batch_size)
            self._failed_after, self._retrained = error.steps, None
            self._due = 0.0

    def handle_end(self) -> None:
        """Make the next poll evaluate once more, as the run has ended."""
        self._due = 0.0

    def evaluate(self, hello: Hello, histories: Mapping[str, MemoryHistory], now: float) -> BatchSizeAdvice | None:
        """Return the size that would fit, as of the last evaluation; `now` is monotonic."""
        if now < self._due or not self._peaks:
            return self._advice
        self._due = now + EVALUATION_SECONDS
        present = max(self._largest, self._largest_before)
        self._largest_before, self._largest = self._largest, 0
        if self._failed is not None and present >= self._failed > self._largest_before > 0:
            present = self._largest_before
        if present:
            self._advice = self._advise(hello, present, histories)
        return self._advice

    def _advise(self, hello: Hello, present: int, histories: Mapping[str, MemoryHistory]) -> BatchSizeAdvice | None:
        """Return the smallest advised size of all devices; None if one of them has none."""
        prior_peaks = self._prior_runs.peaks(self._uid, hello)
        found: list[BatchSizeAdvice] = []
        for uuid, peaks in self.peaks(histories).items():
            history = histories.get(uuid)
            cost = fit_cost(peaks, prior_peaks)
            if history is None or history.limit is None or cost is None:
                return None
            advice = advise(cost, present, history.limit, failed=self._failed, multiple_of=len(self._peaks))
            if advice is None:
                return None
            found.append(advice)
        return min(found, key=lambda each: each.advised)

    def peaks(self, histories: Mapping[str, MemoryHistory]) -> dict[str, tuple[SizePeak, ...]]:
        """Return the memory peaks by size, by the device's UUID."""
        newest = {uuid: history.series.newest for uuid, history in histories.items()}
        return {
            uuid: known.peaks(window.lowest if (window := newest.get(uuid)) else None)
            for uuid, known in self._peaks.items()
        }
