"""Table of incidents in the run database: functions of its connection, called on the database's thread."""

from __future__ import annotations

import json
import sqlite3
import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from gpuwarden.fairness.subordinate_uids import find_user
from gpuwarden.incidents.incident import Incident, json_from_incident, outline

MAX_TOTAL_BYTES = 64 << 20  # of all incidents, compressed

# Rowids in retention order, as of run records: each user's newest before any user's second newest. An incident from
# the future, of before the clock was set back, counts as old.
_BY_RANK = """
    SELECT rowid AS place, length(whole) AS size, row_number() OVER (ORDER BY of_user, early, at DESC) AS rank FROM (
        SELECT *, row_number() OVER (PARTITION BY user_of(uid), gpu ORDER BY early, at DESC) AS of_user
        FROM (SELECT rowid, uid, gpu, whole, at, at > strftime('%s', 'now') + 60 AS early FROM incidents)
    )
"""
_RETAINED = f"""
    SELECT place FROM (SELECT place, rank, sum(size) OVER (ORDER BY rank) AS total FROM ({_BY_RANK}))
    WHERE rank <= ? AND total <= ?
"""  # noqa: S608 - no text of others


class IncidentShare(NamedTuple):
    """Share of the incidents that one counts for: of a user, of any program on a GPU, or else of the hardware.

    `uid` is the user's, `gpu` the GPU's index; -1 for none.
    """

    uid: int = -1
    gpu: int = -1


@dataclass(frozen=True, slots=True)
class IncidentRow:
    """Stored incident: `outline` is its JSON without details, `whole` all of it, compressed."""

    id: str
    share: IncidentShare
    at: float  # Unix time
    outline: bytes
    whole: bytes

    @property
    def json(self) -> bytes:
        """The whole incident as JSON."""
        return zlib.decompress(self.whole)


def find_share(uid: int | None, kind: str, gpu: int | None) -> IncidentShare:
    """Return the share that an incident counts for: that of the user of the run that opened it, if a run did.

    Pressure, and an XID that a program caused, count for their GPU: else a program that fills its GPU
    or crashes again and again would displace those of other GPUs, and the failures of the hardware.
    """
    if uid is not None:
        return IncidentShare(uid=find_user(uid))
    is_of_program = kind in ("GpuMemoryPressureCritical", "GpuThermalPressureCritical", "GpuXidInfo")
    return IncidentShare(gpu=gpu or 0) if is_of_program else IncidentShare()


def row_from_incident(incident: Incident) -> IncidentRow:
    """Encode an incident; some tens of milliseconds."""
    document = json_from_incident(incident)
    return IncidentRow(
        incident.id,
        find_share(incident.uid, incident.kind, incident.subject.gpu),
        incident.at_timestamp_seconds,
        _compact(outline(document)),
        zlib.compress(_compact(document), 1),
    )


def _compact(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def write(connection: sqlite3.Connection, row: IncidentRow, limit: int) -> None:
    """Write an incident durably, and delete those over the limits."""
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(
        "INSERT OR REPLACE INTO incidents (id, uid, gpu, at, outline, whole) VALUES (?, ?, ?, ?, ?, ?)",
        (row.id, *row.share, row.at, row.outline.decode(), row.whole),
    )
    connection.execute(f"DELETE FROM incidents WHERE rowid NOT IN ({_RETAINED})", (limit, MAX_TOTAL_BYTES))  # noqa: S608 - likewise


def mark_interrupted(connection: sqlite3.Connection) -> None:
    """Mark the incidents that an earlier daemon did not complete, because it was killed or the host crashed."""
    ends = (b'"ended_timestamp_seconds":', b'"interrupted":')
    found = connection.execute("SELECT id, outline FROM incidents").fetchall()
    for incident_id in (name.decode() for name, text in found if not any(end in text for end in ends)):
        with suppress(OSError):  # damaged
            document = json.loads(find(connection, incident_id) or b"{}") | {"interrupted": True}
            values = _compact(outline(document)).decode(), zlib.compress(_compact(document), 1), incident_id
            connection.execute("UPDATE incidents SET outline = ?, whole = ? WHERE id = ?", values)


def read_outlines(connection: sqlite3.Connection, limit: int) -> list[tuple[str, float, bytes]]:
    """Return id, time and outline of the newest incidents, the newest first."""
    rows = connection.execute("SELECT id, at, outline FROM incidents ORDER BY at DESC LIMIT ?", (limit,))
    return [(name.decode(), at, text) for name, at, text in rows]


def find(connection: sqlite3.Connection, incident_id: str) -> bytes | None:
    """Return an incident as JSON; None without one. Raises OSError if it is damaged."""
    found = connection.execute("SELECT whole FROM incidents WHERE id = ?", (incident_id,)).fetchone()
    try:
        return zlib.decompress(found[0]) if found else None
    except zlib.error as error:
        raise OSError(None, f"the incident is damaged: {error}") from None
