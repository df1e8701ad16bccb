"""What becomes known of one run's end: some of it at once, some in the next polls, and then it is settled.

What is settled stays: an outcome that has been shown or counted never becomes another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.protocol import End
from gpuwarden.runs.ending import Ending, Evidence, conclude
from gpuwarden.runs.oom_kill import OomKill

SETTLE_SECONDS = 2.0  # after the process's end: the kernel logs a kill before it, a poll or two read the log
PATIENCE_SECONDS = 10.0  # for the end of a process after its goodbye, or for an exit status that nobody tells yet
XID_SECONDS = 30.0  # before a run's end, in which a fault of its GPU may be the cause
_SLACK_SECONDS = 1.0  # by which the kernel log's clock may be off


@dataclass(slots=True)
class Inquest:
    """`began` and `ended` are monotonic, `at` is the end in Unix time; `gone` is when the process ended, monotonic."""

    pid: int
    began: float
    ended: float
    at: float
    evidence: Evidence
    gone: float | None = None
    ending: Ending | None = None

    def hear(self, farewell: End) -> Ending:
        """Take the run's goodbye."""
        return self._learn(self.evidence._replace(farewell=farewell))

    def see_exit(self, now: float, status: int | None, cgroup_oom_kills: int) -> Ending:
        """Take the end of its process, with its exit status where that is told."""
        self.gone = now
        return self._learn(self.evidence._replace(exit_status=status, cgroup_oom_kills=cgroup_oom_kills))

    def see_status(self, status: int) -> Ending:
        """Take the exit status, told later."""
        return self._learn(self.evidence._replace(exit_status=status))

    def review(self, kills: Iterable[OomKill], xids: Iterable[int]) -> Ending:
        """Take what the kernel's OOM killer did, and the XIDs of the run's GPUs around its end."""
        kill = next((kill for kill in kills if self._is_of(kill)), None)
        return self._learn(self.evidence._replace(oom_kill=kill, xids=tuple(xids)))

    def ready(self, now: float) -> bool:
        """Tell whether there was time enough for all that is to be known."""
        complete = self.gone is not None and (self.evidence.exit_status is not None or not self.pid)
        since = self.ended if self.gone is None else self.gone
        return now - since >= (SETTLE_SECONDS if complete else PATIENCE_SECONDS)

    def hear_nothing_more(self) -> Ending:
        """Take it that the run closed its connection and did not come back, though its process lives."""
        self.ending = Ending("unknown", "it closed its connection, and its process went on", self.at)
        return self.ending

    @property
    def settled(self) -> bool:
        """Whether nothing changes it any more."""
        return self.ending is not None and self.ending.settled

    def settle(self) -> Ending:
        """Stand by what was concluded."""
        self.ending = (self.ending or self._conclude())._replace(settled=True)
        return self.ending

    def _learn(self, evidence: Evidence) -> Ending:
        if evidence != self.evidence or self.ending is None:
            self.evidence = evidence
            self.ending = self._conclude()
        return self.ending

    def _conclude(self) -> Ending:
        return Ending(*conclude(self.evidence), at=self.at)

    def _is_of(self, kill: OomKill) -> bool:
        """Tell whether a kill is this process's: its pid was nobody else's while it lived."""
        after = kill.latest >= self.began - _SLACK_SECONDS
        return kill.pid == self.pid and after and kill.earliest <= (self.gone or 0.0) + _SLACK_SECONDS


def xids(uuids: Iterable[str], snapshot: Snapshot, at: float) -> Iterator[int]:
    """Return the XIDs that GPUs, or those their MIG instances are on, had shortly before `at` (Unix time)."""
    for gpu in {gpu.identity.uuid: gpu for uuid in uuids if (gpu := snapshot.gpu_with(uuid))}.values():
        for code, xid in gpu.xids.items():
            if at - XID_SECONDS <= xid.last <= at + SETTLE_SECONDS:
                yield code
