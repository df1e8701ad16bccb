"""Run records of the daemon: of runs that go on, from poll to poll, and of those that ended, in a database.

The database is used on a thread of its own: the event loop never waits for a disk. A disk that fails is logged once,
and counted; rows stay in memory, and are written when it works again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from gpuwarden.analysis.batch_size.cost_model import SizePeak
from gpuwarden.analysis.batch_size.prior_runs import PriorRuns
from gpuwarden.fair_eviction import select_evicted
from gpuwarden.host import procfs
from gpuwarden.records.builder import build_record, conclude_record, continue_record, usage_from_record
from gpuwarden.records.record import RunRecord
from gpuwarden.records.store import RecordRow, RecordStore, StoredRecords, StoreThread, as_json, row_from_record
from gpuwarden.records.summary import log_line
from gpuwarden.records.timeline import continue_timeline, with_timeline, without_timeline
from gpuwarden.runs.outcome import Ending
from gpuwarden.runs.run_events import RunEvent, bounded
from gpuwarden.runs.run_snapshot import JoinedPoll, RunSnapshot
from gpuwarden.usage.run_usage import NO_USAGE, RunUsage

log = logging.getLogger(__name__)

API_VERSION = 1
DEFAULT_LISTED = 256  # ended runs in a listing, unless more are asked for
FLUSH_SECONDS = 1.0  # between two writes
WRITE_SECONDS = 60.0  # between two records of a run that goes on
MAX_WRITES_PER_SECOND = 4.0  # of records of runs that go on: with more than 240 runs each is written less often
RETRY_SECONDS = 30.0  # between attempts at a disk that fails
OPEN_SECONDS = 1.0  # that the start waits for the database
STOP_SECONDS = 2.0  # and the end, twice so long at most
READ_SECONDS = 5.0  # and a request
HANG_SECONDS = 30.0  # after which a disk hangs that has not answered
MAX_WAITING = 1024  # rows that wait for a disk, or stay in memory where there is none

NO_EVENTS: Mapping[str, Sequence[RunEvent]] = MappingProxyType({})
_STOPPED = "it ended while the daemon did not run"
_LOST = "it ended some time after its connection was lost"
_REBOOTED = "the machine was booted anew"
_TOO_MANY = "it did not report any more, as too many others did not to follow them all"
_UNSEEN = "the daemon was started anew, and cannot see the process"

_Key: TypeAlias = "tuple[str, float]"


def _uptime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True)
class _Live:
    """A run of the last poll; `before` is its record from before it or the daemon was gone for a while.

    `began_uptime` and `slept` (until the run was first seen) are seconds since the machine's boot. `recorded` is the
    end that its record has. `due` is monotonic: when what is so far is to be written next.
    """

    run: RunSnapshot
    usage: RunUsage
    began_uptime: float
    slept: float
    before: RunRecord | None = None
    events: tuple[RunEvent, ...] = ()
    recorded: Ending | None = None
    logged: frozenset[str] = frozenset()  # outcomes
    due: float = 0.0


@dataclass(frozen=True, slots=True)
class _Absent:
    """A run that goes on for all that is known, but has not reported to this daemon, or not for long."""

    receipt: RunRecord
    evidence: str  # of its end, once that is found


class Recorder:
    """Records of all runs, updated with each poll, on one event loop. `folder` is None to keep all in memory.

    At most `limit` records of ended runs are kept there. Of runs that have not ended there are as many that report no
    more as there may be that do, `most_runs`, at least. `wall` and `uptime` (CLOCK_BOOTTIME) are clocks in seconds.
    """

    def __init__(
        self,
        folder: Path | None,
        limit: int,
        user_name: Callable[[int], str] = str,
        wall: Callable[[], float] = time.time,
        *,
        most_runs: int,
        predecessors: PriorRuns | None = None,
        uptime: Callable[[], float] = _uptime,
    ) -> None:
        self.folder = folder
        self.errors = 0  # faults of the database, each once until it is mended, and rows that were given up for it
        self._store = RecordStore(folder, limit) if folder else None
        self._thread: StoreThread | None = None  # once it is opened
        self._most_runs = most_runs
        self._user_name = user_name
        self._wall = wall
        self._uptime = uptime
        self._predecessors = predecessors or PriorRuns()
        self._boot_id = _boot_id()
        self._live: dict[str, _Live] = {}
        self._absent: dict[str, _Absent] = {}
        self._resumed: dict[str, RunUsage] = {}  # usage in records that were read since the last poll, by run id
        self._waiting: dict[_Key, RecordRow] = {}
        self._batch: dict[_Key, RecordRow] = {}  # that the thread writes now
        self._flushing: asyncio.Task[None] | None = None
        self._flush_began = 0.0  # monotonic, as the others
        self._flush_due = 0.0
        self._look_due = 0.0  # for runs that are gone
        self._seen_at = time.monotonic()
        self._is_open = False
        self._trouble = ""  # logged, and not over
        self._going_on: bytes | None = None  # records of runs that go on, as JSON

    async def open(self) -> None:
        """Begin to open the database, and wait for that a little."""
        if self._store:
            self._thread = StoreThread()
            self._flush(time.monotonic())
            await self._wait(OPEN_SECONDS)

    async def stop(self, usage: Mapping[str, RunUsage]) -> None:
        """Write the records of all runs, and wait for that a little; once more, where the disk failed a moment ago.

        `usage` is by run id, with all that was polled.
        """
        for run_id, live in self._live.items():
            live.usage = usage.get(run_id, live.usage)
        until = time.monotonic() + 2 * STOP_SECONDS
        await self._wait(STOP_SECONDS)
        if (
            self._thread and not self._is_open and (self._live or self._waiting)
        ):  # an earlier daemon may have begun some
            await self._flush_until(until)
        for live in self._live.values():
            if live.run.up:
                self._write(self._receipt(live))
            elif live.recorded != live.run.ending:
                self._end(live)
        if self._is_open:
            await self._flush_until(until)
            if self._thread and self._store and not self._flushing:
                with suppress(OSError, asyncio.TimeoutError):  # the disk may hang by now
                    await asyncio.wait_for(self._thread.call(self._store.close), STOP_SECONDS)
                self._thread = None

    async def _flush_until(self, until: float) -> None:
        self._flush_due = 0.0
        self._flush(time.monotonic())
        await self._wait(max(until - time.monotonic(), 0.0))

    async def _wait(self, seconds: float) -> None:
        if self._flushing:
            await asyncio.wait([self._flushing], timeout=seconds)  # not wait_for: a call to a disk cannot be cancelled

    def resume(self, runs: Iterable[RunSnapshot]) -> Mapping[str, RunUsage]:
        """Resume the records of runs that an earlier daemon, or the registry, has dropped; return their usage then.

        It is by run id, and returned once.
        """
        resumed, self._resumed = self._resumed, {}
        for run in runs:
            absent = self._absent.pop(run.peer.run_id, None) if self._absent else None
            if absent is not None:
                resumed[run.peer.run_id] = usage_from_record(absent.receipt)
                self._live[run.peer.run_id] = self._new(run, absent.receipt)
        return resumed

    def _new(self, run: RunSnapshot, before: RunRecord | None = None) -> _Live:
        # Never negative: where the clocks disagree (a time namespace, a replay) the reader would refuse the record.
        return _Live(run, NO_USAGE, max(self._uptime() - run.lasted, 0.0), self._slept(), before)

    def _slept(self) -> float:
        """Return for how long the machine has slept since its boot: the monotonic clock stood still meanwhile."""
        return self._uptime() - time.monotonic()

    def update(
        self, poll: JoinedPoll, usage: Mapping[str, RunUsage], events: Mapping[str, Sequence[RunEvent]] = NO_EVENTS
    ) -> None:
        """Update with the runs of a poll and their usage, of those that are gone too. Does not block.

        `usage` is by run id, as are `events`: new ones, that a run's own reports do not tell of.
        """
        runs, now = poll.runs, poll.now
        self._going_on = None
        if self._flushing and now - self._flush_began > HANG_SECONDS:
            self._fail("it does not answer")
        for run in runs:
            live = self._live.get(run.peer.run_id)
            if live is None:
                live = self._live[run.peer.run_id] = self._new(run)
            live.usage = usage.get(run.peer.run_id, live.usage)
            if new := events.get(run.peer.run_id):
                live.events = bounded((*live.events, *new))
            self._follow(live, run)
        present = {run.peer.run_id for run in runs}
        parted = [run_id for run_id in self._live if run_id not in present]
        for run_id in parted:
            self._part(self._live.pop(run_id), usage)
        self._bound_absent()
        if parted or now >= self._look_due:
            self._look_due = now + WRITE_SECONDS
            self._look_for_absent()
        self._write_so_far(now)
        self._flush(now)

    def _follow(self, live: _Live, run: RunSnapshot) -> None:
        before, live.run = live.run, run
        if run.errors[-1:] != before.errors[-1:]:  # what most matters of a run: not to be lost with the daemon
            live.due = 0.0
        if run.ending is None and live.recorded is not None:  # it goes on after all
            live.recorded = None
            self._write(self._receipt(live))
        elif run.ending is not None and run.ending.settled and live.recorded != run.ending:
            self._end(live)

    def _end(self, live: _Live) -> None:
        receipt = self._receipt(live)
        live.recorded = live.run.ending
        self._keep(receipt, log_it=(receipt.outcome or "") not in live.logged)  # one may end again and again
        live.logged |= {receipt.outcome or ""}

    def _part(self, live: _Live, usage: Mapping[str, RunUsage]) -> None:
        """Drop a run that the registry has dropped; it may come back if its end was not seen."""
        live.usage = usage.get(live.run.peer.run_id, live.usage)
        if not live.run.up:
            if live.recorded != live.run.ending:
                self._end(live)
            return
        receipt = self._receipt(live)
        self._absent[receipt.run_id] = _Absent(receipt, _LOST)
        self._write(receipt)

    def _receipt(self, live: _Live) -> RunRecord:
        """Make a run's record with its story; some 100 µs a device."""
        receipt = with_timeline(self._since(live), live.run, live.events)
        return continue_record(live.before, continue_timeline(live.before, receipt)) if live.before else receipt

    def _outline(self, live: _Live) -> RunRecord:
        """Make the record as it is listed: without its story."""
        receipt = self._since(live)
        return continue_record(live.before, receipt) if live.before else receipt

    def _since(self, live: _Live) -> RunRecord:
        """Make the record of what this daemon has seen."""
        run = live.run
        user = self._user_name(run.peer.uid)
        return build_record(
            run,
            self._wall(),
            boot_id=self._boot_id,
            user=None if user == str(run.peer.uid) else user,
            account=live.usage,
            began_uptime=live.began_uptime,
            slept=max(self._slept() - live.slept, 0.0),
        )

    def _bound_absent(self) -> None:
        """Conclude the records of silent runs where they are too many; processes may live for ever.

        Runs of an earlier daemon count as silent until they have reported to this one.
        """
        limit = 2 * self._most_runs - len(self._live)
        if len(self._absent) > limit:
            absent = ((run_id, absent.receipt.uid, 1) for run_id, absent in self._absent.items())
            for run_id in select_evicted(absent, limit):
                self._conclude(run_id, _TOO_MANY)

    def _look_for_absent(self) -> None:
        """Conclude the records of runs that are gone without a word to this daemon."""
        for run_id, absent in list(self._absent.items()):
            evidence = self._evidence_of_end(absent)
            if evidence:
                self._conclude(run_id, evidence)

    def _conclude(self, run_id: str, evidence: str) -> None:
        self._keep(conclude_record(self._absent.pop(run_id).receipt, evidence))

    def _evidence_of_end(self, absent: _Absent) -> str:
        """Return how it is known that a run is gone; empty where it lives."""
        receipt = absent.receipt
        if receipt.boot_id != self._boot_id:
            return _REBOOTED
        if not receipt.pid:
            return _UNSEEN
        return "" if procfs.lives(receipt.pid, receipt.run_id.removeprefix(f"{receipt.pid}-")) else absent.evidence

    def _write_so_far(self, now: float) -> None:
        """Write what is so far of the runs that wait for it longest; no poll has to write more than a few."""
        elapsed, self._seen_at = min(now - self._seen_at, 10.0), now
        if not self._is_open:
            return
        due = sorted((live for live in self._live.values() if live.run.up and now >= live.due), key=_due)
        for live in due[: max(round(elapsed * MAX_WRITES_PER_SECOND), 1)]:
            live.due = now + WRITE_SECONDS
            self._write(self._receipt(live))

    def _keep(self, receipt: RunRecord, *, log_it: bool = True) -> None:
        """Keep the record of a run that ended."""
        self._write(receipt)
        self._learn(receipt)
        if log_it:
            log.info("%s", log_line(receipt))

    def _learn(self, receipt: RunRecord) -> None:
        batches = [each for device in receipt.devices for each in device.batch_memory]
        seen = [SizePeak(each.batch_size, each.floor_bytes, each.peak_bytes) for each in batches]
        self._predecessors.add(receipt.uid, receipt.name, receipt.framework, seen)

    def _write(self, receipt: RunRecord) -> None:
        """Have a record written with the next flush."""
        row = row_from_record(receipt)
        self._waiting.pop(row.key, None)
        if row.ended or self._store:
            self._waiting[row.key] = row
        if len(self._waiting) > MAX_WAITING:
            for key in select_evicted(((key, row.uid, 1) for key, row in self._waiting.items()), MAX_WAITING):
                del self._waiting[key]
                self.errors += self._store is not None

    def _flush(self, now: float) -> None:
        """Begin to write what waits, unless that is under way, or the disk has failed a moment ago."""
        if self._thread and not self._flushing and now >= self._flush_due and (self._waiting or not self._is_open):
            self._flush_began, self._flush_due = now, now + FLUSH_SECONDS
            self._flushing = asyncio.create_task(self._write_waiting())

    async def _write_waiting(self) -> None:
        assert self._thread
        assert self._store
        try:
            if not self._is_open:
                self._take_found(await self._thread.call(self._store.open, DEFAULT_LISTED))
            self._batch, self._waiting = self._waiting, {}
            await self._thread.call(self._store.write, self._batch.values())
        except Exception as error:
            self._waiting = {**self._batch, **self._waiting}  # what is newer wins
            self._flush_due = self._flush_began + RETRY_SECONDS
            if not isinstance(error, OSError):
                log.exception("a fault of our own")
            self._fail(getattr(error, "strerror", None) or str(error))
        else:
            if self._trouble:
                log.warning("run records are written again file=%s", self._store.path)
            self._trouble = ""
        finally:
            self._batch, self._flushing = {}, None

    def _fail(self, why: str) -> None:
        if self._trouble != why and self._store:
            self.errors += 1
            log.warning("run records stay in memory error=%s file=%s", why, self._store.path)
        self._trouble = why

    def _take_found(self, found: StoredRecords) -> None:
        self._is_open = True
        for receipt in (*found.ended, *found.unfinished):  # of the latter, some may go on
            self._learn(receipt)
        for receipt in found.unfinished:
            live = self._live.get(receipt.run_id)
            if live is None or receipt.boot_id != self._boot_id:
                self._absent[receipt.run_id] = _Absent(receipt, _STOPPED)
                continue
            own = row_from_record(self._receipt(live)).key  # the disk was slower than the run
            live.before = receipt
            earlier = usage_from_record(receipt)
            live.usage = live.usage.after(earlier)
            self._resumed[receipt.run_id] = earlier
            if self._waiting.pop(own, None):
                self._write(self._receipt(live))
        self._look_for_absent()

    async def listing(self, limit: int = DEFAULT_LISTED) -> bytes:
        """Return the records of all runs that go on, and of the newest that ended, as JSON."""
        if self._going_on is None:
            going_on = [
                *(self._outline(live) for live in self._live.values() if live.recorded is None),
                *(without_timeline(absent.receipt) for absent in self._absent.values()),
            ]
            going_on.sort(key=lambda receipt: receipt.began_timestamp_seconds, reverse=True)
            self._going_on = b",".join(map(as_json, going_on))
        going_on_json, in_memory = self._going_on, {**self._batch, **self._waiting}
        rows = {row.key: row for row in await self._recent(limit)} | in_memory
        ended = sorted((row for row in rows.values() if row.ended), key=lambda row: row.age)
        left_out = set(select_evicted(((row.key, row.uid, 1) for row in ended), limit))
        parts = [
            *([b'"folder":' + json.dumps(str(self.folder)).encode()] if self.folder else []),
            b'"live":[' + going_on_json + b"]",
            b'"past":[' + b",".join(row.outline for row in reversed(ended) if row.key not in left_out) + b"]",
        ]
        return b'{"version":%d,' % API_VERSION + b",".join(parts) + b"}\n"

    async def _recent(self, limit: int) -> list[RecordRow]:
        """Return what the database has; nothing while it does not answer, which has been logged."""
        if self._thread and self._store and self._is_open:
            with suppress(OSError, asyncio.TimeoutError):
                return await asyncio.wait_for(self._thread.call(self._store.recent, limit), READ_SECONDS)
        return []

    async def one(self, run_id: str) -> bytes | None:
        """Return the record of a run as JSON, of several boots' the newest; None where there is none.

        Raises OSError while the database does not answer.
        """
        live = self._live.get(run_id)
        if live is not None and live.recorded is None:
            return as_json(self._receipt(live)) + b"\n"
        if run_id in self._absent:
            return as_json(self._absent[run_id].receipt) + b"\n"
        found = [row for row in (*self._batch.values(), *self._waiting.values()) if row.run_id == run_id and row.ended]
        if found:
            return max(found, key=lambda row: row.age).json + b"\n"
        if self._thread and self._store and self._is_open:
            try:
                record = await asyncio.wait_for(self._thread.call(self._store.find, run_id), READ_SECONDS)
            except asyncio.TimeoutError:
                raise OSError(None, "it does not answer") from None
            return None if record is None else record + b"\n"
        return None


def _due(live: _Live) -> float:
    return live.due


def _boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None
