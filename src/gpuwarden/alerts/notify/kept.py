"""What targets have been told, kept on disk: a daemon that starts anew does not tell all of it again.

A file a target. Used by the target's own thread; blocks as long as the file system does. Where nothing can be kept, a
restart tells what still fires once more, in one message.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from gpuwarden.alerts.alert import Alert
from gpuwarden.alerts.notify.message import clean
from gpuwarden.alerts.rules import ALERTS

log = logging.getLogger(__name__)

VERSION = 1
LARGEST_FILE = 1 << 22  # bytes

_LONGEST = 400  # characters of a text that is kept


class Kept:
    """The file of one target; none where there is no folder.

    `whom` gives a digest of the address that the target reaches, None where that is not known: what another address was
    told is no news that this one has. It may block.
    """

    def __init__(self, folder: Path | None, name: str, whom: Callable[[], str | None] = lambda: None) -> None:
        self._whom = whom
        self._file = folder / f"{name}.json" if folder else None
        self._faulty = False
        self._to: str | None = None

    def read(self, wall: float) -> list[tuple[Alert, float]]:
        """Return the alerts, and how many seconds ago each was told; nothing where there is no file of ours."""
        if self._file is None:
            return []
        self._to = self._whom()
        try:
            with self._file.open("rb") as file:
                content = json.loads(file.read(LARGEST_FILE))
            known = list(_alerts(content, wall))
            to = content.get("to")
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning("%s cannot be read, so that alerts may be told again: %s", self._file, error)
            return []
        if to is None or self._to is None or to == self._to:
            return known
        log.info("%s says what another address was told, so that what fires is told to the new one", self._file)
        return []

    def write(self, told: Iterable[tuple[Alert, float]], wall: float) -> None:
        """Keep them; a fault is logged once."""
        if self._file is None:
            return
        # An address that changes while the daemon runs has not heard what the one before it has: the next start sees.
        self._to = self._to or self._whom()
        rows = [
            {
                "name": alert.name,
                "labels": dict(alert.labels),
                "description": clean(alert.description, _LONGEST),
                "since": alert.since,
                "last": alert.last,
                "owner": clean(alert.owner, _LONGEST),
                "told": wall - seconds,
            }
            for alert, seconds in told
        ]
        new = self._file.with_suffix(".tmp")
        try:
            self._file.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
            new.write_text(json.dumps({"version": VERSION, "to": self._to, "alerts": rows}))
            new.replace(self._file)
            self._faulty = False
        except OSError as error:
            if not self._faulty:
                log.warning("%s: what was told cannot be kept over a restart: %s", self._file, error.strerror or error)
            self._faulty = True


def _alerts(content: Any, wall: float) -> Iterator[tuple[Alert, float]]:
    if content["version"] != VERSION:
        raise ValueError("it is of another version")
    for row in content["alerts"]:
        if row["name"] not in ALERTS:
            continue  # an alert of another version
        labels = {str(name): str(value) for name, value in row["labels"].items()}
        texts = str(row["description"]), float(row["since"]), str(row["owner"]), float(row.get("last", 0.0))
        yield Alert(row["name"], labels, *texts), max(wall - float(row["told"]), 0.0)
