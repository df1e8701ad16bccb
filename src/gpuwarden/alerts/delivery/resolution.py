"""Alerts that stopped firing but are not confirmed resolved.

For the targets of `notify`: a message that a fault is over has to be true. An Alertmanager is notified of ends as the
rules have them, or it would get one end from Prometheus and another from the daemon. Pure, used by one event loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpuwarden.health.model import Alert, Key
from gpuwarden.state import State

# Longer than any condition has to hold before it fires: until then an alert of an earlier daemon cannot be resolved.
RESTORED_SECONDS = 120.0


@dataclass(slots=True)
class _Unconfirmed:
    alert: Alert
    least: float  # monotonic: it is not resolved before


class Resolution:
    """Tracker of unconfirmed alerts from poll to poll. `now` is monotonic."""

    def __init__(self) -> None:
        self._alerts: dict[Key, _Unconfirmed] = {}

    def restore(self, alerts: Iterable[Alert], now: float, wall: float) -> None:
        """Add what an earlier daemon sent as firing; `wall` is `now` as Unix time.

        An event, which this daemon may not know of, stays unresolved for as long as its alert would have fired.
        """
        for alert in alerts:
            event = alert.condition.event_seconds
            age = wall - (alert.last or alert.since)
            lasts = RESTORED_SECONDS if event is None else min(event - age, event)
            self._alerts[alert.key] = _Unconfirmed(alert, now + lasts)

    def update(
        self, firing: Iterable[Alert], ended: Iterable[Alert], state: State, now: float
    ) -> tuple[frozenset[Key], list[Alert]]:
        """Take a poll: what fires, what stopped. Return what is unconfirmed, and what is resolved and how it ended."""
        for alert in firing:
            self._alerts.pop(alert.key, None)
        for alert in ended:
            self._alerts[alert.key] = _Unconfirmed(alert, now)
        resolved = []
        for key, each in list(self._alerts.items()):
            check_ending = each.alert.condition.ending
            ending = check_ending(each.alert.labels, state) if check_ending else ""
            if now >= each.least and ending is not None:
                resolved.append(replace(each.alert, ending=ending))
                del self._alerts[key]
        return frozenset(self._alerts), resolved
