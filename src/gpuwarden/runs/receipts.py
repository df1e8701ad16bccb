"""The receipts of all runs: of those that go on, so far, and of those that ended, in memory and in a folder.

The folder is read and written on a thread: the event loop never waits for a disk. What goes wrong with it is told
once, counted, and costs its files alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from gpuwarden.gpu.threads import outcome_of
from gpuwarden.runs import proc
from gpuwarden.runs.ending import Ending
from gpuwarden.runs.fairness import excess
from gpuwarden.runs.kept import MOST, KeptReceipts, as_json, kept, lesson_of
from gpuwarden.runs.predecessors import Predecessors
from gpuwarden.runs.receipt import Receipt
from gpuwarden.runs.receipt_content import account_of, concluded, continued, receipt_of
from gpuwarden.runs.receipt_files import Found, ReceiptFiles, stem_of
from gpuwarden.runs.receipt_story import continued_story, with_story, without_story
from gpuwarden.runs.receipt_text import log_line
from gpuwarden.runs.run import Run
from gpuwarden.runs.share import Account

T = TypeVar("T")
log = logging.getLogger(__name__)

API_VERSION = 1
WRITE_SECONDS = 60.0  # between two writes of what a run is so far, and between attempts of a disk that fails
MOST_WRITES = 4.0  # a second, of what runs are so far: more than 240 at once take turns
GOLDEN = 5**0.5 / 2 - 0.5  # of the golden ratio: each multiple falls into the widest gap that is left
OPEN_SECONDS = 1.0  # that the start waits for the folder
STOP_SECONDS = 2.0  # and the end, twice so long at most
HANG_SECONDS = 30.0  # after which a disk hangs that has not answered
MAX_WAITING = 1024  # receipts that wait for a disk
SHOWN_STRANGERS = 5

_STOPPED = "it ended while the daemon did not run"
_LOST = "it ended some time after its connection was lost"
_REBOOTED = "the machine was booted anew"
_TOO_MANY = "it did not report any more, as too many others did not to follow them all"
_UNSEEN = "the daemon was started anew, and cannot see the process"


def _asleep() -> float:
    """Return for how long the machine has slept since its boot: the monotonic clock stood still meanwhile."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


@dataclass(slots=True)
class _Live:
    """A run of the last poll; `before` is what was written of it before it or the daemon was gone for a while.

    `written` is the end that was written.
    """

    run: Run
    stem: str = ""
    before: Receipt | None = None
    written: Ending | None = None
    told: frozenset[str] = frozenset()  # outcomes, in the log
    due: float | None = None  # monotonic, when what is so far is to be written next
    began_uptime: float = field(init=False)
    slept: float = field(default_factory=_asleep)  # the machine, since its boot until the run was seen

    def __post_init__(self) -> None:
        self.began_uptime = time.clock_gettime(time.CLOCK_BOOTTIME) - self.run.lasted


class _Absent(NamedTuple):
    """A run that goes on for all that is known, but has not reported to this daemon, or not for long."""

    stem: str
    receipt: Receipt
    evidence: str  # of its end, once that is found
    account: Account | None = None  # that the receipt was made of, by this daemon


class Receipts:
    """Follows the runs from poll to poll, on one event loop. `folder` is None to keep all in memory.

    At most `most` receipts of ended runs are kept there. Of runs that have not ended there are as many that report no
    more as there may be that do, `most_runs`, at least.
    """

    def __init__(
        self,
        folder: Path | None,
        most: int,
        user_name: Callable[[int], str] = str,
        wall: Callable[[], float] = time.time,
        *,
        most_runs: int,
        predecessors: Predecessors | None = None,
    ) -> None:
        self.folder = folder
        self.errors = 0  # attempts to read or write the folder that failed, and receipts that found no place
        self._files = ReceiptFiles(folder, most) if folder else None
        self._most_runs = most_runs
        self._user_name = user_name
        self._wall = wall
        self._predecessors = predecessors or Predecessors()
        self._boot_id = _boot_id()
        self._live: dict[str, _Live] = {}
        self._absent: dict[str, _Absent] = {}
        self._past = KeptReceipts()
        self._waiting: dict[str, Receipt] = {}
        self._job: asyncio.Future[Any] | None = None
        self._job_began = 0.0
        self._batch: dict[str, Receipt] = {}  # that the thread writes now
        self._retry_at = 0.0  # monotonic
        self._is_open = False
        self._trouble = ""  # told, and not over
        self._due = 0.0  # monotonic, for a look for those that are gone
        self._begun = 0  # runs, in all
        self._listing: bytes | None = None

    async def open(self) -> None:
        """Begin to read the folder, and wait for that a little."""
        if self._files:
            self._begin(self._files, time.monotonic(), {})
            await self._wait(OPEN_SECONDS)

    async def stop(self) -> None:
        """Write the receipts of all runs, and wait for that a little; once more, where the disk failed a moment ago."""
        until = time.monotonic() + 2 * STOP_SECONDS
        await self._wait(STOP_SECONDS)
        self._retry_at = 0.0
        if not self._is_open and (self._live or self._waiting):  # first: an earlier daemon may have begun receipts
            await self._work_until(until)
        for live in self._live.values():
            if live.run.up:
                live.run.account.settle()
                self._write(live.stem, self._receipt(live))
            elif live.written != live.run.ending:
                self._end(live)
        if self._is_open:
            await self._work_until(until)

    async def _work_until(self, until: float) -> None:
        self._work(time.monotonic())
        await self._wait(max(until - time.monotonic(), 0.0))

    async def _wait(self, seconds: float) -> None:
        if self._job:
            await asyncio.wait([self._job], timeout=seconds)  # not wait_for: a call to a disk cannot be cancelled
            self._take(time.monotonic())

    def take_up(self, runs: Iterable[Run]) -> None:
        """Go on with accounts that an earlier daemon began, or the registry let go of, before the poll's are joined."""
        for run in runs:
            live = self._live.get(run.peer.run_id)
            if live is not None and live.run.account is not run.account:  # forgotten, and back before a poll saw that
                run.account.take_over(live.run.account)
                live.run = run
            absent = self._absent.pop(run.peer.run_id, None) if self._absent else None
            if absent is not None:
                self._live[run.peer.run_id] = _Live(run, absent.stem, absent.receipt)
                if absent.account is not run.account:  # else it was in no poll, but not forgotten
                    run.account.resume(account_of(absent.receipt))

    def see(self, runs: Sequence[Run], now: float) -> None:
        """Take the runs of a poll, with their accounts; `now` is monotonic. Does not block."""
        self._listing = None
        if self._job is not None:
            self._look_after(now)
        if self._trouble:  # without a run too: what the folder has is to be listed
            self._work(now)
        if not (runs or self._live or self._absent or self._waiting):
            return
        for run in runs:
            live = self._live.get(run.peer.run_id)
            if live is None:
                live = self._live[run.peer.run_id] = _Live(run)
            live.run = run
            live.stem = live.stem or stem_of(self._receipt(live))
            self._follow(live)
        present = {run.peer.run_id for run in runs}
        parted = [run_id for run_id in self._live if run_id not in present]
        for run_id in parted:
            self._part(self._live.pop(run_id))
        if parted:
            self._look_for_absent()
        self._bound_absent()
        if now >= self._due:
            self._due = now + WRITE_SECONDS
            self._look_for_absent()
        self._write_so_far(now)
        self._work(now)

    def _follow(self, live: _Live) -> None:
        if live.run.ending is None:
            if live.written is not None:  # it goes on after all
                self._past.forget(live.stem)
            live.written = None
        elif live.run.ending.settled and live.written != live.run.ending:
            self._end(live)

    def _end(self, live: _Live) -> None:
        receipt = self._receipt(live)
        live.written = live.run.ending
        self._keep(live.stem, receipt)
        self._write(live.stem, receipt)
        outcome = receipt.outcome or ""
        if outcome not in live.told:  # one that says its end again and again must not fill the log
            log.info("%s", log_line(receipt))
        live.told |= {outcome}

    def _part(self, live: _Live) -> None:
        """Let go of a run that the registry has forgotten; it may come back where nobody saw its end."""
        if not live.run.up:
            if live.written != live.run.ending:
                self._end(live)
            return
        live.run.account.settle()  # else what the driver's counters were not asked for yet would be lost
        receipt = self._receipt(live)
        self._absent[receipt.run_id] = _Absent(live.stem, receipt, _LOST, live.run.account)
        self._write(live.stem, receipt)

    def _receipt(self, live: _Live) -> Receipt:
        """Make a run's receipt with its story; some 100 µs a device."""
        receipt = with_story(self._since(live), live.run)
        return continued(live.before, continued_story(live.before, receipt)) if live.before else receipt

    def _outline(self, live: _Live) -> Receipt:
        """Make the receipt as it is among others: without its story."""
        receipt = self._since(live)
        return continued(live.before, receipt) if live.before else receipt

    def _since(self, live: _Live) -> Receipt:
        """Make the receipt of what this daemon has seen."""
        run = live.run
        user = self._user_name(run.peer.uid)
        known = None if user == str(run.peer.uid) else user
        return receipt_of(
            run,
            self._wall(),
            boot_id=self._boot_id,
            user=known,
            account=run.account.now(),
            began_uptime=live.began_uptime,
            slept=_asleep() - live.slept,
        )

    def _bound_absent(self) -> None:
        """Conclude the receipts of runs that report no more where they are too many; processes may live for ever.

        An earlier daemon's count as such until they have reported to this one.
        """
        most = 2 * self._most_runs - len(self._live)
        if len(self._absent) > most:
            absent = ((run_id, absent.receipt.uid, 1) for run_id, absent in self._absent.items())
            for run_id in excess(absent, most):
                self._conclude(run_id, _TOO_MANY)

    def _conclude(self, run_id: str, evidence: str) -> None:
        absent = self._absent.pop(run_id)
        receipt = concluded(absent.receipt, evidence)
        self._keep(absent.stem, receipt)
        self._write(absent.stem, receipt)
        log.info("%s", log_line(receipt))

    def _look_for_absent(self) -> None:
        """Conclude the receipts of runs that are gone without a word to this daemon."""
        for run_id, absent in list(self._absent.items()):
            evidence = self._gone(absent)
            if evidence:
                self._conclude(run_id, evidence)

    def _gone(self, absent: _Absent) -> str:
        """Say how it is known that a run is gone; nothing where it lives."""
        receipt = absent.receipt
        if receipt.boot_id != self._boot_id:
            return _REBOOTED
        if not receipt.pid:
            return _UNSEEN
        return "" if proc.lives(receipt.pid, receipt.run_id.removeprefix(f"{receipt.pid}-")) else absent.evidence

    def _write_so_far(self, now: float) -> None:
        """Write what is so far of the runs whose minute is over; those that begin together do not come due together."""
        pause = max(WRITE_SECONDS, sum(live.run.up for live in self._live.values()) / MOST_WRITES)
        for live in self._live.values():
            if live.due is None:
                self._begun += 1
                live.due = now + pause * (self._begun * GOLDEN % 1)
            elif live.due > now + 2 * pause:  # there were many more runs; one fewer must not have all written anew
                live.due -= pause * ((live.due - now) // pause)
            if self._is_open and now >= live.due:
                live.due += pause * ((now - live.due) // pause + 1)  # however late this is, it keeps its place
                if live.run.up:
                    self._write(live.stem, self._receipt(live))

    def _write(self, stem: str, receipt: Receipt) -> None:
        if self._files is None:
            return
        self._waiting.pop(stem, None)
        self._waiting[stem] = receipt

    def _keep(self, stem: str, receipt: Receipt) -> None:
        whole = kept(receipt)
        self._past.add(stem, whole)
        self._predecessors.learn(whole.lesson)

    def _work(self, now: float) -> None:
        """Give the thread what is to be done, if it is free and its disk has not failed a moment ago."""
        if self._files is not None and self._job is None and now >= self._retry_at:
            if not self._is_open:
                self._begin(self._files, now, {})
            elif self._waiting:
                batch, self._waiting = self._waiting, {}
                self._begin(self._files, now, batch)
        if len(self._waiting) > MAX_WAITING:
            waiting = ((stem, receipt.uid, 1) for stem, receipt in self._waiting.items())
            for stem in excess(waiting, MAX_WAITING):
                del self._waiting[stem]
                self.errors += 1

    def _begin(self, files: ReceiptFiles, now: float, batch: dict[str, Receipt]) -> None:
        def work() -> Found | None:
            if not batch:
                return files.open(MOST)
            files.write(batch)
            return None

        self._batch, self._job_began = batch, now
        self._job = _on_a_thread(work)

    def _look_after(self, now: float) -> None:
        if self._job is not None and not self._job.done():
            if now - self._job_began > HANG_SECONDS:
                self._fail("it does not answer")
            return
        self._take(now)

    def _take(self, now: float) -> None:
        """Take what the thread has found or done."""
        if self._job is None or not self._job.done():
            return
        outcome, self._job = self._job.result(), None
        if isinstance(outcome, Exception):
            self._retry_at = now + WRITE_SECONDS
            self._waiting = {**self._batch, **self._waiting}  # what is newer wins
            if not isinstance(outcome, OSError):
                log.error("a fault of our own", exc_info=outcome)
            self._fail(getattr(outcome, "strerror", None) or str(outcome))
            return
        if self._trouble:
            log.warning("receipts are written to %s again", self.folder)
        self._trouble = ""
        if outcome is not None:
            self._take_found(outcome)

    def _fail(self, why: str) -> None:
        if self._trouble != why:
            self.errors += 1
            log.warning("receipts of runs stay in memory: %s: %s", self.folder, why)
        self._trouble = why

    def _take_found(self, found: Found) -> None:
        self._is_open = True
        if found.strange:
            shown = "; ".join(found.strange[:SHOWN_STRANGERS])
            more = f"; and {len(found.strange) - SHOWN_STRANGERS} more" if len(found.strange) > SHOWN_STRANGERS else ""
            log.warning("%s: left alone what are no receipts of this version: %.1000r", self.folder, shown + more)
        self._past.begin_with(reversed(tuple(found.ended.items())))
        for each in reversed(tuple(found.ended.values())):
            self._predecessors.learn(each.lesson)
        for stem, receipt in sorted(found.open.items(), key=lambda each: each[1].updated_timestamp_seconds):
            self._predecessors.learn(lesson_of(receipt))  # it may go on
            self._absent[receipt.run_id] = _Absent(stem, receipt, _STOPPED)
        self._look_for_absent()
        for run_id in self._absent.keys() & self._live.keys():  # the disk was slower than the run
            absent, live = self._absent.pop(run_id), self._live[run_id]
            live.stem, live.before = absent.stem, absent.receipt
            live.run.account.resume(account_of(absent.receipt))

    def listing(self) -> bytes:
        """Return all of this as JSON; the same object until something changes."""
        if self._listing is None:
            so_far = [
                *map(self._outline, self._unwritten()),
                *(without_story(absent.receipt) for absent in self._absent.values()),
            ]
            so_far.sort(key=lambda receipt: receipt.began_timestamp_seconds, reverse=True)
            parts = [
                *([b'"folder":' + json.dumps(str(self.folder)).encode()] if self.folder else []),
                b'"live":[' + b",".join(map(as_json, so_far)) + b"]",
                b'"past":[' + b",".join(self._past.newest_first()) + b"]",
            ]
            self._listing = b'{"version":%d,' % API_VERSION + b",".join(parts) + b"}\n"
        return self._listing

    def one(self, run_id: str) -> bytes | None:
        """Return the receipt of a run as JSON, of several boots' the newest; None where none is in memory."""
        live = self._live.get(run_id)
        if live is not None and live.written is None:
            return as_json(self._receipt(live)) + b"\n"
        if run_id in self._absent:
            return as_json(self._absent[run_id].receipt) + b"\n"
        found = self._past.one(run_id)
        return None if found is None else found + b"\n"

    def _unwritten(self) -> Iterator[_Live]:
        return (live for live in self._live.values() if live.written is None)


def _on_a_thread(work: Callable[[], T]) -> asyncio.Future[T | Exception]:
    """Do blocking work on a thread that ends with it, as one that waited would take its memory; what it raises counts.

    A daemon thread: one that hangs in a disk must not keep the process from ending.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T | Exception] = loop.create_future()

    def run() -> None:
        outcome = outcome_of(work)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(future.set_result, outcome)

    threading.Thread(target=run, name="receipts", daemon=True).start()
    return future


def _boot_id() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None
