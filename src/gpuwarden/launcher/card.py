"""Card of a program that has ended: how it ended and why, what its runs did and used, and the next step."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gpuwarden.errors.explanation import ErrorEvent, Explanation, explain_events
from gpuwarden.errors.recognition import find_problem
from gpuwarden.explain.events import read_events
from gpuwarden.launcher.host_kills import HostKills
from gpuwarden.launcher.program import ProgramEnd
from gpuwarden.protocol.messages import OOM_KINDS
from gpuwarden.protocol.run_folder import ProcessNote, ProgramError
from gpuwarden.records.record import RunRecord
from gpuwarden.records.run_headline import READ_OUTPUT, list_run_events
from gpuwarden.runs.outcome import Evidence, conclude


@dataclass(frozen=True, slots=True)
class Card:
    """Card of one program.

    `evidence` is that of its outcome, in words. `explanation` is the first cause of what went wrong, None if nothing is
    known to have. `runs` are the records of its processes, the program's own first; `gpus` has the numbers of GPUs by
    UUID.
    """

    command: Sequence[str]
    end: ProgramEnd
    outcome: str
    evidence: str
    explanation: Explanation | None
    runs: tuple[RunRecord, ...]
    gpus: Mapping[str, str]

    @property
    def next_step(self) -> str | None:
        """The first thing to do, None if the program did not fail."""
        if self.explanation is not None:
            return self.explanation.root.problem.first_step
        return READ_OUTPUT if self.outcome == "failed" else None


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """Facts about a program that has ended, from this side of it.

    `notes` are those that its processes left, `crashes` the texts of Python's faulthandler.
    """

    end: ProgramEnd
    kills: HostKills
    notes: Sequence[ProcessNote]
    crashes: Sequence[str]


def make_card(command: Sequence[str], facts: ProgramFacts, runs: Sequence[RunRecord], gpus: Mapping[str, str]) -> Card:
    """Make the card from the facts and the records of the program's runs."""
    end = facts.end
    own = next((run for run in runs if run.pid == end.pid), None)
    ordered = tuple(sorted(runs, key=lambda run: (run is not own, run.rank or 0, run.began_timestamp_seconds)))
    outcome, evidence = _conclude(facts, own)
    events = list(_list_events(facts, ordered))
    if end.signal is not None and (death := find_problem(evidence)) is not None:
        events.append(ErrorEvent(0, death, evidence))
    return Card(command, end, outcome, evidence, explain_events(events), ordered, gpus)


def _conclude(facts: ProgramFacts, own: RunRecord | None) -> tuple[str, str]:
    """Return outcome and evidence: by exit status, kills and notes, with what the daemon knows beyond them."""
    kills = facts.kills
    status = Evidence(exit_status=facts.end.status, oom_kill=kills.of_program, cgroup_oom_kills=kills.in_cgroup)
    outcome, ended_by = conclude(status)
    if outcome == "failed" and any(_ended_by_oom(note, facts.end.pid) for note in facts.notes):
        outcome = "out_of_memory"
    if own is None or own.evidence is None:
        return outcome, ended_by
    if own.outcome == "out_of_memory":
        outcome = "out_of_memory"
    return outcome, own.evidence if ended_by in own.evidence else f"{ended_by}; {own.evidence}"


def _ended_by_oom(note: ProcessNote, pid: int) -> bool:
    error = note.error
    return note.pid == pid and error is not None and not error.thread and error.framework_kind in OOM_KINDS


def _list_events(facts: ProgramFacts, runs: Sequence[RunRecord]) -> Iterator[ErrorEvent]:
    for note in facts.notes:
        has_succeeded = note.pid == facts.end.pid and facts.end.status == 0
        for error in filter(None, (note.error, note.thread_error)):
            if error.thread or error.unraisable or not has_succeeded:  # `python -i` goes on after an error
                yield from _list_error_events(error)
    for crash in facts.crashes:
        yield from read_events(io.BytesIO(crash.encode()))
    for run in runs:
        # SIGTERM ends a child of the program by its parent's will: a notebook's kernel, ranks after one that failed.
        is_ended = run.pid != facts.end.pid and run.exit_signal == "SIGTERM"
        yield from list_run_events(replace(run, outcome=None) if is_ended else run)


def _list_error_events(error: ProgramError) -> Iterator[ErrorEvent]:
    """Yield the events of a kept error; that of its exception has the frame that the process found."""
    for event in read_events(io.BytesIO(error.text.encode())):
        yield replace(event, frame=error.frame) if error.frame and error.type in event.text else event
