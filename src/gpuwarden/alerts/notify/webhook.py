"""Alerts as JSON, for programs; docs/notify.md describes it."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from gpuwarden.alerts.notify.markdown import plain
from gpuwarden.alerts.notify.message import (
    LONGEST_NAME,
    LONGEST_OWNER,
    Message,
    Told,
    clean,
    page,
    still,
    what_to_do,
)
from gpuwarden.alerts.notify.post import host_of, post
from gpuwarden.alerts.notify.target import digest_of
from gpuwarden.config import Notify
from gpuwarden.secret import Secret

VERSION = 1
MOST_ALERTS = 200  # in one body; further ones are counted in it


class Webhook:
    """Posts to one address."""

    def __init__(self, name: str, url: Secret, settings: Notify) -> None:
        self.name = name
        self.least = settings.webhook_severity
        self.place = f"webhook at {host_of(url)}"
        self._url = url
        self._settings = settings

    def whom(self) -> str | None:
        """Return a digest of the address."""
        return digest_of(self._url)

    def send(self, message: Message) -> None:
        """Post it."""
        post(self._url, body(message), self._settings, self._settings.webhook_token)


def body(message: Message) -> dict[str, Any]:
    """Return what is posted."""
    firing, over = message.firing, message.over
    room = max(MOST_ALERTS - len(firing), 0)
    return {
        "version": VERSION,
        "host": message.host,
        "test": bool(message.test),
        "severity": message.severity,
        "title": message.title,
        "text": message.text,
        "firing": [_alert(each, message.docs) for each in firing[:MOST_ALERTS]],
        "over": [_alert(each, message.docs) for each in over[:room]],
        "left_out": len(firing[MOST_ALERTS:]) + len(over[room:]),
        "still": still(message.standing),
    }


def _alert(told: Told, docs: str) -> dict[str, Any]:
    alert = told.alert
    return {
        "alert": alert.name,
        "severity": alert.rule.severity,
        "labels": {name: clean(value, LONGEST_NAME) for name, value in alert.labels.items()},
        "summary": alert.rule.summary,
        "description": clean(alert.description),
        "owner": clean(alert.owner, LONGEST_OWNER),
        "do": plain(what_to_do(alert.rule), docs),
        "more": f"{docs}/{page(alert.rule)}",
        "since": _utc(alert.since),
        "over": None if told.over is None else _utc(told.over),
        "ending": alert.ending,
        "again": told.again,
    }


def _utc(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
