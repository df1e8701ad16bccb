"""Events of a run's memory, for the text next to its chart: a bounded number of each kind.

Of each kind the first and the newest are kept, as these show how it began and how it ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from gpuwarden.protocol.messages import Action, Phase, Report
from gpuwarden.severity import Severity

RunEventKind = Literal["phase", "batch_size", "retry", "out_of_memory", "co_tenant", "pressure", "event"]
MAX_EVENTS_PER_KIND = 8
MAX_EVENT_TEXT = 200  # characters

_FIRST: dict[Phase, str] = {"train": "training starts", "test": "first evaluation", "predict": "first prediction"}
_ACTIONS: dict[Action, str] = {
    "stop": "on_pressure stops training",
    "checkpoint": "on_pressure saved a checkpoint",
    "call": "on_pressure called the program's function",
}


@dataclass(frozen=True, slots=True)
class RunEvent:
    """Event of the run that concerns its memory."""

    at_seconds: Annotated[float, "Time, in seconds since the run started."]
    kind: Annotated[RunEventKind, "phase, batch_size, retry, out_of_memory, co_tenant, pressure or event."]
    text: Annotated[str, "Description."]
    uuid: Annotated[str | None, "GPU or MIG instance of the event."] = None
    level: Annotated[Severity | None, "Severity of a problem, as of alerts: warning or critical."] = None


def bounded(events: Iterable[RunEvent]) -> tuple[RunEvent, ...]:
    """Return the events in order of time, of each kind the first and the newest."""
    by_kind: dict[RunEventKind, list[RunEvent]] = {}
    for event in sorted(events, key=lambda event: event.at_seconds):
        by_kind.setdefault(event.kind, []).append(event)
    kept = (each for alike in by_kind.values() for each in (*alike[:1], *alike[1:][-(MAX_EVENTS_PER_KIND - 1) :]))
    return tuple(sorted(map(_clipped, kept), key=lambda event: event.at_seconds))


def _clipped(event: RunEvent) -> RunEvent:
    return event if len(event.text) <= MAX_EVENT_TEXT else replace(event, text=event.text[:MAX_EVENT_TEXT])


def join_events(events: Iterable[RunEvent], later: Iterable[RunEvent]) -> tuple[RunEvent, ...]:
    """Return events with those of a later daemon, which repeats some of the earlier ones: these count once."""
    before = list(events)
    known = {(each.kind, each.text) for each in before if each.kind == "batch_size" or each.text in _FIRST.values()}
    return bounded(dict.fromkeys((*before, *(each for each in later if (each.kind, each.text) not in known))))


class ReportEvents:
    """Events derived from one run's reports: phases, batch sizes, retries, actions on advice, a NaN loss."""

    def __init__(self) -> None:
        self.events: tuple[RunEvent, ...] = ()
        self._phases: set[Phase] = set()

    def add_report(self, before: Report | None, report: Report, at: float) -> None:
        """Add the events of a report; `before` is the previous one."""
        new: list[RunEvent] = []
        if (before is None or report.phase != before.phase) and (text := self._phase_text(before, report.phase)):
            new.append(RunEvent(at, "phase", text))
        largest = report.largest_batch_size
        if largest is not None and (before is None or largest != before.largest_batch_size):
            new.append(RunEvent(at, "batch_size", f"batch size {largest}"))
        if before is not None and report.oom_retries > before.oom_retries:
            smaller = "" if report.batch_size is None else f" with batch size {report.batch_size}"
            new.append(RunEvent(at, "retry", f"restarts{smaller} after an out-of-memory error"))
        for action, text in _ACTIONS.items():
            if before is not None and report.actions.get(action, 0) > before.actions.get(action, 0):
                new.append(RunEvent(at, "pressure", text))
        loss, known = report.nonfinite_loss, before.nonfinite_loss if before else None
        if loss and loss.steps and not (known and known.steps):
            text = f"loss NaN or infinite by step {loss.first}"
            new.append(RunEvent(max(at - loss.seconds_ago, 0.0), "event", text, level="warning"))
        if loss and loss.validations and not (known and known.validations):
            new.append(RunEvent(at, "event", "validation loss NaN or infinite", level="warning"))
        if new:
            self.events = bounded((*self.events, *new))

    def _phase_text(self, before: Report | None, phase: Phase) -> str:
        if phase not in self._phases:
            self._phases.add(phase)
            return _FIRST.get(phase, "")
        return "training starts again" if phase == "train" and before and before.phase == "idle" else ""
