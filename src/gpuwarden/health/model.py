"""Model of what can be wrong: a condition with all that is known about it, and what its check finds.

Expressions and texts name numbers that can be set, and joins that many have, as `%{name}`: `rule_settings` has the
numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import cleandoc
from textwrap import indent
from typing import Literal

from gpuwarden.formatting import format_elapsed
from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.owners.owner_text import gpu_owner_text, process_owner_text
from gpuwarden.protocol.messages import Level
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.state import State

Severity = Literal["critical", "warning", "info"]
Subject = Literal["run", "gpu", "box"]
Labels = Mapping[str, str]
_NO_LABELS: Labels = {}
Key = tuple[str, tuple[tuple[str, str], ...]]

SEVERITY_RANK: Mapping[str, int] = {"critical": 0, "warning": 1, "info": 2}
_PRESSURE_SUFFIXES: Mapping[Level, str] = {"critical": "Critical", "warning": ""}  # of the names of conditions
PRESSURE_SEVERITY: Mapping[Level, Severity] = {"critical": "critical", "warning": "warning", "none": "info"}

# Labels by which one subject of an alert is told from another, as one would silence it.
SUBJECT_LABELS: Mapping[Subject, str] = {"run": "run_id", "gpu": "uuid", "box": "instance"}

# For how long a critical alert fires on (`keep`): Prometheus ends each at once whose daemon it cannot scrape, and
# people would be told that all is well while it is restarted, or until GpuwardenDown says otherwise.
OUTLIVES_RESTART = "2m"

_PLACE = re.compile(r"%\{([\w.]+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Occurrence:
    """A condition that holds at one poll, as its check reports it.

    `labels` are those of the rule's result, without `job`, `instance` and `severity`. `text` names it in a few words,
    to stand next to its subject; it is empty where another condition says the same. `description` is a sentence, with
    numbers; `owner` says who holds the memory or runs the run, in words, empty where that is unknown. `since` is Unix
    time, and so is `last`: of an event, when it happened last.
    """

    labels: Labels
    text: str
    description: str
    since: float
    owner: str = ""
    last: float = 0.0


Check = Callable[[State], Iterable[Occurrence]]
Ending = Callable[[Labels, State], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """One thing that can be wrong with a run, a GPU or the box.

    `expr` is the PromQL of its alert, empty for a condition that is shown and has no alert. It gives the labels
    `run_id` or `uuid`, by which `query` adds the names of the subjects in `names`; None is the condition's own subject.
    `of_instances` says that its device may be a MIG instance too, which only conditions of a `gpu` need to say.
    `hold` and `keep` are durations in PromQL, or places for them: how long the condition has to hold before its alert
    fires, and how long that fires on afterwards (keep_firing_for).
    `check` evaluates it against one poll: None where that takes a history, or another machine. While the condition
    named `implied_by` holds, no alert is raised of this one. `ending` returns how an alert has ended whose condition no
    longer holds, empty where that needs no words; None while this poll cannot tell. Of an event, which a daemon that
    restarts may not know, `event_seconds` is how long it is reported after it happened.
    `summary` is constant, `description` a template of Prometheus'. The rest is for the docs, in Markdown: `told` says
    for how long the alert fires where that is not as long as its condition holds; `means` what it is; `look` and `do`
    what to look at and do; `wrong` when it is wrong, and what to do then.
    """

    name: str
    subject: Subject
    severity: Severity
    expr: str = ""
    hold: str = ""
    keep: str = ""
    check: Check | None = None
    implied_by: str = ""
    ending: Ending | None = None
    event_seconds: float | None = None
    summary: str
    description: str = ""
    told: str = ""
    means: str
    look: str
    do: str
    wrong: str
    of_instances: bool = False
    names: tuple[Subject, ...] | None = None

    def __post_init__(self) -> None:
        """Join the lines that texts are written in."""
        for name in ("summary", "description", "told", "means", "look", "do", "wrong"):
            object.__setattr__(self, name, " ".join(getattr(self, name).split()))

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
class Alert:
    """A condition that has held for as long as its rule asks for, with the fields of its occurrence.

    `ending` says how it ended, where it was not seen to be over.
    """

    condition: Condition
    labels: Labels
    description: str
    since: float
    owner: str = ""
    last: float = 0.0
    ending: str = ""

    @property
    def name(self) -> str:
        """Name of the condition."""
        return self.condition.name

    @property
    def key(self) -> Key:
        """Identity of the alert from poll to poll."""
        return self.name, tuple(sorted(self.labels.items()))


def run_occurrence(
    state: State,
    run: RunSnapshot,
    text: str,
    description: str,
    labels: Labels = _NO_LABELS,
    *,
    since: float | None = None,
    happened: float | None = None,
) -> Occurrence:
    """Return an occurrence of a run with further labels: since this poll, since a time, or of an event at a time."""
    return Occurrence(
        labels={"run_id": run.peer.run_id, "run_name": run.hello.name, **labels},
        text=text,
        description=description,
        since=next(at for at in (happened, since, state.snapshot.time) if at is not None),
        owner=process_owner_text(state.owners, run.peer.pid, run.peer.uid),
        last=happened or 0.0,
    )


def gpu_occurrence(
    state: State,
    gpu: Gpu,
    text: str,
    description: str,
    labels: Labels = _NO_LABELS,
    *,
    happened: float | None = None,
) -> Occurrence:
    """Return an occurrence of a GPU with further labels: since this poll, or of an event at a time."""
    return Occurrence(
        labels={**device_labels(gpu.identity.uuid, gpu), **labels},
        text=text,
        description=description,
        since=state.snapshot.time if happened is None else happened,
        owner=gpu_owner_text(state.owners, gpu),
        last=happened or 0.0,
    )


def pressure_conditions(
    name: str, subject: Subject, check: Callable[[Level], Check], *, summary: str, look: str, do: str, wrong: str
) -> tuple[Condition, ...]:
    """Return the conditions of pressure, one a level: they are shown, and advice goes by them; none has an alert."""
    return tuple(
        Condition(
            name=f"{name}{suffix}",
            subject=subject,
            severity=PRESSURE_SEVERITY[level],
            check=check(level),
            summary=summary,
            means=f"Its pressure is *{level}* ([pressure.md](understand/pressure.md)).",
            look=look,
            do=do,
            wrong=wrong,
        )
        for level, suffix in _PRESSURE_SUFFIXES.items()
    )


def fill_places(text: str, values: Mapping[str, str]) -> str:
    """Return a text with its places filled; raises KeyError for one that is unknown."""
    return _PLACE.sub(lambda found: fill_places(values[found[1]], values), text)


def device_labels(uuid: str, gpu: Gpu) -> dict[str, str]:
    """Return the labels of a device; a MIG instance has the index and the name of its GPU."""
    return {"uuid": uuid, "gpu": str(gpu.identity.index), "name": gpu.identity.name}


def run_text(run: RunSnapshot) -> str:
    """Name a run in a sentence."""
    return f"Run {run.hello.name} ({run.peer.run_id})"


def gpu_text(gpu: Gpu) -> str:
    """Name a GPU in a sentence."""
    return f"GPU {gpu.identity.index} ({gpu.identity.name})"


def ago_text(state: State, at: float) -> str:
    """Return how long before this poll something was."""
    return f"{format_elapsed(max(state.snapshot.time - at, 0.0))} ago"
