"""Explanation of errors: the first cause, its consequences, and what else the text shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuwarden.errors.device_problems import XID_NOTICE
from gpuwarden.errors.memory_problems import MEMORY_WAS_SHORT
from gpuwarden.errors.problems import ANY, Problem
from gpuwarden.errors.program_problems import PROGRAM_ERROR
from gpuwarden.errors.recognition import find_step
from gpuwarden.errors.run_problems import NAN_LOSS, RANK_FAILED


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """One error of a log or a run record. `text` is its message, `frame` the innermost line of the user's own code.

    `warning` is True if the program could go on. `repeats` counts later ones that are alike, of any source.
    """

    line: int
    problem: Problem
    text: str
    source: str = ""
    frame: str = ""
    warning: bool = False
    repeats: int = 0


@dataclass(frozen=True, slots=True)
class Explanation:
    """First cause, the errors that follow from it, and those that it does not explain; each in the text's order."""

    root: ErrorEvent
    followers: tuple[ErrorEvent, ...]
    others: tuple[ErrorEvent, ...]


def explain_events(events: Sequence[ErrorEvent]) -> Explanation | None:
    """Return the explanation of errors in their order; None if there are none."""
    if not events:
        return None
    root = _find_root(events)
    explained = {root.problem.name}
    for event in events:
        if not explained.isdisjoint(event.problem.follows):
            explained.add(event.problem.name)
    rest = [event for event in events if event is not root]
    followers = [event for event in rest if _is_follower(event, root, explained)]
    if (
        not root.frame and root.problem.name != PROGRAM_ERROR.name
    ):  # such as a signal, whose place is in faulthandler's report
        frames = (each.frame for each in rest if (each.problem.name, each.source) == (root.problem.name, root.source))
        root = replace(root, frame=next(filter(None, frames), ""))
    step = find_step(root.problem, root.text, "\n".join(each.text for each in rest))
    root = replace(root, problem=replace(root.problem, first_step=step))
    return Explanation(root, tuple(followers), tuple(event for event in rest if event not in followers))


def _find_root(events: Sequence[ErrorEvent]) -> ErrorEvent:
    """Return the first error that is no mere consequence, or the earlier one that explains it."""
    first = min(events, key=lambda event: (_rank(event), event.line))
    for _ in events:
        causes = [event for event in events if event.problem.name in first.problem.follows]
        if not causes:
            break
        first = min(causes, key=lambda event: (_rank(event), event.line))
    return first


def _rank(event: ErrorEvent) -> int:
    """Return how little an error can be the first cause."""
    if event.problem.name == MEMORY_WAS_SHORT.name:
        return 6
    if event.problem.name == RANK_FAILED.name:
        return 5
    if ANY in event.problem.follows:
        return 4
    if event.warning or event.problem.name == XID_NOTICE.name:
        return 3
    if event.problem.name == PROGRAM_ERROR.name:
        return 2
    return 1 if event.problem.name == NAN_LOSS.name else 0


def _is_follower(event: ErrorEvent, root: ErrorEvent, explained: set[str]) -> bool:
    if ANY in event.problem.follows or event.problem.name == root.problem.name:
        return True
    return event.problem.name in explained or (event.problem.name == PROGRAM_ERROR.name and event.line >= root.line)
