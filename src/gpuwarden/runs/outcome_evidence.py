"""Evidence of one run's end, of which some comes at once and some in the next polls.

A settled ending stays: an outcome that has been shown or counted never becomes another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.host.oom_killer import OomKill
from gpuwarden.runs.outcome import Ending, Evidence, conclude

SETTLE_SECONDS = 2.0  # after the process's end: the kernel logs a kill before it, a poll or two read the log
PATIENCE_SECONDS = 10.0  # for the end of a process after its goodbye, or for an exit status that is not known yet
XID_SECONDS = 30.0  # before a run's end, in which a fault of its GPU may be the cause
_SLACK_SECONDS = 1.0  # by which the kernel log's clock may be off


@dataclass(slots=True)
class OutcomeEvidence:
    """Evidence of one run's end, until its ending is settled.

    `began` and `ended` are monotonic, `at` is the end in Unix time; `gone` is when the process ended, monotonic.
    """

    pid: int
    began: float
    ended: float
    at: float
    evidence: Evidence
    gone: float | None = None
    _settled: Ending | None = None

    @property
    def ending(self) -> Ending:
        """Outcome of the run, as far as it is known."""
        return self._settled or Ending(*conclude(self.evidence), at=self.at)

    @property
    def settled(self) -> bool:
        """True once the ending is final."""
        return self._settled is not None

    def ready(self, now: float) -> bool:
        """Return whether there was time enough for all evidence to come in."""
        complete = self.gone is not None and (self.evidence.exit_status is not None or not self.pid)
        since = self.ended if self.gone is None else self.gone
        return now - since >= (SETTLE_SECONDS if complete else PATIENCE_SECONDS)

    def settle(self) -> Ending:
        """Conclude for the last time, and return the ending."""
        self._settled = replace(self.ending, settled=True)
        return self._settled

    def oom_kill(self, kills: Iterable[OomKill]) -> OomKill | None:
        """Return the OOM killer's kill of the run's process."""
        return next((kill for kill in kills if self._is_of(kill)), None)

    def _is_of(self, kill: OomKill) -> bool:
        """Return whether a kill is this process's: no other process had its pid while it lived."""
        after = kill.latest >= self.began - _SLACK_SECONDS
        return kill.pid == self.pid and after and kill.earliest <= (self.gone or 0.0) + _SLACK_SECONDS


def xids(uuids: Iterable[str], snapshot: Snapshot, at: float) -> Iterator[int]:
    """Return the XIDs that GPUs, or those their MIG instances are on, had shortly before `at` (Unix time)."""
    for gpu in {gpu.identity.uuid: gpu for uuid in uuids if (gpu := snapshot.gpu_with(uuid))}.values():
        for code, xid in gpu.xids.items():
            if at - XID_SECONDS <= xid.last <= at + SETTLE_SECONDS:
                yield code
