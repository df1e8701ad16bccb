"""Loop tracker: the steps of one loop of this process, counted into the run and reported.

Noting takes no lock. Counting and reporting is done by one thread at a time, a few times a second, for all loops of the
run: the thread that reports may not be the one whose steps are slow.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf
from numbers import Integral, Real
from time import monotonic
from typing import Any

from gpuwarden.client.advice_state import AdviceState
from gpuwarden.client.errors.classifier import error_from_exception
from gpuwarden.client.errors.uncaught import is_error
from gpuwarden.client.frameworks.detect import FrameworkSearch
from gpuwarden.client.guard import Guard, guarded, log
from gpuwarden.client.hello import make_hello
from gpuwarden.client.reporter import Reporter, join_run
from gpuwarden.client.settings import Settings
from gpuwarden.protocol.messages import PHASES, Error, Hello, Phase
from gpuwarden.protocol.validators import MAX_COUNT

MAX_UNCOUNTED_STEPS = 1 << 16  # steps that wait to be counted, should another thread's report never come back
MAX_CLOSE_WAIT_SECONDS = 0.1  # that the end of a loop may wait for another thread's report
MAX_CHANGES_PER_SECOND = 20  # reports a second of a new phase or epoch; more wait for the next look
MAX_HINTS = 8  # different sentences in the log

_open: set[LoopTracker] = set()
_reporting = threading.Lock()


class LoopTracker:
    """Tracker of one loop, which counts its steps into this process's run. None of its methods raises."""

    def __init__(self, settings: Settings, framework: str | None) -> None:
        self._guard = Guard("watch", off=settings.disabled)
        self._settings = settings
        self._search = FrameworkSearch(framework, settings.devices)
        self._outer_phases: list[
            tuple[Phase, bool]
        ] = []  # the phases around this one, and whether a step was under way
        self._left_training_at = 0.0  # when the phase was last left in which steps are made
        self._failed_in: Phase | None = None  # a phase that an exception left
        self._resting = True  # no step came since the beginning, the data's end or a phase
        self._has_stepped = False  # ever
        self._step_began: float | None = None  # when the step under way began; may be unknown before the first
        # Of each step: seconds, None if it is not timed; examples; seconds that it waited for its batches.
        self._uncounted: deque[tuple[float | None, int | None, float | None]] = deque(maxlen=MAX_UNCOUNTED_STEPS)
        self._step_wait: float | None = None  # seconds that the step under way has waited for its batches
        self._epoch: int | None = None
        self._epoch_steps = 0
        self._loss: float | None = None
        self._change_times: deque[float] = deque(maxlen=MAX_CHANGES_PER_SECOND)  # when they were reported
        self._warned: set[str] = set()
        self._failure: Error | None = None  # the run's last when this began
        self.closed = False  # and still to be counted while it is in _open
        self.phase: Phase = "train"
        self.stepping = False  # a step is under way
        self.run: Reporter
        self._begin()

    @guarded
    def _begin(self) -> None:
        self.run = run = join_run(self._settings.socket, self._make_hello())
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
            self._uncounted.append((took, size, self._step_wait))
            self._step_wait = None
            if loss is not None:
                self._loss = self._check_number(loss)
        if now >= self.run.observe_due:
            self._send(self.run.observe)
        if self.phase == "train":
            self._step_began = monotonic()  # what this took is no part of a step

    def _start_stepping(self, now: float) -> None:
        """Record the first step after a rest; the very first may compile."""
        if not self._has_stepped and self._step_began is not None:
            self.run.compile_seconds = (self.run.compile_seconds or 0.0) + now - self._step_began
        self._has_stepped, self._resting, self.stepping = True, False, True
        self._failed_in = None

    @guarded
    def begin_epoch(self, number: Any) -> None:
        """Record that an epoch begins, and its first step with it."""
        self._run_exclusively(self._count_all)
        self._epoch, self._epoch_steps = self._check_whole(number, "epoch"), 0
        self._start_step()
        self._report_change()

    @guarded
    def begin_batches(self) -> None:
        """Record that a loader is asked for its first batch, and a step begins with it."""
        self._start_step()
        if self.phase == "train":
            self.stepping = True

    def record_wait(self, asked: float) -> None:
        """Record that a batch came that was `asked` for; `asked` is monotonic. For each batch, and nothing can fail."""
        if self.phase == "train":
            self._step_wait = (self._step_wait or 0.0) + monotonic() - asked

    @guarded
    def rest(self) -> None:
        """Record that the data is at its end, so that silence from here on is no step that hangs."""
        if self.phase == "train":
            self.stepping, self._resting = False, True
            self._report_change()

    @guarded
    def enter(self, phase: Phase) -> None:
        """Record that another phase begins within this one; steps are made in "train" alone."""
        if phase not in PHASES:
            given = repr(phase[:20]) if isinstance(phase, str) else f"this {type(phase).__name__}"
            self._warn_once(f"phase: want one of {', '.join(PHASES)}, not {given}; idle is taken for it")
            phase = "idle"
        self._outer_phases.append((self.phase, self.stepping))
        self._failed_in = None
        self._switch_phase(phase, stepping=self.stepping and phase == "train")

    @guarded
    def leave(self, *, failed: bool) -> None:
        """Record that the phase is over."""
        self._failed_in = self.phase if failed else None
        phase, stepping = self._outer_phases.pop()
        self._switch_phase(phase, stepping=stepping)

    def _switch_phase(self, phase: Phase, *, stepping: bool) -> None:
        """Go to a phase; the time between two phases of training is no part of the step that it falls into."""
        now = monotonic()
        if self.phase == "train" != phase:
            self._left_training_at = now
        elif self.phase != "train" == phase and self._step_began is not None:
            self._step_began += now - self._left_training_at
        self.phase, self.stepping, self._resting = phase, stepping, True
        self._report_change()

    @guarded
    def fail(self, error: BaseException) -> None:
        """Report an error as text, and keep nothing else of it: its frames hold tensors on the device."""
        if not is_error(error):
            return
        self._run_exclusively(self._count_all)
        run = self.run
        run.memory.sample()
        failure = error_from_exception(error, self._failed_in or self.phase, run.steps, run.memory.latest())
        last = None if run.failure is self._failure else run.failure
        # The same one may have been reported where it was raised, by a watch or a callback within this one.
        if last is None or (last.exception, last.text, last.steps) != (failure.exception, failure.text, failure.steps):
            run.report_error(failure)

    @property
    def advice(self) -> AdviceState:
        """Advice of the daemon up to now; none where the loop is switched off."""
        run: Reporter | None = getattr(self, "run", None)  # its making may have failed
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
        self.stepping, self.phase, self.closed = False, "idle", True
        others = [each for each in tuple(_open) if each.run is self.run and not each.closed]
        (others or [self])[0].report_end()

    @guarded
    def report_end(self) -> None:
        """Report that a loop has ended, and where this one stands."""
        self._run_exclusively(partial(self._count_and_send, self.run.report), MAX_CLOSE_WAIT_SECONDS)

    def _give_up(self) -> None:
        """Say that no step of this loop is under way: its silence from here on is no step that hangs."""
        self.stepping, self.phase = False, "idle"
        if not any(each.stepping for each in tuple(_open) if each.run is self.run):
            self.run.give_up()

    def _send(self, send: Callable[[float], None]) -> None:
        """Count what is noted, say where the loop stands, and send."""
        self._run_exclusively(partial(self._count_and_send, send))

    def _count_and_send(self, send: Callable[[float], None]) -> None:
        run = self.run
        if self._search.update(run.memory):
            run.set_hello(self._make_hello())
        self._count_all()
        run.phase = self.phase
        run.epoch = run.epoch if self._epoch is None else self._epoch
        run.batch = max(self._epoch_steps - 1, 0)
        run.stepping = any(each.stepping for each in tuple(_open) if each.run is run)
        send(monotonic())

    def _run_exclusively(self, act: Callable[[], None], wait: float = 0.0) -> None:
        """Do what only one thread may do at a time; not at all while another does for longer than `wait` seconds."""
        lock = _reporting
        if lock.acquire(timeout=wait):
            try:
                act()
            finally:
                lock.release()

    def _report_change(self) -> None:
        """Report a new state at once; or, where that is done too often, with the next report."""
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
        """Count what is noted into the run."""
        run = self.run
        noted = [self._uncounted.popleft() for _ in range(len(self._uncounted))]
        run.add_executions([took for took, _, _ in noted], 1)
        self._epoch_steps += len(noted)
        if sizes := [size for _, size, _ in noted if size]:
            total = (run.examples or 0) + sum(sizes)
            run.examples = total if total < MAX_COUNT else run.examples  # a message with more would be refused
            run.record_batch_size(sizes[-1], max(sizes))
        if waits := [(waited, took) for took, _, waited in noted if waited is not None and took is not None]:
            run.input.add(sum(waited for waited, _ in waits), sum(took for _, took in waits))
        if (loss := self._loss) is not None:
            run.loss = loss if abs(loss) < MAX_COUNT else None  # NaN and infinity are no numbers of a message
            self._loss = None

    def _make_hello(self) -> Hello:
        return make_hello(self._settings.name, self._search.framework, self._search.devices)

    def _start_step(self) -> None:
        """Begin a step now."""
        if self.phase == "train":
            self._step_began = monotonic()
            self._step_wait = None

    def _check_whole(self, value: Any, what: str) -> int | None:
        # By type first: to ask an abstract class takes some µs.
        if (type(value) is int or isinstance(value, Integral)) and 0 <= value < MAX_COUNT:  # type: ignore[operator] # they compare
            return int(value)
        self._warn_once(f"{what}: want a whole number, 0 or more, not this {type(value).__name__}; left out")
        return None

    def _check_number(self, value: Any) -> float | None:
        # Not float() of anything: a tensor would wait for its device.
        if type(value) is float or isinstance(value, Real):
            try:
                return float(value)
            except OverflowError:  # a whole number past a float's greatest
                return inf
        self._warn_once(f"loss: want a number such as loss.item(), not {type(value).__name__}; left out")
        return None

    def _warn_once(self, text: str) -> None:
        """Log once what the program might do better."""
        if text not in self._warned and len(self._warned) < MAX_HINTS:
            self._warned.add(text)
            log.warning(text)

    def switch_off(self) -> None:
        """Switch off: the loop was its parent's, in a forked child, or its watch is gone."""
        self._guard.off = self.closed = True


def _count_rest(run: Reporter) -> None:
    """Count what loops have noted, before the run reports its end."""
    for each in tuple(_open):
        if each.run is run:
            with contextlib.suppress(Exception):  # whatever fails here must not show at a program's end
                each.count()


def _forget_in_child() -> None:
    global _reporting  # noqa: PLW0603 - the lock may be held, by a thread that the child does not have
    _reporting = threading.Lock()
    for each in tuple(_open):
        each.switch_off()
    _open.clear()


os.register_at_fork(after_in_child=_forget_in_child)
