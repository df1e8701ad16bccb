"""Alerts that a target was notified of, saved on disk so that a restart repeats nothing; a file a target.

Used by the sender's thread; blocks as the file system does. Where nothing can be saved, a restart sends what still
fires once more, in one message.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from gpuwarden.alerts.delivery.message import clean
from gpuwarden.health.conditions import CONDITIONS
from gpuwarden.health.model import Alert
from gpuwarden.records.record import MAX_TIME

log = logging.getLogger(__name__)

VERSION = 1
MAX_FILE_BYTES = 1 << 22

_MAX_LENGTH = 400  # characters of a saved text


class SentAlerts:
    """File of one target in `folder`, None for none; `address_digest` says which address was notified, and may block.

    What another address was notified of is not taken: the new one has not seen it.
    """

    def __init__(self, folder: Path | None, name: str, address_digest: Callable[[], str | None] = lambda: None) -> None:
        self._address_digest = address_digest
        self._file = folder / f"{name}.json" if folder else None
        self._faulty = False
        self._to: str | None = None

    def read(self, wall: float) -> list[tuple[Alert, float]]:
        """Return the alerts, and how many seconds ago each was sent; nothing where there is no file of ours."""
        if self._file is None:
            return []
        self._to = self._address_digest()
        try:
            with self._file.open("rb") as file:
                content = json.loads(file.read(MAX_FILE_BYTES))
            known = list(_alerts(content, wall))
            to = content.get("to")
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            log.warning("%s cannot be read, alerts may be sent again: %s", self._file, error)
            return []
        if to is None or self._to is None or to == self._to:
            return known
        log.info("%s is of another address: what fires is sent to the new one", self._file)
        return []

    def write(self, sent: Iterable[tuple[Alert, float]], wall: float) -> None:
        """Save them; a fault is logged once."""
        if self._file is None:
            return
        # An address that changes while the daemon runs counts as another one from the next start on.
        self._to = self._to or self._address_digest()
        rows = [
            {
                "name": alert.name,
                "labels": dict(alert.labels),
                "description": clean(alert.description, _MAX_LENGTH),
                "since": alert.since,
                "last": alert.last,
                "owner": clean(alert.owner, _MAX_LENGTH),
                "told": wall - seconds,
            }
            for alert, seconds in sent
        ]
        new = self._file.with_suffix(".tmp")
        try:
            self._file.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            new.write_text(json.dumps({"version": VERSION, "to": self._to, "alerts": rows}))
            new.replace(self._file)
            self._faulty = False
        except OSError as error:
            if not self._faulty:
                log.warning(
                    "%s: cannot be written, a restart may send alerts again: %s", self._file, error.strerror or error
                )
            self._faulty = True


def _alerts(content: Any, wall: float) -> Iterator[tuple[Alert, float]]:
    if content["version"] != VERSION:
        raise ValueError("it is of another version")
    for row in content["alerts"]:
        if row["name"] not in CONDITIONS:
            continue  # an alert of another version
        labels = {str(name): str(value) for name, value in row["labels"].items()}
        since, last, told = float(row["since"]), float(row.get("last", 0.0)), float(row["told"])
        if not all(0.0 <= each < MAX_TIME for each in (since, last, told)):  # a message could not have its date
            raise ValueError("a time is out of range")
        condition = CONDITIONS[row["name"]]
        yield Alert(condition, labels, str(row["description"]), since, str(row["owner"]), last), max(wall - told, 0.0)
