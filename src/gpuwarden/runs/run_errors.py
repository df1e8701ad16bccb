"""Errors that one run reported, with the diagnosis of out-of-memory errors."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from gpuwarden.analysis.memory.headroom import Headrooms
from gpuwarden.analysis.oom.diagnoser import Diagnoser, PollFacts, RunFacts
from gpuwarden.analysis.oom.diagnosis import Diagnosis
from gpuwarden.analysis.oom.failed_allocation import Oom, find_ooms
from gpuwarden.protocol.messages import OOM_KINDS, Error, ErrorKind, Hello, Report
from gpuwarden.runs.error_log import ErrorLog
from gpuwarden.runs.run_snapshot import KEPT_ERRORS, SeenError


class RunErrors:
    """Errors of one run. Used by one event loop.

    `recent` are the last errors reported one by one, `last` the Unix time of the last of each kind. `ooms` are the
    failed allocations of the last out-of-memory error on GPUs, by UUID.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self.recent: deque[SeenError] = deque(maxlen=KEPT_ERRORS)
        self.last: dict[ErrorKind, float] = {}
        self.ooms: Mapping[str, Oom] = {}
        self._last_device_oom: SeenError | None = None
        self._diagnoser = Diagnoser()
        self._log = ErrorLog()

    @property
    def diagnosis(self) -> Diagnosis | None:
        """Diagnosis of the last out-of-memory error."""
        return self._diagnoser.diagnosis

    @property
    def newest(self) -> Error | None:
        """Last reported error."""
        return self.recent[-1].error if self.recent else None

    def has_other_cause(self, steps: int) -> bool:
        """Return whether the last out-of-memory had another cause than the batch, and no step succeeded since."""
        last = next((each for each in reversed(self.recent) if each.diagnosis), None)
        return bool(last and last.diagnosis and last.diagnosis.cause != "batch_too_large" and steps <= last.error.steps)

    def handle_report(self, report: Report, before: Report | None, at: float) -> None:
        """Date errors that were only counted. Without a report `before`, their age is unknown."""
        self._diagnoser.handle_report(report, before)
        for kind, count in report.errors.items() if before else ():
            if before and count > before.errors.get(kind, 0):
                self.last[cast("ErrorKind", kind)] = at

    def handle_error(
        self, error: Error, hello: Hello, facts: RunFacts | None, left: Headrooms, *, at: float, now: float
    ) -> None:
        """Add an error and log it, with a diagnosis by the `facts` of an out-of-memory error.

        `left` is the headroom before, `at` is Unix time, `now` is monotonic.
        """
        diagnosis = self._diagnoser.handle_error(error, facts) if facts else None
        seen = SeenError(error, at, left.now, left.at_peak, diagnosis)
        self.recent.append(seen)
        self.last[error.kind] = at
        if error.kind == "device_oom":
            self._last_device_oom = seen
            self.ooms = _ooms(seen, hello, facts.uuids if facts else {})
        self._log.log_error(self._run_id, hello.name, seen, now)

    def handle_poll(self, poll: PollFacts, hello: Hello, uuids: Mapping[str, str], *, up: bool) -> None:
        """Diagnose the last out-of-memory error again by a poll's facts, unless that is done.

        `uuids` are those of the run's devices while it was running.
        """
        if self._last_device_oom and not self.ooms:  # the error came before the first poll
            self.ooms = _ooms(self._last_device_oom, hello, uuids)
        diagnosis = self._diagnoser.handle_poll(poll, up=up)
        if diagnosis is None:
            return
        for place, seen in reversed(list(enumerate(self.recent))):
            if seen.error.kind in OOM_KINDS:
                self.recent[place] = replace(seen, diagnosis=diagnosis)
                break
        self._log.log_revision(self._run_id, hello.name, diagnosis)


def _ooms(seen: SeenError, hello: Hello, uuids: Mapping[str, str]) -> Mapping[str, Oom]:
    return find_ooms(seen.error, hello, uuids, seen.headroom, seen.least_headroom)
