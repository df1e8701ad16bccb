"""Errors of a run record, as a log of the run would have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gpuwarden.analysis.findings import nonfinite_loss_text
from gpuwarden.errors.device_problems import CPU_ONLY_BUILD, NO_DEVICE_VISIBLE
from gpuwarden.errors.problems import Cause, Problem
from gpuwarden.errors.program_problems import PROGRAM_ERROR
from gpuwarden.errors.recognition import find_problem
from gpuwarden.errors.run_problems import NAN_LOSS
from gpuwarden.explain.events import ErrorEvent
from gpuwarden.explain.evidence import MOMENT_PREFIX
from gpuwarden.explain.xid_problems import problem_from_xid
from gpuwarden.formatting import format_bytes
from gpuwarden.records.record import RunRecord
from gpuwarden.records.record_parts import RecordedError
from gpuwarden.xid.codes import find_xid


def list_run_events(record: RunRecord) -> Iterator[ErrorEvent]:
    """Yield what went wrong in a run: no GPU used, XIDs, errors, losses that are not finite, its death.

    Their causes are judged by the record: memory that other processes hold now is no evidence.
    """
    for event in _list_events(record):
        checks = (name for cause in event.problem.causes for name in cause.checks)
        has_moment = any(name.startswith(MOMENT_PREFIX) for name in checks)
        yield replace(event, problem=_without_moment(event.problem)) if has_moment else event


def _without_moment(problem: Problem) -> Problem:
    """Return a problem without the checks of this moment."""
    causes = (
        replace(cause, checks=tuple(name for name in cause.checks if not name.startswith(MOMENT_PREFIX)))
        for cause in problem.causes
    )
    return replace(problem, causes=tuple(causes))


def _list_events(record: RunRecord) -> Iterator[ErrorEvent]:
    if record.no_gpu is not None:
        problem = CPU_ONLY_BUILD if record.no_gpu == "cpu_build" else NO_DEVICE_VISIBLE
        yield ErrorEvent(0, problem, f"no GPU used: {record.no_gpu}", warning=True)
    if record.nonfinite_loss is not None:
        yield ErrorEvent(0, NAN_LOSS, f"loss {nonfinite_loss_text(record.nonfinite_loss.reported)}")
    for error in record.reported_errors:
        text = f"{error.exception}: {error.text}"
        yield ErrorEvent(0, _find_error_problem(error, text), text, frame=error.frame or "")
    for code in record.xids or {}:  # of the run's GPUs, so perhaps of another process: a cause only where it explains
        yield ErrorEvent(0, problem_from_xid(find_xid(int(code))), f"XID {code} on a GPU of the run", warning=True)
    is_dead = record.outcome in {"killed", "crashed", "out_of_memory"}
    if is_dead and (death := find_problem(record.evidence or "")) is not None:
        yield ErrorEvent(0, _add_host_memory(death, record), record.evidence or "")


def _add_host_memory(death: Problem, record: RunRecord) -> Problem:
    """Return the problem of a death, for want of host memory with what the run had used."""
    if death.kind != "host_oom" or record.host_memory_peak_bytes is None:
        return death
    used = f"By its record, its processes used up to {format_bytes(record.host_memory_peak_bytes)} of host memory."
    return replace(death, causes=(Cause(used), *death.causes))


def _find_error_problem(error: RecordedError, text: str) -> Problem:
    """Return the problem of an error; a diagnosis of the daemon says more than the table's causes."""
    problem = find_problem(text) or PROGRAM_ERROR
    if error.diagnosis is None:
        return problem
    causes = (Cause(error.diagnosis.evidence, problem.causes[0].checks), *problem.causes[1:])
    return replace(problem, causes=causes, first_step=error.diagnosis.next_step)
