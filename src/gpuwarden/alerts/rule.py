"""Rule: an alert for Prometheus with all its texts for people, or a recording rule that alerts are made from.

Expressions and texts name numbers that can be set, and joins that many have, as `%{name}`: `settings` has the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import cleandoc
from textwrap import indent
from typing import Literal

Severity = Literal["critical", "warning", "info"]
Subject = Literal["run", "gpu", "box"]

# Labels by which one subject of an alert is told from another, as one would silence it.
SUBJECT_LABELS: Mapping[Subject, str] = {"run": "run_id", "gpu": "uuid", "box": "instance"}

# Joins that give a sample the names of its run or device, by which people know them.
JOINS = {
    "of_run": "* on (cluster, job, instance, run_id) group_left (run_name) gpuwarden_run_info",
    "of_gpu": "* on (cluster, job, instance, uuid) group_left (gpu, name) gpuwarden:device:info",
}

# For how long a critical alert fires on (`keep`): Prometheus ends each at once whose daemon it cannot scrape, and
# people would be told that all is well while it is restarted, or until GpuwardenDown says otherwise.
OUTLIVES_RESTART = "2m"

_PLACE = re.compile(r"%\{([\w.]+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingRule:
    """A series made from others, `name` by Prometheus' custom level:metric:operation."""

    name: str
    expr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertRule:
    """One alert.

    `expr` gives the labels `run_id` or `uuid`, by which `query` adds the names of the subjects in `names`; None is the
    alert's own subject. `of_instances` says that its device may be a MIG instance too, which only alerts of a `gpu`
    need to say.
    `hold` and `keep` are durations in PromQL, or places for them: how long the expression has to hold before it fires,
    and how long it fires on after that (keep_firing_for). `summary` is constant, `description` a template of
    Prometheus'. The rest is for the docs, in Markdown: `told` says for how long it fires where that is not as long as
    its condition holds; `means` what it is; `look` and `do` what to look at and do; `wrong` when it is wrong, and what
    to do then.
    """

    name: str
    subject: Subject
    severity: Severity
    expr: str
    hold: str = ""
    keep: str = ""
    summary: str
    description: str
    told: str = ""
    means: str
    look: str
    do: str
    wrong: str
    of_instances: bool = False
    names: tuple[Subject, ...] | None = None

    @property
    def query(self) -> str:
        """Expression with the joins that add the names of its run or GPU."""
        expr = cleandoc(self.expr)
        subjects = {"run": ("run",), "gpu": ("gpu",), "box": ()}[self.subject] if self.names is None else self.names
        if not subjects:
            return expr
        group = f"(\n{indent(expr, '  ')}\n)" if "\n" in expr else f"({expr})"
        return "\n".join([group, *(f"  %{{of_{each}}}" for each in subjects)])


@dataclass(frozen=True, slots=True)
class Group:
    """Rules that Prometheus evaluates one after the other, and no more often than every `least_interval` seconds."""

    name: str
    rules: tuple[RecordingRule | AlertRule, ...]
    least_interval: float = 0.0

    @property
    def recorded(self) -> tuple[RecordingRule, ...]:
        """Recording rules."""
        return tuple(rule for rule in self.rules if isinstance(rule, RecordingRule))

    @property
    def alerts(self) -> tuple[AlertRule, ...]:
        """Alert rules."""
        return tuple(rule for rule in self.rules if isinstance(rule, AlertRule))


def filled(text: str, values: Mapping[str, str]) -> str:
    """Return a text with its places filled; raises KeyError for one that nobody knows."""
    return _PLACE.sub(lambda found: filled(values[found[1]], values), text)
