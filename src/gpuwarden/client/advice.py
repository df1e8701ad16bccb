"""What this process has been told by the daemon: the pressure on its GPUs now, and what there is to act on."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple, TypeVar

from gpuwarden.protocol import LEVELS, MAX_DEVICES, RESOURCES, Advice, Level

log = logging.getLogger("gpuwarden")

MAX_SOURCES = MAX_DEVICES * (len(RESOURCES) + 1)  # of advice that are told apart
MAX_ALARMS = 16  # that wait to be answered
MAX_ANSWERING = 64  # who answer, the last of a process
MAX_LINES = 20  # of the log, an hour
HOUR = 3600.0
EVENT_LASTS = 600.0  # seconds in which an event that comes again is the same episode
RETURN = 60.0  # seconds in which a daemon that comes again goes on with the episodes of before

_GRAVITY = {level: gravity for gravity, level in enumerate(LEVELS)}

Key = TypeVar("Key", bound=Hashable)


@dataclass(slots=True)
class _Episode:
    """A time in which something was the matter: the worst that was said of it, and until when it lasts (monotonic)."""

    worst: Level = "none"
    until: float = inf


class _Alarm(NamedTuple):
    """An episode that has come to a level it had not had, by what was said; `serial` counts them."""

    serial: int
    before: Level
    advice: Advice


class Told:
    """What the daemon has told this process's run, whoever trains in it.

    Pressure on a resource of any of the run's devices is one episode, from where there was none until there is none any
    more. An event does not end: one of its kind is the same episode where it comes within EVENT_LASTS. Each episode has
    a line in the log for each device, and one more where it gets worse.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last: Advice | None = None
        self._levels: dict[tuple[str, str], Level] = {}  # by UUID and resource, of those under pressure
        self._by_device: dict[tuple[str, str], _Episode] = {}  # for the log
        self._by_subject: dict[str, _Episode] = {}  # for what is done about it
        self._alarms: deque[_Alarm] = deque(maxlen=MAX_ALARMS)
        self._raised = 0
        self._answered: dict[Hashable, int] = {}
        self._lines: deque[float] = deque(maxlen=MAX_LINES)

    @property
    def pressure(self) -> Level:
        """The worst level on the run's devices now; "none" where no daemon says otherwise."""
        return max(tuple(self._levels.values()), key=_GRAVITY.__getitem__, default="none")

    def pressure_on(self, uuid: str, resource: str) -> Level:
        """Give the level of one device's resource."""
        return self._levels.get((uuid, resource), "none")

    def take(self, advice: Advice, now: float) -> None:
        """Take note of advice; `now` is monotonic."""
        self.count += 1
        self.last = advice
        subject, pressed = _subject(advice)
        device = advice.uuid, subject
        if device not in self._by_device and len(self._by_device) >= MAX_SOURCES:
            return
        until = inf if pressed else now + EVENT_LASTS
        if advice.level == "none":
            self._levels.pop(device, None)
            if self._by_device.pop(device, None) is not None:
                self._write(logging.INFO, advice, now)
            self._relieve(subject, now)
            return
        if pressed:
            self._levels[device] = advice.level
        if _worsened(self._by_device, device, advice.level, until, now) is not None:
            self._write(logging.WARNING, advice, now)
        before = _worsened(self._by_subject, subject, advice.level, until, now)
        if before is not None:
            self._raised += 1
            self._alarms.append(_Alarm(self._raised, before, advice))

    def _relieve(self, subject: str, now: float) -> None:
        """End the episode as far as devices go of which nothing is the matter any more.

        Of some a daemon may have told that is no more: those are part of it for RETURN, and for ever if that were not
        looked at, as the next daemon has nothing to say of them.
        """
        on_others = [each.until for (_, other), each in self._by_device.items() if other == subject]
        until = max((each for each in on_others if each >= now), default=None)
        if until is None:
            self._by_subject.pop(subject, None)
        elif subject in self._by_subject:
            self._by_subject[subject].until = until

    def lose(self, now: float) -> None:
        """Take note that no daemon is there: nobody says any more that there is pressure."""
        if self._levels:
            self._levels.clear()
            for episodes in (self._by_device, self._by_subject):
                for each in episodes.values():
                    each.until = min(each.until, now + RETURN)

    def unanswered(self, who: Hashable, level: Level, now: float) -> list[Advice]:
        """Give the advice that `who` has not been given yet by which episodes that still last came to `level`."""
        since = self._answered.pop(who, 0)
        self._answered[who] = self._raised
        if len(self._answered) > MAX_ANSWERING:
            del self._answered[next(iter(self._answered))]
        return [
            each.advice
            for each in self._alarms
            if each.serial > since
            and _GRAVITY[each.before] < _GRAVITY[level] <= _GRAVITY[each.advice.level]
            and self._lasts(each.advice, now)
        ]

    def _lasts(self, advice: Advice, now: float) -> bool:
        episode = self._by_subject.get(_subject(advice)[0])
        return episode is not None and now <= episode.until

    def _write(self, severity: int, advice: Advice, now: float) -> None:
        """Write a line to the log, one of MAX_LINES an hour."""
        if len(self._lines) == MAX_LINES and now - self._lines[0] < HOUR:
            return
        self._lines.append(now)
        with contextlib.suppress(Exception):  # a logging handler of the user's may raise
            subject, pressed = _subject(advice)
            log.log(severity, "%s%s %s: %s", subject, " pressure" if pressed else "", advice.level, advice.text)


def _subject(advice: Advice) -> tuple[str, bool]:
    """Say what advice is about, and whether that is pressure, which ends, and no event."""
    pressed = advice.kind == "pressure" and advice.resource is not None
    return str(advice.resource if pressed else advice.kind), pressed


def _worsened(episodes: dict[Key, _Episode], key: Key, level: Level, until: float, now: float) -> Level | None:
    """Give the worst level that this episode had, if this one is worse, else None."""
    episode = episodes.get(key)
    if episode is None or now > episode.until:
        episode = episodes[key] = _Episode()
    episode.until = until
    before = episode.worst
    if _GRAVITY[level] <= _GRAVITY[before]:
        return None
    episode.worst = level
    return before
