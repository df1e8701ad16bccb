"""Writer of run records: rows waiting for the database, and reads from both.

The database is used on a thread of its own: the event loop never waits for a disk. A disk that fails is logged once,
and counted; rows stay in memory, and are written when it works again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from gpuwarden.fairness.fair_eviction import select_evicted
from gpuwarden.fairness.subordinate_uids import find_user
from gpuwarden.formatting import format_fields
from gpuwarden.host.call_thread import CallThread
from gpuwarden.records.record import RunRecord
from gpuwarden.records.store import RecordRow, RecordStore, StoredRecords, row_from_record

T = TypeVar("T")
log = logging.getLogger(__name__)

DEFAULT_LISTED = 256  # ended runs in a list by default
FLUSH_SECONDS = 1.0  # between two writes
RETRY_SECONDS = 30.0  # between attempts after a disk error
OPEN_SECONDS = 1.0  # that startup waits for the database
STOP_SECONDS = 2.0  # that shutdown waits, at most twice
READ_SECONDS = 5.0  # that a request waits
HANG_SECONDS = 30.0  # without an answer, after which the disk counts as hung
MAX_PENDING_CALLS = 64  # beyond this the disk counts as hung
MAX_WAITING = 1024  # rows waiting for the disk, or kept in memory without one

_NO_ANSWER = "the database does not answer"
_Key: TypeAlias = "tuple[str, float]"


class RecordWriter:
    """Rows waiting for a database with at most `limit` records of ended runs. Used by one event loop.

    `folder` is None to keep those of ended runs in memory. Times are monotonic.
    """

    def __init__(self, folder: Path | None, limit: int) -> None:
        self.errors = 0  # faults, each counted once until it is resolved, and dropped rows
        self._store = RecordStore(folder, limit) if folder else None
        self._thread: CallThread | None = None  # once opened
        self._is_open = False
        self._found: StoredRecords | None = None  # when the database was opened
        self._waiting: dict[_Key, RecordRow] = {}
        self._batch: dict[_Key, RecordRow] = {}  # being written by the thread
        self._task: asyncio.Task[None] | None = None  # opening or writing
        self._began = 0.0
        self._due = 0.0
        self._failure = ""  # the current fault, already logged

    @property
    def is_open(self) -> bool:
        """True once the database has been opened."""
        return self._is_open

    @property
    def pending(self) -> int:
        """Number of rows that are not on the disk."""
        return len(self._waiting) + len(self._batch)

    @property
    def stores(self) -> bool:
        """True if there is a database, open or not."""
        return self._store is not None

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on the database's thread, with its connection. Raises OSError, also if it is not open."""
        if not (self._store and self._is_open):
            raise OSError(None, "the database is not open")
        return await self._call(self._store.run, function, *arguments)

    async def read(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function as `run` does, and wait READ_SECONDS at most. Raises OSError."""
        return await _wait_for_read(self.run(function, *arguments))

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on the thread. Raises its exception, or OSError if too many calls wait."""
        assert self._thread
        if self._thread.pending > MAX_PENDING_CALLS:
            raise OSError(None, _NO_ANSWER)
        return await asyncio.wrap_future(self._thread.submit(function, *arguments))

    async def open(self) -> None:
        """Start to open the database, and wait briefly."""
        if self._store:
            self._thread = CallThread("records")
            self.flush(time.monotonic())
            await self.wait(OPEN_SECONDS)

    def pop_found(self) -> StoredRecords | None:
        """Return, once, the records that the database had when it was opened."""
        found, self._found = self._found, None
        return found

    async def close(self) -> None:
        """Close the database if it is not in use, and wait briefly."""
        if self._is_open and self._store and not self._task:
            with suppress(OSError, asyncio.TimeoutError):  # the disk may hang
                await asyncio.wait_for(self._call(self._store.close), STOP_SECONDS)
            self._thread, self._is_open = None, False

    def write(self, record: RunRecord, joined: RunRecord | None = None) -> None:
        """Queue a record for the next flush; `joined` is the one with those of earlier daemons, if any."""
        row = row_from_record(record)
        if joined is not None and joined is not record:
            row = replace(row, joined=row_from_record(joined))
        self._waiting.pop(row.key, None)
        if row.ended or self._store:
            self._waiting[row.key] = row
        if len(self._waiting) > MAX_WAITING:
            for key in select_evicted(((key, find_user(row.uid)) for key, row in self._waiting.items()), MAX_WAITING):
                del self._waiting[key]
                self.errors += self._store is not None

    def flush(self, now: float) -> None:
        """Start to write waiting rows, unless a write is running or the disk has just failed."""
        if self._task and now - self._began > HANG_SECONDS:
            self._fail(_NO_ANSWER)
        has_work = not self._is_open or self._waiting
        if self._thread and not self._task and now >= self._due and has_work:
            self._began, self._due = now, now + FLUSH_SECONDS
            self._task = asyncio.create_task(self._write_waiting())

    async def flush_until(self, until: float) -> None:
        """Write waiting rows now, even if the disk has just failed, and wait."""
        self._due = 0.0
        self.flush(time.monotonic())
        await self.wait(max(until - time.monotonic(), 0.0))

    async def wait(self, seconds: float) -> None:
        """Wait for the running task."""
        if self._task:
            await asyncio.wait([self._task], timeout=seconds)  # not wait_for: a call to a disk cannot be cancelled

    async def _write_waiting(self) -> None:
        assert self._store
        try:
            if self._is_open:
                self._batch, self._waiting = self._waiting, {}
                await self._call(self._store.write, self._batch.values())
            else:
                self._found = await self._call(self._store.open, DEFAULT_LISTED)
                self._is_open, self._due = True, 0.0
        except Exception as error:
            self._waiting = {**self._batch, **self._waiting}  # newer rows win
            self._due = self._began + RETRY_SECONDS
            if not isinstance(error, OSError):
                log.exception("internal error while writing run records, please report it")
            self._fail(getattr(error, "strerror", None) or str(error))
        else:
            if self._failure:
                log.warning("writing run records again %s", format_fields(file=self._store.path))
            self._failure = ""
        finally:
            self._batch, self._task = {}, None

    def _fail(self, why: str) -> None:
        if self._failure != why and self._store:
            self.errors += 1
            log.warning(
                "cannot write run records, keeping them in memory %s", format_fields(error=why, file=self._store.path)
            )
        self._failure = why

    async def recent(self, limit: int, name: str | None = None) -> list[RecordRow]:
        """Return the newest rows of ended runs, all or of a name, newest first; over the limit, fair by user.

        Rows of the database are missing while it does not answer, which is logged.
        """
        in_memory, stored = {**self._batch, **self._waiting}, []
        if self._store and self._is_open:
            with suppress(OSError):
                stored = await _wait_for_read(self._call(self._store.recent, limit, name))
        rows = {row.key: row for row in stored} | {key: row.joined or row for key, row in in_memory.items()}
        ended = sorted(
            (row for row in rows.values() if row.ended and name in (None, row.name)), key=lambda row: row.age
        )
        left_out = set(select_evicted(((row.key, find_user(row.uid)) for row in ended), limit))
        return [row for row in reversed(ended) if row.key not in left_out]

    async def find(self, run_id: str) -> bytes | None:
        """Return the newest record of an ended run by id as JSON; None without one.

        Raises OSError while the database does not answer.
        """
        found = [row for row in (*self._batch.values(), *self._waiting.values()) if row.run_id == run_id and row.ended]
        if found:
            newest = max(found, key=lambda row: row.age)
            return (newest.joined or newest).json
        if self._store and self._is_open:
            return await _wait_for_read(self._call(self._store.find, run_id))
        return None


async def _wait_for_read(reading: Awaitable[T]) -> T:
    """Wait for a read, READ_SECONDS at most. Raises OSError if it takes longer."""
    try:
        return await asyncio.wait_for(reading, READ_SECONDS)
    except asyncio.TimeoutError:
        raise OSError(None, _NO_ANSWER) from None
