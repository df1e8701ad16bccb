"""Dispatcher of the daemon's own alerts: passes what the detector found to each target's sender."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

from gpuwarden.alerts.delivery.alertmanager import AlertmanagerTarget
from gpuwarden.alerts.delivery.apprise import AppriseTarget
from gpuwarden.alerts.delivery.persistence import SentAlerts
from gpuwarden.alerts.delivery.sender import Sender
from gpuwarden.alerts.delivery.target import MessageTarget
from gpuwarden.alerts.delivery.validation import warnings
from gpuwarden.alerts.delivery.webhook import WebhookTarget
from gpuwarden.config.schema import Config
from gpuwarden.config.state_folder import state_folder
from gpuwarden.formatting import format_fields
from gpuwarden.state import Alert, DeliveryCounts, Detection

log = logging.getLogger(__name__)

STOP_SECONDS = 3.0  # for sending new alerts at the end; systemd waits ten


class Dispatcher:
    """Delivery of alerts to all targets. Used by one event loop, and never blocks it.

    `folder` stores the sent alerts of the targets of `notify` over restarts; None to store nothing.
    """

    def __init__(self, config: Config, folder: Path | None, targets: Iterable[MessageTarget] | None = None) -> None:
        self._alertmanagers = [
            Sender(AlertmanagerTarget(url, config)) for url in dict.fromkeys(config.alertmanager.url)
        ]
        chosen = message_targets(config) if targets is None else targets
        self._notifiers = [Sender(each, SentAlerts(folder, each.name, each.address_digest)) for each in chosen]

    @property
    def _senders(self) -> Iterator[Sender]:
        return chain(self._alertmanagers, self._notifiers)

    def start(self) -> None:
        """Start a thread for each target."""
        for sender in self._senders:
            sender.start()
            log.info(
                "notifications enabled %s",
                format_fields(target=sender.target.place, min_severity=sender.target.policy.min_severity),
            )

    def pop_restored(self) -> list[Alert]:
        """Return, once, what an earlier daemon sent as firing."""
        return [alert for sender in self._notifiers for alert in sender.pop_restored()]

    def dispatch(self, detection: Detection) -> None:
        """Pass the alerts of one poll on."""
        for sender in self._alertmanagers:  # without confirmation of endings, as from Prometheus
            sender.add_detection(Detection(firing=detection.firing))
        for sender in self._notifiers:
            sender.add_detection(detection)

    async def stop(self) -> None:
        """Send new alerts for a short time, and end; targets that hang are abandoned."""
        for sender in self._senders:
            sender.stop()
        end = time.monotonic() + STOP_SECONDS
        while time.monotonic() < end and any(sender.is_alive for sender in self._senders):  # noqa: ASYNC110 - threads
            await asyncio.sleep(0.02)

    @property
    def pending(self) -> int:
        """Alerts that wait for their first message, summed over the targets."""
        return sum(sender.pending for sender in self._senders)

    @property
    def posted(self) -> Mapping[str, DeliveryCounts]:
        """Counts of Alertmanagers by URL; `sent` counts alerts."""
        return {
            each.target.name: DeliveryCounts(each.alerts, each.failed, each.dropped) for each in self._alertmanagers
        }

    @property
    def notified(self) -> Mapping[str, DeliveryCounts]:
        """Counts of the targets of `notify` by name; `sent` counts messages."""
        return {each.target.name: DeliveryCounts(each.messages, each.failed, each.dropped) for each in self._notifiers}


def start_dispatcher(config: Config) -> Dispatcher:
    """Start a dispatcher; log problems of its configuration."""
    for warning in warnings(config):
        log.warning("%s", warning)
    folder = state_folder()
    dispatcher = Dispatcher(config, folder / "notified" if folder else None)
    dispatcher.start()
    return dispatcher


def message_targets(config: Config) -> Iterator[MessageTarget]:
    """Yield the targets of the section `notify`, each with a unique name."""
    for number, url in enumerate(config.notify.webhook, 1):
        yield WebhookTarget(_name("webhook", number), url, config)
    for number, url in enumerate(config.notify.apprise, 1):
        yield AppriseTarget(_name("apprise", number), url, config)


def _name(kind: str, number: int) -> str:
    return kind if number == 1 else f"{kind}-{number}"
