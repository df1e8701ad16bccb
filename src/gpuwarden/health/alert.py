"""An alert as the daemon itself raises it: one of the rules' alerts, with the labels that Prometheus would give it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuwarden.alerts.prometheus_rules import ALERTS
from gpuwarden.alerts.rule import AlertRule

Key = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Alert:
    """One that fires, or has fired.

    `name` is that of its rule; `labels` are those of the rule's result, without `job`, `instance` and `severity`.
    `description` has its numbers, in one sentence for people; `owner` says who holds the memory or runs the run, in
    words, empty where nobody knows. `since` is Unix time, and so is `last`: of an event, when it
    happened last. `ending` says how it ended, where nobody has seen it to be over.
    """

    name: str
    labels: Mapping[str, str]
    description: str
    since: float
    owner: str = ""
    last: float = 0.0
    ending: str = ""

    @property
    def rule(self) -> AlertRule:
        """The rule: severity, summary, what to do."""
        return ALERTS[self.name]

    @property
    def key(self) -> Key:
        """Identity of the alert from poll to poll."""
        return self.name, tuple(sorted(self.labels.items()))
