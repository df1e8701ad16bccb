"""Step counter of one fit: the number of steps and their durations, from the start times of executions."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

from gpuwarden.client.keras.fit.function_patch import ReturnCounter
from gpuwarden.client.reporter import Reporter

COMPILED_RATIO = 10.0  # times the usual step: a step longer than that compiled, if a function was traced meanwhile


class StepCounter:
    """Counter of the steps of one fit into its run. Of several fits of a process, only the last one counts.

    An execution is one call of Keras's train function: `per_execution` steps, or fewer at the end of an epoch. It
    starts at a call of `begin` and ends where the next one starts. `in_epoch` is the number of steps in an epoch, None
    if Keras does not know it: then the last `begin` of an epoch may only find the end of the data, and `updates`, the
    optimizer's own count, shows how many steps the execution before it made. With one step an execution that count is
    not read: TensorFlow increases it even in the call that finds no data.

    `traces` changes whenever a function was traced; None if unknown. An execution that traced counts as a step, but its
    time counts as compile time: the first one, and later ones that are much longer than usual. If traces are unknown,
    the first execution of a fit counts as compiling. `count_ended` counts finished ones; the run calls it before a
    report. `returned` counts the executions that have returned: if another callback's exception ends the fit, it
    shows whether the last one has. Then `cut_short` is called with the number of steps of the epoch or its last part.
    """

    def __init__(
        self,
        run: Reporter,
        per_execution: int,
        in_epoch: int | None,
        *,
        updates: Callable[[], int | None] = lambda: None,
        traces: Callable[[], object | None] = lambda: None,
        cut_short: Callable[[int], None] = lambda _steps: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._per_execution = per_execution
        self._in_epoch = in_epoch
        self._clock = clock
        self._updates = updates if per_execution > 1 and in_epoch is None else lambda: None
        self._updates_before: int | None = None
        self._traces = traces
        self._cut_short = cut_short
        self._traced = traces()
        if self._traced is not None:
            run.state.compile_seconds = run.state.compile_seconds or 0.0
        self._first = True  # the current execution, or the next one, is the fit's first
        # If an execution may be short, it is known to be complete only after the next one has ended.
        self._doubtful = 1 if per_execution > 1 and in_epoch is None else 0
        self.returned = ReturnCounter()
        self._begins: list[float] = []  # start times of executions since the last `count_ended`, and of the current one
        self._reset()
        run.finish()  # a fit that another callback's exception ended
        run.active_counter = self

    def _reset(self) -> None:
        self._begins.clear()
        self._last_batch: int | None = None
        self._no_data: float | None = None  # start of the execution that only found the end of the data
        self._executions = 0  # finished
        self._ended: list[float | None] = []  # seconds of the finished ones not counted yet; None: compiled
        self._counted = 0
        self._returned_before = self.returned.count
        self._run.state.stepping = False

    @property
    def counts(self) -> bool:
        """True while this fit counts: no other fit, and no second callback of this fit, has started since."""
        return self._run.active_counter is self

    def begin_epoch(self) -> None:
        """Start counting an epoch."""
        self._reset()
        self._updates_before = self._updates()

    def begin(self, batch: int, now: float) -> None:
        """Record the start of the execution of a batch; ignore the same batch again, from a callback listed twice."""
        if batch != self._last_batch:
            self._last_batch = batch
            self._begins.append(now)

    def restart(self) -> None:
        """Move the start of the current execution to now: the time since `begin` belongs to no step."""
        self._begins[-1] = self._clock()

    def find_end(self) -> None:
        """Record that the current execution found the end of the data."""
        self._no_data = self._begins[-1] if self._begins else None

    def count_ended(self) -> None:
        """Count the executions that are known to be complete."""
        if not self.counts:
            self._begins.clear()
        if not self._begins:
            return
        ended = [after - before for before, after in pairwise(self._begins)]
        del self._begins[:-1]
        self._end_executions(ended)
        self._run.state.batch = self._executions * self._per_execution
        complete = len(self._ended) - self._doubtful
        if complete > 0:
            self._count_executions(self._ended[:complete], self._per_execution)
            del self._ended[:complete]

    def finish(self) -> None:
        """Count the remaining steps of a fit that has ended without a hook, by another callback's exception."""
        self.count_ended()
        if not self._begins:
            return
        if self.returned.count - self._returned_before > self._executions:
            self._executions += 1
            self._ended.append(None)  # its end is unknown
        # Without reading `updates`, since the process may be ending.
        most = self._executions * self._per_execution
        self._cut_short(self._count_rest(most if self._in_epoch is None else min(most, self._in_epoch)))

    def end_epoch(self) -> int | None:
        """Count the remaining steps when validation starts or the epoch ends; return the number of steps.

        None if none has started since the last call.
        """
        now = self._clock()
        self.count_ended()
        if not self._begins:
            return None
        no_data = self._begins[-1] == self._no_data
        self._end_executions([now - self._begins[-1]])
        return self._count_rest(self._count_steps(self._executions - no_data))

    def _count_rest(self, made: int) -> int:
        """Count those of the epoch's `made` steps that have not been counted; return the number of steps."""
        full, short = divmod(max(made - self._counted, 0), self._per_execution)
        self._count_executions(self._ended[:full], self._per_execution)
        if short:
            self._count_executions(self._ended[full : full + 1], short)
        counted = self._counted
        self._reset()
        return counted

    def fail(self) -> int:
        """Count the remaining steps after the current execution has failed; return the number of steps."""
        self.count_ended()
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
        if first and traced is None and self._traced is None:  # otherwise the model that had traces is gone
            kept[0] = None
        elif traced != self._traced:
            compiled = 0 if first else self._find_compiled(seconds)
            if compiled is not None:
                self._run.state.compile_seconds = (self._run.state.compile_seconds or 0.0) + seconds[compiled]
                kept[compiled] = None
        self._traced, self._first = traced, False
        self._ended += kept

    def _find_compiled(self, seconds: list[float]) -> int | None:
        """Return the index of the execution that traced: the longest, if it is much longer than usual; else None."""
        (median,) = self._run.durations.percentiles(0.5)
        longest = max(seconds)
        is_long = median is not None and longest > COMPILED_RATIO * median * self._per_execution
        return seconds.index(longest) if is_long else None

    def _count_executions(self, executions: list[float | None], steps: int) -> None:
        self._run.add_executions(executions, steps)
        self._counted += len(executions) * steps

    def _count_steps(self, executions: int) -> int:
        most = executions * self._per_execution
        if self._in_epoch is not None:
            return min(most, self._in_epoch)
        before, after = self._updates_before, self._updates()
        self._updates_before = after  # for the rest of the epoch, after an evaluation within it
        if before is None or after is None:
            return most
        # An optimizer may skip updates or make several a step, so the number of executions limits the result.
        return min(max(after - before, most - self._per_execution + 1), most)
