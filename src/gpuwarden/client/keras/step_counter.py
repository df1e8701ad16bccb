"""Step counter of one fit: the number of steps and their durations, from the begins of their executions."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

from gpuwarden.client.reporter import Reporter

COMPILED_RATIO = 10.0  # times the usual step: one that long compiled, if a function was traced meanwhile


class StepCounter:
    """Counter of the steps of one fit into its run; of a process's fits the one that began last counts.

    An execution is one call of Keras's train function: `per_execution` steps, the last of an epoch perhaps fewer. It
    starts at a call of `begin` and ends where the next starts. `in_epoch` is how many steps an epoch has, None where
    Keras does not know: then the last begin of an epoch may only find the end of the data, and `updates`, the
    optimizer's own count, says how many steps the execution before it made. With one step an execution that count is
    not read: TensorFlow raises it even in the call that finds no data.

    `traces` changes whenever a function was traced; None where that is unknown. An execution that traced counts, and
    its time goes to the compile time: the first, and a later one that is much longer than usual. Where traces are
    unknown, the first of a fit is taken to compile. `settle` counts what has ended; the run calls it before it reports.
    """

    def __init__(
        self,
        run: Reporter,
        per_execution: int,
        in_epoch: int | None,
        *,
        updates: Callable[[], int | None] = lambda: None,
        traces: Callable[[], object | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._per_execution = per_execution
        self._in_epoch = in_epoch
        self._clock = clock
        self._updates = updates if per_execution > 1 and in_epoch is None else lambda: None
        self._updates_before: int | None = None
        self._traces = traces
        self._traced = traces()
        if self._traced is not None:
            run.compile_seconds = run.compile_seconds or 0.0
        self._first = True  # the execution under way, or the next, is the fit's first
        # Where a begin may follow a short execution, an execution is known to be full only once the next has ended.
        self._doubtful = 1 if per_execution > 1 and in_epoch is None else 0
        self._begins: list[float] = []  # of the executions since the last settling, and of the one under way
        self._reset()
        run.settle()  # the steps of a fit that another callback's exception ended
        run.active_counter = self

    def _reset(self) -> None:
        self._begins.clear()
        self._last_batch: int | None = None
        self._no_data: float | None = None  # the begin that only found the end of the data
        self._executions = 0  # that have ended
        self._ended: list[float | None] = []  # seconds of those that are not counted yet; None is no usual step
        self._counted = 0
        self._run.stepping = False

    @property
    def counts(self) -> bool:
        """True while this fit counts: no other one, and no second callback of this one, has begun since."""
        return self._run.active_counter is self

    def begin_epoch(self) -> None:
        """Start to count an epoch."""
        self._reset()
        self._updates_before = self._updates()

    def begin(self, batch: int, now: float) -> None:
        """Record that the execution of that batch starts; the same one again is of a callback that is listed twice."""
        if batch != self._last_batch:
            self._last_batch = batch
            self._begins.append(now)

    def restart(self) -> None:
        """Let the execution under way start now: what was done since its begin is no part of a step."""
        self._begins[-1] = self._clock()

    def find_end(self) -> None:
        """Record that the execution under way found the end of the data."""
        self._no_data = self._begins[-1] if self._begins else None

    def settle(self) -> None:
        """Count the executions that have surely ended."""
        if not self.counts:
            self._begins.clear()
        if not self._begins:
            return
        ended = [after - before for before, after in pairwise(self._begins)]
        del self._begins[:-1]
        self._end_executions(ended)
        self._run.batch = self._executions * self._per_execution
        sure = len(self._ended) - self._doubtful
        if sure > 0:
            self._count_executions(self._ended[:sure], self._per_execution)
            del self._ended[:sure]

    def end_epoch(self) -> int | None:
        """Count what is left when training stops for validation or the epoch's end; return how many steps there were.

        None if none had begun since this was called last.
        """
        now = self._clock()
        self.settle()
        if not self._begins:
            return None
        no_data = self._begins[-1] == self._no_data
        self._end_executions([now - self._begins[-1]])
        left = self._count_steps(self._executions - no_data) - self._counted
        full, short = divmod(max(left, 0), self._per_execution)
        self._count_executions(self._ended[:full], self._per_execution)
        if short:
            self._count_executions(self._ended[full : full + 1], short)
        made = self._counted
        self._reset()
        return made

    def fail(self) -> int:
        """Count what is left when the execution under way has failed; return how many steps there were."""
        self.settle()
        self._count_executions(self._ended, self._per_execution)
        made = self._counted
        self._reset()
        return made

    def _end_executions(self, seconds: list[float]) -> None:
        if not seconds:
            return
        self._executions += len(seconds)
        kept: list[float | None] = [*seconds]
        traced, first = self._traces(), self._first
        if first and traced is None and self._traced is None:  # else who counted traces is gone
            kept[0] = None
        elif traced != self._traced:
            compiled = 0 if first else self._find_compiled(seconds)
            if compiled is not None:
                self._run.compile_seconds = (self._run.compile_seconds or 0.0) + seconds[compiled]
                kept[compiled] = None
        self._traced, self._first = traced, False
        self._ended += kept

    def _find_compiled(self, seconds: list[float]) -> int | None:
        """Return which of these executions was the one that traced: the longest, if it is far longer than usual."""
        (usual,) = self._run.durations.percentiles(0.5)
        longest = max(seconds)
        far = usual is not None and longest > COMPILED_RATIO * usual * self._per_execution
        return seconds.index(longest) if far else None

    def _count_executions(self, executions: list[float | None], steps: int) -> None:
        self._run.add_executions(executions, steps)
        self._counted += len(executions) * steps

    def _count_steps(self, executions: int) -> int:
        """Return how many steps these executions of the epoch made."""
        most = executions * self._per_execution
        if self._in_epoch is not None:
            return min(most, self._in_epoch)
        before, after = self._updates_before, self._updates()
        self._updates_before = after  # an evaluation within the epoch may divide it
        if before is None or after is None:
            return most
        # An optimizer may skip updates or make several a step; the executions bound what it can mean.
        return min(max(after - before, most - self._per_execution + 1), most)
