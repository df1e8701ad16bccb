"""SQLite database of run records.

`RecordStore` blocks as long as the disk does; the daemon calls it on a `CallThread`. One process has the database at
a time: SQLite's exclusive lock keeps a second daemon out, and its write-ahead log survives a kill at any moment.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sqlite3
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any, TypeVar

from gpuwarden.fairness.subordinate_uids import find_user
from gpuwarden.formatting import format_fields
from gpuwarden.records.joining import join_records
from gpuwarden.records.record import RunRecord, record_from_json
from gpuwarden.records.record_json import RunRecordError, json_from_record

T = TypeVar("T")
log = logging.getLogger(__name__)

FILE_NAME = "runs.db"

# The statements that bring a database from one `user_version` to the next. Only ever append to this.
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE runs (
            run_id TEXT NOT NULL,
            began REAL NOT NULL,       -- Unix time
            uid INTEGER NOT NULL,
            updated REAL NOT NULL,     -- Unix time; of a run that ended, its end
            ended INTEGER NOT NULL,    -- 0 or 1
            outline TEXT NOT NULL,     -- the record as JSON, without the timeline of its memory
            whole BLOB NOT NULL,       -- all of it as JSON, compressed (zlib)
            checksum INTEGER NOT NULL, -- CRC-32 of the outline and the whole
            PRIMARY KEY (run_id, began)
        )""",
        "CREATE INDEX runs_by_user ON runs (ended, uid, updated DESC, began DESC)",
    ),
    (  # read and written by incidents/incident_table.py
        """CREATE TABLE incidents (
            id TEXT PRIMARY KEY,
            uid INTEGER NOT NULL,      -- of the run that opened it; -1 for a GPU or the host
            at REAL NOT NULL,          -- Unix time
            outline TEXT NOT NULL,     -- the incident as JSON, without its details
            whole BLOB NOT NULL        -- all of it as JSON, compressed (zlib)
        )""",
    ),
    (  # an incident of any program on a GPU had -2 less the GPU's index as its uid
        "ALTER TABLE incidents ADD COLUMN gpu INTEGER NOT NULL DEFAULT -1",
        "UPDATE incidents SET uid = -1, gpu = -2 - uid WHERE uid < -1",
    ),
    (  # a run has a row for each daemon that saw it, in the order of their rowids; only the last one can have ended
        "ALTER TABLE runs ADD COLUMN boot TEXT NOT NULL DEFAULT ''",
        "UPDATE runs SET boot = coalesce(json_extract(outline, '$.boot_id'), '')",
    ),
    (  # keys of records that had other names before the first release
        "UPDATE runs SET outline = rename_keys(outline), whole = rename_keys(whole)",
        "UPDATE runs SET checksum = checksum_of(outline, whole)",
        "UPDATE incidents SET outline = rename_keys(outline), whole = rename_keys(whole)",
    ),
    (  # kinds of incidents, which are names of conditions since
        "UPDATE incidents SET outline = rename_kinds(outline), whole = rename_kinds(whole)",
    ),
)
_FORMER_KEYS = {
    b'"errors_told":': b'"reported_errors":',
    b'"verdict":{"name":"neighbour"': b'"diagnosis":{"name":"co_tenant"',
    b'"verdict":': b'"diagnosis":',
    b'"story":': b'"timeline":',
    b'"marks":': b'"events":',
    b'"kind":"neighbour"': b'"kind":"co_tenant"',
}
_FORMER_KINDS = {
    f'"kind":"{former}"'.encode(): f'"kind":"{present}"'.encode()
    for former, present in {
        "out_of_memory": "RunOutOfMemory",
        "run_died": "RunDied",
        "xid": "GpuXidCritical",
        "gpu_lost": "GpuDown",
        "pressure": "GpuMemoryPressureCritical",
        "thermal_slowdown": "GpuThrottled",
        "stall": "RunStalled",
        "run_began": "run_started",
    }.items()
}
INCIDENTS_VERSION = 2  # the first with the table of incidents

MAX_PARTS = 16  # rows of a run; over that, the earlier ones become one

_SELECT = "SELECT outline, whole, checksum FROM runs"
_INSERT = """
    INSERT OR REPLACE INTO runs (run_id, began, uid, updated, ended, outline, whole, checksum, boot)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
# A + keeps SQLite from another index than the primary key's.
_CONTINUE = "UPDATE runs SET ended = 0 WHERE run_id = ? AND began != ? AND boot = ? AND +ended = 1"
_PARTS = "FROM runs WHERE run_id = ? AND boot = ? ORDER BY +rowid"
_UNFINISHED = """
    SELECT run_id, boot, whole FROM runs WHERE ended = 0 AND NOT EXISTS (
        SELECT 1 FROM runs AS other WHERE other.run_id = runs.run_id AND other.boot = runs.boot AND +other.ended = 1
    ) ORDER BY rowid
"""

# Rows of ended runs in retention order: each user's newest before any user's second newest. A row from the future,
# written before the clock was set back, counts as old: else it would push out each run that ends now.
_FROM_FUTURE = "updated > strftime('%s', 'now') + 60"
_NAME = "json_extract(outline, '$.name')"
_BY_RANK = f"""
    SELECT rowid FROM runs WHERE ended = 1 AND (:name IS NULL OR {_NAME} = :name)
    ORDER BY row_number() OVER (PARTITION BY user_of(uid) ORDER BY {_FROM_FUTURE}, updated DESC, began DESC),
        {_FROM_FUTURE}, updated DESC LIMIT :limit
"""  # noqa: S608 - no text of others
_RECENT = f"SELECT run_id, {_NAME}, began, uid, updated, ended, outline, boot FROM runs WHERE rowid IN ({_BY_RANK})"  # noqa: S608 - no text of others
_RETAIN = f"""
    DELETE FROM runs WHERE (run_id, boot) IN
        (SELECT run_id, boot FROM runs WHERE ended = 1 AND rowid NOT IN ({_BY_RANK}))
"""  # noqa: S608 - likewise


@dataclass(frozen=True, slots=True)
class RecordRow:
    """Record of a run by one daemon: `outline` is its JSON without the timeline, `whole` all of it, compressed.

    `joined` is the row with the records of earlier daemons, if any, for reading.
    """

    run_id: str
    name: str
    began: float  # Unix time
    uid: int
    updated: float  # Unix time
    ended: bool
    outline: bytes
    whole: bytes = b""
    boot: str = ""
    joined: RecordRow | None = None

    @property
    def key(self) -> tuple[str, float]:
        """Run id, unique for one boot, and start of this part."""
        return self.run_id, self.began

    @property
    def age(self) -> tuple[float, float]:
        """Sort key: end, then start."""
        return self.updated, self.began

    @property
    def json(self) -> bytes:
        """The whole record as JSON."""
        return zlib.decompress(self.whole)


def row_from_record(record: RunRecord) -> RecordRow:
    """Encode a record; about 1 ms."""
    plain = json_from_record(record)
    whole = zlib.compress(_compact(plain), 1)
    plain.pop("events", None)
    for device in plain.get("devices", ()):
        device.pop("timeline", None)
    return RecordRow(
        record.run_id,
        record.name,
        plain["began_timestamp_seconds"],
        record.uid,
        record.updated_timestamp_seconds,
        record.outcome is not None,
        _compact(plain),
        whole,
        record.boot_id or "",
    )


def _compact(plain: Any) -> bytes:
    return json.dumps(plain, separators=(",", ":")).encode()


def render_record(record: RunRecord) -> bytes:
    """Return a record as JSON in one line."""
    return _compact(json_from_record(record))


@dataclass(frozen=True, slots=True)
class StoredRecords:
    """Records of a database when it is opened: parts of each unfinished run, and of ended runs the newest."""

    unfinished: tuple[tuple[RunRecord, ...], ...] = ()
    ended: tuple[RunRecord, ...] = ()


class RecordStore:
    """Database in `folder` that keeps at most `limit` records of ended runs; fair by user. Used by one thread.

    Methods raise OSError.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.path = folder / FILE_NAME
        self._log = folder / f"{FILE_NAME}-wal"
        self._limit = limit
        self._connection: sqlite3.Connection | None = None
        self._inodes: list[tuple[int, int] | None] = []  # of the file and its write-ahead log

    @classmethod
    def open_read_only(cls, folder: Path) -> RecordStore:
        """Open a database as it is, to read it while no daemon has it. Raises OSError."""
        store = cls(folder, 0)
        if not store.path.is_file():
            raise FileNotFoundError(None, f"no {FILE_NAME}")
        store._inodes = [_inode(store.path), None]
        # Without a write-ahead log SQLite need not lock the file, which would leave a log behind.
        how = "mode=ro" if store._log.exists() else "immutable=1"
        store._connection = _prepare(sqlite3.connect(f"{store.path.resolve().as_uri()}?{how}", timeout=0, uri=True))
        with store._connected() as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version != len(MIGRATIONS):
                raise OSError(None, f"{FILE_NAME} is of another version ({version}); a daemon of this one migrates it")
        return store

    def open(self, newest: int) -> StoredRecords:
        """Open or create the database, and read the unfinished and the newest records."""
        with self._connected() as connection:
            parts: dict[tuple[bytes, bytes], list[bytes]] = {}
            for run_id, boot, whole in connection.execute(_UNFINISHED):
                parts.setdefault((run_id, boot), []).append(zlib.decompress(whole))
            ended = connection.execute(f"{_RECENT} ORDER BY updated", {"limit": newest, "name": None})
            return StoredRecords(
                tuple(filter(None, map(_readable, parts.values()))),
                _readable(outline for *_, outline, _boot in ended),
            )

    def write(self, rows: Iterable[RecordRow]) -> None:
        """Write rows in one durable transaction, and delete runs over the limit."""
        with self._connected() as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            for row in rows:
                connection.execute(_INSERT, _values(row))
                connection.execute(_CONTINUE, (row.run_id, row.began, row.boot))
                _limit_parts(connection, row)
            (ended,) = connection.execute("SELECT count(*) FROM runs WHERE ended = 1").fetchone()
            if ended > self._limit:
                connection.execute(_RETAIN, {"limit": self._limit, "name": None})

    def recent(self, limit: int, name: str | None = None) -> list[RecordRow]:
        """Return the newest records of ended runs, all or of a name, without their timelines.

        Over the limit, fair by user.
        """
        with self._connected() as connection:
            found = connection.execute(_RECENT, {"limit": limit, "name": name}).fetchall()
            return [
                RecordRow(
                    id_.decode(),
                    run_name.decode(),
                    began,
                    uid,
                    updated,
                    bool(ended),
                    _join(connection, "outline", id_, boot),
                )
                for id_, run_name, began, uid, updated, ended, _outline, boot in found
            ]

    def find(self, run_id: str) -> bytes | None:
        """Return the newest record of an ended run by id as JSON; None without one."""
        query = "SELECT boot FROM runs WHERE run_id = ? AND +ended = 1 ORDER BY updated DESC, began DESC LIMIT 1"
        with self._connected() as connection:
            if (found := connection.execute(query, (run_id,)).fetchone()) is None:
                return None
            return _join(connection, "whole", run_id.encode(), found[0])

    def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function with the connection, for another table of the database; return its result."""
        with self._connected() as connection, connection:
            return function(connection, *arguments)

    def close(self) -> None:
        """Close the database."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            with suppress(sqlite3.Error):
                connection.close()

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection, reopened if the file was removed or replaced. Raises OSError."""
        try:
            if self._connection is None or _inode(self.path) != self._inodes[0]:
                self._connect()
            assert self._connection is not None
            yield self._connection
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            if _is_damage(error):
                self.close()  # checked and set aside at the next opening
            text = str(error)
            raise OSError(None, "another daemon uses it" if "locked" in text else text) from error

    def _connect(self) -> None:
        if self._connection is not None:  # of a removed file; SQLite would apply its log to the new one
            self.close()
            if _inode(self._log) == self._inodes[1]:
                self._log.unlink(missing_ok=True)
        try:
            try:
                self._begin()
            except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
                if not _is_damage(error):
                    raise
                self.close()
                aside = self._set_aside()
                log.error(  # noqa: TRY400 - an event
                    "run database is damaged, starting a new one %s", format_fields(error=error, set_aside=aside)
                )
                self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        """Open the file, check it, and migrate it to the current schema."""
        former = self.path.parent.with_name("receipts")  # name of the folder before the first release
        if self.path.parent.name == "records" and former.is_dir() and not self.path.parent.exists():
            shutil.move(former, self.path.parent)  # a rename fails for a folder of an image
        if not self.path.parent.is_dir():
            self.path.parent.mkdir(parents=True)
            self.path.parent.chmod(0o750)  # whatever the umask
        with suppress(FileExistsError):
            file = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o640)
            os.fchmod(file, 0o640)  # SQLite gives its write-ahead log the same
            os.close(file)
        _check_usable(self.path)
        self._connection = connection = _prepare(
            sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
        )
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA journal_size_limit = 4194304")  # bytes of the log that stay after a large import
        with connection:
            connection.execute("BEGIN IMMEDIATE")  # takes the lock, which is then kept
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > len(MIGRATIONS):
                raise OSError(None, f"{self.path.name} was written by a newer gpuwarden (version {version})")
            _verify(connection, version)
            for statements in MIGRATIONS[version:]:
                for statement in statements:
                    connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        self._inodes = [_inode(self.path), _inode(self._log)]

    def _set_aside(self) -> Path:
        """Rename the damaged database and its write-ahead log; return the new name."""
        aside = self.path.with_name(f"{FILE_NAME}.damaged-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
        while aside.exists():
            aside = aside.with_name(f"{aside.name}+")
        with suppress(FileNotFoundError):
            self._log.rename(f"{aside}-wal")
        self.path.rename(aside)
        return aside


def _prepare(connection: sqlite3.Connection) -> sqlite3.Connection:
    """Add what the statements of this module need to a connection."""
    connection.text_factory = bytes
    connection.create_function("user_of", 1, find_user, deterministic=True)
    connection.create_function("rename_keys", 1, partial(_rename, _FORMER_KEYS), deterministic=True)
    connection.create_function("rename_kinds", 1, partial(_rename, _FORMER_KINDS), deterministic=True)
    connection.create_function("checksum_of", 2, _checksum_of, deterministic=True)
    return connection


def _check_usable(path: Path) -> None:
    """Open a file as SQLite does, to get the system's reason: SQLite only says disk I/O error. Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o640)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(None, "not a regular file")
    finally:
        os.close(file)


def _verify(connection: sqlite3.Connection, version: int) -> None:
    """Read a whole database of a `user_version`. Raises sqlite3.DatabaseError if it is damaged."""
    (result,) = connection.execute("PRAGMA integrity_check(1)").fetchone()  # quick_check does not read indexes
    if result != b"ok":
        raise sqlite3.DatabaseError(" ".join(result.decode(errors="replace").split()))
    has_table = connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'runs'").fetchone() is not None
    if has_table != (version > 0):
        raise sqlite3.DatabaseError(f"version {version} does not match its tables")
    if has_table:
        _verify_records(connection)
    if version >= INCIDENTS_VERSION:
        _select(connection, "SELECT id, uid, at, outline, whole FROM incidents LIMIT 0")


def _select(connection: sqlite3.Connection, query: str) -> sqlite3.Cursor:
    """Execute a query. Raises sqlite3.DatabaseError if the schema is damaged."""
    try:
        return connection.execute(query)
    except sqlite3.OperationalError as error:
        if "no such" not in str(error):  # a table or column
            raise
        raise sqlite3.DatabaseError(str(error)) from error


def _verify_records(connection: sqlite3.Connection) -> None:
    for outline, whole, checksum in _select(connection, _SELECT):
        is_text = isinstance(outline, bytes) and isinstance(whole, bytes)
        if not is_text or _checksum(outline, whole) != checksum:
            raise sqlite3.DatabaseError("a record does not match its checksum")


def _values(row: RecordRow) -> tuple[Any, ...]:
    """Return the values of a row for _INSERT."""
    checksum = _checksum(row.outline, row.whole)
    return (row.run_id, row.began, row.uid, row.updated, row.ended, row.outline.decode(), row.whole, checksum, row.boot)


def _limit_parts(connection: sqlite3.Connection, row: RecordRow) -> None:
    """Join the earlier parts of a run in place of the first, if there are too many."""
    *earlier, _last = connection.execute(f"SELECT rowid, whole {_PARTS}", (row.run_id, row.boot)).fetchall()
    parts = _readable(zlib.decompress(whole) for _, whole in earlier) if len(earlier) >= MAX_PARTS else ()
    if not parts:
        return
    joined = row_from_record(reduce(join_records, parts))
    (kept, _), *others = earlier
    connection.executemany("DELETE FROM runs WHERE rowid = ?", [(rowid,) for rowid, _ in others])
    connection.execute(
        "UPDATE runs SET updated = ?, outline = ?, whole = ?, checksum = ? WHERE rowid = ?",
        (joined.updated, joined.outline.decode(), joined.whole, _checksum(joined.outline, joined.whole), kept),
    )


def _join(connection: sqlite3.Connection, column: str, run_id: bytes, boot: bytes) -> bytes:
    """Return one record of the parts of a run in JSON: of their outlines, or of the whole."""
    parts = [part for (part,) in connection.execute(f"SELECT {column} {_PARTS}", (run_id.decode(), boot.decode()))]
    parts = [zlib.decompress(part) for part in parts] if column == "whole" else parts
    readable = _readable(parts) if len(parts) > 1 else ()
    return render_record(reduce(join_records, readable)) if readable else parts[-1]


def _checksum(outline: bytes, whole: bytes) -> int:
    return zlib.crc32(whole, zlib.crc32(outline))


def _rename(names: Mapping[bytes, bytes], document: str | bytes) -> str | bytes:
    """Return a record or incident, as JSON or compressed, with the present names."""
    former = re.compile(rb"(?<!\\)(?:" + b"|".join(map(re.escape, names)) + b")")  # a \" is within a text
    if isinstance(document, str):
        return former.sub(lambda found: names[found[0]], document.encode()).decode()
    try:
        plain = zlib.decompress(document)
    except zlib.error:  # of a damaged incident, which has no checksum
        return document
    return zlib.compress(former.sub(lambda found: names[found[0]], plain), 1)


def _checksum_of(outline: str, whole: bytes) -> int:
    return _checksum(outline.encode(), whole)


def _readable(records: Iterable[bytes]) -> tuple[RunRecord, ...]:
    """Return the records that this version can read; others are skipped."""
    found = []
    for record in records:
        with suppress(RunRecordError, ValueError):
            found.append(record_from_json(json.loads(record)))
    return tuple(found)


def _inode(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        status = path.stat()
        return status.st_dev, status.st_ino
    return None


def _is_damage(error: Exception) -> bool:
    """Return whether the file itself is damaged; for a file in use SQLite raises an OperationalError.

    A UnicodeDecodeError comes from a message that repeats a damaged schema.
    """
    return type(error) is sqlite3.DatabaseError or isinstance(error, UnicodeDecodeError)
