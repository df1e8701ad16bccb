"""Run without a known end that does not report to this daemon: its process is watched, and its end concluded."""

from __future__ import annotations

import contextlib
import os
import select
from concurrent.futures import Future
from dataclasses import replace

from gpuwarden.errors.recognition import find_problem
from gpuwarden.host import procfs
from gpuwarden.host.call_thread import CallThread
from gpuwarden.host.exit_status import read_exit_status
from gpuwarden.host.process_key import parse_run_id
from gpuwarden.protocol.messages import End, Error, uncaught_reason
from gpuwarden.protocol.run_folder import ProcessLog, read_log
from gpuwarden.protocol.validators import clip
from gpuwarden.records.joining import conclude_record
from gpuwarden.records.record import RunRecord
from gpuwarden.runs.outcome import SETTLE_SECONDS, OutcomeTracker
from gpuwarden.runs.run_snapshot import JoinedPoll


class AbsentRun:
    """Absent run; used by one event loop. `last` is the last part of its record, `since` what it is absent since.

    Its state is unknown until it reports again or its process is gone. The evidence of its end is what the kernel knows
    of the process, and the log that this left in the folder of `gpuwarden run`. `began` is monotonic.
    """

    def __init__(self, record: RunRecord, last: RunRecord, since: str, began: float) -> None:
        self.record = record
        self.last = last
        self._since = since
        self._start = (parse_run_id(record.run_id) or (0, -1))[1]
        self._outcome = OutcomeTracker(record.pid, began)
        self._log: Future[ProcessLog | None] | None = None  # once the process is gone
        self._pidfd: int | None = None
        with contextlib.suppress(OSError, OverflowError):  # it has ended, or there is no descriptor left
            self._pidfd = os.pidfd_open(record.pid)
        if procfs.is_alive(record.pid, self._start):  # so the descriptor is of this process
            self._reason = f"it ended after {since}"
        else:
            self._reason = "it ended while the daemon was not running"
            self.close()

    def _is_alive(self) -> bool:
        if self._pidfd is None:
            return procfs.is_alive(self.record.pid, self._start)
        end = select.poll()
        end.register(self._pidfd, select.POLLIN)
        return not end.poll(0)

    @property
    def shown(self) -> RunRecord:
        """Its record as it is shown now."""
        if not self._outcome.is_gone:
            return replace(self.record, state="unknown", evidence=f"no report since {self._since}")
        return self.conclude(self.record)

    def add_poll(self, poll: JoinedPoll, at: float, folders: CallThread) -> bool:
        """Add the evidence of a poll, at a Unix time; return whether the run has ended and all evidence is in.

        Its folder, which is its user's, is read on the thread `folders`: what is there may block.
        """
        if not self._outcome.is_gone:
            if self._is_alive():
                return False
            self._outcome.begin(poll.now, at, None, None)
            if folder := self.record.run_folder:
                self._log = folders.submit(read_log, folder, self.record.pid, self.record.uid)
        self._outcome.handle_exit(poll.now, read_exit_status(self._pidfd, self.record.pid, self._start), None)
        is_read = self._log is None or self._log.done()
        if self._log is not None and is_read and (log := self._log.result()) is not None:
            self._add_log(log)
        uuids = [each.uuid for each in self.record.devices]
        self._outcome.add_evidence(poll.oom_kills, uuids, poll.snapshot, poll.now)
        ended = self._outcome.ended
        if ended is not None and poll.now - ended >= SETTLE_SECONDS and self._pidfd is None and is_read:
            self._outcome.conclude(goes_on=False)  # no exit status can come
        return not self._outcome.is_open

    def _add_log(self, log: ProcessLog) -> None:
        began = self.record.began_timestamp_seconds  # what had this pid before may have left a log too
        for error in log.errors:
            if error.pid == self.record.pid and error.origin == "program" and error.at >= began:
                problem = find_problem(error.message)
                raised = Error(
                    problem.kind if problem else "other", clip(error.type), "", "idle", self.record.steps or 0
                )
                self._outcome.handle_farewell(End(uncaught_reason(error.type), "failed"), raised)

    def conclude(self, record: RunRecord) -> RunRecord:
        """Return a record of this run with what is known of its end."""
        ending = self._outcome.ending
        if ending is None or ending.outcome == "unknown":
            return conclude_record(record, self._reason)
        concluded = conclude_record(record, f"{ending.evidence}; {self._reason}")
        return replace(concluded, state=ending.outcome, outcome=ending.outcome, exit_signal=ending.exit_signal)

    def close(self) -> None:
        """Stop watching the process."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
