"""Headline of a run: what went wrong first, with its evidence and the next step; and all errors of its record.

The only place that decides these: the card of `gpuwarden run`, `runs`, `explain`, the pages and the summary read them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuwarden.analysis.findings import list_findings
from gpuwarden.errors.device_problems import CPU_ONLY_BUILD, NO_DEVICE_VISIBLE
from gpuwarden.errors.explanation import ErrorEvent, explain_events
from gpuwarden.errors.kind_guides import find_error_guide
from gpuwarden.errors.problems import MOMENT_PREFIX, Cause, Problem
from gpuwarden.errors.program_problems import PROGRAM_ERROR
from gpuwarden.errors.recognition import find_problem
from gpuwarden.errors.run_problems import NAN_LOSS
from gpuwarden.formatting import format_bytes
from gpuwarden.protocol.messages import OOM_KINDS, uncaught_reason
from gpuwarden.records.census_text import find_main_holder
from gpuwarden.records.record_parts import RecordedError, RecordedHeadline
from gpuwarden.xid.codes import find_xid
from gpuwarden.xid.xid_problems import problem_from_xid

if TYPE_CHECKING:
    from gpuwarden.records.record import RunRecord

READ_OUTPUT = (
    "Read the last lines that the program printed. If they do not say why, save all of its output (2>&1) and pass it "
    "to `gpuwarden explain`."
)
CAUSE_TEXTS: Mapping[str, str] = {  # by the cause of a diagnosis
    "host_input": "the input pipeline used it up",
    "leak": "its use kept growing until none was left",
    "co_tenant": "another process took it",
    "fragmentation": "enough was free, but not in one piece",
    "phase_peak": "one phase needed more than training",
    "too_big": "the model does not fit",
    "batch_too_large": "the batch does not fit",
    "unknown": "no known cause",
}
_HELD = "tensors that the program keeps fill it"  # where a census names what keeps them
_HELD_STEP = "Drop what is no longer needed there, or keep numbers (`float(loss)`) or copies in place of tensors."
_UNCAUGHT = re.compile(r"uncaught ([\w.]+)")  # in the evidence, from the run's own last message


def find_headline(record: RunRecord) -> RecordedHeadline | None:
    """Return the headline of a run; None for one that goes well, or ended well or for an unknown reason."""
    causes = list(_list_causes(record))
    explanation = explain_events([event for event, _headline in causes])
    if explanation is not None:
        root = explanation.root
        event, headline = next(
            each for each in causes if (each[0].problem.name, each[0].text) == (root.problem.name, root.text)
        )
        has_failed = record.outcome not in {None, "finished"}
        if has_failed or event.problem.name in {NAN_LOSS.name, CPU_ONLY_BUILD.name, NO_DEVICE_VISIBLE.name}:
            return replace(headline, next_step=root.problem.first_step)
    if record.outcome == "failed":
        return RecordedHeadline("unknown", "Failed without a known cause", READ_OUTPUT)
    return None


def list_run_events(record: RunRecord) -> Iterator[ErrorEvent]:
    """Yield what went wrong in a run: no GPU used, XIDs, errors, losses that are not finite, its death."""
    return (event for event, _headline in _list_causes(record))


def explain_memory_error(record: RunRecord, error: RecordedError) -> RecordedHeadline | None:
    """Return the headline of a run that this out-of-memory error ends; None for an error without a diagnosis.

    Where a census of a leak or of an unknown cause names what keeps most of the memory, that is the cause.
    """
    diagnosis = error.diagnosis
    if diagnosis is None:
        return None
    place = "host" if error.kind == "host_oom" else "GPU"
    text, step, code = CAUSE_TEXTS.get(diagnosis.name, diagnosis.name), diagnosis.next_step, diagnosis.code
    holder = None
    if diagnosis.name in {"leak", "unknown"} and record.census is not None:
        code = None  # the command that takes a census
        if (holder := find_main_holder(record.census)) is not None:
            text, step = (_HELD if diagnosis.name == "unknown" else text), _HELD_STEP
    return RecordedHeadline(diagnosis.name, f"Out of {place} memory: {text}", step, diagnosis.evidence, code, holder)


def _list_causes(record: RunRecord) -> Iterator[tuple[ErrorEvent, RecordedHeadline]]:
    loss = record.nonfinite_loss
    for finding in list_findings(loss.reported if loss else None, record.no_gpu, None):
        headline = RecordedHeadline(finding.name, finding.text.rstrip("."), finding.next_step)
        no_gpu = CPU_ONLY_BUILD if record.no_gpu == "cpu_build" else NO_DEVICE_VISIBLE
        is_loss = finding.name == "nonfinite_loss"
        yield _make_event(NAN_LOSS if is_loss else no_gpu, headline, headline.text, warning=not is_loss), headline
    for error in record.reported_errors:
        text = f"{error.exception}: {error.text}"
        problem = find_problem(text) or _problem_of_kind(error.kind)
        headline = explain_memory_error(record, error) or _headline_of_problem(problem, error.exception)
        # What a run survived is a cause only where it explains the error that ended it.
        event = _make_event(problem, headline, text, warning=not _has_ended_by(record, error))
        yield replace(event, frame=error.frame or ""), headline
    uncaught = _UNCAUGHT.search(record.evidence or "") if record.outcome == "failed" else None
    if uncaught and not any(_has_ended_by(record, error) for error in record.reported_errors):
        problem = find_problem(f"{uncaught[1]}: ") or PROGRAM_ERROR
        headline = _headline_of_problem(problem, uncaught[1])
        yield _make_event(problem, headline, uncaught[0]), headline
    for code in record.xids or {}:  # of the run's GPUs, so perhaps of another process: likewise
        fault = problem_from_xid(find_xid(int(code)))
        headline = replace(_headline_of_problem(fault), evidence=f"XID {code} on a GPU of the run.")
        yield _make_event(fault, headline, f"XID {code} on a GPU of the run", warning=True), headline
    is_dead = record.outcome in {"killed", "crashed", "out_of_memory"}
    if is_dead and (death := find_problem(record.evidence or "")) is not None:
        headline = _headline_of_problem(death)
        if death.kind == "host_oom" and record.host_memory_peak_bytes is not None:
            used = format_bytes(record.host_memory_peak_bytes)
            headline = replace(headline, evidence=f"By its record, its processes used up to {used} of host memory.")
        if death.kind in OOM_KINDS and record.census is not None:
            headline = replace(headline, holder=find_main_holder(record.census))
        yield _make_event(death, headline, record.evidence or ""), headline


def _problem_of_kind(kind: str) -> Problem:
    """Return the problem of an error whose text shows none, by the kind that the run has seen in its type."""
    guide = find_error_guide(kind)
    if guide is find_error_guide("other"):
        return PROGRAM_ERROR
    return replace(PROGRAM_ERROR, name=kind, title=guide.meaning.rstrip("."), first_step=guide.next_step)


def _headline_of_problem(problem: Problem, exception: str = "") -> RecordedHeadline:
    title = f"{problem.title[0].upper()}{problem.title[1:]}"
    text = f"{title}: {exception}" if exception and problem is PROGRAM_ERROR else title
    return RecordedHeadline(problem.name, text, problem.first_step)


def _make_event(problem: Problem, headline: RecordedHeadline, text: str, *, warning: bool = False) -> ErrorEvent:
    """Return the event of a problem, with what the record says beyond the problem's own row."""
    found = " ".join(filter(None, (headline.holder, headline.evidence)))
    # What is free now is no evidence of a death before.
    causes = tuple(
        replace(each, checks=tuple(c for c in each.checks if not c.startswith(MOMENT_PREFIX)))
        for each in problem.causes
    )
    causes = (Cause(found), *causes) if found else causes
    # A diagnosis or a holder is of the memory itself, also without a GPU.
    follows = () if headline.name not in {problem.name, "unknown"} or headline.holder else problem.follows
    steps = problem.steps if headline.next_step == problem.first_step else ()  # a diagnosis has its own
    own = replace(
        problem, title=headline.text, causes=causes, first_step=headline.next_step, steps=steps, follows=follows
    )
    return ErrorEvent(0, own, text, warning=warning)


def _has_ended_by(record: RunRecord, error: RecordedError) -> bool:
    """Return whether a run ended by an error: its last one, unless it has said that another was not caught."""
    if record.outcome in {None, "finished"} or error is not record.reported_errors[-1]:
        return False
    uncaught = _UNCAUGHT.search(record.evidence or "")
    return uncaught is None or uncaught[0] == uncaught_reason(error.exception)
