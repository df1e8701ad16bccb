"""Delivery as JSON to a webhook; docs/use/notifications.md describes the body."""

from __future__ import annotations

from typing import Any

from gpuwarden.alerts.alert_links import AlertLinks, fill_labels
from gpuwarden.alerts.delivery.http_client import Server, host_text
from gpuwarden.alerts.delivery.message import (
    MAX_NAME_CHARS,
    MAX_OWNER_CHARS,
    Message,
    Notification,
    action_text,
    clean,
    fill_text,
    format_standing,
    format_utc,
)
from gpuwarden.alerts.delivery.target import MessageTarget
from gpuwarden.alerts.markdown import render_plain
from gpuwarden.config.schema import Config
from gpuwarden.config.secrets import Secret
from gpuwarden.health.conditions import CONDITIONS

VERSION = 1
MAX_LISTED_ALERTS = 200  # in one body; further ones are only counted


class WebhookTarget(MessageTarget):
    """Target that posts JSON to one web address."""

    def __init__(self, name: str, url: Secret, config: Config) -> None:
        super().__init__(name, f"webhook at {host_text(url)}", url, config, config.notify.webhook_severity)

    def _deliver(self, message: Message) -> None:
        settings = self._settings
        server = Server(
            url=self._url,
            timeout=settings.timeout,
            bearer_token=settings.webhook_token,
            ca_file=settings.ca_file,
        )
        server.post(render_body(message))


def render_body(message: Message) -> dict[str, Any]:
    """Return the JSON body that docs/use/notifications.md describes."""
    firing, over = message.firing, message.over
    links = AlertLinks(daemon_url=message.daemon_url)
    room = max(MAX_LISTED_ALERTS - len(firing), 0)
    return {
        "version": VERSION,
        "host": message.host,
        "test": bool(message.test),
        "severity": message.severity,
        "title": message.title,
        "text": message.text,
        "firing": [_alert(each, message.host, links) for each in firing[:MAX_LISTED_ALERTS]],
        "over": [_alert(each, message.host, links) for each in over[:room]],
        "left_out": len(firing[MAX_LISTED_ALERTS:]) + len(over[room:]),
        "still": format_standing(message.standing),
    }


def _alert(notification: Notification, host: str, links: AlertLinks) -> dict[str, Any]:
    alert = notification.alert
    return {
        "alert": alert.name,
        "severity": alert.severity,
        "labels": {name: clean(value, MAX_NAME_CHARS) for name, value in alert.labels.items()},
        "summary": clean(fill_labels(fill_text(CONDITIONS[alert.name].summary), {**alert.labels, "instance": host})),
        "description": clean(alert.description),
        "owner": clean(alert.owner, MAX_OWNER_CHARS),
        "do": render_plain(action_text(CONDITIONS[alert.name])),
        "more": links.runbook(CONDITIONS[alert.name]),
        "page": fill_labels(links.dashboard(CONDITIONS[alert.name]), alert.labels),
        "since": format_utc(alert.since),
        "over": None if notification.resolved_at is None else format_utc(notification.resolved_at),
        "ending": alert.ending,
        "again": notification.repeated,
    }
