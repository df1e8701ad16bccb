"""What one target is to be told, and what it has been told. Pure; times are monotonic, in seconds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuwarden.alerts.alert import Alert, Key
from gpuwarden.alerts.inhibition import hidden
from gpuwarden.alerts.notify.message import RANK, Told
from gpuwarden.config import Notify

MOST_ALERTS = 2000  # of each severity, kept at once; further ones are counted as dropped
RECALLED_SECONDS = 15.0  # until what is remembered and does not fire is gone
LATEST_SECONDS = 3600.0  # how long an alert that is over is kept for a target that does not take it

_NEARLY = 0.5  # of the time to a repetition: one that is that old goes along with another


@dataclass(slots=True)
class Entry:
    """One alert: since when it is known, when it was told, and since when it is gone; whether it only lingers."""

    alert: Alert
    began: float
    told: float | None = None
    gone: float | None = None
    lingers: bool = False


class Book:
    """Follows what fires. An alert that is gone for less than `resolve_after` counts as if it had never been gone.

    One that another hides, which says more, is not begun to be told; what has been told of it stands.
    """

    def __init__(self, settings: Notify, least: str) -> None:
        self.dropped = 0
        self._settings = settings
        self._least = RANK[least]
        self._entries: dict[Key, Entry] = {}
        self._left_out: set[Key] = set()

    def remember(self, told: Iterable[tuple[Alert, float]], now: float) -> None:
        """Take what an earlier daemon told, so many seconds ago.

        Unless it fires by the next polls, which go on with it where it is not over, it is gone.
        """
        for alert, seconds in told:
            known = self._entries.get(alert.key)
            gone = now + RECALLED_SECONDS if known is None else known.gone
            kept = alert if known is None else known.alert
            self._entries[alert.key] = Entry(kept, now, told=now - seconds, gone=gone)

    def see(
        self, firing: Sequence[Alert], now: float, lingering: Collection[Key] = (), over: Iterable[Alert] = ()
    ) -> None:
        """Take all that fires now, what does no more and may not be over, and what is over, with how it ended."""
        current = {alert.key: alert for alert in firing if self._concerns(alert)}
        says_less = hidden(current.values())
        self._note_gone(current, lingering, over, now)
        left_out: set[Key] = set()
        count = Counter(entry.alert.rule.severity for entry in self._entries.values())
        for key, alert in current.items():
            known = self._entries.get(key)
            if known is not None:
                known.alert, known.gone = alert, None
                if key in says_less and known.told is None:
                    del self._entries[key]
            elif key in says_less:
                continue
            elif count[alert.rule.severity] < MOST_ALERTS:
                self._entries[key] = Entry(alert, now)
                count[alert.rule.severity] += 1
            else:
                left_out.add(key)
        self.dropped += len(left_out - self._left_out)
        self._left_out = left_out
        for key, entry in list(self._entries.items()):
            if self._is_over(entry, now) and entry.told is not None and not self._settings.resolved:
                del self._entries[key]

    def _note_gone(
        self, current: Collection[Key], lingering: Collection[Key], over: Iterable[Alert], now: float
    ) -> None:
        for key, entry in self._entries.items():
            entry.lingers = key in lingering
            if entry.lingers:
                entry.gone = None
            elif key not in current and entry.gone is None:
                entry.gone = now
        for alert in over:
            if alert.key in self._entries:
                self._entries[alert.key].alert = alert

    def _concerns(self, alert: Alert) -> bool:
        return RANK[alert.rule.severity] <= self._least and alert.name not in self._settings.mute

    def give_up(self, now: float) -> None:
        """Drop what is over for long and could not be told: its target takes nothing."""
        for key, entry in list(self._entries.items()):
            if entry.gone is not None and now - entry.gone > LATEST_SECONDS + self._settings.resolve_after:
                self.dropped += 1
                del self._entries[key]

    def due(self) -> tuple[float, float]:
        """Say when something is to be told, and when something new and critical is; infinity for never."""
        soonest = urgent = math.inf
        for entry in self._entries.values():
            at = self._due(entry)
            soonest = min(soonest, at)
            if entry.told is None and entry.alert.rule.severity == "critical":
                urgent = min(urgent, at)
        return soonest, urgent

    @property
    def has_new(self) -> bool:
        """Whether there is something that was never told."""
        return any(entry.told is None for entry in self._entries.values())

    def take(self, now: float, wall: float) -> tuple[Told, ...]:
        """Return all that can be said now, once anything is due; `wall` is the same time as Unix time."""
        found = []
        for entry in self._entries.values():
            since = wall - (now - entry.gone) if entry.gone is not None and self._is_over(entry, now) else None
            if entry.told is None or since is not None:
                found.append(Told(entry.alert, over=since))
            elif entry.gone is None and not entry.lingers and now - entry.told >= _NEARLY * self._settings.repeat:
                found.append(Told(entry.alert, again=True))
        return tuple(found)

    def standing(self, besides: Iterable[Told]) -> Mapping[str, int]:
        """Count what fires still and is not told now, by name."""
        told = {each.alert.key for each in besides}
        return Counter(e.alert.name for key, e in self._entries.items() if key not in told and e.gone is None)

    def mark(self, told: Iterable[Told], now: float) -> None:
        """Note what has been told."""
        for each in told:
            entry = self._entries.get(each.alert.key)
            if entry is None:
                continue
            if each.over is None:
                entry.told = now
            elif entry.gone is not None:
                del self._entries[each.alert.key]
            else:  # it came back while it was told to be over
                entry.told, entry.began = None, now

    def told(self, now: float) -> Iterator[tuple[Alert, float]]:
        """Give what the target knows to fire, and how many seconds ago it was told."""
        for entry in self._entries.values():
            if entry.told is not None:
                yield entry.alert, now - entry.told

    def _is_over(self, entry: Entry, now: float) -> bool:
        return entry.gone is not None and now - entry.gone >= self._settings.resolve_after

    def _due(self, entry: Entry) -> float:
        if entry.told is None:
            return entry.began + self._settings.group_wait
        if entry.gone is None:
            return math.inf if entry.lingers else entry.told + self._settings.repeat
        return entry.gone + self._settings.resolve_after if self._settings.resolved else math.inf
