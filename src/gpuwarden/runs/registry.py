"""The runs that count now: bounded in number, ended by the kernel's word, forgotten after their expiry.

Ages are taken by the monotonic clock: a wall clock that is set back must not make old values young.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from gpuwarden.analysis.batch_size.prior_runs import PriorRuns
from gpuwarden.analysis.oom.co_tenants import CoTenants
from gpuwarden.fair_eviction import find_user_with_most
from gpuwarden.formatting import format_fields
from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.host.oom_killer import OomKill
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.host.process_tree import HostUsage
from gpuwarden.protocol.codec import ProtocolError
from gpuwarden.protocol.messages import Hello, Message
from gpuwarden.runs.outcome import OUTCOMES, Outcome
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.runs.run_state import Rules, RunState
from gpuwarden.runs.stall import Patience

log = logging.getLogger(__name__)

KEPT_OOM_KILLS = 256
NO_CO_TENANTS = CoTenants()
_PATIENCE = Patience()


class RunRegistry:
    """Receives messages and answers with frozen runs. Used by one event loop; `now` is monotonic everywhere."""

    def __init__(
        self,
        *,
        limit: int,
        expiry: float,
        overhead: float,
        patience: Patience = _PATIENCE,
        wall: Callable[[], float] = time.time,
        prior_runs: PriorRuns | None = None,
        alerting: bool = False,
    ) -> None:
        self._limit = limit
        self._rules = Rules(expiry, overhead, patience, wall, prior_runs or PriorRuns(), alerting)
        self._records: dict[str, RunState] = {}
        self._oom_kills: deque[OomKill] = deque(maxlen=KEPT_OOM_KILLS)
        self._advice_connections = itertools.count(1)
        self.ended: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.displaced: list[ProcessKey] = []  # whose connections are to be closed, by whoever holds them
        self.received = 0
        self.rejected: Counter[str] = Counter()

    def receive(self, peer: ProcessKey, message: Message, now: float) -> bool:
        """Handle one message; return whether it is worth a poll before the next is due.

        Raises ProtocolError: a report before its hello, one run too many, or a fault of our own that the message met.
        """
        record = self._records.get(peer.run_id)
        if record is None:
            if not isinstance(message, Hello):
                raise ProtocolError("no_hello", f"run {peer.run_id} sends a report before its hello")
            record = self._admit(peer, message, now)
        try:
            is_urgent = record.handle(message, now)
        except Exception as error:
            self._log_fault(record, error)
            raise ProtocolError("internal", f"{type(error).__name__}: the log of the daemon says more") from error
        self.received += 1
        return is_urgent

    def _log_fault(self, record: RunState, fault: Exception) -> None:
        """Log a fault of our own with its traceback, the first time: one that lasts would come with each message."""
        if not self.rejected["internal"]:
            log.error(
                "internal error in a run, please report it; other runs are not affected %s",
                format_fields(run=record.peer.run_id, name=record.hello.name),
                exc_info=fault,
            )

    def _admit(self, peer: ProcessKey, hello: Hello, now: float) -> RunState:
        if len(self._records) >= self._limit and not self._make_room(peer, now):
            raise ProtocolError("too_many_runs", f"at most {self._limit} (runs.max)")
        record = self._records[peer.run_id] = RunState(
            peer,
            hello,
            self._rules,
            seen_at=now,
            named_at=now,
            began=self._rules.wall(),
            began_at=now,
        )
        fields = format_fields(run=peer.run_id, name=hello.name, pid=peer.pid, uid=peer.uid)
        log.info("run connected %s", fields)
        return record

    def _make_room(self, newcomer: ProcessKey, now: float) -> bool:
        """Drop one run for a new one; return whether there was one to drop.

        That is the run that ended first, or the one silent for longest, past its expiry. Else it is a run of the user
        with the most, unless that is the newcomer's user: the newest one, and not the oldest, since a run that is
        turned away comes back, and the longest history would be lost each time.
        """
        ended = [
            (each.outcome.ended, run_id) for run_id, each in self._records.items() if each.outcome.ended is not None
        ]
        silent = [
            (each.seen_at, run_id) for run_id, each in self._records.items() if now - each.seen_at > self._rules.expiry
        ]
        if ended or silent:
            self._forget(min(ended or silent)[1], now)
            return True
        crowd = find_user_with_most((record.peer.uid for record in self._records.values()), newcomer=newcomer.uid)
        if crowd == newcomer.uid:
            return False
        run_id = next(run_id for run_id in reversed(self._records) if self._records[run_id].peer.uid == crowd)
        self.displaced.append(self._records.pop(run_id).peer)
        if not self.rejected["too_many_runs"]:
            log.warning(
                "too many runs (runs.max), dropping one of the user with the most; further ones are only counted %s",
                format_fields(run=run_id, uid=crowd, newcomer_uid=newcomer.uid, limit=self._limit),
            )
        self.rejected["too_many_runs"] += 1
        return True

    def _forget(self, run_id: str, now: float) -> None:
        self._count(self._records.pop(run_id).conclude(now))

    def _count(self, outcome: Outcome | None) -> None:
        if outcome is not None:
            self.ended[outcome] += 1

    def knows(self, peer: ProcessKey) -> bool:
        """Return whether the peer is a run that counts."""
        return peer.run_id in self._records

    def exited(self, peer: ProcessKey, now: float, status: int | None = None) -> None:
        """Handle the end of a process: its memory is free again, its totals stay until their expiry.

        `status` is its exit status as of wait(2); one that is told later is taken by another call.
        """
        record = self._records.get(peer.run_id)
        if record is not None:
            record.handle_exit(now, status)

    def reconnect_advice(self, peer: ProcessKey) -> bool:
        """Handle that a run reads advice on another connection: it gets again what holds. Return whether it had one."""
        record = self._records.get(peer.run_id)
        if record is None:
            return False
        before, record.advice_connection = record.advice_connection, next(self._advice_connections)
        return before > 0

    def set_advice_limits(self, limits: Mapping[str, Mapping[str, float]]) -> None:
        """Set beyond how many bytes in use, by run id and UUID, a report is worth a poll before the next is due."""
        for run_id, record in self._records.items():
            record.advice_limits = limits.get(run_id, {})

    def awaits_exit_status(self, peer: ProcessKey) -> bool:
        """Return whether the exit status of a run that has ended would still count."""
        record = self._records.get(peer.run_id)
        return record is not None and record.outcome.is_open

    def add_oom_kills(self, kills: Iterable[OomKill]) -> None:
        """Add kills by the kernel's OOM killer, with pids as this daemon sees them."""
        self._oom_kills.extend(kills)

    def disconnected(self, peer: ProcessKey, now: float) -> None:
        """Handle that a run has no connection left; unless it comes back it is dropped after an expiry."""
        record = self._records.get(peer.run_id)
        if record is not None:
            record.connected, record.seen_at = False, now

    def expire(self, now: float) -> None:
        """Forget runs that ended, or that lost their connection, an expiry ago."""
        for run_id, record in list(self._records.items()):
            if record.up and record.connected:
                continue  # silent but alive: its totals still hold
            if now - (record.seen_at if record.outcome.ended is None else record.outcome.ended) > self._rules.expiry:
                reason = "disconnected" if record.up else "ended"
                self._forget(run_id, now)
                log.info("run expired %s", format_fields(run=run_id, name=record.hello.name, reason=reason))

    def peers(self) -> list[ProcessKey]:
        """Return the processes of all runs."""
        return [record.peer for record in self._records.values()]

    def living(self) -> dict[int, str]:
        """Return the runs that have not ended, their ids by pid."""
        return {each.peer.pid: run_id for run_id, each in self._records.items() if each.up}

    def newest_age(self, now: float) -> float:
        """Return the age in seconds of the newest run that has not ended; infinite where there is none."""
        living = (now - record.began_at for record in self._records.values() if record.up)
        return min(living, default=math.inf)

    def is_urgent_on_host(self) -> bool:
        """Return whether a run takes the host's memory so fast that it has to be sampled often."""
        return any(record.leaks.urgent for record in self._records.values())

    def update(
        self,
        snapshot: Snapshot,
        now: float,
        usages: Mapping[ProcessKey, HostUsage] = MappingProxyType({}),
        co_tenants: CoTenants = NO_CO_TENANTS,
        *,
        available: float | None = None,
    ) -> tuple[RunSnapshot, ...]:
        """Return all runs, joined with the GPUs of `snapshot` and with what their processes use on the host.

        `available` is the memory that the host has left, in bytes, as of the same sample.
        """
        joined: list[RunSnapshot] = []
        for record in self._records.values():
            try:
                self._count(record.outcome.update(self._oom_kills, record.uuids.values(), snapshot, now))
                run = record.run(snapshot, usages.get(record.peer), co_tenants, now, available)
            except Exception as error:  # noqa: BLE001 - told; what one run says must not cost the others their poll
                self._log_fault(record, error)
                self.rejected["internal"] += 1
                continue
            joined.append(run)
        return tuple(joined)
