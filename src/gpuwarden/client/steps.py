"""How many training steps an epoch has made and how long they took, told by the begins of their executions alone."""

from __future__ import annotations

from collections.abc import Callable

from gpuwarden.client.run import Run


class Steps:
    """Counts the steps of one fit into its run.

    An execution is one call of Keras's train function: `per_execution` steps, the last of an epoch perhaps fewer. It
    ends where the next begins. `in_epoch` is how many steps an epoch has, None where Keras does not know: then the last
    begin of an epoch only finds the data at its end, and `updates`, the optimizer's own count, tells how many steps the
    execution before it made. Where there is one step an execution that count is not asked: TensorFlow raises it even
    in the call that finds no data.

    The first execution compiles: its steps count, its time does not.
    """

    def __init__(
        self, run: Run, per_execution: int, in_epoch: int | None, updates: Callable[[], int | None] = lambda: None
    ) -> None:
        self._run = run
        self._per_execution = per_execution
        self._in_epoch = in_epoch
        self._asks = updates if per_execution > 1 and in_epoch is None else lambda: None
        # Where a begin may follow a short execution, an execution is known to be full only once the next has ended.
        self._doubtful = 1 if per_execution > 1 and in_epoch is None else 0
        self._compiled = False
        self._reset()

    def _reset(self) -> None:
        self._begun = 0
        self._counted = 0
        self._resumed: float | None = None
        self._ended: list[float | None] = []

    def begin_epoch(self) -> None:
        """Start to count an epoch."""
        self._reset()
        self._updates_before = self._asks()

    def begin(self, now: float) -> int:
        """Take note that an execution begins; return the index of its first step in the epoch."""
        if self._resumed is not None:
            self._end_execution(now - self._resumed)
            while len(self._ended) > self._doubtful:
                self._count(self._per_execution)
        self._resumed = now
        self._begun += 1
        return (self._begun - 1) * self._per_execution

    def resume(self, now: float) -> None:
        """Start the execution's clock anew: what the hook itself took is no part of a step."""
        self._resumed = now

    def end_epoch(self, now: float, *, stopped: bool) -> None:
        """Count what is left when training stops for validation or the epoch's end; a second call counts nothing.

        `stopped`: training was asked to stop, so no begin was made in vain.
        """
        if self._resumed is None:
            return
        self._end_execution(now - self._resumed)
        left = self._total(stopped=stopped) - self._counted
        while left > 0 and self._ended:
            left -= self._count(min(left, self._per_execution))
        self._reset()

    def _end_execution(self, seconds: float) -> None:
        self._ended.append(seconds if self._compiled else None)
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
