"""Which alerts fire, from poll to poll: conditions that have held for as long as their rules ask for.

Pure, and used by one event loop. An alert that is over for a moment only goes on, as what it tells of mostly does.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from gpuwarden.alerts.prometheus_rules import ALERTS, Choices
from gpuwarden.alerts.rule import filled
from gpuwarden.config.schema import PressureConfig as Limits
from gpuwarden.config.value_types import DURATION
from gpuwarden.health.alert import Alert, Key
from gpuwarden.health.conditions import CONDITIONS, TOLD_ON, Condition
from gpuwarden.state import State

log = logging.getLogger(__name__)

STEADY_SECONDS = 15.0  # that an alert goes on when its condition holds no more, where its rule asks for no longer
# Of each severity, beyond which further ones are counted and not told: a box has some hundreds of GPUs and runs, and a
# thousand runs that died must not keep a lost GPU from being told.
MOST_FIRING = 1000


@dataclass(slots=True)
class _Episode:
    """A condition that holds, or did until a moment ago; times are monotonic."""

    alert: Alert  # with the numbers of the last poll in which it held
    began: float
    held: float
    fires: bool = False


class Firing:
    """Follows conditions. `now` is monotonic."""

    def __init__(self, limits: Limits, conditions: Mapping[str, Condition] = CONDITIONS) -> None:
        self.dropped = 0  # alerts beyond MOST_FIRING, each once
        self._limits = limits
        self._conditions = conditions
        values = Choices().values()
        self._holds = {name: _seconds(ALERTS[name].hold, values) for name in conditions}
        self._keeps = {
            name: max(_seconds(ALERTS[name].keep, values), TOLD_ON.get(name, STEADY_SECONDS)) for name in conditions
        }
        self._episodes: dict[Key, _Episode] = {}
        self._left_out: set[Key] = set()
        self._faulty: set[str] = set()  # conditions whose own fault is in the log

    def see(self, state: State, now: float) -> tuple[list[Alert], list[Alert]]:
        """Take a poll; return what fires now, and what has fired until the last poll and does no more."""
        left_out: set[Key] = set()
        count = Counter(each.alert.rule.severity for each in self._episodes.values())
        for alert in self._holding(state):
            key = alert.key
            episode = self._episodes.get(key)
            if episode is not None:
                episode.alert, episode.held = replace(alert, since=episode.alert.since), now
            elif count[alert.rule.severity] < MOST_FIRING:
                self._episodes[key] = _Episode(alert, now, now)
                count[alert.rule.severity] += 1
            else:
                left_out.add(key)
        if left_out and not self._left_out:
            log.warning("over %d alerts of a severity at once: nobody is told of further ones", MOST_FIRING)
        self.dropped += len(left_out - self._left_out)
        self._left_out = left_out
        ended = [each.alert for each in self._forgotten(now) if each.fires]
        return list(self._firing(now)), ended

    def _holding(self, state: State) -> Iterator[Alert]:
        """Give all that holds now. A row that meets a fault of our own costs its alerts alone, and is told once."""
        for name, condition in self._conditions.items():
            found: Iterable[Alert] = ()
            try:
                found = list(condition(state, self._limits))
            except Exception:
                if name not in self._faulty:
                    self._faulty.add(name)
                    log.exception("the alert %s meets an error of gpuwarden's own, please report it", name)
            yield from found

    def _forgotten(self, now: float) -> Iterator[_Episode]:
        """Forget and give what holds no more: at once where it has not fired yet, as Prometheus does."""
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
