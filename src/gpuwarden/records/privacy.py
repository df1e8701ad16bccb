"""Private texts of run records, such as error messages and names in a program: withheld from other users."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeAlias, get_type_hints

from gpuwarden.records.record import Private, RecordedAllocation, RecordedError, RecordedTensors

# Returns whether a reader may read the private texts of a user's runs, by uid.
Reader: TypeAlias = "Callable[[int], bool]"

WITHHELD = "not shown: only the run's user and root can read it (gpuwarden runs show, on the host)"

PRIVATE_KEYS = frozenset(
    name
    for part in (RecordedError, RecordedAllocation, RecordedTensors)
    for name, hint in get_type_hints(part, include_extras=True).items()
    if isinstance(hint.__metadata__[-1], Private)
)


def read_all(_uid: int) -> bool:
    """Return true: a reader of every text."""
    return True


def reader(uid: int | None, own_uid: int, show: str) -> Reader:
    """Return the reader that a client is; `uid` is its user, None if unknown. `show` is `web.show_error_text`.

    A user reads the texts of their own runs; root and the daemon's user read all, as they can read the database. A
    client whose user is unknown reads those of the daemon's user if `show` is "own", unless that is root.
    """
    if show == "true" or (uid is not None and uid in (0, own_uid)):
        return read_all
    if uid is None and show == "own" and own_uid:
        uid = own_uid
    return lambda owner: owner == uid


def withhold_texts(record: bytes, may_read: Reader) -> bytes:
    """Return a record in JSON as a reader may see it; 0.5 ms for one with eight long messages to withhold."""
    if b'"errors_told"' not in record and b'"census"' not in record:
        return record
    document = json.loads(record)
    if not withhold_private(document, may_read):
        return record
    return json.dumps(document, separators=(",", ":")).encode()


def withhold_private(record: dict[str, Any], may_read: Reader) -> bool:
    """Withhold the private texts of a record's JSON in place, unless the reader may see them; return whether it did."""
    if may_read(record["uid"]):
        return False
    errors, census = record.get("errors_told", ()), record.get("census", {})
    allocations = (each for error in errors for each in error.get("allocations", ()))
    for part in (*errors, *allocations, *census.get("groups", ())):
        for key in PRIVATE_KEYS & part.keys():
            del part[key]
    for error in errors:
        error["text"] = WITHHELD
    return True
