"""Queue of one target: the alerts to send, and when. Pure; times are monotonic, in seconds.

An alert is pending until it was sent to the target, then firing, and resolved when it has been gone for
`resolve_after` seconds. The queue holds alerts, not messages: a change of an alert while nothing can be sent replaces
its earlier state.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from gpuwarden.alerts.delivery.message import Notification
from gpuwarden.alerts.delivery.target import Policy
from gpuwarden.health.conditions import severity_of
from gpuwarden.severity import SEVERITY_RANK
from gpuwarden.state import Alert, AlertKey, Detection

# Of each severity, active ones and those whose end is not sent yet; further ones are dropped and counted.
MAX_QUEUED_ALERTS = 2000
RESTORED_SECONDS = 15.0  # until an alert of an earlier daemon that does not fire is gone

_REPEAT_RATIO = 0.5  # of the repeat interval, after which an alert is repeated together with others


@dataclass(slots=True)
class _Entry:
    """One alert with the times it was queued, last sent and gone; `unconfirmed`: it stopped firing, end not known."""

    alert: Alert
    queued: float
    sent: float | None = None
    gone: float | None = None
    unconfirmed: bool = False


class Queue:
    """Alerts of one target. An alert that is gone for less than `resolve_after` does not resolve."""

    def __init__(self, policy: Policy) -> None:
        self.dropped = 0  # alerts that were never sent
        self._policy = policy
        self._entries: dict[AlertKey, _Entry] = {}
        self._left_out: set[AlertKey] = set()

    @property
    def pending(self) -> int:
        """Number of alerts that were not sent yet."""
        return sum(entry.sent is None for entry in self._entries.values())

    def restore(self, sent: Iterable[tuple[Alert, float]], now: float) -> None:
        """Add alerts that an earlier daemon sent, with their ages in seconds; gone if they do not fire soon."""
        for alert, seconds in sent:
            known = self._entries.get(alert.key)
            gone = now + RESTORED_SECONDS if known is None else known.gone
            self._entries[alert.key] = _Entry(known.alert if known else alert, now, sent=now - seconds, gone=gone)

    def add_detection(self, alerts: Detection, now: float) -> None:
        """Add the alerts of one poll, and mark those that no longer fire."""
        current = {alert.key: alert for alert in alerts.firing if self._concerns(alert.name)}
        self._note_gone(current, alerts, now)
        left_out: set[AlertKey] = set()
        count = Counter(entry.alert.severity for entry in self._entries.values())
        for key, alert in current.items():
            known = self._entries.get(key)
            if known is not None:
                known.alert, known.gone = alert, None
                if known.sent is None and self._is_inhibited(alert):
                    del self._entries[key]
            elif self._is_inhibited(alert):
                continue
            elif count[alert.severity] < MAX_QUEUED_ALERTS:
                self._entries[key] = _Entry(alert, now)
                count[alert.severity] += 1
            else:
                left_out.add(key)
        self.dropped += len(left_out - self._left_out)
        self._left_out = left_out
        if not self._policy.sends_resolved:
            for key, entry in list(self._entries.items()):
                if entry.sent is not None and self._is_resolved(entry, now):
                    del self._entries[key]

    def _note_gone(self, current: Collection[AlertKey], alerts: Detection, now: float) -> None:
        for key, entry in self._entries.items():
            entry.unconfirmed = key in alerts.unconfirmed
            if entry.unconfirmed:
                entry.gone = None
            elif key not in current and entry.gone is None:
                entry.gone = now
        for alert in alerts.resolved:
            if alert.key in self._entries:
                self._entries[alert.key].alert = alert

    def _concerns(self, name: str) -> bool:
        is_grave = SEVERITY_RANK[severity_of(name)] <= SEVERITY_RANK[self._policy.min_severity]
        return is_grave and name not in self._policy.mute

    def _is_inhibited(self, alert: Alert) -> bool:
        """Return whether the target gets another alert that explains this one."""
        return self._policy.inhibits and any(map(self._concerns, alert.inhibited_by))

    def expire(self, now: float) -> None:
        """Drop alerts that have been gone for too long; called after a failed delivery."""
        for key, entry in list(self._entries.items()):
            limit = self._policy.expire_unsent_after if entry.sent is None else self._policy.expire_after
            if entry.gone is not None and now - entry.gone >= limit:
                self.dropped += entry.sent is None
                del self._entries[key]

    def due(self) -> tuple[float, float]:
        """Return the due times of the next message and of a new critical alert; infinity for never."""
        soonest = urgent = math.inf
        for entry in self._entries.values():
            at = self._due(entry)
            soonest = min(soonest, at)
            if entry.sent is None and entry.alert.severity == "critical":
                urgent = min(urgent, at)
        return soonest, urgent

    @property
    def has_new(self) -> bool:
        """True if an alert was never sent."""
        return any(entry.sent is None for entry in self._entries.values())

    def next_notifications(self, now: float, wall: float) -> tuple[Notification, ...]:
        """Return the next message's notifications, new and resolved alerts first; `wall` is `now` as Unix time."""
        found: list[tuple[float, Notification]] = []
        for entry in self._entries.values():
            if entry.gone is not None and self._is_resolved(entry, now):
                found.append((-math.inf, Notification(entry.alert, resolved_at=wall - (now - entry.gone))))
            elif entry.sent is None:
                found.append((-math.inf, Notification(entry.alert)))
            elif entry.gone is None and not entry.unconfirmed and now - entry.sent >= self._repeat_age:
                found.append((entry.sent, Notification(entry.alert, repeated=True)))
        found.sort(key=lambda each: each[0])  # the oldest repetitions first, so that a slow target gets all of them
        return tuple(notification for _, notification in found[: self._policy.max_batch])

    @property
    def _repeat_age(self) -> float:
        return _REPEAT_RATIO * self._policy.repeat

    def standing(self, besides: Iterable[Notification]) -> Mapping[str, int]:
        """Count by name the alerts that still fire and are not in this message."""
        taken = {each.alert.key for each in besides}
        return Counter(e.alert.name for key, e in self._entries.items() if key not in taken and e.gone is None)

    def mark_sent(self, notifications: Iterable[Notification], now: float) -> None:
        """Mark alerts as sent."""
        for each in notifications:
            entry = self._entries.get(each.alert.key)
            if entry is None:
                continue
            if each.resolved_at is None:
                entry.sent = now
            elif entry.gone is not None:
                del self._entries[each.alert.key]
            else:  # it fired again while its resolution was sent
                entry.sent, entry.queued = None, now

    def sent(self, now: float) -> Iterator[tuple[Alert, float]]:
        """Yield each sent alert with its age since sending, in seconds."""
        for entry in self._entries.values():
            if entry.sent is not None:
                yield entry.alert, now - entry.sent

    def _is_resolved(self, entry: _Entry, now: float) -> bool:
        return entry.gone is not None and now - entry.gone >= self._policy.resolve_after

    def _due(self, entry: _Entry) -> float:
        if entry.sent is None:
            return entry.queued + self._policy.group_wait
        if entry.gone is None:
            return math.inf if entry.unconfirmed else entry.sent + self._policy.repeat
        return entry.gone + self._policy.resolve_after if self._policy.sends_resolved else math.inf
