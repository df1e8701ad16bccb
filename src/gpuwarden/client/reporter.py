"""Reporter of this process as one training run: it keeps the totals and sends them."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from gpuwarden.client.advice_state import AdviceState
from gpuwarden.client.connection import DaemonConnection
from gpuwarden.client.errors.nonfinite_loss import NonFiniteLossCounter
from gpuwarden.client.errors.uncaught import error_from_uncaught, find_uncaught_type
from gpuwarden.client.frameworks.allocator_memory import AllocatorMemory
from gpuwarden.protocol.messages import (
    OOM_KINDS,
    STEP_BUCKETS,
    Advice,
    Error,
    Headroom,
    Hello,
    Phase,
    Report,
    Summary,
    uncaught_reason,
)
from gpuwarden.protocol.step_histogram import StepHistogram
from gpuwarden.protocol.validators import MAX_COUNT

if TYPE_CHECKING:
    from gpuwarden.client.census.take_census import CensusTaker

DEFAULT_SOCKET = "/run/gpuwarden/run.sock"
MAX_ERROR_WAIT_SECONDS = 0.1  # wait for a full queue after an error, which has interrupted training anyway
MAX_SENT_ERRORS = 20  # errors of a run that are sent one by one; a loop that catches errors must not wait for each
MAX_END_WAIT_SECONDS = 0.1  # wait for a full queue at the interpreter's exit
MAX_SUMMARY_WAIT_SECONDS = 0.3
MIN_SUMMARY_INTERVAL_SECONDS = 10.0  # a program that calls fit in a loop must not wait at each end
REPORT_INTERVAL_SECONDS = 0.25
OBSERVE_INTERVAL_SECONDS = 0.25
PERCENTILES_INTERVAL_SECONDS = 1.0
LISTEN_INTERVAL_SECONDS = 0.05  # between two reads of the socket, if the program acts on advice

_runs: dict[tuple[int, str], Reporter] = {}


class ActiveCounter(Protocol):
    """Step counter of the fit that counts into the run."""

    def count_ended(self) -> None:
        """Count the steps that have ended."""

    def finish(self) -> None:
        """Count the steps that have ended, the last one too: no other follows."""


class SummaryRequests:
    """Requests for the daemon's summary of a run: whether they are made, how many were, and the last answer."""

    def __init__(self) -> None:
        self.enabled = False
        self.count = 0
        self.received = Summary(0)
        self._due = 0.0  # monotonic

    def add(self, now: float, *, at_once: bool = False) -> bool:
        """Add a request if they are enabled, and the last one is MIN_SUMMARY_INTERVAL_SECONDS old unless `at_once`."""
        if not self.enabled or (now < self._due and not at_once):
            return False
        self._due = now + MIN_SUMMARY_INTERVAL_SECONDS
        self.count += 1
        return True

    @property
    def is_answered(self) -> bool:
        """True if the last request has its summary."""
        return self.received.serial == self.count


class Reporter:
    """Totals of this process since its first report; one for each process and socket, for all loops and fits.

    `state` is what is sent: loops and fits assign its fields, and never change a field's value in place, since another
    thread may be sending it. A loop calls `observe` at `observe_due`, and `listen` at `listen_due` if it acts on
    advice. It calls `report` after a change of phase, epoch or `stepping`. `advice` is the daemon's.
    """

    def __init__(self, connection: DaemonConnection) -> None:
        self.state = Report("idle", 0, 0.0, (0,) * (len(STEP_BUCKETS) + 1), {})
        self.memory = AllocatorMemory()
        self.interval = REPORT_INTERVAL_SECONDS
        self.observe_due = self.listen_due = 0.0  # monotonic
        self.advice = AdviceState()
        self.active_counter: ActiveCounter | None = None  # counter of the last fit that started: only its steps count
        self.count_loops: Callable[[Reporter], None] = lambda _run: None  # counts the recorded steps of watch() loops
        self._knows_examples = True  # of all steps
        self.nonfinite_losses = NonFiniteLossCounter()
        self.durations = StepHistogram()
        self.failure: Error | None = None  # the last error
        self.interrupted_in: Phase | None = None  # phase in which an exception left a loop
        self.census: CensusTaker | None = None  # None: switched off
        self.wants_headroom = False
        self.headroom: int | None = None  # bytes, as of the daemon's last poll; None: not known, or not wanted
        self.summaries = SummaryRequests()
        self._pid = os.getpid()
        self._connection = connection
        self._report_due = 0.0
        self._percentiles_due = 0.0

    def set_hello(self, hello: Hello) -> None:
        """Send the hello again if it has changed."""
        self._connection.set_hello(replace(hello, census=self.census is not None, headroom=self.wants_headroom))

    def record_batch_size(self, examples: int, largest: int | None = None) -> None:
        """Record the number of examples of a step, and the largest since the last record."""
        self.state.batch_size = examples
        self.state.largest_batch_size = max(self.state.largest_batch_size or 0, examples, largest or 0)

    def add_executions(self, executions: Sequence[float | None], steps: int) -> None:
        """Add executions of `steps` each, by their seconds; None: unknown, or not typical (compilation)."""
        self.state.steps += len(executions) * steps
        self.durations.extend([each for each in executions if each is not None], steps)

    def count_ended(self) -> None:
        """Count the steps of the active fit that have ended."""
        if self.active_counter is not None:
            self.active_counter.count_ended()

    def finish(self) -> None:
        """Count the steps of a fit that ended without a hook."""
        if self.active_counter is not None:
            self.active_counter.finish()

    def add_examples(self, count: int | None) -> None:
        """Add the examples of some steps; where they are unknown (None), so is the run's sum from now on."""
        self._knows_examples = self._knows_examples and count is not None
        total = (self.state.examples or 0) + (count or 0)
        if total < MAX_COUNT:  # a message with more would be refused
            self.state.examples = total if self._knows_examples else None

    def report_soon(self) -> None:
        """Make the next step report, regardless of the interval."""
        self.observe_due = self.listen_due = self._report_due = 0.0

    def listen(self, now: float) -> None:
        """Read the daemon's advice, at most every LISTEN_INTERVAL_SECONDS; never waits. `now` is monotonic."""
        if now < self.listen_due:
            return
        self.listen_due = now + LISTEN_INTERVAL_SECONDS
        self._receive(now)

    def _receive(self, now: float) -> None:
        for each in self._connection.receive():
            if isinstance(each, Advice):
                self.advice.handle(each, now)
                if self.census is not None:
                    self.census.handle_advice(each)
            elif isinstance(each, Headroom):
                self.headroom = each.bytes
            else:
                self.summaries.received = each
        if not self._connection.is_connected():
            self._drop_daemon_state(now)

    def _drop_daemon_state(self, now: float) -> None:
        """Drop advice and headroom, which are outdated once the connection is lost; `now` is monotonic."""
        self.advice.disconnect(now)
        self.headroom = None

    def observe(self, now: float) -> None:
        """Collect, and report if the last report is `interval` old; `now` is monotonic."""
        self._collect(now)
        if now >= self._report_due:
            self._send(now)

    def report(self, now: float) -> None:
        """Collect and report at once; if the report is not sent the next carries the same totals."""
        self._collect(now)
        self._send(now)

    def _collect(self, now: float) -> None:
        """Read advice, count the recorded steps, sample the allocators, and take a census if one is due."""
        self.observe_due = now + min(OBSERVE_INTERVAL_SECONDS, self.interval)
        self.listen(now)
        self.count_ended()
        self.memory.sample()
        self._take_census(now)

    def _take_census(self, now: float) -> None:
        if self.census is None or not self._connection.is_connected():
            return
        in_use = sum(each.current for each in self.memory.latest().values())
        census = self.census.take_if_due(self.state.steps, in_use or None, now)
        if census is not None:
            self._connection.send(census)

    def report_error(self, error: Error) -> None:
        """Count an error and send it, waiting at most MAX_ERROR_WAIT_SECONDS for a slow daemon.

        After MAX_SENT_ERRORS errors are only counted.
        """
        self.failure = error
        self.state.errors = add_one(self.state.errors, error.kind)
        if sum(self.state.errors.values()) <= MAX_SENT_ERRORS:
            self._connection.wait_for_room(MAX_ERROR_WAIT_SECONDS)
            self._connection.send(error)
        if self.census is not None and error.kind in OOM_KINDS:
            self.census.request()
            self._take_census(time.monotonic())
        self._send(time.monotonic())

    def _send(self, now: float) -> None:
        state = self.state
        self._report_due = now + self.interval
        if now >= self._percentiles_due:
            self._percentiles_due = now + PERCENTILES_INTERVAL_SECONDS
            state.step_median, state.step_p95 = self.durations.percentiles(0.5, 0.95)
        state.step_seconds, state.step_buckets = self.durations.total, tuple(self.durations.buckets)
        state.memory = self.memory.latest()
        state.nonfinite_loss = self.nonfinite_losses.summarize(now)
        state.advice_heard, state.summaries_wanted = self.advice.count, self.summaries.count
        state.dropped = self._connection.dropped
        self._connection.send(state)
        if not self._connection.is_connected():
            self._drop_daemon_state(now)  # at once: another daemon may be connected before the next read

    def print_summary(self, *, at_once: bool = False) -> None:
        """Print the daemon's summary of the run to standard error, as SummaryRequests allows.

        Blocks for MAX_SUMMARY_WAIT_SECONDS at most; without a summary by then it prints nothing.
        """
        now = time.monotonic()
        if not self.summaries.add(now, at_once=at_once):
            return
        self._send(now)
        until = now + MAX_SUMMARY_WAIT_SECONDS
        while (left := until - time.monotonic()) > 0 and self._connection.wait_for_message(left):
            self._receive(time.monotonic())
            if self.summaries.is_answered:
                with contextlib.suppress(Exception):  # standard error may be closed
                    sys.stderr.write("".join(f"gpuwarden: {line}\n" for line in self.summaries.received.lines))
                    sys.stderr.flush()
                return

    def give_up(self) -> None:
        """Report that no step is in progress, since recording has stopped.

        Counts and samples nothing: that may fail.
        """
        self.state.phase, self.state.stepping = "idle", False
        self._send(time.monotonic())

    def end(self) -> None:
        """Send the exception that ends the process, if not sent yet, the last totals, and the end.

        Waits at most MAX_END_WAIT_SECONDS for a slow daemon, MAX_ERROR_WAIT_SECONDS more to send an error, and
        MAX_SUMMARY_WAIT_SECONDS more for the diagnosis of an out-of-memory.
        """
        self.count_loops(self)
        self._connection.wait_for_room(MAX_END_WAIT_SECONDS)
        phase = self.interrupted_in or self.state.phase
        self.state.phase, self.state.stepping = "idle", False
        self.finish()
        self._percentiles_due = 0.0
        with contextlib.suppress(Exception):  # no internal failure may show at a program's end
            error = error_from_uncaught(self.failure, phase, self.state.steps, self.memory.latest())
            if error is not None and error.kind in OOM_KINDS and os.getpid() == self._pid:
                # Only then: a forked child that exits may be deadlocked in the framework.
                age = self.memory.sample_at_exit()
                error = replace(error, memory=self.memory.latest() if error.memory else {}, memory_age=age)
            if error is not None:
                self.report_error(error)
        kind = find_uncaught_type()
        if kind is not None and self.failure is not None and self.failure.kind in OOM_KINDS:
            self.print_summary(at_once=True)  # below the traceback
        self._send(time.monotonic())
        if kind is None:
            self._connection.end("exit", "finished")
        else:
            self._connection.end(uncaught_reason(kind), "failed")


def add_one(counts: Mapping[str, int], name: str) -> dict[str, int]:
    """Return the counts with one more of a name, as a copy."""
    return {**counts, name: counts.get(name, 0) + 1}


def join_run(
    path: str | None, hello: Hello, *, census: bool = False, summary: bool = False, headroom: bool = False
) -> Reporter:
    """Return this process's run at the socket `path`, by default GPUWARDEN_SOCKET's, and send the daemon `hello`.

    `census`, `summary` and `headroom` switch these on for the whole run.
    """
    path = path or os.environ.get("GPUWARDEN_SOCKET") or DEFAULT_SOCKET
    key = os.getpid(), path  # a forked child that trains is another run
    run = _runs.get(key)
    if run is None:
        run = _runs[key] = Reporter(DaemonConnection(path, hello))
        atexit.register(run.end)
    if census and run.census is None:
        # Before the first step, but not in a process without the switch.
        from gpuwarden.client.census.take_census import CensusTaker  # noqa: PLC0415

        run.census = CensusTaker()
    run.summaries.enabled |= summary
    run.wants_headroom |= headroom
    run.set_hello(hello)
    return run


def has_reported() -> bool:
    """Return whether this process has a run."""
    return any(pid == os.getpid() for pid, _ in tuple(_runs))


def report_oom_retry() -> None:
    """Report a retry after an out-of-memory, in all runs of this process."""
    for (pid, _), run in tuple(_runs.items()):
        if pid == os.getpid():
            run.state.oom_retries += 1
            run.report(time.monotonic())
