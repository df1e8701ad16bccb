"""Card of a program that has ended: how it ended and why, what its runs did and used, and the next step."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from linecache import getline
from pathlib import Path

from gpuwarden.errors.explanation import ErrorEvent, Explanation, explain_events
from gpuwarden.errors.problems import ANY
from gpuwarden.errors.recognition import find_problem
from gpuwarden.explain.events import read_events
from gpuwarden.explain.log_lines import clean_text
from gpuwarden.launcher.host_kills import HostKills
from gpuwarden.launcher.program import ProgramEnd
from gpuwarden.protocol.messages import OOM_KINDS
from gpuwarden.protocol.run_folder import ProcessLog, ProgramError
from gpuwarden.records.record import RunRecord
from gpuwarden.records.run_headline import READ_OUTPUT, list_run_events
from gpuwarden.runs.outcome import Evidence, conclude

MAX_WORDS = 5  # lines


@dataclass(frozen=True, slots=True)
class Card:
    """Card of one program.

    `evidence` is that of its outcome, in words. `explanation` is the first cause of what went wrong, None if nothing is
    known to have. `last_words` are the last lines of its standard error, where it failed without a known cause. `runs`
    are the records of its processes, the program's own first; `gpus` has the numbers of GPUs by UUID.
    """

    command: Sequence[str]
    end: ProgramEnd
    outcome: str
    evidence: str
    explanation: Explanation | None
    last_words: Sequence[str]
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

    `logs` are those of its processes, `stderr` the end of its standard error, as far as it was kept.
    """

    end: ProgramEnd
    kills: HostKills
    logs: Sequence[ProcessLog]
    stderr: bytes = b""


def make_card(command: Sequence[str], facts: ProgramFacts, runs: Sequence[RunRecord], gpus: Mapping[str, str]) -> Card:
    """Make the card from the facts and the records of the program's runs."""
    end = facts.end
    own = next((run for run in runs if run.pid == end.pid), None)
    ordered = tuple(sorted(runs, key=lambda run: (run is not own, run.rank or 0, run.began_timestamp_seconds)))
    errors = sorted(
        (error for log in facts.logs for error in log.errors), key=lambda error: (error.origin != "program", error.at)
    )
    if end.status == 0:  # `python -i` goes on after an error, and other programs do after one of a thread
        errors = [each for each in errors if each.pid != end.pid and each.origin == "program"]
    interrupt = min((each.at for each in errors if each.origin == "interrupt"), default=None)
    if interrupt is not None:  # errors while tidying up are no cause
        errors = [each for each in errors if each.at < interrupt]
        ordered = tuple(replace(run, reported_errors=()) for run in ordered)
    outcome, evidence = _conclude(facts, errors, own, interrupted=interrupt is not None)
    events = list(_list_events(facts, errors, ordered))
    if end.signal is not None and (death := find_problem(evidence)) is not None:
        events.append(ErrorEvent(0, death, evidence))
    explanation = explain_events(events)
    words: Sequence[str] = ()
    if end.status and interrupt is None and _is_open(explanation):
        events += read_events(io.BytesIO(facts.stderr))
        explanation = explain_events(events)
        words = list(_list_words(facts.stderr))[-MAX_WORDS:] if _is_open(explanation) else ()
    return Card(command, end, outcome, evidence, explanation, words, ordered, gpus)


def _is_open(explanation: Explanation | None) -> bool:
    """Return whether the cause is unknown, or a mere consequence of another one."""
    return explanation is None or ANY in explanation.root.problem.follows


def _list_words(stderr: bytes) -> Iterator[str]:
    """Yield the lines of a program's standard error that are not blank, without escape sequences."""
    for line in stderr.splitlines(keepends=False):
        if text := clean_text(line).strip():
            yield text


def _conclude(
    facts: ProgramFacts, errors: Sequence[ProgramError], own: RunRecord | None, *, interrupted: bool
) -> tuple[str, str]:
    """Return outcome and evidence: by exit status, kills and errors, with what the daemon knows beyond them."""
    kills = facts.kills
    status = Evidence(exit_status=facts.end.status, oom_kill=kills.of_program, cgroup_oom_kills=kills.in_cgroup)
    outcome, ended_by = conclude(status)
    if outcome == "failed" and interrupted:
        return "killed", f"{ended_by} after an interrupt"
    if outcome == "failed" and any(_is_oom(error, facts.end.pid) for error in errors):
        outcome = "out_of_memory"
    if own is None or own.evidence is None:
        return outcome, ended_by
    if own.outcome == "out_of_memory":
        outcome = "out_of_memory"
    return outcome, own.evidence if ended_by in own.evidence else f"{ended_by}; {own.evidence}"


def _is_oom(error: ProgramError, pid: int) -> bool:
    """Return whether an error ended the process `pid` for want of memory."""
    is_end = error.pid == pid and error.origin == "program"
    return is_end and any(event.problem.kind in OOM_KINDS for event in list_error_events(error))


def _list_events(
    facts: ProgramFacts, errors: Sequence[ProgramError], runs: Sequence[RunRecord]
) -> Iterator[ErrorEvent]:
    for number, error in enumerate(errors):  # of several ranks the first to fail counts
        for event in list_error_events(error):
            yield replace(event, line=number)
    for log in facts.logs:
        yield from read_events(io.BytesIO(log.crash.encode()))
    for run in runs:
        # SIGTERM ends a child of the program by its parent's will: a notebook's kernel, ranks after one that failed.
        is_ended = run.pid != facts.end.pid and run.exit_signal == "SIGTERM"
        yield from list_run_events(replace(run, outcome=None) if is_ended else run)


def list_error_events(error: ProgramError) -> list[ErrorEvent]:
    """Return the events of a kept error."""
    text = _add_code(error.text) if error.type == "AssertionError" else error.text
    return read_events(io.BytesIO(text.encode()))


def _add_code(text: str) -> str:
    """Return a traceback with the code of its last frame, which may be all that an assertion says."""
    frames = [*re.finditer(r'^  File "(.+)", line (\d+).*\n', text, re.MULTILINE)]
    if not frames or not Path(frames[-1][1]).is_file():  # to open a FIFO would wait for its writer
        return text
    end = frames[-1].end()
    return f"{text[:end]}    {getline(frames[-1][1], int(frames[-1][2])).strip()}\n{text[end:]}"
