"""Registry of runs: bounded in number, ended by evidence from the kernel, dropped after their expiry.

Ages are by the monotonic clock: setting the wall clock back must not make old values current.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from gpuwarden.analysis.batch_size.prior_runs import PriorRuns
from gpuwarden.analysis.oom.co_tenants import CoTenants
from gpuwarden.fairness.log_limiter import limit_lines_of
from gpuwarden.fairness.rate_limit import RateLimits
from gpuwarden.fairness.subordinate_uids import find_user
from gpuwarden.formatting import format_fields
from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.host.oom_killer import OomKill
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.host.process_tree import HostUsage
from gpuwarden.protocol.codec import ProtocolError
from gpuwarden.protocol.messages import Hello, Message
from gpuwarden.runs.admission import Admission
from gpuwarden.runs.devices import ListedProcesses, list_processes
from gpuwarden.runs.outcome import OUTCOMES, Outcome
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.runs.run_state import Rules, RunState
from gpuwarden.runs.stall import Patience

log = logging.getLogger(__name__)

KEPT_OOM_KILLS = 256
URGENT_MESSAGES, URGENT_SECONDS = 3, 5.0  # that trigger an early poll: in a row of each user, and between later ones
NO_CO_TENANTS = CoTenants()
_PATIENCE = Patience()


class RunRegistry:
    """All runs: receives their messages, returns their snapshots. Used by one event loop; `now` is monotonic.

    `sees_host`: this daemon has the pids of the host, as the driver does. `trust_reports`: a run uses the GPUs that it
    names. `displaced` are runs dropped for newer ones: the server closes their connections and clears the list.
    `oom_kills` are the last ones of any process.
    """

    def __init__(
        self,
        *,
        limit: int,
        user_limit: int = sys.maxsize,
        new_per_minute: int = sys.maxsize,
        expiry: float,
        overhead: float,
        patience: Patience = _PATIENCE,
        wall: Callable[[], float] = time.time,
        prior_runs: PriorRuns | None = None,
        alerting: bool = False,
        sees_host: bool = True,
        trust_reports: bool = False,
    ) -> None:
        self._limit = limit
        self._admission = Admission(limit, user_limit, new_per_minute)
        self._list_processes = partial(list_processes, sees_host=sees_host, trust_reports=trust_reports)
        self._urgent = RateLimits(URGENT_MESSAGES, URGENT_SECONDS)
        self._rules = Rules(expiry, overhead, patience, wall, prior_runs or PriorRuns(), alerting)
        self._runs: dict[str, RunState] = {}
        self._leaving: dict[str, RunState] = {}  # ended ones that made room, until a poll has shown their end
        self._listed = ListedProcesses()  # at the last poll
        self.oom_kills: deque[OomKill] = deque(maxlen=KEPT_OOM_KILLS)
        self._advice_connections = itertools.count(1)
        self.ended: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.displaced: list[ProcessKey] = []
        self.received = 0
        self.rejected: Counter[str] = Counter()

    def receive(self, peer: ProcessKey, message: Message, now: float) -> bool:
        """Handle one message; return whether it should trigger an early poll. Each user has a limit of these.

        Raises ProtocolError for a report before its hello, too many runs, or an internal error.
        """
        with limit_lines_of(peer.uid):
            return self._receive(peer, message, now)

    def _receive(self, peer: ProcessKey, message: Message, now: float) -> bool:
        if isinstance(message, Hello) and not message.name.strip():
            message = replace(message, name=peer.run_id)
        state = self._runs.get(peer.run_id)
        if state is None:
            if not isinstance(message, Hello):
                raise ProtocolError("no_hello", f"run {peer.run_id} sent a report before its hello")
            state = self._admit(peer, message, now)
        try:
            is_urgent = state.handle(message, now)
        except Exception as error:
            self._log_fault(state, error)
            raise ProtocolError("internal", f"{type(error).__name__}: see the daemon's log") from error
        self.received += 1
        user = find_user(peer.uid)
        if not is_urgent or not self._urgent.allows(user, now):
            return False
        self._urgent.consume(user, now)
        return True

    def _log_fault(self, state: RunState, fault: Exception) -> None:
        """Log an internal error with its traceback, once: a lasting one would repeat with each message."""
        if not self.rejected["internal"]:
            log.error(
                "internal error in a run, please report it; other runs are not affected %s",
                format_fields(run=state.peer.run_id, name=state.hello.name),
                exc_info=fault,
            )

    def _admit(self, peer: ProcessKey, hello: Hello, now: float) -> RunState:
        state = self._leaving.get(peer.run_id) or RunState(
            peer,
            hello,
            self._rules,
            seen_at=now,
            began=self._rules.wall(),
            began_monotonic=now,
        )
        evicted = self._admission.admit(state, self._runs, self._uses_gpu, now)
        if evicted is not None:
            self._make_room(evicted, peer, now)
        self._leaving.pop(peer.run_id, None)
        self._runs[peer.run_id] = state
        fields = format_fields(run=peer.run_id, name=hello.name, pid=peer.pid, uid=peer.uid)
        log.info("run connected %s", fields)
        return state

    def _uses_gpu(self, state: RunState) -> bool:
        return any(state.devices.values()) or self._listed.has(state.peer.pid)

    def _make_room(self, run_id: str, newcomer: ProcessKey, now: float) -> None:
        """Drop a run for a new one. An ended one stays until a poll has its outcome, for its record."""
        state = self._runs[run_id]
        if not state.up:
            self._leaving[run_id] = self._runs.pop(run_id)
        elif now - state.seen_at > self._rules.expiry:
            self._forget(run_id, now)
        else:
            self.displaced.append(self._runs.pop(run_id).peer)
            if not self.rejected["too_many_runs"]:
                log.warning(
                    "too many runs (runs.max), dropped one of the user with the most, further ones are only counted %s",
                    format_fields(run=run_id, uid=state.peer.uid, newcomer_uid=newcomer.uid, limit=self._limit),
                )
            self.rejected["too_many_runs"] += 1

    def _forget(self, run_id: str, now: float) -> None:
        self._count(self._runs.pop(run_id).conclude(now))

    def _count(self, outcome: Outcome | None) -> None:
        if outcome is not None:
            self.ended[outcome] += 1

    def knows(self, peer: ProcessKey) -> bool:
        """Return whether the peer is a registered run."""
        return self._find(peer) is not None

    def _find(self, peer: ProcessKey) -> RunState | None:
        return self._runs.get(peer.run_id) or self._leaving.get(peer.run_id)

    def exited(self, peer: ProcessKey, now: float, status: int | None = None) -> None:
        """Handle the end of a process: its memory is free, its totals stay until the expiry.

        `status` is its exit status (wait(2)); call again if it is known only later.
        """
        state = self._find(peer)
        if state is not None:
            state.handle_exit(now, status)

    def reconnect_advice(self, peer: ProcessKey) -> bool:
        """Handle a new advice connection, which gets all current advice again; return whether there was one before."""
        state = self._runs.get(peer.run_id)
        if state is None:
            return False
        before, state.advice_connection = state.advice_connection, next(self._advice_connections)
        return before > 0

    def set_advice_limits(self, limits: Mapping[str, Mapping[str, float]]) -> None:
        """Set the bytes in use, by run id and UUID, above which a report triggers an early poll."""
        for run_id, state in self._runs.items():
            state.advice_limits = limits.get(run_id, {})

    def awaits_exit_status(self, peer: ProcessKey) -> bool:
        """Return whether the exit status of an ended run could still change its outcome."""
        state = self._find(peer)
        return state is not None and state.outcome.is_open

    def add_oom_kills(self, kills: Iterable[OomKill]) -> None:
        """Add kills by the kernel's OOM killer, with pids in this daemon's namespace."""
        self.oom_kills.extend(kills)

    def disconnected(self, peer: ProcessKey, now: float) -> None:
        """Handle the loss of a run's last connection; it is dropped after the expiry unless it reconnects."""
        state = self._runs.get(peer.run_id)
        if state is not None:
            state.connected, state.seen_at = False, now

    def expire(self, now: float) -> None:
        """Drop runs that ended, or lost their connection, longer than the expiry ago."""
        self._admission.expire(now)
        self._urgent.expire(now)
        for run_id, state in list(self._runs.items()):
            if state.up and state.connected:
                continue  # silent but alive: its totals are still right
            if now - (state.seen_at if state.outcome.ended is None else state.outcome.ended) > self._rules.expiry:
                has_ended = not state.up
                self._forget(run_id, now)
                if not has_ended:
                    with limit_lines_of(state.peer.uid):
                        log.info(
                            "run expired %s", format_fields(run=run_id, name=state.hello.name, reason="disconnected")
                        )

    def peers(self) -> list[ProcessKey]:
        """Return the processes of all runs."""
        return [state.peer for state in self._runs.values()]

    def living(self) -> dict[int, str]:
        """Return the ids of runs that have not ended, by pid."""
        return {each.peer.pid: run_id for run_id, each in self._runs.items() if each.up}

    def names(self) -> dict[str, str]:
        """Return the names of runs that have not ended, by id."""
        return {run_id: each.hello.name for run_id, each in self._runs.items() if each.up}

    def newest_age(self, now: float) -> float:
        """Return the age in seconds of the newest running run; infinite without one."""
        living = (now - state.began_monotonic for state in self._runs.values() if state.up)
        return min(living, default=math.inf)

    def is_urgent_on_host(self) -> bool:
        """Return whether a run allocates host memory so fast that it must be sampled often."""
        return any(state.leaks.urgent for state in self._runs.values())

    def add_poll(
        self,
        snapshot: Snapshot,
        now: float,
        usages: Mapping[ProcessKey, HostUsage] = MappingProxyType({}),
        co_tenants: CoTenants = NO_CO_TENANTS,
        *,
        available: float | None = None,
        cgroups: Mapping[int, Sequence[str]] = MappingProxyType({}),
    ) -> tuple[RunSnapshot, ...]:
        """Add a poll; return all runs, joined with the GPUs of `snapshot` and their host usage.

        `available` is the host's free memory in bytes, of the same sample as `usages`; `cgroups` are the folders of
        processes' cgroups by pid.
        """
        joined: list[RunSnapshot] = []
        listed = self._listed = self._list_processes(snapshot, co_tenants.owners.identities)
        leaving, self._leaving = self._leaving, {}
        for state in (*leaving.values(), *self._runs.values()):
            try:
                self._count(state.outcome.add_evidence(self.oom_kills, state.uuids.values(), snapshot, now))
                if state.peer.run_id in leaving:
                    self._count(state.conclude(now))
                usage, folders = usages.get(state.peer), cgroups.get(state.peer.pid, ())
                with limit_lines_of(state.peer.uid):
                    run = state.add_poll(snapshot, usage, co_tenants, listed, now, available=available, cgroups=folders)
            except Exception as error:  # noqa: BLE001 - logged; a bad run must not break the poll of others
                self._log_fault(state, error)
                self.rejected["internal"] += 1
                continue
            joined.append(run)
        return tuple(joined)
