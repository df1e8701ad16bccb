"""Evaluator of alerts: conditions that have held for as long as their rules ask for.

Pure, and used by one event loop. An alert whose condition ends for a moment goes on, as its cause mostly does.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from gpuwarden.config import rule_settings
from gpuwarden.config.value_types import DURATION
from gpuwarden.health.conditions import ALERTS, ConditionChecks
from gpuwarden.health.model import Alert, Condition, Key, filled
from gpuwarden.state import State

log = logging.getLogger(__name__)

STEADY_SECONDS = 15.0  # that an alert goes on after its condition ends, where its rule asks for no longer
# Of each severity; further ones are counted and dropped. A box has some hundreds of GPUs and runs, and a thousand runs
# that died must not keep the alert of a lost GPU out.
MAX_ALERTS = 1000


@dataclass(slots=True)
class _Episode:
    """A condition that holds, or did until a moment ago; times are monotonic."""

    alert: Alert  # with the numbers of the last poll in which it held
    began: float
    held: float
    fires: bool = False


class AlertEvaluator:
    """Follows conditions from poll to poll. `now` is monotonic."""

    def __init__(self, conditions: Collection[Condition] = ALERTS.values()) -> None:
        self.dropped = 0  # alerts beyond MAX_ALERTS, each once
        self._checks = ConditionChecks(conditions)
        values = rule_settings.values()
        self._holds = {each.name: _seconds(each.hold, values) for each in conditions}
        self._keeps = {each.name: max(_seconds(each.keep, values), STEADY_SECONDS) for each in conditions}
        self._episodes: dict[Key, _Episode] = {}
        self._left_out: set[Key] = set()

    def update(self, state: State, now: float) -> tuple[list[Alert], list[Alert]]:
        """Evaluate a poll; return what fires now, and what has fired until the last poll and no longer does."""
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
        return list(self._firing(now)), ended

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


def _seconds(duration: str, values: Mapping[str, str]) -> float:
    return DURATION.read(filled(duration, values)) if duration else 0.0
