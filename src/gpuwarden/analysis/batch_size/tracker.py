"""One run's batch sizes: what they took on each of its devices, and which would fit."""

from __future__ import annotations

from collections.abc import Mapping

from gpuwarden.analysis.batch_size.cost_model import BatchSizeAdvice, SizePeak, advise, fit_cost
from gpuwarden.analysis.batch_size.prior_runs import PriorRuns
from gpuwarden.analysis.batch_size.size_peaks import SizePeaks
from gpuwarden.analysis.memory.device_memory import memory_by_gpu
from gpuwarden.analysis.memory.memory_history import MemoryHistory
from gpuwarden.protocol.messages import Error, Hello, Report

EVALUATION_SECONDS = 10.0  # between two looks: what fits changes slowly
MIN_RETRAINED_SECONDS = 10.0  # and
MIN_RETRAINED_STEPS = 20  # in which a size that was out of memory has to train well, to be called too large no more


class BatchSizeTracker:
    """Used by one event loop. A look takes some 30 µs a device and size."""

    def __init__(self, predecessors: PriorRuns, uid: int) -> None:
        self._predecessors = predecessors
        self._uid = uid
        self._first: Report | None = None
        self._memory: dict[str, SizePeaks] = {}
        self._failed: int | None = None  # the least size that was out of memory and has not trained since
        self._failed_after = 0  # steps
        self._again: tuple[float, int] | None = None  # since when it trains again, and after how many steps
        self._due = 0.0
        self._present = self._before = 0  # largest sizes since the last look, and since the one before
        self._advice: BatchSizeAdvice | None = None

    def hear(self, report: Report, uuids: Mapping[str, str], at: float) -> None:
        """Take a report of a run whose devices have these UUIDs; `at` is seconds since it was first heard of."""
        if self._first is None:
            self._first = report  # it comes before the first poll that knows which device is which
        if report.batch_size is None:
            return
        self._present = max(self._present, report.batch_size)
        if self._failed is not None:
            self._hear_again(report, report.batch_size, self._failed, at)
        for uuid, memory in memory_by_gpu(report.memory, uuids).items():
            known = self._memory.get(uuid)
            if known is None:
                first = memory_by_gpu(self._first.memory, uuids).get(uuid)
                known = self._memory[uuid] = SizePeaks(
                    memory.peak if first is None or self._first.steps else first.peak
                )
            known.hear(memory, report, at)

    def _hear_again(self, report: Report, size: int, failed: int, at: float) -> None:
        """Take it back that a size is too large where it trains again; larger ones are still not to be trusted."""
        if size < failed:
            self._again = None
        elif report.steps > self._failed_after:
            since, steps = self._again = self._again or (at, report.steps)
            if at - since >= MIN_RETRAINED_SECONDS and report.steps - steps >= MIN_RETRAINED_STEPS:
                self._failed, self._again, self._due = size + 1, None, 0.0

    def fail(self, error: Error) -> None:
        """Take an out-of-memory on a device."""
        if error.batch_size:
            self._failed = min(error.batch_size, self._failed or error.batch_size)
            self._failed_after, self._again = error.steps, None
            self._due = 0.0

    def conclude(self) -> None:
        """Look once more at the next poll, whenever that is: the run is over."""
        self._due = 0.0

    def look(self, hello: Hello, histories: Mapping[str, MemoryHistory], now: float) -> BatchSizeAdvice | None:
        """Return what would fit, as of the last look; `now` is monotonic."""
        if now < self._due or not self._memory:
            return self._advice
        self._due = now + EVALUATION_SECONDS
        present = max(self._present, self._before)
        self._before, self._present = self._present, 0
        if self._failed is not None and present >= self._failed > self._before > 0:
            present = self._before
        if present:
            self._advice = self._judge(hello, present, histories)
        return self._advice

    def _judge(self, hello: Hello, present: int, histories: Mapping[str, MemoryHistory]) -> BatchSizeAdvice | None:
        """Ask each device: the least that one of them advises counts."""
        others = self._predecessors.of(self._uid, hello)
        found: list[BatchSizeAdvice] = []
        for uuid in self._memory:
            history = histories.get(uuid)
            cost = fit_cost(self.seen(uuid, histories), others)
            if history is None or history.limit is None or cost is None:
                return None
            advice = advise(cost, present, history.limit, failed=self._failed, of=len(self._memory))
            if advice is None:
                return None
            found.append(advice)
        return min(found, key=lambda each: each.advised)

    def seen(self, uuid: str, histories: Mapping[str, MemoryHistory]) -> tuple[SizePeak, ...]:
        """Return what batches took on a device."""
        known, history = self._memory.get(uuid), histories.get(uuid)
        if known is None:
            return ()
        windows = history.windows if history else []
        return known.seen(windows[-1].lowest if windows else None)
