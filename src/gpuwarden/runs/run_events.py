"""Marks of what happened to a run's memory: a bounded list for the text next to its chart.

Of each kind the first and the newest are kept, as these show how it began and how it ended; those between them are
counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from gpuwarden.protocol.messages import Phase, Report

MarkKind = Literal["phase", "batch_size", "retry", "oom", "neighbour", "pressure", "event"]
MOST_OF_A_KIND = 8
MAX_MARK_TEXT = 200  # characters

_FIRST: dict[Phase, str] = {"train": "training begins", "test": "first evaluation", "predict": "first prediction"}


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened `at` so many seconds since the run was first heard of, told in one sentence.

    `uuid` is the GPU or MIG instance that it is about, where it is about one.
    """

    at: float
    kind: MarkKind
    text: str
    uuid: str | None = None


@dataclass(slots=True)
class Marks:
    """The marks of one run. Used by one event loop."""

    dropped: int = 0
    _kept: dict[MarkKind, list[Mark]] = field(default_factory=dict)
    _phases: set[Phase] = field(default_factory=set)

    def add(self, mark: Mark) -> None:
        """Keep a mark, at the cost of the second oldest of its kind where they are too many."""
        alike = self._kept.setdefault(mark.kind, [])
        alike.append(replace(mark, text=mark.text[:MAX_MARK_TEXT]) if len(mark.text) > MAX_MARK_TEXT else mark)
        if len(alike) > MOST_OF_A_KIND:
            del alike[1]
            self.dropped += 1

    def hear(self, before: Report | None, report: Report, at: float) -> None:
        """Mark what a report says is new: a phase for the first time, training anew, another batch size, a retry."""
        if before is None or report.phase != before.phase:
            self._note_phase(None if before is None else before.phase, report.phase, at)
        largest = report.largest_batch_size
        if largest is not None and (before is None or largest != before.largest_batch_size):
            self.add(Mark(at, "batch_size", f"batches of {largest}"))
        if before is not None and report.oom_retries > before.oom_retries:
            smaller = "" if report.batch_size is None else f" with batches of {report.batch_size}"
            self.add(Mark(at, "retry", f"begins anew{smaller} after an out-of-memory"))

    def _note_phase(self, before: Phase | None, phase: Phase, at: float) -> None:
        if phase not in self._phases:
            self._phases.add(phase)
            if phase in _FIRST:
                self.add(Mark(at, "phase", _FIRST[phase]))
        elif phase == "train" and before == "idle":
            self.add(Mark(at, "phase", "training begins again"))

    def __iter__(self) -> Iterator[Mark]:
        """Give the marks in the order of time."""
        return iter(sorted((mark for alike in self._kept.values() for mark in alike), key=lambda mark: mark.at))


def followed(marks: Iterable[Mark], later: Iterable[Mark]) -> Marks:
    """Return marks and later ones of another daemon, which begins with what was told before: that counts once."""
    before = list(marks)
    told = {(mark.kind, mark.text) for mark in before if mark.kind == "batch_size" or mark.text in _FIRST.values()}
    return merged(before, (mark for mark in later if (mark.kind, mark.text) not in told))


def merged(marks: Iterable[Mark], others: Iterable[Mark]) -> Marks:
    """Return the marks of both, as many as may be kept; of two that are equal one."""
    both = Marks()
    for mark in sorted(dict.fromkeys((*marks, *others)), key=lambda mark: mark.at):
        both.add(mark)
    return both
