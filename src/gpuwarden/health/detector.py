"""Detector: the stage of a poll that decides what is wrong, for all readers.

It evaluates the table of conditions once a poll. A condition that another one implies does not hold. An alert is
pending until its condition has held for the duration `for_`, then firing, and keeps firing if the condition ends only
for a moment. When the condition has ended it is unconfirmed until a poll shows how it ended, then over. It reads only
the state of the poll. Used by one event loop.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from gpuwarden.config import rule_settings
from gpuwarden.config.value_types import DURATION
from gpuwarden.health.conditions import CHECKED, CONDITIONS
from gpuwarden.health.inhibitions import find_inhibiting
from gpuwarden.health.model import Condition, fill_places
from gpuwarden.runs.outcome import Ending
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.state import Alert, AlertKey, Detection, State

log = logging.getLogger(__name__)

STEADY_SECONDS = 15.0  # minimum of keep_firing_for
MAX_ALERTS = 1000  # of each condition; further ones are counted and dropped

# Longer than `for_` of any condition with a check: until then an alert of an earlier daemon cannot be resolved.
RESTORED_SECONDS = 120.0


@dataclass(slots=True)
class _Episode:
    """A condition that holds, or held until a moment ago; times are monotonic."""

    alert: Alert
    began: float
    held: float  # time of the last poll at which it held


@dataclass(slots=True)
class _Unconfirmed:
    alert: Alert
    earliest: float  # monotonic: not resolved before


class Detector:
    """Tracker of conditions from poll to poll. `now` is monotonic."""

    def __init__(self, conditions: Collection[Condition] = CHECKED) -> None:
        self.dropped = 0  # alerts above MAX_ALERTS, each counted once
        self._conditions = conditions
        values = rule_settings.placeholder_values()
        self._for_seconds = {each.name: _seconds(each.for_, values) for each in conditions}
        self._keep_firing_seconds = {
            each.name: max(_seconds(each.keep_firing_for, values), STEADY_SECONDS) for each in conditions
        }
        self._episodes: dict[AlertKey, _Episode] = {}
        self._open: dict[AlertKey, Alert] = {}  # those that hold, and those whose end is unknown
        self._resolution = Resolution()
        self._endings: Mapping[str, Ending | None] = {}  # of the runs of the previous poll
        self._left_out: set[AlertKey] = set()
        self._faulty: set[str] = set()

    def restore(self, alerts: Iterable[Alert], now: float, wall: float) -> None:
        """Add what an earlier daemon sent as firing; `wall` is `now` as Unix time."""
        self._resolution.restore(alerts, now, wall)

    def evaluate(self, state: State, now: float) -> Detection:
        """Evaluate the conditions against a poll; return what holds, and what has changed since the previous one."""
        held = list(self._track(state, now))
        ended = [each.alert for each in self._pop_ended(now) if each.alert.fires]
        inhibiting = find_inhibiting(each.alert for each in self._episodes.values())
        for key, episode in self._episodes.items():
            if episode.alert.inhibited_by != inhibiting.get(key, ()):
                episode.alert = replace(episode.alert, inhibited_by=inhibiting.get(key, ()))
        firing = [each.alert for each in self._episodes.values() if each.alert.fires]
        unconfirmed, resolved = self._resolution.evaluate(firing, ended, state, now)
        holding = {key: self._episodes[key].alert for key in held}
        before, self._open = self._open, dict(holding)
        closed = []
        for key, alert in before.items():
            if key not in holding:
                if (ending := _find_ending(alert, state)) is None:
                    self._open[key] = alert
                else:
                    closed.append(replace(alert, ending=ending))
        started = [run for run in state.runs if run.peer.run_id not in self._endings]
        return Detection(
            holding=tuple(holding.values()),
            opened=[alert for key, alert in holding.items() if key not in before],
            changed=[alert for key, alert in holding.items() if key in before and alert.last > before[key].last],
            closed=closed,
            firing=firing,
            unconfirmed=unconfirmed,
            resolved=resolved,
            started=started,
            ended=list(self._ended_runs(state)),
        )

    def _ended_runs(self, state: State) -> Iterator[RunSnapshot]:
        before = self._endings
        self._endings = {run.peer.run_id: run.ending for run in state.runs}
        for run in state.runs:
            known = before.get(run.peer.run_id)
            if run.ending is not None and (known is None or (run.ending.settled and run.ending != known)):
                yield run

    def _track(self, state: State, now: float) -> Iterator[AlertKey]:
        """Begin or continue the episode of each condition that holds; yield their keys."""
        left_out: set[AlertKey] = set()
        count = Counter(each.alert.name for each in self._episodes.values())
        evaluated = list(self._check_conditions(state))
        holding = {condition.name for condition, _found in evaluated}
        for condition, found in evaluated:
            if condition.implied_by in holding:
                continue
            name = condition.name
            alert = replace(found, name=name, severity=condition.severity)
            key = alert.key
            episode = self._episodes.get(key)
            if episode is None:
                if count[name] >= MAX_ALERTS:
                    left_out.add(key)
                    continue
                episode = self._episodes[key] = _Episode(alert, now, now)
                count[name] += 1
            known = episode.alert
            fires = known.fires or (bool(condition.expr) and now - episode.began >= self._for_seconds[name])
            episode.alert = replace(alert, since=known.since, fires=fires, inhibited_by=known.inhibited_by)
            episode.held = now
            yield key
        if left_out and not self._left_out:
            log.warning("too many active alerts, dropping new ones limit=%d", MAX_ALERTS)
        self.dropped += len(left_out - self._left_out)
        self._left_out = left_out

    def _check_conditions(self, state: State) -> Iterator[tuple[Condition, Alert]]:
        """Yield what the checks find. One that raises loses only its own alerts, and is logged once."""
        for condition in self._conditions:
            found: list[Alert] = []
            try:
                if condition.check:
                    found = list(condition.check(state))
            except Exception:
                if condition.name not in self._faulty:
                    self._faulty.add(condition.name)
                    log.exception("bug: condition check failed, please report it condition=%s", condition.name)
            yield from ((condition, alert) for alert in found)

    def _pop_ended(self, now: float) -> Iterator[_Episode]:
        """Remove and yield conditions that have ended; at once if they have not fired yet, as in Prometheus."""
        for key, episode in list(self._episodes.items()):
            keeps = self._keep_firing_seconds[episode.alert.name] if episode.alert.fires else 0.0
            if episode.held < now and now - episode.held >= keeps:
                yield self._episodes.pop(key)


class Resolution:
    """Tracker of unconfirmed alerts from poll to poll, so that "resolved" is never sent for a fault that may last."""

    def __init__(self) -> None:
        self._alerts: dict[AlertKey, _Unconfirmed] = {}

    def restore(self, alerts: Iterable[Alert], now: float, wall: float) -> None:
        """Add what an earlier daemon sent as firing; `wall` is `now` as Unix time.

        An event, which this daemon may not know, stays unresolved for as long as its alert would have fired.
        """
        for alert in alerts:
            event = CONDITIONS[alert.name].event_seconds
            age = wall - (alert.last or alert.since)
            lasts = RESTORED_SECONDS if event is None else min(event - age, event)
            self._alerts[alert.key] = _Unconfirmed(alert, now + lasts)

    def evaluate(
        self, firing: Iterable[Alert], ended: Iterable[Alert], state: State, now: float
    ) -> tuple[frozenset[AlertKey], list[Alert]]:
        """Return the unconfirmed alerts at a poll, and the resolved ones with their endings."""
        for alert in firing:
            self._alerts.pop(alert.key, None)
        for alert in ended:
            self._alerts[alert.key] = _Unconfirmed(alert, now)
        resolved = []
        for key, each in list(self._alerts.items()):
            ending = _find_ending(each.alert, state)
            if now >= each.earliest and ending is not None:
                resolved.append(replace(each.alert, ending=ending))
                del self._alerts[key]
        return frozenset(self._alerts), resolved


def _find_ending(alert: Alert, state: State) -> str | None:
    """Return how an alert ended; None while that is unknown."""
    ending = CONDITIONS[alert.name].ending
    return ending(alert.labels, state) if ending else ""


def _seconds(duration: str, values: Mapping[str, str]) -> float:
    return DURATION.read(fill_places(duration, values)) if duration else 0.0
