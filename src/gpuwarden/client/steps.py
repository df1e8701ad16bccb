"""How many training steps an epoch has made and how long they took, told by the begins of their executions alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from operator import sub

from gpuwarden.client.hook import Hook
from gpuwarden.client.run import Run

COMPILED = 10.0  # times the usual step: one that long compiled, if a function was traced meanwhile
LOOK_INTERVAL = 1.0  # seconds between two calls of each of `looks`
APART = 0.01  # seconds: between steps that are shorter one thing is done at a time
MANY = 64  # executions that are settled by themselves: sorting the times of hundreds takes as long as a report
MOST_OF_THE_TIME = 0.0005  # that goes into looks and reports, unless
MOST_INTERVALS = 4  # would pass without one


class Steps:
    """Counts the steps of one fit into its run.

    An execution is one call of Keras's train function: `per_execution` steps, the last of an epoch perhaps fewer. It
    begins with a call of `begin`, the hook's, and ends where the next begins. `in_epoch` is how many steps an epoch
    has, None where Keras does not know: then the last begin of an epoch may only find the data at its end, and
    `updates`, the optimizer's own count, tells how many steps the execution before it made. Where there is one step an
    execution that count is not asked: TensorFlow raises it even in the call that finds no data.

    `traces` changes whenever a function was traced; None where nobody can tell. An execution that traced counts, and
    its time goes to what compiling took: the first, and a later one that is much longer than usual. Where nobody can
    tell, the first of a fit is taken to compile. Each of `looks` is called about once a second between two steps. Steps
    are counted when the run looks. What there is to do is shared out over several begins where those come faster than
    reports are asked for: no step waits for all of it. `answers`, where somebody acts on what the daemon says, is
    called between two steps once it has said something, and may take its time.
    """

    def __init__(
        self,
        run: Run,
        per_execution: int,
        in_epoch: int | None,
        *,
        updates: Callable[[], int | None] = lambda: None,
        traces: Callable[[], object | None] = lambda: None,
        looks: Sequence[Callable[[], None]] = (),
        answers: Callable[[], None] | None = None,
        hook: Hook | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run = run
        self._per_execution = per_execution
        self._in_epoch = in_epoch
        self._epoch = 0
        self._clock = clock
        self.resume()
        self._asks = updates if per_execution > 1 and in_epoch is None else lambda: None
        self._traces = traces
        self._traced = traces()
        if self._traced is not None:
            run.compile_seconds = run.compile_seconds or 0.0
        self._looks = looks
        self._answers = answers
        self._answered = 0  # of what the daemon has said
        self._look_due = 0.0
        self._pending: list[Callable[[], None]] = []  # looks that are due
        self._spent = 0.0  # seconds since the run looked last
        self._begun = False  # an epoch has
        self._first = True  # the execution under way, or the next, is the fit's first
        # Where a begin may follow a short execution, an execution is known to be full only once the next has ended.
        self._doubtful = 1 if per_execution > 1 and in_epoch is None else 0
        # When the execution under way and those since the last settling began; one list for good, as the hook has it.
        self._begins: list[float] = []
        self._hook = hook or Hook(clock=clock)
        self.begin = self._hook.begin
        self._reset()

    def _reset(self) -> None:
        self._begins.clear()
        self._executions = 0  # that have ended
        self._ended: list[float | None] = []  # seconds of those that are not counted yet; None is no usual step
        self._counted = 0
        self._interrupted = False  # the first execution that ends from here on held a fit within this one
        self._run.stepping = False

    @property
    def under_way(self) -> float | None:
        """When the execution under way began; None where there is none."""
        return self._begins[-1] if self._begins else None

    def superseded(self) -> bool:
        """Say whether another fit, or another callback of the same one, has begun to count into the run since."""
        return self._run.settle != self.settle

    def displaced(self) -> bool:
        """Say whether that one goes on to count: a second callback of this fit, or a fit of another thread.

        To be asked as an epoch begins. A second callback counts from before the first epoch on; what displaced this
        later came within it, and is over by now, though an exception may have ended it unseen.
        """
        if not self.superseded() or self._run.phase != "train":
            return False
        return not self._begun or self._run.settled_in != threading.get_ident()

    def resume(self) -> None:
        """Count into the run from now on, where another fit has done so, which may have ended by an exception."""
        run = self._run
        run.settle()
        run.settle = self.settle
        run.settled_in, run.settled_since = threading.get_ident(), self._clock()

    def _goes_on(self) -> bool:
        """Count into the run again after a fit within this one, which is over; say whether this one counts.

        That of another thread goes on beside this one.
        """
        if self.superseded():
            if self._run.settled_in != threading.get_ident():
                return False
            self._interrupted = bool(self._begins) and self._begins[0] <= self._run.settled_since
            self._run.epoch = self._epoch
            self.resume()
        return True

    def begin_epoch(self, number: int = 0) -> None:
        """Start to count the epoch of that number; its first begin is reported at once."""
        self._reset()
        self._begun = True
        self._run.epoch = self._epoch = number
        self._updates_before = self._asks()
        self._run.hasten()
        self.take_notes()

    def take_notes(self) -> None:
        """Have the hook note for these steps, the next begin at once, where it may have noted for others since."""
        self._hook.point(self._begins.append, self._attend)

    def _attend(self, now: float) -> float:
        """Do what is due as an execution begins; say when there is more to do.

        The execution's clock starts at the end of it: what it takes is no part of a step.
        """
        run = self._run
        if self._answers is None:
            if now >= run.look_due:
                self._observe(now)
            return run.look_due
        run.listen(now)
        if run.told.count != self._answered and not self.superseded():
            self._answered = run.told.count
            self._answers()
            now = self._begins[-1] = self._clock()
        if now >= run.look_due:
            self._observe(now)
        return min(run.look_due, run.listen_due)

    def _observe(self, now: float) -> None:
        if not self._goes_on():
            self._reset()
            return
        self._run.phase, self._run.stepping = "train", True  # whatever a fit or test within this one has left
        all_done = self._do_next(now)
        done = self._begins[-1] = self._clock()
        self._spent += done - now
        if all_done:
            # Where that takes long the next one waits: half a thousandth of the time is enough for it.
            pause = min(self._spent / MOST_OF_THE_TIME, MOST_INTERVALS * self._run.interval)
            self._run.look_due = max(self._run.look_due, done + pause)
            self._spent = 0.0

    def _do_next(self, now: float) -> bool:
        """Do what is due, or only a part of it; say whether that was all, else the next begin goes on."""
        if not self._executions and len(self._begins) == 1:
            self._run.report(now)  # should the epoch's first step hang, the daemon knows that it began
            return True
        if now >= self._look_due and not self._pending:
            self._look_due = now + LOOK_INTERVAL
            self._pending = list(self._looks)
        fast = now - self._begins[-2] < min(APART, self._run.interval)
        if fast and len(self._begins) > MANY:
            self.settle()
            return False
        if self._pending:
            self._pending.pop()()
            if fast:
                return False
        self._run.observe(now)
        return True

    def settle(self) -> None:
        """Count the executions that have surely ended."""
        begins = self._begins
        if not begins:
            return
        # An execution lasts until the next begin; before the epoch's first there was none.
        ended = list(map(sub, begins[1:], begins))
        del begins[:-1]
        self._end_executions(ended)
        self._run.batch = self._executions * self._per_execution
        sure = len(self._ended) - self._doubtful
        if sure > 0:
            self._count(self._ended[:sure], self._per_execution)
            del self._ended[:sure]

    def end_epoch(self, *, in_vain: bool) -> int | None:
        """Count what is left when training stops for validation or the epoch's end; tell how many steps there were.

        None if none had begun since this was called last.

        `in_vain`: the last begin only found the data at its end.
        """
        now = self._clock()
        self._goes_on()
        self.settle()
        if not self._begins:
            return None
        self._end_executions([now - self._begins[0]])
        left = self._total(in_vain=in_vain) - self._counted
        full, short = divmod(max(left, 0), self._per_execution)
        self._count(self._ended[:full], self._per_execution)
        if short:
            self._count(self._ended[full : full + 1], short)
        made = self._counted
        self._reset()
        return made

    def fail(self) -> int:
        """Count what is left when the execution under way has failed; tell how many steps there were."""
        self.settle()
        self._count(self._ended, self._per_execution)
        made = self._counted
        self._reset()
        return made

    def _end_executions(self, seconds: list[float]) -> None:
        if not seconds:
            return
        self._executions += len(seconds)
        kept: list[float | None] = [*seconds]
        traced, first, interrupted = self._traces(), self._first, self._interrupted
        if interrupted or (first and traced is None and self._traced is None):  # else who counted traces is gone
            kept[0] = None
        elif traced != self._traced:
            compiled = 0 if first else self._compiled(seconds)
            if compiled is not None:
                self._run.compile_seconds = (self._run.compile_seconds or 0.0) + seconds[compiled]
                kept[compiled] = None
        self._traced, self._first, self._interrupted = traced, False, False
        self._ended += kept

    def _compiled(self, seconds: list[float]) -> int | None:
        """Say which of these executions was the one that traced: the longest, if it is far longer than usual."""
        (usual,) = self._run.durations.percentiles(0.5)
        longest = max(seconds)
        far = usual is not None and longest > COMPILED * usual * self._per_execution
        return seconds.index(longest) if far else None

    def _count(self, executions: list[float | None], steps: int) -> None:
        timed = [each for each in executions if each is not None]
        self._run.execute(timed, steps)
        self._run.count((len(executions) - len(timed)) * steps, None)
        self._counted += len(executions) * steps

    def _total(self, *, in_vain: bool) -> int:
        """Say how many steps the epoch made."""
        most = (self._executions - in_vain) * self._per_execution
        if self._in_epoch is not None:
            return min(most, self._in_epoch)
        before, after = self._updates_before, self._asks()
        if before is None or after is None:
            return most
        # An optimizer may skip updates or make several a step; the executions bound what it can mean.
        return min(max(after - before, most - self._per_execution + 1), most)
