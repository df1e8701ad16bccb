"""Store of incidents: in the run database, or in memory without one and while the disk fails.

An incident is encoded on a thread, then written on the database's thread: the event loop waits for neither.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401 - asyncio looks for it at the first thread, when it may be gone
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from gpuwarden.fairness.fair_eviction import select_evicted
from gpuwarden.formatting import format_fields
from gpuwarden.incidents import incident_table
from gpuwarden.incidents.incident import VERSION, Incident
from gpuwarden.incidents.incident_table import IncidentRow, row_from_incident
from gpuwarden.records.privacy import Reader, withhold_private
from gpuwarden.records.writer import RETRY_SECONDS, RecordWriter

log = logging.getLogger(__name__)

MAX_IN_MEMORY = 32  # incidents that wait for the disk, or are kept without one
MAX_IN_MEMORY_BYTES = 16 << 20  # of them, compressed
MAX_LISTED = 1000
DEFAULT_LISTED = 100
WITHHELD_LINE = "not shown: only root and the daemon's user can read it over the Unix socket"


class IncidentStore:
    """Incidents of this host, at most `limit` of them; fair by user. Used by one event loop."""

    def __init__(self, database: RecordWriter, limit: int) -> None:
        self._database = database
        self._limit = limit
        self._jobs: dict[str, Callable[[], Incident]] = {}  # to be encoded, by incident's id
        self._rows: dict[str, IncidentRow] = {}  # encoded, not in the database
        self._task: asyncio.Task[None] | None = None
        self._due = 0.0  # monotonic: after a failure of the disk
        self._failure = ""  # the current one, already logged
        self._has_marked = False  # those that an earlier daemon did not complete
        self._reported: set[str] = set()  # bugs, logged once

    def put(self, incident_id: str, build: Callable[[], Incident]) -> None:
        """Store an incident, which `build` returns on a thread; it replaces an earlier one of the same id."""
        self._jobs[incident_id] = build
        self.flush(time.monotonic())

    def flush(self, now: float) -> None:
        """Start to encode and write what waits, unless that is running or the disk has just failed."""
        has_rows = (bool(self._rows) or not self._has_marked) and self._database.is_open and now >= self._due
        if self._task is None and (self._jobs or has_rows):
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def wait(self, seconds: float) -> None:
        """Wait until nothing is being encoded or written."""
        if self._task:
            await asyncio.wait([self._task], timeout=seconds)

    async def _work(self) -> None:
        try:
            while self._jobs:
                incident_id = next(iter(self._jobs))
                await self._encode(incident_id, self._jobs.pop(incident_id))
                await self._write()
            await self._write()
        finally:
            self._task = None

    async def _encode(self, incident_id: str, build: Callable[[], Incident]) -> None:
        try:
            row = await asyncio.to_thread(lambda: row_from_incident(build()))
        except Exception as error:
            if (name := f"{type(error).__name__}: {error}") not in self._reported:
                self._reported.add(name)
                log.exception("bug: incident not recorded, please report it id=%s", incident_id)
            return
        self._rows[incident_id] = row
        self._bound()

    def _bound(self) -> None:
        total = sum(len(row.whole) for row in self._rows.values())
        left = min(MAX_IN_MEMORY, self._limit)
        while len(self._rows) > left or (total > MAX_IN_MEMORY_BYTES and len(self._rows) > 1):
            by_age = sorted(self._rows.values(), key=lambda row: row.at)
            (evicted,) = select_evicted(((row.id, row.share) for row in by_age), len(self._rows) - 1)
            total -= len(self._rows.pop(evicted).whole)

    async def _write(self) -> None:
        if not self._database.is_open or time.monotonic() < self._due:
            return
        try:
            if not self._has_marked:
                await self._database.run(incident_table.mark_interrupted)
                self._has_marked = True
            for row in list(self._rows.values()):
                await self._database.run(incident_table.write, row, self._limit)
                if self._rows.get(row.id) is row:
                    del self._rows[row.id]
        except OSError as error:
            self._fail(error.strerror or str(error))
            return
        if self._failure:
            log.warning("writing incidents again")
        self._failure = ""

    def _fail(self, why: str) -> None:
        self._due = time.monotonic() + RETRY_SECONDS
        if why != self._failure:
            self._database.errors += 1
            log.warning("cannot write incidents, keeping them in memory %s", format_fields(error=why))
        self._failure = why

    async def listing(self, limit: int = DEFAULT_LISTED) -> bytes:
        """Return the newest incidents without their details as JSON, the newest first."""
        known = {row.id: (row.at, row.outline) for row in self._rows.values()}
        if self._database.stores:
            with suppress(OSError):
                stored = await self._database.read(incident_table.read_outlines, limit)
                known = {name: (at, text) for name, at, text in stored} | known
        newest = sorted(known.values(), key=lambda each: each[0], reverse=True)[:limit]
        return b'{"version":%d,"incidents":[%s]}\n' % (VERSION, b",".join(text for _at, text in newest))

    async def one(self, incident_id: str, may_read: Reader) -> bytes | None:
        """Return an incident as JSON as a reader may see it; None without one. Raises OSError."""
        row = self._rows.get(incident_id)
        if row is not None:
            whole: bytes | None = row.json
        elif not self._database.stores:
            return None
        else:
            whole = await self._database.read(incident_table.find, incident_id)
        return None if whole is None else await asyncio.to_thread(_withhold, whole, may_read)


def _withhold(whole: bytes, may_read: Reader) -> bytes:
    """Withhold a run's private texts from other users; the kernel log from all but root and the daemon's user."""
    document: dict[str, Any] = json.loads(whole)
    for run in document.get("runs", ()):
        withhold_private(run, may_read)
    if not may_read(0):  # false too for HTTP clients that may read the runs of the daemon's user
        for line in document.get("kernel_lines", ()):
            line["text"] = WITHHELD_LINE
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"
