"""Private texts of run records, such as error messages and names in a program: withheld from other users."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from typing import Any, TypeAlias

from gpuwarden.records.figure import Private, find_part, list_keys
from gpuwarden.records.record import RunRecord

# Returns whether a reader may read the private texts of a user's runs, by uid.
Reader: TypeAlias = "Callable[[int], bool]"

WITHHELD = "not shown: only the run's user and root can read it (gpuwarden runs show, on the host)"


@dataclass(frozen=True, slots=True)
class PrivateKey:
    """Key of a document with private text: its own, or within the part that it holds, alone or in a list."""

    part: type | None
    required: bool


@cache
def find_private_keys(document: type) -> Mapping[str, PrivateKey]:
    """Return the keys that are private, or hold parts with private keys, by the declarations of figures and parts."""
    required = {each.name for each in fields(document) if each.default is MISSING}
    found = {}
    for name, kind, meaning in list_keys(document):
        part = find_part(kind)
        if isinstance(meaning, Private):
            found[name] = PrivateKey(None, name in required)
        elif part is not None and find_private_keys(part):
            found[name] = PrivateKey(part, name in required)
    return found


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
    if not any(b'"%s"' % name.encode() in record for name in find_private_keys(RunRecord)):
        return record
    document = json.loads(record)
    if not withhold_private(document, may_read):
        return record
    return json.dumps(document, separators=(",", ":")).encode()


def withhold_private(record: dict[str, Any], may_read: Reader) -> bool:
    """Withhold the private texts of a record's JSON in place, unless the reader may see them; return whether it did."""
    if may_read(record["uid"]):
        return False
    _withhold(RunRecord, record)
    return True


def _withhold(document: type, plain: dict[str, Any]) -> None:
    for name, private in find_private_keys(document).items():
        if name not in plain:
            continue
        if private.part is not None:
            value = plain[name]
            for each in value if isinstance(value, list) else [value]:
                _withhold(private.part, each)
        elif private.required:
            plain[name] = WITHHELD
        else:
            del plain[name]
