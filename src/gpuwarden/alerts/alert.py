"""An alert as the daemon itself raises it: one of the rules' alerts, with the labels that Prometheus would give it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from gpuwarden.alerts.rule import AlertRule
from gpuwarden.alerts.rules import ALERTS

Key = tuple[str, tuple[tuple[str, str], ...]]


class Alert(NamedTuple):
    """One that fires, or has fired.

    `name` is that of its rule; `labels` are those of the rule's result, without `job`, `instance` and `severity`.
    `description` has its numbers, in one sentence for people; `owner` says who holds the memory or runs the run, in
    words, empty where nobody knows. `since` is Unix time. `ending` says how it ended, where nobody has seen it to be
    over.
    """

    name: str
    labels: Mapping[str, str]
    description: str
    since: float
    owner: str = ""
    ending: str = ""

    @property
    def rule(self) -> AlertRule:
        """The rule: severity, summary, what to do."""
        return ALERTS[self.name]

    @property
    def key(self) -> Key:
        """What makes it the same alert from poll to poll."""
        return self.name, tuple(sorted(self.labels.items()))


class Sink(Protocol):
    """Whom alerts are told: called by the event loop at each poll, and never blocks."""

    def see(self, firing: Sequence[Alert], ended: Sequence[Alert], now: float) -> None:
        """Take all that fire now, and those that fired at the last poll and do no more; `now` is Unix time."""

    async def stop(self) -> None:
        """Tell what is still to be told, for a short time, and end."""
