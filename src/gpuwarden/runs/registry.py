"""The runs that count now: bounded in number, ended by the kernel's word, forgotten after their expiry.

Ages are taken by the monotonic clock: a wall clock that is set back must not make old values young.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast

from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.gpu.table import GpuReadings, MigReadings
from gpuwarden.headroom import headroom
from gpuwarden.protocol import DeviceMemory, End, Error, ErrorKind, Hello, Message, ProtocolError, Report
from gpuwarden.runs.devices import resolve
from gpuwarden.runs.ending import OUTCOMES, Ending, Evidence, Outcome
from gpuwarden.runs.error_log import ErrorLog
from gpuwarden.runs.inquest import Inquest, xids
from gpuwarden.runs.oom import Oom, ooms
from gpuwarden.runs.oom_kill import OomKill
from gpuwarden.runs.peer import Peer
from gpuwarden.runs.process_tree import Present, Usage
from gpuwarden.runs.share import NO_ACCOUNT, Account
from gpuwarden.runs.stall import Patience, Stall, StallWatch

log = logging.getLogger(__name__)

KEPT_ERRORS = 8  # of a run
KEPT_OOM_KILLS = 256
TOLD_STALLS = 20  # of a run, in the log
_PATIENCE = Patience()


@dataclass(frozen=True, slots=True)
class SeenError:
    """An error that a run told, when (Unix time), and the headroom by UUID that the daemon had known before it."""

    error: Error
    at: float
    headroom: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Run:
    """One run as it stands at a poll; what the metric table reads.

    `last_report` is Unix time; `report` is the last one and carries the totals. `memory` and both headrooms are by UUID
    of a GPU or MIG instance and hold only what is current: nothing once the process is gone, or the last report older
    than the expiry. `unresolved` counts the run's devices that could not be told to be a certain GPU. `usage` is what
    its processes use on the host, where that is known. `began` is when it first said hello, in Unix time. `errors` are
    the last that it told; the report counts them all. `last_errors` is when the last of each kind was heard of, in Unix
    time; `ooms` are the allocations that failed in the last out-of-memory on GPUs, by UUID. `ending` is there once the
    run is not up, and may change until it is settled. `stall` is there while a step hangs, which it did `stalls` times
    so far. `account` says what it has had of the GPUs.
    """

    peer: Peer
    hello: Hello
    report: Report | None
    last_report: float | None
    up: bool
    current: bool
    memory: Mapping[str, DeviceMemory] = field(default_factory=dict)
    headroom: Mapping[str, float] = field(default_factory=dict)
    headroom_at_peak: Mapping[str, float] = field(default_factory=dict)
    unresolved: int = 0
    usage: Usage | None = None
    began: float = 0.0
    errors: tuple[SeenError, ...] = ()
    last_errors: Mapping[ErrorKind, float] = field(default_factory=dict)
    ooms: Mapping[str, Oom] = field(default_factory=dict)
    ending: Ending | None = None
    stall: Stall | None = None
    stalls: int = 0
    account: Account = NO_ACCOUNT


@dataclass(slots=True)
class _Record:
    peer: Peer
    hello: Hello
    seen: float
    named: float  # when its name or framework last changed
    wish: Hello | None = None  # a hello whose new name has to wait
    report: Report | None = None
    last_report: float | None = None
    last_report_time: float | None = None  # Unix time, to show
    inquest: Inquest | None = None  # once it is not up
    told: set[Outcome] = field(default_factory=set)  # in the log and the counter
    connected: bool = True
    began: float = 0.0  # Unix time, to show
    began_at: float = 0.0  # monotonic
    resolved: tuple[Hello, object] | None = None  # what the next was found by
    resolution: Mapping[str, str] = field(default_factory=dict)  # UUIDs by device, now
    uuids: Mapping[str, str] = field(default_factory=dict)  # likewise, while it lived
    headroom: Mapping[str, float] = field(default_factory=dict)  # at the last poll, by UUID
    present: Present | None = None  # when its processes were last seen
    stalling: StallWatch = field(default_factory=StallWatch)
    errors: deque[SeenError] = field(default_factory=lambda: deque(maxlen=KEPT_ERRORS))
    last_errors: dict[ErrorKind, float] = field(default_factory=dict)  # Unix time, to show
    last_oom: SeenError | None = None
    ooms: Mapping[str, Oom] = field(default_factory=dict)
    error_log: ErrorLog = field(default_factory=ErrorLog)


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
    ) -> None:
        self._limit = limit
        self._patience = patience
        self._expiry = expiry
        self._overhead = overhead
        self._wall = wall
        self._records: dict[str, _Record] = {}
        self._oom_kills: deque[OomKill] = deque(maxlen=KEPT_OOM_KILLS)
        self._evidence: object = None  # of which device is which, as of the last poll that changed it
        self.ended: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.displaced: list[Peer] = []  # whose connections are to be closed, by whoever holds them
        self.received = 0
        self.rejected: Counter[str] = Counter()

    def receive(self, peer: Peer, message: Message, now: float) -> None:
        """Take one message. Raises ProtocolError: a report before its hello, or one run too many."""
        if isinstance(message, Hello):
            record = self._greet(peer, message, now)
        else:
            known = self._records.get(peer.run_id)
            if known is None:
                raise ProtocolError("no_hello", f"run {peer.run_id} sends a report before its hello")
            record = known
            if record.wish is not None:
                self._rename(record, record.wish, now)
        record.seen, record.connected = now, True
        if record.inquest and record.inquest.evidence.exit_status is None:  # it goes on
            record.inquest = None
        if isinstance(message, Error):
            self._note(record, message, now)
        elif isinstance(message, Report):
            self._date_errors(record, message)
            record.report, record.last_report, record.last_report_time = message, now, self._wall()
            record.stalling.hear(message, now)
        elif isinstance(message, End):
            self._end(record, now).hear(message)
        self.received += 1

    def _greet(self, peer: Peer, hello: Hello, now: float) -> _Record:
        record = self._records.get(peer.run_id)
        if record is not None:
            self._rename(record, hello, now)
            return record
        if len(self._records) >= self._limit and not self._make_room(now) and not self._displace(peer):
            raise ProtocolError("too_many_runs", f"at most {self._limit} (runs.max)")
        record = self._records[peer.run_id] = _Record(
            peer, hello, seen=now, named=now, began=self._wall(), began_at=now
        )
        log.info("run=%s name=%r pid=%d uid=%d reports", peer.run_id, hello.name, peer.pid, peer.uid)
        return record

    def _rename(self, record: _Record, hello: Hello, now: float) -> None:
        """Take a changed hello; but a new name makes new series, so there is one an expiry at most: the last one."""
        same = _labels(hello) == _labels(record.hello)
        record.wish = None
        if not same and now - record.named <= self._expiry:
            record.wish = hello
            hello = replace(hello, **_labels(record.hello))
        elif not same:
            record.named = now
        record.hello = hello

    def _make_room(self, now: float) -> bool:
        """Forget one run for a new one: the first that ended, else the one silent for longest, past its expiry."""
        ended = [(record.inquest.ended, run_id) for run_id, record in self._records.items() if record.inquest]
        silent = [(each.seen, run_id) for run_id, each in self._records.items() if now - each.seen > self._expiry]
        if not ended and not silent:
            return False
        self._forget(min(ended or silent)[1], now)
        return True

    def _displace(self, newcomer: Peer) -> bool:
        """Turn the newest run of the user with most away for one of a user with at least two less.

        Of less than two they would take turns: the one turned away would have the same right to come back.
        """
        held = Counter(record.peer.uid for record in self._records.values())
        crowd, most = held.most_common(1)[0]
        if most < held[newcomer.uid] + 2:
            return False
        run_id = next(run_id for run_id in reversed(self._records) if self._records[run_id].peer.uid == crowd)
        self.displaced.append(self._records.pop(run_id).peer)
        if not self.rejected["too_many_runs"]:
            log.warning(
                "run=%s uid=%d gives way to one of uid=%d, who has fewer runs; at most %d (runs.max; further ones are "
                "counted only)",
                *(run_id, crowd, newcomer.uid, self._limit),
            )
        self.rejected["too_many_runs"] += 1
        return True

    def _forget(self, run_id: str, now: float) -> None:
        record = self._records.pop(run_id)
        if record.inquest is None:
            self._end(record, now).hear_nothing_more()
        self._settle(record)

    def knows(self, peer: Peer) -> bool:
        """Tell whether the peer is a run that counts."""
        return peer.run_id in self._records

    def exited(self, peer: Peer, now: float, status: int | None = None) -> None:
        """Note that the process is gone: its memory is free again, its totals stay until their expiry.

        `status` is its exit status as of wait(2); one that is told later is taken by another call.
        """
        record = self._records.get(peer.run_id)
        if record is None:
            return
        inquest = self._end(record, now)
        if inquest.settled:
            return
        if inquest.gone is None:
            kills = record.present.oom_kills if record.present else None
            inquest.see_exit(now, status, kills.since() if kills else 0)
        elif status is not None:
            inquest.see_status(status)

    def awaits(self, peer: Peer) -> bool:
        """Tell whether the exit status of a run that has ended would still count."""
        record = self._records.get(peer.run_id)
        return record is not None and record.inquest is not None and not record.inquest.settled

    def note_oom_kills(self, kills: Iterable[OomKill]) -> None:
        """Take whom the kernel's OOM killer killed, by pids as this daemon sees them."""
        self._oom_kills.extend(kills)

    def _end(self, record: _Record, now: float) -> Inquest:
        if record.inquest is None:
            error = record.errors[-1].error if record.errors else None
            evidence = Evidence(error=error)
            record.inquest = Inquest(record.peer.pid, record.began_at, now, self._wall(), evidence)
        return record.inquest

    def _review(self, record: _Record, snapshot: Snapshot, now: float) -> None:
        """Take what has become known of a run's end since, until that is settled."""
        inquest = record.inquest
        if inquest is None or inquest.settled:
            return
        if inquest.gone is not None and record.peer.pid:
            inquest.review(self._oom_kills, xids(record.uuids.values(), snapshot, inquest.at))
        if inquest.ready(now):
            self._settle(record)

    def _settle(self, record: _Record) -> None:
        """Stand by how a run ended; log and count it, unless it had ended that way before and gone on."""
        if record.inquest is None or record.inquest.settled:
            return
        ending = record.inquest.settle()
        if ending.outcome in record.told:  # one that says its end again and again must not fill the log
            return
        record.told.add(ending.outcome)
        self.ended[ending.outcome] += 1
        who = record.peer.run_id, record.hello.name
        log.info("run=%s name=%r ended: %s (%s)", *who, ending.outcome, ending.evidence)

    def _note(self, record: _Record, error: Error, now: float) -> None:
        seen = SeenError(error, self._wall(), record.headroom)
        record.errors.append(seen)
        record.last_errors[error.kind] = seen.at
        failed = ooms(error, record.hello, record.uuids, seen.headroom) if error.kind == "device_oom" else {}
        if error.kind == "device_oom":
            record.last_oom, record.ooms = seen, failed
        record.error_log.tell(record.peer.run_id, record.hello, error, failed, now)

    def _date_errors(self, record: _Record, report: Report) -> None:
        """Take note of errors that were not told one by one; of a first report nobody knows how old they are."""
        if record.report is None:
            return
        for kind, count in report.errors.items():
            if count > record.report.errors.get(kind, 0):
                record.last_errors[cast("ErrorKind", kind)] = self._wall()

    def disconnected(self, peer: Peer, now: float) -> None:
        """Note that the run has no connection left; unless it comes back it is forgotten in an expiry."""
        record = self._records.get(peer.run_id)
        if record is not None:
            record.connected, record.seen = False, now

    def expire(self, now: float) -> None:
        """Forget runs that ended, or that lost their connection, an expiry ago."""
        for run_id, record in list(self._records.items()):
            if record.inquest is None and record.connected:
                continue  # silent but alive: its totals still hold
            if now - (record.inquest.ended if record.inquest else record.seen) > self._expiry:
                self._forget(run_id, now)
                log.info("run=%s name=%r forgotten", run_id, record.hello.name)

    def peers(self) -> list[Peer]:
        """Return the processes of all runs."""
        return [record.peer for record in self._records.values()]

    def runs(
        self, snapshot: Snapshot, now: float, usages: Mapping[Peer, Usage] = MappingProxyType({})
    ) -> tuple[Run, ...]:
        """Return all runs, joined with the GPUs of `snapshot` and with what their processes use on the host."""
        evidence = _evidence(snapshot)
        if evidence != self._evidence:
            self._evidence = evidence
        return tuple(self._run(record, snapshot, now, usages.get(record.peer)) for record in self._records.values())

    def _run(self, record: _Record, snapshot: Snapshot, now: float, usage: Usage | None) -> Run:
        self._review(record, snapshot, now)
        up = record.inquest is None
        current = up and record.last_report is not None and now - record.last_report <= self._expiry
        uuids = self._uuids(record, snapshot)
        if up:
            record.uuids = uuids or record.uuids
            record.present = (usage.present if usage else None) or record.present
        if record.last_oom and not record.ooms:  # it came before the first poll
            record.ooms = ooms(record.last_oom.error, record.hello, record.uuids, record.last_oom.headroom)
        memory = _by_gpu(record.report.memory, uuids) if record.report and current else {}
        record.headroom, at_peak = self._headrooms(record.peer.pid, memory, snapshot)
        return Run(
            peer=record.peer,
            hello=record.hello,
            report=record.report,
            last_report=record.last_report_time,
            up=up,
            current=current,
            memory=memory,
            headroom=record.headroom,
            headroom_at_peak=at_peak,
            unresolved=len(record.hello.devices) - len(uuids),
            usage=usage,
            began=record.began,
            errors=tuple(record.errors),
            last_errors=dict(record.last_errors),
            ooms=record.ooms,
            ending=record.inquest.ending if record.inquest else None,
            stall=self._stall(record, usage, snapshot, now),
            stalls=record.stalling.stalls,
        )

    def _uuids(self, record: _Record, snapshot: Snapshot) -> Mapping[str, str]:
        """Resolve a run's devices, anew only where it or what tells them apart has changed."""
        known = record.resolved
        if known is None or known[0] is not record.hello or known[1] is not self._evidence:
            record.resolved = record.hello, self._evidence
            record.resolution = resolve(record.hello, record.peer.pid, snapshot)
        return record.resolution

    def _stall(self, record: _Record, usage: Usage | None, snapshot: Snapshot, now: float) -> Stall | None:
        watch, before = record.stalling, record.stalling.stall
        watch.look(usage, now)
        report = record.report if record.inquest is None else None
        stall = watch.judge(report, lambda: _busiest(record.uuids.values(), snapshot), self._patience, now)
        who = record.peer.run_id, record.hello.name
        if stall and not before and watch.stalls <= TOLD_STALLS:
            log.warning("run=%s name=%r stalls: no step for %.0f s (%s)", *who, stall.seconds, stall.cause)
        elif before and not stall and watch.stalls <= TOLD_STALLS:
            end = "ended in its stall" if record.inquest else "goes on"
            log.warning("run=%s name=%r %s after %.0f s without a step", *who, end, before.seconds)
        return stall

    def _headrooms(
        self, pid: int, memory: Mapping[str, DeviceMemory], snapshot: Snapshot
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return the headroom by UUID, and what it would be if the run used as much as at its peak."""
        now: dict[str, float] = {}
        at_peak: dict[str, float] = {}
        for uuid, device in memory.items():
            gpu = snapshot.gpu_with(uuid)
            if gpu is None or not gpu.up:
                continue  # nothing is known of the device now
            instance = gpu.instance(uuid)
            row = MigReadings.memory_free_bytes if instance else GpuReadings.memory_free_bytes
            free, held = (instance or gpu).value(row), gpu.memory_of(pid)
            for found, in_use in ((now, device.current), (at_peak, device.peak)):
                left = headroom(free=free, held=held, in_use=in_use, limit=device.limit, overhead=self._overhead)
                if left is not None:
                    found[uuid] = left
        return now, at_peak


def _evidence(snapshot: Snapshot) -> object:
    """Return what `resolve` goes by."""
    return [
        (gpu.identity, [each.identity for each in gpu.mig], [(each.pid, each.instance) for each in gpu.processes])
        for gpu in snapshot.gpus
    ]


def _labels(hello: Hello) -> dict[str, Any]:
    """Give what of a hello becomes labels."""
    return {"name": hello.name, "framework": hello.framework, "job": hello.job, "rank": hello.rank}


def _busiest(uuids: Iterable[str], snapshot: Snapshot) -> float | None:
    gpus = [gpu for uuid in uuids if (gpu := snapshot.gpu_with(uuid))]
    return max((busy for gpu in gpus if (busy := gpu.value(GpuReadings.utilization_ratio)) is not None), default=None)


def _by_gpu(memory: Mapping[str, DeviceMemory], uuids: Mapping[str, str]) -> dict[str, DeviceMemory]:
    """Sum a run's logical devices by the GPU they are parts of."""
    found: dict[str, DeviceMemory] = {}
    for device, part in memory.items():
        if (uuid := uuids.get(device)) is None:
            continue
        other = found.get(uuid)
        found[uuid] = part if other is None else _sum(part, other)
    return found


def _sum(one: DeviceMemory, other: DeviceMemory) -> DeviceMemory:
    return DeviceMemory(
        one.current + other.current,
        one.peak + other.peak,
        _both(one.limit, other.limit),
        _both(one.reserved, other.reserved),
    )


def _both(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
