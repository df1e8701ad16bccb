"""Alerts that people know of and that fire no more, though nobody can say yet that what they tell of is over.

For those whom the daemon tells by itself: a message that all is well again has to be true. Alertmanager is told the
ends as the rules have them, lest it hear one thing from Prometheus and another from the daemon. Pure, and used by one
event loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gpuwarden.alerts.alert import Alert, Key
from gpuwarden.alerts.conditions import OF_EVENTS, end_is_known, ending_of
from gpuwarden.state import State

# That what an earlier daemon told stands at least: longer than any condition has to hold before it fires.
RECALLED_SECONDS = 120.0


@dataclass(slots=True)
class _Lingers:
    alert: Alert
    least: float  # monotonic: until when it does in any case


class Lingering:
    """Follows them from poll to poll. `now` is monotonic."""

    def __init__(self) -> None:
        self._alerts: dict[Key, _Lingers] = {}

    def recall(self, alerts: Iterable[Alert], now: float, wall: float) -> None:
        """Take what an earlier daemon has told to fire; `wall` is the same time as Unix time.

        What was an event, of which nobody may know any more, lingers for as long as it would have been told.
        """
        for alert in alerts:
            event = OF_EVENTS.get(alert.name)
            age = wall - (alert.last or alert.since)
            lasts = RECALLED_SECONDS if event is None else min(event - age, event)
            self._alerts[alert.key] = _Lingers(alert, now + lasts)

    def see(
        self, firing: Iterable[Alert], ended: Iterable[Alert], state: State, now: float
    ) -> tuple[frozenset[Key], list[Alert]]:
        """Take a poll with what fires and what does no more; return what lingers, and what has ended, with how."""
        for alert in firing:
            self._alerts.pop(alert.key, None)
        for alert in ended:
            self._alerts[alert.key] = _Lingers(alert, now)
        over = []
        for key, each in list(self._alerts.items()):
            if now >= each.least and end_is_known(each.alert, state):
                over.append(each.alert._replace(ending=ending_of(each.alert, state)))
                del self._alerts[key]
        return frozenset(self._alerts), over
