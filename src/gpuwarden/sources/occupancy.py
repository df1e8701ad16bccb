"""A workload on its simulated boards: one run after another, for ever."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from gpuwarden.gpu.processes import ProcessIdentity
from gpuwarden.protocol import Message
from gpuwarden.runs.peer import Peer
from gpuwarden.sources.board import NO_LOAD, Board
from gpuwarden.sources.trainer import MAX_BACKLOG, Trainer
from gpuwarden.sources.workloads import Stretch, Workload, life

REPORT_SECONDS = 0.5
_BOOTED = 1_000_000.0  # seconds before the simulation began
_TICKS = 100  # clock ticks a second
_INSTANT = 1e-6  # seconds; less may be lost when added to the time, which would then stand still


class Occupancy:
    """Moves boards and the process on them through time. Its user sees to it that one thread at a time does so."""

    def __init__(
        self,
        workload: Workload,
        boards: Sequence[Board],
        uuids: Sequence[str],
        rng: random.Random,
        *,
        first_pid: int,
        now: float,
    ) -> None:
        self._workload = workload
        self._boards = boards
        self._uuids = uuids
        self._rng = rng
        self._pids = itertools.count(first_pid)
        self._now = now
        self._next_report = now
        self._trainer: Trainer | None = None
        self._gone: Trainer | None = None  # has exited, and its last messages are not fetched yet
        self._stretches: Iterator[Stretch] = iter(())
        self._begin()

    def processes(self) -> list[tuple[int, int]]:
        """Return the pid and its bytes on each of the boards; none while nobody holds a context."""
        memory = self._trainer.process_memory if self._trainer else None
        return [] if self._trainer is None or memory is None else [(self._trainer.peer.pid, memory)]

    def identity(self, pid: int) -> ProcessIdentity | None:
        """Say who the process on the boards is; None for another pid than its."""
        if self._trainer is None or self._trainer.peer.pid != pid:
            return None
        return ProcessIdentity(self._workload.uid, "python", self._workload.place)

    def advance(self, now: float) -> None:
        """Move on to that time. Of a long gap only the last reports are made."""
        self._next_report = max(self._next_report, now - MAX_BACKLOG * REPORT_SECONDS)
        while self._now < now:
            until = min(now, self._ends, self._next_report, self._now + self._seconds_left())
            work = min(board.advance(until, self._stretch.load) for board in self._boards)
            if self._trainer:
                self._trainer.spend(until - self._now, work)
            self._now = until
            self._turn()

    def reports(self) -> Iterator[tuple[Peer, Message | None]]:
        """Yield what the runs said since the last call, the last words of an exited one first."""
        for trainer in (self._gone, self._trainer):
            if trainer:
                yield from trainer.drain()
        self._gone = None

    def _seconds_left(self) -> float:
        left = self._trainer.seconds_left if self._trainer and self._stretch.steps else None
        return float("inf") if left is None else left

    def _turn(self) -> None:
        """Do what is due at this moment."""
        if self._now >= self._next_report:
            self._next_report += REPORT_SECONDS
            if self._trainer:
                self._trainer.report()
        if self._seconds_left() < _INSTANT:
            self._exit()
        elif self._now >= self._ends:
            self._enter()

    def _enter(self) -> None:
        stretch = next(self._stretches, None)
        if stretch is not None and self._trainer is not None:
            self._stretch, self._ends = stretch, self._now + stretch.seconds
            self._trainer.enter(stretch)
        elif self._trainer is not None:
            self._exit()
        else:
            self._begin()

    def _begin(self) -> None:
        leaks = self._workload.leaks
        peer = Peer(next(self._pids), self._workload.uid, int((_BOOTED + self._now) * _TICKS))
        self._trainer = Trainer(self._workload, peer, self._uuids, self._rng.uniform(*leaks) if leaks else None)
        self._stretches = life(self._workload, self._rng)
        self._enter()

    def _exit(self) -> None:
        if self._trainer is not None and self._trainer.exit():
            self._gone = self._trainer
        self._trainer = None
        self._stretch = Stretch(self._rng.uniform(20, 60), NO_LOAD)  # until somebody starts the next one
        self._ends = self._now + self._stretch.seconds
