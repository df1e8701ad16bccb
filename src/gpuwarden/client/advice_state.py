"""State of the daemon's advice to this process: current pressure on its GPUs, and advice to act on."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from gpuwarden.client.guard import log_safely
from gpuwarden.protocol.messages import LEVEL_RANK, RESOURCES, Action, Advice, Level
from gpuwarden.protocol.validators import MAX_DEVICES

MAX_EPISODES = MAX_DEVICES * (len(RESOURCES) + 1)  # devices times kinds of advice
MAX_LINES_PER_HOUR = 20  # in the log
HOUR_SECONDS = 3600.0
EVENT_EPISODE_SECONDS = 600.0  # a repeated event within this time belongs to the same episode
MIN_ACTION_INTERVAL_SECONDS = 30.0  # between actions of a kind: episodes are that far apart by default (pressure.hold)
MAX_ACTION_RATIO = 0.1  # of the training's time, spent in actions of a kind
RECONNECT_SECONDS = 60.0  # a daemon that reconnects within this time continues the episodes

_EVENT_TITLES = {
    "gpu_lost": "GPU lost",
    "co_tenant": "co-tenant",
    "unknown_gpu": "unknown GPU",
    "xid": "XID",
}  # in the log


@dataclass(slots=True)
class _Episode:
    """Period in which something was wrong with a device."""

    advice: Advice  # the last
    level: Level = "none"  # current pressure
    worst: Level = "none"  # worst level since its start
    until: float = inf  # monotonic
    answered: dict[Action, Level] = field(default_factory=dict)  # level at which each action has been taken

    @property
    def lasting_level(self) -> Level:
        """Level that holds now: that of an event until its episode ends."""
        return self.level if _find_subject(self.advice)[1] else self.worst


class AdviceState:
    """Advice received by this process's run, for all its fits and loops.

    Pressure on a resource is one episode, from its start on one of the run's devices until none has it. An event has no
    end: another one of its kind within EVENT_EPISODE_SECONDS belongs to the same episode. Each episode is logged once
    for each device, and again when it gets worse.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last: Advice | None = None
        self._episodes: dict[tuple[str, str], _Episode] = {}  # by UUID and subject
        self._next_action: dict[Action, float] = {}  # monotonic
        self._lines: deque[float] = deque(maxlen=MAX_LINES_PER_HOUR)

    @property
    def pressure(self) -> Level:
        """The worst level on the run's devices now; "none" where no daemon says otherwise."""
        return _find_worst(each.level for each in tuple(self._episodes.values()))

    def handle(self, advice: Advice, now: float) -> None:
        """Record and log advice; `now` is monotonic."""
        self.count += 1
        self.last = advice
        if advice.kind in ("leak", "unknown_gpu"):  # no action follows; a leak asks for a census
            self._log(logging.WARNING, advice, now)
            return
        subject, pressed = _find_subject(advice)
        device = advice.uuid, subject
        if device not in self._episodes and len(self._episodes) >= MAX_EPISODES:
            return
        lasting = self._list_lasting(subject, now)
        episode = self._episodes.pop(device, None)
        if advice.level == "none":
            if episode is not None:
                self._log(logging.INFO, advice, now)
                for each in lasting:  # the same episode continues on other devices
                    each.worst = _find_worst((each.worst, episode.worst))
            return
        if episode is None or now > episode.until:
            episode = _Episode(advice, answered=dict(lasting[0].answered) if lasting else {})
        episode.advice = advice
        if LEVEL_RANK[advice.level] > LEVEL_RANK[episode.worst]:
            episode.worst = advice.level
            self._log(logging.WARNING, advice, now)
        episode.level = advice.level if pressed else "none"
        episode.until = inf if pressed else now + EVENT_EPISODE_SECONDS
        self._episodes[device] = episode

    def disconnect(self, now: float) -> None:
        """Record that the connection is lost: pressure is unknown, reported as "none".

        The next daemon does not report that pressure ended meanwhile, so each episode ends after RECONNECT_SECONDS.
        """
        for each in self._episodes.values():
            if each.level != "none":
                each.level, each.until = "none", now + RECONNECT_SECONDS

    def pop_unanswered(self, action: Action, level: Level, now: float) -> list[Advice]:
        """Return advice of `level` or worse that still holds, and mark its episodes as answered by `action`.

        Empty while the last action is too recent; advice that still holds after that is returned then.
        """
        if now < self._next_action.get(action, 0.0):
            return []
        found: list[Advice] = []
        for subject in dict.fromkeys(subject for _, subject in self._episodes):
            lasting = self._list_lasting(subject, now)
            worst = max(lasting, key=lambda each: LEVEL_RANK[each.lasting_level], default=None)
            if worst is None or LEVEL_RANK[worst.lasting_level] < LEVEL_RANK[level]:
                continue
            if LEVEL_RANK[worst.answered.get(action, "none")] < LEVEL_RANK[level]:
                found.append(worst.advice)
                for each in lasting:
                    each.answered[action] = worst.lasting_level
        return found

    def record_action(self, action: Action, began: float, now: float) -> None:
        """Record an action from `began` to `now` (monotonic), and delay the next: flapping must cost little time."""
        self._next_action[action] = now + max(MIN_ACTION_INTERVAL_SECONDS, (now - began) / MAX_ACTION_RATIO)

    def _list_lasting(self, subject: str, now: float) -> list[_Episode]:
        return [each for (_, other), each in self._episodes.items() if other == subject and now <= each.until]

    def _log(self, severity: int, advice: Advice, now: float) -> None:
        if len(self._lines) == MAX_LINES_PER_HOUR and now - self._lines[0] < HOUR_SECONDS:
            return
        self._lines.append(now)
        subject, pressed = _find_subject(advice)
        title = f"{subject} pressure" if pressed else _EVENT_TITLES.get(subject, subject)
        log_safely(severity, "%s %s: %s", title, advice.level, advice.text)


def _find_subject(advice: Advice) -> tuple[str, bool]:
    """Return the subject of advice, and whether it is pressure, which ends, or else an event."""
    pressed = advice.kind == "pressure" and advice.resource is not None
    return str(advice.resource if pressed else advice.kind), pressed


def _find_worst(levels: Iterable[Level]) -> Level:
    return max(levels, key=LEVEL_RANK.__getitem__, default="none")
