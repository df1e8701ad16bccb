"""Evaluator of alerts: those that are firing, unconfirmed or resolved at a poll.

An alert is pending until its condition has held for the duration `for_`, then firing. When the condition has ended it
is unconfirmed until a poll shows how it ended, then resolved. It keeps firing if the condition ends only for a
moment. Pure, and used by one event loop.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gpuwarden.config import rule_settings
from gpuwarden.config.value_types import DURATION
from gpuwarden.health.conditions import ALERTS, ConditionChecks
from gpuwarden.health.model import Alert, Condition, Key, fill_places
from gpuwarden.state import State

log = logging.getLogger(__name__)

STEADY_SECONDS = 15.0  # minimum of keep_firing_for
# Of each severity; further ones are counted and dropped. A host has some hundreds of GPUs and runs, and a thousand
# failed runs must not displace the alert of a lost GPU.
MAX_ACTIVE_ALERTS = 1000

# Longer than any `for_`: until then an alert of an earlier daemon cannot be resolved.
RESTORED_SECONDS = 120.0


@dataclass(slots=True)
class _Episode:
    """A condition that holds, or held until a moment ago; times are monotonic."""

    alert: Alert  # with the numbers of the last poll in which the condition held
    began: float
    held: float  # last time
    fires: bool = False


@dataclass(frozen=True, slots=True)
class AlertStates:
    """Alerts of one poll: firing ones, keys of unconfirmed ones, and those that it resolves."""

    firing: Sequence[Alert] = ()
    unconfirmed: frozenset[Key] = frozenset()
    resolved: Sequence[Alert] = ()


class AlertEvaluator:
    """Tracker of conditions from poll to poll. `now` is monotonic."""

    def __init__(self, conditions: Collection[Condition] = ALERTS.values()) -> None:
        self.dropped = 0  # alerts above MAX_ACTIVE_ALERTS, each counted once
        self._checks = ConditionChecks(conditions)
        values = rule_settings.placeholder_values()
        self._holds = {each.name: _seconds(each.for_, values) for each in conditions}
        self._keeps = {each.name: max(_seconds(each.keep_firing_for, values), STEADY_SECONDS) for each in conditions}
        self._episodes: dict[Key, _Episode] = {}
        self._left_out: set[Key] = set()
        self._resolution = Resolution()

    def restore(self, alerts: Iterable[Alert], now: float, wall: float) -> None:
        """Add what an earlier daemon sent as firing; `wall` is `now` as Unix time."""
        self._resolution.restore(alerts, now, wall)

    def update(self, state: State, now: float) -> AlertStates:
        """Evaluate a poll."""
        left_out: set[Key] = set()
        count = Counter(each.alert.condition.severity for each in self._episodes.values())
        occurrences = list(self._checks.occurrences(state))
        holding = {condition.name for condition, _found in occurrences}
        for condition, found in occurrences:
            if condition.implied_by in holding:
                continue
            alert = Alert(condition, found.labels, found.description, found.since, found.owner, found.last)
            key = alert.key
            episode = self._episodes.get(key)
            if episode is not None:
                episode.alert, episode.held = replace(alert, since=episode.alert.since), now
            elif count[condition.severity] < MAX_ACTIVE_ALERTS:
                self._episodes[key] = _Episode(alert, now, now)
                count[condition.severity] += 1
            else:
                left_out.add(key)
        if left_out and not self._left_out:
            log.warning("too many active alerts, dropping new ones limit=%d", MAX_ACTIVE_ALERTS)
        self.dropped += len(left_out - self._left_out)
        self._left_out = left_out
        ended = [each.alert for each in self._pop_ended(now) if each.fires]
        firing = list(self._firing(now))
        return AlertStates(firing, *self._resolution.update(firing, ended, state, now))

    def _pop_ended(self, now: float) -> Iterator[_Episode]:
        """Remove and yield conditions that have ended; at once if they have not fired yet, as in Prometheus."""
        for key, episode in list(self._episodes.items()):
            lasts = self._keeps[episode.alert.name] if episode.fires else 0.0
            if episode.held < now and now - episode.held >= lasts:
                yield self._episodes.pop(key)

    def _firing(self, now: float) -> Iterator[Alert]:
        for episode in self._episodes.values():
            episode.fires = episode.fires or now - episode.began >= self._holds[episode.alert.name]
            if episode.fires:
                yield episode.alert


@dataclass(slots=True)
class _Unconfirmed:
    alert: Alert
    earliest: float  # monotonic: not resolved before


class Resolution:
    """Tracker of unconfirmed alerts from poll to poll, so that "resolved" is never sent for a fault that may last."""

    def __init__(self) -> None:
        self._alerts: dict[Key, _Unconfirmed] = {}

    def restore(self, alerts: Iterable[Alert], now: float, wall: float) -> None:
        """Add what an earlier daemon sent as firing; `wall` is `now` as Unix time.

        An event, which this daemon may not know, stays unresolved for as long as its alert would have fired.
        """
        for alert in alerts:
            event = alert.condition.event_seconds
            age = wall - (alert.last or alert.since)
            lasts = RESTORED_SECONDS if event is None else min(event - age, event)
            self._alerts[alert.key] = _Unconfirmed(alert, now + lasts)

    def update(
        self, firing: Iterable[Alert], ended: Iterable[Alert], state: State, now: float
    ) -> tuple[frozenset[Key], list[Alert]]:
        """Return the unconfirmed alerts at a poll, and the resolved ones with their endings."""
        for alert in firing:
            self._alerts.pop(alert.key, None)
        for alert in ended:
            self._alerts[alert.key] = _Unconfirmed(alert, now)
        resolved = []
        for key, each in list(self._alerts.items()):
            check_ending = each.alert.condition.ending
            ending = check_ending(each.alert.labels, state) if check_ending else ""
            if now >= each.earliest and ending is not None:
                resolved.append(replace(each.alert, ending=ending))
                del self._alerts[key]
        return frozenset(self._alerts), resolved


def _seconds(duration: str, values: Mapping[str, str]) -> float:
    return DURATION.read(fill_places(duration, values)) if duration else 0.0
