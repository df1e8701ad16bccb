"""Recorder of runs: updates the record of each run at every poll, until its end."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from types import MappingProxyType

from gpuwarden.analysis.batch_size.cost_model import SizePeak
from gpuwarden.analysis.batch_size.prior_runs import PriorRuns
from gpuwarden.fairness.fair_eviction import select_evicted
from gpuwarden.fairness.log_limiter import limit_lines_of
from gpuwarden.fairness.subordinate_uids import find_user
from gpuwarden.formatting import format_elapsed, format_fields
from gpuwarden.host import procfs
from gpuwarden.host.call_thread import CallThread
from gpuwarden.records.absent_run import AbsentRun
from gpuwarden.records.joining import add_usage, conclude_record, join_records
from gpuwarden.records.privacy import Reader, read_all, withhold_texts
from gpuwarden.records.record import RunRecord, build_record
from gpuwarden.records.record_parts import RecordedHeadline
from gpuwarden.records.store import render_record
from gpuwarden.records.timeline import add_timeline, remove_timeline
from gpuwarden.records.writer import DEFAULT_LISTED, STOP_SECONDS, RecordWriter
from gpuwarden.runs.outcome import Ending
from gpuwarden.runs.run_events import RunEvent, bounded
from gpuwarden.runs.run_snapshot import JoinedPoll, RunSnapshot
from gpuwarden.usage.run_usage import NO_USAGE, DeviceUsage, RunUsage

log = logging.getLogger(__name__)

API_VERSION = 1
WRITE_SECONDS = 60.0  # between two writes of a running run
MAX_WRITES_PER_SECOND = 4.0  # of running runs: with more than 240 of them each is written less often

NO_KEYS: Mapping[str, str] = MappingProxyType({})
NO_EVENTS: Mapping[str, Sequence[RunEvent]] = MappingProxyType({})
_RESTARTED = "the daemon was restarted"
_LOST = "its connection was lost"
_REBOOTED = "the host was rebooted"
_TOO_MANY = "it stopped reporting, and there were too many such runs to track"
_UNSEEN = "the daemon was restarted, and cannot see the process"


def _uptime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True)
class _PresentRun:
    """Run of the last poll; `before` is its record by earlier daemons, or of before it was away for a while.

    `began_uptime` and `slept` (until the run was first seen) are seconds since the machine's boot. `recorded` is the
    end that its record has. `due` is monotonic: when its record is to be written next.
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


class Recorder:
    """Records of all runs, updated with each poll, on one event loop. `folder` is None to keep all in memory.

    At most `limit` records of ended runs are kept there. Of runs that have not ended there are as many that report no
    more as there may be that do, `max_runs`, at least. `uptime` is CLOCK_BOOTTIME, in seconds.
    """

    def __init__(
        self,
        folder: Path | None,
        limit: int,
        user_name: Callable[[int], str] = str,
        *,
        max_runs: int,
        prior_runs: PriorRuns | None = None,
        uptime: Callable[[], float] = _uptime,
    ) -> None:
        self.folder = folder
        self._writer = RecordWriter(folder, limit)
        self._max_runs = max_runs
        self._user_name = user_name
        self._uptime = uptime
        self._prior_runs = prior_runs or PriorRuns()
        self._boot_id = procfs.read_boot_id()
        self._present: dict[str, _PresentRun] = {}
        self._absent: dict[str, AbsentRun] = {}
        self._folders = CallThread("run folders")
        self._updated_at = time.monotonic()
        self._listing = asyncio.Lock()  # for one at a time: a list may have tens of MiB
        # Names and records of runs that have not ended, as JSON, since the last poll.
        self._unfinished: list[tuple[str, bytes]] | None = None

    @property
    def database(self) -> RecordWriter:
        """Database of the records, for other tables."""
        return self._writer

    def outlines(self, run_ids: Iterable[str]) -> list[RunRecord]:
        """Return the records of runs of the last poll, without their timelines."""
        return [self._outline(self._present[run_id]) for run_id in run_ids if run_id in self._present]

    def find_headline(self, run_id: str) -> RecordedHeadline | None:
        """Return the headline of a run of the last poll."""
        present = self._present.get(run_id)
        return self._outline(present).headline if present else None

    @property
    def errors(self) -> int:
        """Faults of the database, each counted once until it is resolved, and rows dropped because of it."""
        return self._writer.errors

    async def open(self) -> None:
        """Start to open the database, and wait briefly."""
        await self._writer.open()
        self._add_stored()

    async def stop(self, usage: Mapping[str, RunUsage]) -> None:
        """Write the records of all runs, and wait briefly; retry once if the disk has just failed.

        `usage` is by run id, with all that was polled.
        """
        for run_id, present in self._present.items():
            present.usage = usage.get(run_id, present.usage)
        until = time.monotonic() + 2 * STOP_SECONDS
        await self._writer.wait(STOP_SECONDS)
        if not self._writer.is_open and (
            self._present or self._writer.pending
        ):  # an earlier daemon may have begun some
            await self._writer.flush_until(until)
        self._add_stored()
        for present in self._present.values():
            if present.run.up:
                self._write(present)
            elif present.recorded != present.run.ending:
                self._end(present)
        if self._writer.is_open:
            await self._writer.flush_until(until)
            await self._writer.close()

    def list_usage(self) -> dict[str, Mapping[str, DeviceUsage]]:
        """Return the usage by each run of the last poll, by run id and UUID; what earlier daemons recorded is included."""
        return {
            run_id: add_usage(present.before, present.usage.devices) if present.before else present.usage.devices
            for run_id, present in self._present.items()
        }

    def add_poll(
        self, poll: JoinedPoll, usage: Mapping[str, RunUsage], events: Mapping[str, Sequence[RunEvent]] = NO_EVENTS
    ) -> None:
        """Add the runs of a poll and their usage, including ended ones. Does not block.

        `usage` is by run id, as are `events`: new ones that are not derived from a run's own reports.
        """
        runs, now = poll.runs, poll.now
        self._add_stored()
        self._unfinished = None
        for run in runs:
            present = self._present.get(run.peer.run_id)
            if present is None:
                present = self._present[run.peer.run_id] = self._new(run)
                if absent := self._absent.pop(run.peer.run_id, None):
                    present.before = absent.record
                    absent.close()
            present.usage = usage.get(run.peer.run_id, present.usage)
            if new := events.get(run.peer.run_id):
                present.events = bounded((*present.events, *new))
            self._follow(present, run)
        dropped = self._present.keys() - {run.peer.run_id for run in runs}
        for run_id in [each for each in self._present if each in dropped]:  # in their order
            self._drop(self._present.pop(run_id), usage)
        self._bound_absent()
        self._conclude_ended(poll)
        self._write_due(now)
        self._writer.flush(now)

    def _new(self, run: RunSnapshot) -> _PresentRun:
        # Never negative: if the clocks disagree (a time namespace, a replay), the reader would refuse the record.
        return _PresentRun(run, NO_USAGE, max(self._uptime() - run.lasted, 0.0), self._slept())

    def _slept(self) -> float:
        """Return the seconds that the host has slept since boot, in which the monotonic clock stopped."""
        return self._uptime() - time.monotonic()

    def _follow(self, present: _PresentRun, run: RunSnapshot) -> None:
        before, present.run = present.run, run
        if run.errors[-1:] != before.errors[-1:]:  # the most important part: must survive the daemon
            present.due = 0.0
        if run.ending is None and present.recorded is not None:  # it is still running
            present.recorded = None
            self._write(present)
        elif run.ending is not None and run.ending.settled and present.recorded != run.ending:
            self._end(present)

    def _end(self, present: _PresentRun) -> None:
        last, record = self._records(present)
        present.recorded = present.run.ending
        self._keep(last, record, log_it=(record.outcome or "") not in present.logged)  # a run may end repeatedly
        present.logged |= {record.outcome or ""}

    def _drop(self, present: _PresentRun, usage: Mapping[str, RunUsage]) -> None:
        """Drop a run that the registry dropped; it may come back if its end was not seen."""
        present.usage = usage.get(present.run.peer.run_id, present.usage)
        if not present.run.up:
            if present.recorded != present.run.ending:
                self._end(present)
            return
        last, record = self._records(present)
        self._add_absent(record, last, _LOST)
        self._writer.write(last, record)

    def _add_absent(self, record: RunRecord, last: RunRecord, since: str) -> None:
        began = -math.inf if record.began_uptime_seconds is None else record.began_uptime_seconds - self._slept()
        self._absent[record.run_id] = AbsentRun(record, last, since, began)

    def _write(self, present: _PresentRun) -> None:
        self._writer.write(*self._records(present))

    def _records(self, present: _PresentRun) -> tuple[RunRecord, RunRecord]:
        """Return a run's record by this daemon alone, and the complete one; about 100 µs per device."""
        last = add_timeline(self._record_since(present), present.run, present.events)
        return last, join_records(present.before, last) if present.before else last

    def _outline(self, present: _PresentRun) -> RunRecord:
        """Return a run's record for the list, without its timeline."""
        record = self._record_since(present)
        return join_records(remove_timeline(present.before), record) if present.before else record

    def _record_since(self, present: _PresentRun) -> RunRecord:
        """Return the record of a run, as seen by this daemon."""
        run = present.run
        user = self._user_name(run.peer.uid)
        return build_record(
            run,
            time.time(),
            boot_id=self._boot_id,
            user=None if user == str(run.peer.uid) else user,
            usage=present.usage,
            began_uptime=present.began_uptime,
            slept=max(self._slept() - present.slept, 0.0),
        )

    def _add_stored(self) -> None:
        """Add the records of the database once it is open; unfinished runs may still be running."""
        stored = self._writer.pop_found()
        if stored is None:
            return
        self._learn_peaks(*stored.ended, *(part for parts in stored.unfinished for part in parts))
        for parts in stored.unfinished:
            record = reduce(join_records, parts)
            present = self._present.get(record.run_id)
            if present is None or record.boot_id != self._boot_id:
                self._add_absent(record, parts[-1], _RESTARTED)
                continue
            present.before = record  # the disk was slower than the run
            if present.run.up or present.recorded:
                self._write(present)

    def _bound_absent(self) -> None:
        """Conclude the records of absent runs if there are too many; processes may live forever.

        Runs of an earlier daemon count as absent until they have reported to this one.
        """
        # Between two polls more runs can end than may run at once.
        limit = max(2 * self._max_runs - len(self._present), 0)
        if len(self._absent) > limit:
            absent = ((run_id, find_user(absent.record.uid)) for run_id, absent in self._absent.items())
            for run_id in select_evicted(absent, limit):
                self._conclude(run_id, partial(conclude_record, evidence=_TOO_MANY))

    def _conclude_ended(self, poll: JoinedPoll) -> None:
        """Conclude the records of absent runs whose process has ended, or cannot be seen."""
        for run_id, absent in list(self._absent.items()):
            if absent.record.boot_id != self._boot_id:
                self._conclude(run_id, partial(conclude_record, evidence=_REBOOTED))
            elif not absent.record.pid:
                self._conclude(run_id, partial(conclude_record, evidence=_UNSEEN))
            elif absent.add_poll(poll, time.time(), self._folders):
                self._conclude(run_id, absent.conclude)

    def _conclude(self, run_id: str, conclude: Callable[[RunRecord], RunRecord]) -> None:
        absent = self._absent.pop(run_id)
        absent.close()
        self._keep(conclude(absent.last), conclude(absent.record))

    def _write_due(self, now: float) -> None:
        """Write the records that are due for longest, a few per poll."""
        elapsed, self._updated_at = min(now - self._updated_at, 10.0), now
        if not self._writer.is_open:
            return
        due = [present for present in self._present.values() if present.run.up and now >= present.due]
        due.sort(key=lambda present: present.due)
        for present in due[: max(round(elapsed * MAX_WRITES_PER_SECOND), 1)]:
            present.due = now + WRITE_SECONDS
            self._write(present)

    def _keep(self, last: RunRecord, record: RunRecord, *, log_it: bool = True) -> None:
        """Store the last part of the record of an ended run."""
        self._writer.write(last, record)
        self._learn_peaks(record)
        if log_it:
            with limit_lines_of(record.uid):
                log.info("run ended %s", _format_end(record))

    def _learn_peaks(self, *records: RunRecord) -> None:
        for record in records:
            batches = [each for device in record.devices for each in device.batch_memory]
            peaks = [SizePeak(each.batch_size, each.floor_bytes, each.peak_bytes) for each in batches]
            self._prior_runs.add(record.uid, record.name, record.framework, peaks)

    async def listing(
        self,
        limit: int = DEFAULT_LISTED,
        may_read: Reader = read_all,
        more: Mapping[str, str] = NO_KEYS,
        name: str | None = None,
    ) -> bytes:
        """Return the records of unfinished runs, and of the newest ended ones, as JSON, with `more` keys.

        With `name` only those of that name.
        """
        async with self._listing:
            return await self._render_listing(limit, may_read, more, name)

    async def _render_listing(self, limit: int, may_read: Reader, more: Mapping[str, str], name: str | None) -> bytes:
        if self._unfinished is None:
            unfinished = [
                *(self._outline(present) for present in self._present.values() if present.recorded is None),
                *(remove_timeline(absent.shown) for absent in self._absent.values()),
            ]
            unfinished.sort(key=lambda record: record.began_timestamp_seconds, reverse=True)
            self._unfinished = [(record.name, render_record(record)) for record in unfinished]
        lists = {
            "live": [each for run_name, each in self._unfinished if name in (None, run_name)],
            "past": [row.outline for row in await self._writer.recent(limit, name)],
        }
        known = {"folder": str(self.folder) if self.folder else None, "boot_id": self._boot_id, **more}
        head = {"version": API_VERSION, **{key: value for key, value in known.items() if value is not None}}
        parts = [json.dumps(head).encode()[:-1]]
        for key, found in lists.items():
            shown = []
            for each in found:
                shown.append(withhold_texts(each, may_read))
                await asyncio.sleep(0)  # a record with long messages takes 0.5 ms
            parts.append(b'"%s":[%s]' % (key.encode(), b",".join(shown)))
        return b",".join(parts) + b"}\n"

    async def one(self, run_id: str, may_read: Reader = read_all) -> bytes | None:
        """Return the newest record of a run as JSON; None without one.

        Raises OSError while the database does not answer.
        """
        present = self._present.get(run_id)
        if present is not None and present.recorded is None:
            found: bytes | None = render_record(self._records(present)[1])
        elif run_id in self._absent:
            found = render_record(self._absent[run_id].shown)
        else:
            found = await self._writer.find(run_id)
        return None if found is None else withhold_texts(found, may_read) + b"\n"


def _format_end(record: RunRecord) -> str:
    counts = {"errors": record.errors, "xids": record.xids}
    return format_fields(
        run=record.run_id,
        name=record.name,
        outcome=record.outcome,
        after=format_elapsed(record.duration_seconds),
        evidence=record.evidence,
        **{name: ",".join(f"{what}:{n}" for what, n in known.items()) for name, known in counts.items() if known},
    )
