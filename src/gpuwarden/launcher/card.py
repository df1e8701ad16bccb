"""Card of a program that has ended: how it ended and why, what its runs did and used, and the next step."""

from __future__ import annotations

import io
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuwarden.errors.recognition import find_problem
from gpuwarden.explain.events import ErrorEvent, read_events
from gpuwarden.explain.explanation import Explanation, explain_events
from gpuwarden.explain.record_events import list_run_events
from gpuwarden.launcher.host_kills import HostKills
from gpuwarden.launcher.program import ProgramEnd
from gpuwarden.launcher.program_notes import ProgramNote
from gpuwarden.records.record import RunRecord
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
    def command_line(self) -> str:
        """The command as a shell would take it."""
        return shlex.join(self.command)


def make_card(
    command: Sequence[str],
    end: ProgramEnd,
    kills: HostKills,
    runs: Sequence[RunRecord],
    notes: Sequence[ProgramNote],
    *,
    gpus: Mapping[str, str],
) -> Card:
    """Make the card from a program's end, the kernel's kills, the records of its runs, and the notes that it left."""
    own = next((run for run in runs if run.pid == end.pid), None)
    ordered = tuple(sorted(runs, key=lambda run: (run is not own, run.rank or 0, run.began_timestamp_seconds)))
    outcome, evidence = _conclude(end, kills, own)
    events = list(_list_events(ordered, notes))
    if end.signal is not None and (death := find_problem(evidence)) is not None:
        events.append(ErrorEvent(0, death, evidence))
    explanation = explain_events(events)
    return Card(command, end, outcome, evidence, explanation, ordered, gpus)


def _conclude(end: ProgramEnd, kills: HostKills, own: RunRecord | None) -> tuple[str, str]:
    """Return outcome and evidence: the daemon's, which knows more; else by exit status and kills alone."""
    outcome, ended_by = conclude(
        Evidence(exit_status=end.status, oom_kill=kills.of_program, cgroup_oom_kills=kills.in_cgroup)
    )
    if own is None or own.outcome in (None, "unknown") or outcome == "out_of_memory":
        return outcome, ended_by
    evidence = own.evidence or ""
    return own.outcome or outcome, evidence if ended_by in evidence else f"{ended_by}; {evidence}"


def _list_events(runs: Sequence[RunRecord], notes: Sequence[ProgramNote]) -> Iterator[ErrorEvent]:
    for note in notes:
        yield from read_events(io.BytesIO(f"{note.error}\n{note.crash}".encode()))
    for run in runs:
        yield from list_run_events(run)
