"""Evaluator of alerts: which fire at a poll, which have stopped, and which are resolved.

An alert is pending while its condition has not held for as long as its rule asks for, then firing. Once the condition
has ended it is unconfirmed until a poll can tell how it ended, and then resolved. One whose condition ends for a moment
goes on firing, as its cause mostly does. Pure, and used by one event loop.
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

STEADY_SECONDS = 15.0  # that an alert goes on after its condition ends, where its rule asks for no longer
# Of each severity; further ones are counted and dropped. A box has some hundreds of GPUs and runs, and a thousand runs
# that died must not keep the alert of a lost GPU out.
MAX_ALERTS = 1000

# Longer than any condition has to hold before it fires: until then an alert of an earlier daemon cannot be resolved.
RESTORED_SECONDS = 120.0


@dataclass(slots=True)
class _Episode:
    """A condition that holds, or did until a moment ago; times are monotonic."""

    alert: Alert  # with the numbers of the last poll in which it held
    began: float
    held: float
    fires: bool = False


@dataclass(frozen=True, slots=True)
class AlertStates:
    """The alerts of one poll: those that fire, the keys of the unconfirmed, and those that are resolved by it."""

    firing: Sequence[Alert] = ()
    unconfirmed: frozenset[Key] = frozenset()
    resolved: Sequence[Alert] = ()


class AlertEvaluator:
    """Follows conditions from poll to poll. `now` is monotonic."""

    def __init__(self, conditions: Collection[Condition] = ALERTS.values()) -> None:
        self.dropped = 0  # alerts beyond MAX_ALERTS, each once
        self._checks = ConditionChecks(conditions)
        values = rule_settings.placeholder_values()
        self._holds = {each.name: _seconds(each.hold, values) for each in conditions}
        self._keeps = {each.name: max(_seconds(each.keep, values), STEADY_SECONDS) for each in conditions}
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
            elif count[condition.severity] < MAX_ALERTS:
                self._episodes[key] = _Episode(alert, now, now)
                count[condition.severity] += 1
            else:
                left_out.add(key)
        if left_out and not self._left_out:
            log.warning("over %d alerts of a severity at once: nobody is told of further ones", MAX_ALERTS)
        self.dropped += len(left_out - self._left_out)
        self._left_out = left_out
        ended = [each.alert for each in self._pop_ended(now) if each.fires]
        firing = list(self._firing(now))
        return AlertStates(firing, *self._resolution.update(firing, ended, state, now))

    def _pop_ended(self, now: float) -> Iterator[_Episode]:
        """Remove and yield what no longer holds: at once where it has not fired yet, as Prometheus does."""
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
    least: float  # monotonic: it is not resolved before


class Resolution:
    """Tracker of unconfirmed alerts from poll to poll: what says that a fault is over has to be true."""

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
        """Return what is unconfirmed at a poll, and what is resolved and how it ended."""
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


def _seconds(duration: str, values: Mapping[str, str]) -> float:
    return DURATION.read(fill_places(duration, values)) if duration else 0.0
