"""What one receiver of alerts is still to be told, or to be told again: filled by the event loop, emptied by a thread.

Bounded, as it holds alerts and not messages: what happens to one while nobody takes it replaces what was to be said.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpuwarden.alerts.alert import Alert, Key

MOST_ENDED = 1000  # that wait to be told, beyond which the oldest are left to expire
BATCH = 64  # alerts in one message, as Prometheus has it


@dataclass(slots=True)
class _Entry:
    """One alert; times are monotonic."""

    alert: Alert
    due: float
    tried: bool = False
    taken: bool = False  # by the receiver, as far as it has said so
    ended: float | None = None


class Post(NamedTuple):
    """One alert that is to be told now, and for how many seconds it has been over, if it is."""

    alert: Alert
    over: float | None


class Outbox:
    """Alerts for one receiver, each told again every `resend` seconds while it fires.

    Its end is told as much later, and nothing in between: who else tells of the same alert has seen its end by then
    too, and neither takes the other's word back. The receiver takes one that is told no more for over after `lasts`
    seconds. `see` never blocks.
    """

    def __init__(self, resend: float, lasts: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.dropped = 0  # alerts that were over before they were taken, and ends beyond MOST_ENDED
        self._resend = resend
        self._lasts = lasts
        self._clock = clock
        self._entries: dict[Key, _Entry] = {}
        self._paused_until = -math.inf
        self._closed = False
        self._news = threading.Condition()  # over all of it

    def see(self, firing: Sequence[Alert], ended: Iterable[Alert]) -> None:
        """Take what fires at a poll, and what does no more."""
        with self._news:
            now = self._clock()
            news = [self._take_firing(alert, now) for alert in firing] + [self._end(alert, now) for alert in ended]
            self._forget(now)
            if any(news):
                self._news.notify()

    def _take_firing(self, alert: Alert, now: float) -> bool:
        """Keep what is said of it now; tell whether it is new."""
        entry = self._entries.get(alert.key)
        if entry is not None and entry.ended is None:
            entry.alert = alert
            return False
        self._entries[alert.key] = _Entry(alert, now)
        return True

    def _end(self, alert: Alert, now: float) -> bool:
        entry = self._entries.get(alert.key)
        if entry is None:
            return False
        if not entry.tried:
            del self._entries[alert.key]
            self.dropped += 1
            return False
        entry.alert, entry.ended, entry.due = alert, now, now + self._resend
        return True

    def _forget(self, now: float) -> None:
        """Forget ends that the receiver has seen by itself by now, and the oldest of too many."""
        ended = [(each.ended, key) for key, each in self._entries.items() if each.ended is not None]
        if not ended:
            return
        ended.sort()
        many = max(len(ended) - MOST_ENDED, 0)
        for number, (at, key) in enumerate(ended):
            if number < many or now - at >= self._lasts:
                self.dropped += number < many or not self._entries[key].taken
                del self._entries[key]

    def take(self) -> list[Post]:
        """Wait until something is due, and return it, ends first; nothing once it is closed. For the thread."""
        with self._news:
            while not self._closed:
                now = self._clock()
                due = [each for each in self._entries.values() if each.due <= now]
                if due and now >= self._paused_until:
                    due.sort(key=lambda each: (each.ended is None, each.due))
                    for each in due[:BATCH]:
                        each.tried = True
                    return [Post(each.alert, None if each.ended is None else now - each.ended) for each in due[:BATCH]]
                self._news.wait(self._patience(now))
            return []

    def _patience(self, now: float) -> float | None:
        if not self._entries:
            return None
        return max(self._paused_until, min(each.due for each in self._entries.values())) - now

    def told(self, posts: Iterable[Post]) -> None:
        """Note that these have been told. For the thread."""
        with self._news:
            now = self._clock()
            for post in posts:
                entry = self._entries.get(post.alert.key)
                if entry is None or (entry.ended is None) is not (post.over is None):
                    continue  # it has ended, or begun anew, meanwhile
                if post.over is not None:
                    self.dropped += not entry.taken  # that it is over is news to nobody
                    del self._entries[post.alert.key]
                else:
                    entry.due, entry.taken = now + self._resend, True

    def rest(self, seconds: float) -> None:
        """Give nothing out for a while. For the thread."""
        with self._news:
            self._paused_until = self._clock() + seconds

    @property
    def pending(self) -> bool:
        """Whether something has still to be told for the first time, or that it is over."""
        with self._news:
            now = self._clock()
            return any(each.due <= now for each in self._entries.values())

    def close(self) -> None:
        """Give nothing out any more."""
        with self._news:
            self._closed = True
            self._news.notify_all()
