"""How many training steps an epoch has made and how long they took, told by the begins of their executions alone."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpuwarden.client.run import Run


class Steps:
    """Counts the steps of one fit into its run.

    An execution is one call of Keras's train function: `per_execution` steps, the last of an epoch perhaps fewer. It
    ends where the next begins. `in_epoch` is how many steps an epoch has, None where Keras does not know: then the last
    begin of an epoch only finds the data at its end, and `updates`, the optimizer's own count, tells how many steps the
    execution before it made. Where there is one step an execution that count is not asked: TensorFlow raises it even
    in the call that finds no data.

    The first execution compiles: its steps count, its time does not. Steps are counted when the run looks.
    """

    def __init__(
        self,
        run: Run,
        per_execution: int,
        in_epoch: int | None,
        updates: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        run.settle()  # what an earlier fit counted, which may have ended by an exception
        run.settle = self.settle
        self._run = run
        self._per_execution = per_execution
        self._in_epoch = in_epoch
        self._clock = clock
        self._asks = updates if per_execution > 1 and in_epoch is None else lambda: None
        # Where a begin may follow a short execution, an execution is known to be full only once the next has ended.
        self._doubtful = 1 if per_execution > 1 and in_epoch is None else 0
        self._compiled = False
        self._resumed = 0.0
        self._reset()

    def _reset(self) -> None:
        self._waits: list[float] = []  # before each begin since the last settling
        self._begun = 0
        self._ended: list[float | None] = []  # seconds of executions that are not counted yet
        self._counted = 0

    def superseded(self) -> bool:
        """Say whether another fit, or another callback of the same one, has begun to count into the run since."""
        return self._run.settle != self.settle

    def begin_epoch(self) -> None:
        """Start to count an epoch."""
        self._reset()
        self._updates_before = self._asks()

    def begin(self) -> None:
        """Note that an execution begins and let the run observe where it is due; no more, since this is done each step.

        The execution's clock starts at the end: what this takes is no part of a step.
        """
        now = self._clock()
        self._waits.append(now - self._resumed)
        if now >= self._run.due:
            self._run.observe(now)
        self._resumed = self._clock()

    def settle(self) -> None:
        """Count the executions that have surely ended."""
        waits, self._waits = self._waits, []
        if not waits:
            return
        # An execution lasts until the next begin; before the epoch's first there was none.
        self._end_executions(waits if self._begun else waits[1:])
        self._begun += len(waits)
        self._run.batch = (self._begun - 1) * self._per_execution
        sure = max(len(self._ended) - self._doubtful, 0)
        for _ in range(sure):
            self._count(self._per_execution)

    def end_epoch(self, *, stopped: bool) -> None:
        """Count what is left when training stops for validation or the epoch's end; a second call counts nothing.

        `stopped`: training was asked to stop, so no begin was made in vain.
        """
        now = self._clock()
        self.settle()
        if not self._begun:
            return
        self._end_executions([now - self._resumed])
        left = self._total(stopped=stopped) - self._counted
        while left > 0 and self._ended:
            left -= self._count(min(left, self._per_execution))
        self._reset()

    def _end_executions(self, seconds: list[float]) -> None:
        self._ended += seconds
        if seconds and not self._compiled:
            self._ended[0] = None
            self._compiled = True

    def _count(self, steps: int) -> int:
        self._run.count(steps, self._ended.pop(0))
        self._counted += steps
        return steps

    def _total(self, *, stopped: bool) -> int:
        """Say how many steps the epoch made."""
        if self._in_epoch is not None:
            return min(self._begun * self._per_execution, self._in_epoch)
        executions = self._begun if stopped else self._begun - 1
        most = executions * self._per_execution
        before, after = self._updates_before, self._asks()
        if before is None or after is None:
            return most
        # An optimizer may skip updates or make several a step; the executions bound what it can mean.
        return min(max(after - before, most - self._per_execution + 1), most)
