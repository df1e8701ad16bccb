"""Delivery to the API of Alertmanager, one poll after a condition holds.

Each alert has the labels of the same alert from Prometheus, so that Alertmanager treats both as one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

from gpuwarden.alerts.alert_links import AlertLinks, fill_labels
from gpuwarden.alerts.delivery.http_client import Server
from gpuwarden.alerts.delivery.message import Notification, format_utc
from gpuwarden.alerts.delivery.target import DeliveryError, PartlySentError, Policy
from gpuwarden.alerts.prometheus_rules import Choices, render_annotations
from gpuwarden.config.schema import Config
from gpuwarden.config.secrets import Secret
from gpuwarden.formatting import format_fields
from gpuwarden.health.conditions import CONDITIONS
from gpuwarden.state import Alert

log = logging.getLogger(__name__)

PATH = "/api/v2/alerts"
MAX_BATCH = 64  # alerts in a message, as in Prometheus
EXPIRY_RESENDS = 4  # times `resend` until an alert that is not sent again is resolved, as in Prometheus
MAX_CLOCK_DIFFERENCE_SECONDS = 15.0  # an answer has whole seconds, and takes time itself
MAX_CLOCK = 250_000_000_000.0  # Unix time in the year 9892: dates after 9999 cannot be written


class AlertmanagerTarget:
    """Target at one Alertmanager.

    A resolution is sent `resend` seconds after the end: by then Prometheus has it too, and both agree.
    """

    def __init__(self, url: str, config: Config) -> None:
        chosen = config.alertmanager
        self.name = url
        self.place = url
        self.policy = Policy(
            min_severity="info",
            group_wait=0.0,
            repeat=chosen.resend,
            resolve_after=chosen.resend,
            expire_unsent_after=chosen.resend,
            expire_after=EXPIRY_RESENDS * chosen.resend,
            first_retry=0.5,
            max_retry=30.0,
            max_batch=MAX_BATCH,
            inhibits=False,  # Alertmanager does it, with what Prometheus sends too
        )
        self._own = {"job": chosen.job, "instance": chosen.instance or str(config.web.reachable)}
        self._external = dict(chosen.labels)  # as external_labels of Prometheus: labels of the alert win
        pages = config.web.read_pages_url()
        self._generator = f"{pages}/"
        links = AlertLinks(chosen.runbook_url, chosen.dashboard_url, pages)
        self._choices = Choices(job=chosen.job, links=links)
        self._templates: dict[str, dict[str, str]] = {}  # annotations by alert
        self._server = Server(
            url=Secret(text=url.rstrip("/") + PATH),
            timeout=chosen.timeout,
            bearer_token=chosen.bearer_token,
            user=chosen.user,
            password=chosen.password,
            ca_file=chosen.ca_file,
            cert_file=chosen.cert_file,
            key_file=chosen.key_file,
            proxies=False,
        )
        self._clock_offset = 0.0  # seconds that the Alertmanager's clock is ahead of this machine's

    def send(self, notifications: Sequence[Notification], standing: Mapping[str, int]) -> None:
        """See Target. Post again at once if the answer shows that the two clocks differ."""
        del standing
        for _ in range(2):
            alerts = [self.rendered(each) for each in notifications]
            try:
                answer = self._server.post(alerts)
            except DeliveryError as error:
                # Alertmanager accepts the valid alerts of a message that it rejects for the others.
                if error.status == HTTPStatus.BAD_REQUEST:
                    raise PartlySentError(str(error)) from None
                raise
            if not self._adjust_clock(answer.get("Date", "")):
                return

    def _adjust_clock(self, date: str) -> bool:
        """Adopt the receiver's clock; return whether it differs from the one used for the message."""
        try:
            there = parsedate_to_datetime(date).timestamp()
        except (ValueError, OverflowError):
            return False
        if there > MAX_CLOCK:
            return False
        offset = there - time.time()
        if abs(offset - self._clock_offset) < MAX_CLOCK_DIFFERENCE_SECONDS:
            return False
        self._clock_offset = offset if abs(offset) >= MAX_CLOCK_DIFFERENCE_SECONDS else 0.0
        log.warning(
            "clock of the Alertmanager differs, alert times adjusted %s",
            format_fields(target=self.place, seconds=f"{offset:+.0f}"),
        )
        return True

    def rendered(self, notification: Notification) -> dict[str, Any]:
        """Return an alert in the format of the API, with times by the receiver's clock."""
        alert = notification.alert
        labels = {
            **self._external,
            **self._own,
            **alert.labels,
            "alertname": alert.name,
            "severity": alert.severity,
        }
        labels = {name: value for name, value in labels.items() if value}  # an empty label means no label
        ends = notification.resolved_at
        if ends is None:
            ends = time.time() + self.policy.expire_after
        return {
            "labels": labels,
            "annotations": self._annotations(alert, labels),
            # Never after its end or in the future, which Alertmanager rejects: the clock may have been set back.
            "startsAt": format_utc(min(alert.since, ends, time.time()) + self._clock_offset, "milliseconds"),
            "endsAt": format_utc(ends + self._clock_offset, "milliseconds"),
            "generatorURL": self._generator,
        }

    def _annotations(self, alert: Alert, labels: Mapping[str, str]) -> dict[str, str]:
        if alert.name not in self._templates:
            self._templates[alert.name] = render_annotations(CONDITIONS[alert.name], self._choices)
        owner = f" Owner: {alert.owner}." if alert.owner else ""
        return {
            name: alert.description + owner if name == "description" else fill_labels(template, labels)
            for name, template in self._templates[alert.name].items()
        }
