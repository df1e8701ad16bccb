"""Sent alerts on disk, one file for each target, so that a restart does not repeat notifications.

Used by the sender's thread; blocks as the file system does. If nothing can be saved, a restart sends all firing alerts
once more, in one message.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from gpuwarden.alerts.delivery.message import clean
from gpuwarden.formatting import format_fields
from gpuwarden.health.conditions import CONDITIONS
from gpuwarden.records.record_json import MAX_TIME
from gpuwarden.state import Alert

log = logging.getLogger(__name__)

VERSION = 1
MAX_FILE_BYTES = 1 << 22

_MAX_LENGTH = 400  # characters of a saved text


class SentAlerts:
    """File of one target in `folder` (None: no file); `address_digest` identifies its address, and may block.

    Alerts that were sent to another address are ignored.
    """

    def __init__(self, folder: Path | None, name: str, address_digest: Callable[[], str | None] = lambda: None) -> None:
        self._address_digest = address_digest
        self._file = folder / f"{name}.json" if folder else None
        self._faulty = False
        self._to: str | None = None

    def read(self, wall: float) -> list[tuple[Alert, float]]:
        """Return the alerts with their ages since sending, in seconds; empty without a valid file."""
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
            log.warning(
                "saved notifications unreadable, alerts may repeat %s", format_fields(file=self._file, error=error)
            )
            return []
        if to is None or self._to is None or to == self._to:
            return known
        log.info("target address changed, sending all firing alerts to it %s", format_fields(file=self._file))
        return []

    def write(self, sent: Iterable[tuple[Alert, float]], wall: float) -> None:
        """Save sent alerts; an error is logged once."""
        if self._file is None:
            return
        # An address that changes while the daemon runs counts as new at the next start.
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
                    "cannot save notifications, a restart may repeat them %s",
                    format_fields(file=self._file, error=error.strerror or error),
                )
            self._faulty = True


def _alerts(content: Any, wall: float) -> Iterator[tuple[Alert, float]]:
    if content["version"] != VERSION:
        raise ValueError("unsupported version")
    for row in content["alerts"]:
        if row["name"] not in CONDITIONS:
            continue  # an alert of another version
        labels = {str(name): str(value) for name, value in row["labels"].items()}
        since, last, sent_at = float(row["since"]), float(row.get("last", 0.0)), float(row["told"])
        if not all(0.0 <= each < MAX_TIME for each in (since, last, sent_at)):  # not a valid date
            raise ValueError("a time is out of range")
        alert = Alert(
            name=row["name"],
            severity=CONDITIONS[row["name"]].severity,
            labels=labels,
            description=str(row["description"]),
            since=since,
            owner=str(row["owner"]),
            last=last,
        )
        yield alert, max(wall - sent_at, 0.0)
