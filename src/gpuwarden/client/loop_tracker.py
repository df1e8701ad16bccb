"""Tracker of one training loop: it records steps, counts them into the run and reports.

Recording a step takes no lock. One thread at a time counts and reports for all loops of the run, a few times a second:
it need not be the thread whose steps are slow.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf, isfinite
from numbers import Integral, Real
from time import monotonic
from typing import Any

from gpuwarden.client.advice_state import AdviceState
from gpuwarden.client.errors.classifier import error_from_exception
from gpuwarden.client.errors.uncaught import is_error
from gpuwarden.client.frameworks.detect import FrameworkSearch
from gpuwarden.client.guard import Guard, guarded, log
from gpuwarden.client.hello import make_hello
from gpuwarden.client.input_wait import add_input_wait
from gpuwarden.client.reporter import Reporter, join_run
from gpuwarden.client.settings import Settings
from gpuwarden.protocol.messages import PHASES, Error, Hello, Phase
from gpuwarden.protocol.validators import MAX_COUNT

MAX_UNCOUNTED_STEPS = 1 << 16  # recorded steps to keep if another thread's report hangs
MAX_CLOSE_WAIT_SECONDS = 0.1  # wait of a loop's end for another thread's report
MAX_CHANGES_PER_SECOND = 20  # immediate reports of a new phase or epoch; others come with the next report
MAX_HINTS = 8  # different warnings in the log

_open: set[LoopTracker] = set()
_reporting = threading.Lock()


class LoopTracker:
    """Tracker of one loop, which counts its steps into this process's run. None of its methods raises."""

    def __init__(self, settings: Settings, framework: str | None) -> None:
        self._guard = Guard("watch", off=settings.disabled)
        self._settings = settings
        self._search = FrameworkSearch(framework, settings.devices)
        self._outer_phases: list[tuple[Phase, bool]] = []  # phases around this one, and whether a step was in progress
        self._left_training_at = 0.0  # when the phase "train" was last left
        self._failed_in: Phase | None = None  # phase that an exception left
        self._resting = True  # no step since the start, the end of the data or a phase
        self._has_stepped = False  # ever
        self._step_began: float | None = None  # start of the current step; may be unknown before the first
        # For each step: seconds, None if not timed; examples; seconds of waiting for its batches; loss.
        self._uncounted: deque[tuple[float | None, int | None, float | None, float | None]] = deque(
            maxlen=MAX_UNCOUNTED_STEPS
        )
        self._step_wait: float | None = None  # seconds that the current step has waited for its batches
        self._epoch: int | None = None
        self._epoch_steps = 0
        self._change_times: deque[float] = deque(maxlen=MAX_CHANGES_PER_SECOND)  # when they were reported
        self._warned: set[str] = set()
        self._failure: Error | None = None  # the run's last error when this loop started
        self.closed = False  # its steps are still to be counted while it is in _open
        self.phase: Phase = "train"
        self.stepping = False  # a step is in progress
        self.run: Reporter
        self._begin()

    @guarded
    def _begin(self) -> None:
        self.run = run = join_run(
            self._settings.socket, self._make_hello(), census=self._settings.census, summary=self._settings.summary
        )
        run.interval = self._settings.interval
        self._failure = run.failure
        _open.add(self)
        run.count_loops = _count_rest
        self._send(run.report)

    @guarded
    def step(self, batch_size: int | None, loss: float | None) -> None:
        """Record that a step has ended."""
        now = monotonic()
        if self.phase == "train":
            took = now - self._step_began if self._has_stepped and self._step_began is not None else None
            if self._resting:
                self._start_stepping(now)
            size = None if batch_size is None else self._check_whole(batch_size, "batch_size")
            number = None if loss is None else self._check_number(loss)
            self._uncounted.append((took, size, self._step_wait, number))
            self._step_wait = None
        if now >= self.run.observe_due:
            self._send(self.run.observe)
        if self.phase == "train":
            self._step_began = monotonic()  # the time of this method belongs to no step

    def _start_stepping(self, now: float) -> None:
        """Record the first step after a rest; the very first may have compiled."""
        if not self._has_stepped and self._step_began is not None:
            self.run.state.compile_seconds = (self.run.state.compile_seconds or 0.0) + now - self._step_began
        self._has_stepped, self._resting, self.stepping = True, False, True
        self._failed_in = None

    @guarded
    def begin_epoch(self, number: Any) -> None:
        """Record that an epoch starts, and its first step with it."""
        self._run_exclusively(self._count_all)
        self._epoch, self._epoch_steps = self._check_whole(number, "epoch"), 0
        self._start_step()
        self._report_change()

    @guarded
    def begin_batches(self) -> None:
        """Record that the first batch is requested from a loader; a step starts with it."""
        self._start_step()
        if self.phase == "train":
            self.stepping = True

    def record_wait(self, requested_at: float) -> None:
        """Record the arrival of a batch that was requested at `requested_at` (monotonic). Cannot fail."""
        if self.phase == "train":
            self._step_wait = (self._step_wait or 0.0) + monotonic() - requested_at

    @guarded
    def rest(self) -> None:
        """Record the end of the data: no step is in progress, so silence from here on is no stall."""
        if self.phase == "train":
            self.stepping, self._resting = False, True
            self._report_change()

    @guarded
    def enter(self, phase: Phase) -> None:
        """Record that another phase starts inside this one; steps count only in "train"."""
        if phase not in PHASES:
            given = repr(phase[:20]) if isinstance(phase, str) else f"a {type(phase).__name__}"
            self._warn_once(f"phase: {given} is unknown, using idle; pass one of {', '.join(PHASES)}")
            phase = "idle"
        self._outer_phases.append((self.phase, self.stepping))
        self._failed_in = None
        self._switch_phase(phase, stepping=self.stepping and phase == "train")

    @guarded
    def leave(self, *, failed: bool) -> None:
        """Record that the phase has ended."""
        self._failed_in = self.phase if failed else None
        phase, stepping = self._outer_phases.pop()
        self._switch_phase(phase, stepping=stepping, report=not failed)

    def _switch_phase(self, phase: Phase, *, stepping: bool, report: bool = True) -> None:
        """Switch to a phase; time outside "train" does not count into the step that it interrupts.

        After a failure memory in use is not that between steps: the error itself is the next report.
        """
        now = monotonic()
        if self.phase == "train" != phase:
            self._left_training_at = now
        elif self.phase != "train" == phase and self._step_began is not None:
            self._step_began += now - self._left_training_at
        self.phase, self.stepping, self._resting = phase, stepping, True
        if report:
            self._report_change()

    @guarded
    def fail(self, error: BaseException) -> None:
        """Report an error. Only its text is kept: its frames hold tensors on the device."""
        if not is_error(error):
            return
        self._run_exclusively(self._count_all)
        run = self.run
        run.memory.sample()
        failure = error_from_exception(error, self._failed_in or self.phase, run.state.steps, run.memory.latest())
        last = None if run.failure is self._failure else run.failure
        # An inner watch or callback may have reported the same error already.
        if last is None or (last.exception, last.text, last.steps) != (failure.exception, failure.text, failure.steps):
            run.report_error(failure)

    @property
    def advice(self) -> AdviceState:
        """Advice of the daemon up to now; none if the loop is switched off."""
        run: Reporter | None = getattr(self, "run", None)  # missing if join_run failed
        if run is None or self._guard.off:
            return AdviceState()
        self._listen()
        return run.advice

    @guarded
    def _listen(self) -> None:
        now = monotonic()
        if now >= self.run.listen_due:
            self._run_exclusively(partial(self.run.listen, now))

    def close(self) -> None:
        """Report the last totals, and switch off."""
        self._close()
        self._guard.off = True

    @guarded
    def _close(self) -> None:
        failed = sys.exc_info()[1] is not None
        if failed:  # closed in a `finally`: the error is reported when it ends the process
            self.run.interrupted_in = self._failed_in or self.phase
        self.stepping, self.phase, self.closed = False, "idle", True
        others = [each for each in tuple(_open) if each.run is self.run and not each.closed]
        (others or [self])[0].report_end()
        if not (failed or others):
            self._run_exclusively(self.run.print_summary, MAX_CLOSE_WAIT_SECONDS)

    @guarded
    def report_end(self) -> None:
        """Report the end of a loop, and the state of this one."""
        self._run_exclusively(partial(self._count_and_send, self.run.report), MAX_CLOSE_WAIT_SECONDS)

    def _give_up(self) -> None:
        """Report that no step of this loop is in progress: silence from here on is no stall."""
        self.stepping, self.phase = False, "idle"
        if not any(each.stepping for each in tuple(_open) if each.run is self.run):
            self.run.give_up()

    def _send(self, send: Callable[[float], None]) -> None:
        """Count the recorded steps, update the loop's state, and send."""
        self._run_exclusively(partial(self._count_and_send, send))

    def _count_and_send(self, send: Callable[[float], None]) -> None:
        run = self.run
        self._count_all()
        if self._search.search(run.memory, stepped=run.state.steps > 0):
            run.set_hello(self._make_hello())
        state = run.state
        state.phase = self.phase
        state.epoch = state.epoch if self._epoch is None else self._epoch
        state.batch = max(self._epoch_steps - 1, 0)
        state.stepping = any(each.stepping for each in tuple(_open) if each.run is run)
        send(monotonic())

    def _run_exclusively(self, act: Callable[[], None], wait: float = 0.0) -> None:
        """Call `act` in one thread at a time; skip it if another thread takes longer than `wait` seconds."""
        lock = _reporting
        if lock.acquire(timeout=wait):
            try:
                act()
            finally:
                lock.release()

    def _report_change(self) -> None:
        """Report a new state at once, or with the next report if there were too many changes."""
        now = monotonic()
        if len(self._change_times) == MAX_CHANGES_PER_SECOND and now - self._change_times[0] < 1:
            return
        self._change_times.append(now)
        self._send(self.run.report)

    def _count_all(self) -> None:
        for each in tuple(_open):
            closed = each.closed
            each.count()
            if closed:
                _open.discard(each)

    def count(self) -> None:
        """Count the recorded steps into the run."""
        run = self.run
        steps = [self._uncounted.popleft() for _ in range(len(self._uncounted))]
        if not steps:
            return
        seconds, sizes, waits, losses = zip(*steps, strict=True)
        first = run.state.steps + 1
        run.add_executions(seconds, 1)
        self._epoch_steps += len(steps)
        run.add_examples(None if None in sizes else sum(sizes))
        if known := [size for size in sizes if size]:
            run.record_batch_size(known[-1], max(known))
        if waited := [pair for pair in zip(waits, seconds, strict=True) if None not in pair]:
            add_input_wait(run.state, sum(wait for wait, _ in waited), sum(took for _, took in waited))
        if passed := [(step, loss) for step, loss in enumerate(losses, first) if loss is not None]:
            self._add_losses(passed)

    def _add_losses(self, losses: list[tuple[int, float]]) -> None:
        run, now = self.run, monotonic()
        for step, loss in losses:
            if isfinite(loss):
                run.nonfinite_losses.record_finite(step)
            else:
                run.nonfinite_losses.record_nonfinite(step, now)
        last = losses[-1][1]
        run.state.loss = last if abs(last) < MAX_COUNT else None  # a message has no NaN or infinity

    def _make_hello(self) -> Hello:
        return make_hello(self._settings.name, self._search.framework, self._search.devices, self._search.no_gpu)

    def _start_step(self) -> None:
        if self.phase == "train":
            self._step_began = monotonic()
            self._step_wait = None

    def _check_whole(self, value: Any, what: str) -> int | None:
        # The exact type first: an abstract class takes some µs.
        if (type(value) is int or isinstance(value, Integral)) and 0 <= value < MAX_COUNT:  # type: ignore[operator] # they compare
            return int(value)
        self._warn_once(f"{what}: ignored, pass a whole number of 0 or more, not {type(value).__name__}")
        return None

    def _check_number(self, value: Any) -> float | None:
        # No float() of any other type: a tensor would wait for its device.
        if type(value) is float or isinstance(value, Real):
            try:
                return float(value)
            except OverflowError:  # an int beyond the range of float
                return inf
        self._warn_once(f"loss: ignored, pass a number such as loss.item(), not {type(value).__name__}")
        return None

    def _warn_once(self, text: str) -> None:
        if text not in self._warned and len(self._warned) < MAX_HINTS:
            self._warned.add(text)
            log.warning(text)

    def switch_off(self) -> None:
        """Switch off, in a forked child or when the watch is garbage-collected."""
        self._guard.off = self.closed = True


def _count_rest(run: Reporter) -> None:
    for each in tuple(_open):
        if each.run is run:
            with contextlib.suppress(Exception):  # no internal failure may show at a program's end
                each.count()


def _forget_in_child() -> None:
    global _reporting  # noqa: PLW0603 - a thread of the parent may hold the lock
    _reporting = threading.Lock()
    for each in tuple(_open):
        each.switch_off()
    _open.clear()


os.register_at_fork(after_in_child=_forget_in_child)
