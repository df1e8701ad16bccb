"""Model of conditions: their fields, and the alerts that their checks return.

Expressions and texts contain placeholders `%{name}`: configurable numbers (config/rule_settings.py), and joins and
sentences that several rules share (alerts/templates.py).
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
from gpuwarden.severity import Severity
from gpuwarden.state import Alert, State

Subject = Literal["run", "gpu", "box"]
Labels = Mapping[str, str]
_NO_LABELS: Labels = {}
_TEXTS = ("summary", "description", "fires", "meaning", "diagnosis", "action", "false_positives")

_PRESSURE_SUFFIXES: Mapping[Level, str] = {"critical": "Critical", "warning": ""}  # of the names of conditions

# Label that identifies the subject of an alert, used to silence it.
SUBJECT_LABELS: Mapping[Subject, str] = {"run": "run_id", "gpu": "uuid", "box": "instance"}

# keep_firing_for of critical alerts: Prometheus resolves an alert as soon as a scrape fails, which would send
# "resolved" at each restart of the daemon, until GpuwardenDown fires.
OUTLIVES_RESTART = "2m"

# PromQL suffix of an expression by run and device: drops runs that the driver's list of processes cannot confirm.
UNLESS_UNVERIFIED = "unless on (cluster, job, instance, run_id, uuid) gpuwarden_run_device_verified == 0"

_PLACE = re.compile(r"%\{([\w.]+)\}")
_SUBJECT_WORDS = {"the_run": "Training run", "the_gpu": "GPU", "on_host": ""}
_SUBJECT_PLACE = re.compile(rf"%\{{({'|'.join(_SUBJECT_WORDS)})\}}")

Check = Callable[[State], Iterable[Alert]]  # without the name and severity of the condition
Ending = Callable[[Labels, State], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A problem of a run, a GPU or the host that gpuwarden detects.

    `expr` is the PromQL of its alert; empty for a condition that is shown and has no alert. Its result has the label
    `run_id` or `uuid`, with which `query` joins the names of the subjects in `joins` (None: the condition's own
    subject). `of_instances`: the device of a GPU condition can also be a MIG instance.
    `for_` and `keep_firing_for` are PromQL durations or placeholders, as in Prometheus.
    `check` evaluates the condition against one poll; None if that needs a history, or data from another machine. While
    the condition named `implied_by` holds, this one does not. `ending` returns how an alert ended whose condition no
    longer holds (empty: nothing to add), or None while it is unknown. `event_seconds` is how
    long an event is reported, also after a restart of the daemon.
    `summary` has the place `the_run`, `the_gpu` or `on_host` of its subject; `description` is a template of
    Prometheus. The other texts are Markdown for the docs, the alert's page and messages: `fires` says how long the
    alert fires, where that differs from how long its condition holds; `meaning`, `diagnosis`, `action` and
    `false_positives` are sections of the alert's reference. While a condition without `links_to_daemon` holds, pages
    of the daemon cannot be read.
    """

    name: str
    subject: Subject
    severity: Severity
    expr: str = ""
    for_: str = ""
    keep_firing_for: str = ""
    check: Check | None = None
    implied_by: str = ""
    ending: Ending | None = None
    event_seconds: float | None = None
    summary: str
    description: str = ""
    fires: str = ""
    meaning: str
    diagnosis: str
    action: str
    false_positives: str
    of_instances: bool = False
    links_to_daemon: bool = True
    joins: tuple[Subject, ...] | None = None

    def __post_init__(self) -> None:
        """Join the lines of the texts."""
        for name in _TEXTS:
            object.__setattr__(self, name, " ".join(getattr(self, name).split()))

    @property
    def title(self) -> str:
        """Summary of any subject."""
        return _SUBJECT_PLACE.sub(lambda found: _SUBJECT_WORDS[found[1]], self.summary)

    @property
    def query(self) -> str:
        """Expression, joined with the names of its run or GPU."""
        expr = cleandoc(self.expr)
        subjects = {"run": ("run",), "gpu": ("gpu",), "box": ()}[self.subject] if self.joins is None else self.joins
        if not subjects:
            return expr
        group = f"(\n{indent(expr, '  ')}\n)" if "\n" in expr else f"({expr})"
        return "\n".join([group, *(f"  %{{of_{each}}}" for each in subjects)])


def run_alert(
    state: State,
    run: RunSnapshot,
    text: str,
    description: str,
    labels: Labels = _NO_LABELS,
    *,
    since: float | None = None,
    happened: float | None = None,
    detail: str = "",
) -> Alert:
    """Return the alert of a run; it starts at this poll, at `since`, or as an event at `happened` (Unix time)."""
    return Alert(
        labels={"run_id": run.peer.run_id, "run_name": run.hello.name, **labels},
        text=text,
        description=description,
        since=next(at for at in (happened, since, state.snapshot.time) if at is not None),
        owner=process_owner_text(state.owners, run.peer.pid, run.peer.uid),
        last=happened or 0.0,
        detail=detail,
    )


def gpu_alert(
    state: State,
    gpu: Gpu,
    text: str,
    description: str,
    labels: Labels = _NO_LABELS,
    *,
    happened: float | None = None,
    detail: str = "",
) -> Alert:
    """Return the alert of a GPU; it starts at this poll, or as an event at `happened` (Unix time)."""
    return Alert(
        labels={**device_labels(gpu.identity.uuid, gpu), **labels},
        text=text,
        description=description,
        since=state.snapshot.time if happened is None else happened,
        owner=gpu_owner_text(state.owners, gpu),
        last=happened or 0.0,
        detail=detail,
    )


def pressure_conditions(
    name: str,
    subject: Subject,
    check: Callable[[Level], Check],
    *,
    ending: Ending | None = None,
    summary: str,
    diagnosis: str,
    action: str,
    false_positives: str,
) -> tuple[Condition, ...]:
    """Return the pressure conditions, one for each level; they are shown and sent as advice, and have no alert."""
    return tuple(
        Condition(
            name=f"{name}{suffix}",
            subject=subject,
            severity="critical" if level == "critical" else "warning",
            check=check(level),
            ending=ending,
            summary=summary,
            meaning=f"Pressure level *{level}* ([pressure](understand/pressure.md)).",
            diagnosis=diagnosis,
            action=action,
            false_positives=false_positives,
        )
        for level, suffix in _PRESSURE_SUFFIXES.items()
    )


def fill_places(text: str, values: Mapping[str, str]) -> str:
    """Return a text with its placeholders replaced; raises KeyError for an unknown one."""
    return _PLACE.sub(lambda found: fill_places(values[found[1]], values), text)


def device_labels(uuid: str, gpu: Gpu) -> dict[str, str]:
    """Return the labels of a device; a MIG instance has the index and name of its GPU."""
    return {"uuid": uuid, "gpu": str(gpu.identity.index), "name": gpu.identity.name}


def run_text(run: RunSnapshot) -> str:
    """Return the name of a run for a sentence."""
    return f"Run {run.hello.name} ({run.peer.run_id})"


def gpu_text(gpu: Gpu) -> str:
    """Return the name of a GPU for a sentence."""
    return f"GPU {gpu.identity.index} ({gpu.identity.name})"


def ago_text(state: State, at: float) -> str:
    """Format the time from an event until this poll."""
    return f"{format_elapsed(max(state.snapshot.time - at, 0.0))} ago"
