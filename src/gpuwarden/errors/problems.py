"""Problem that an error text shows, with its likely causes and what to do first, and the patterns of its texts.

The other modules of the package have the rows, by subject, and patterns.py the texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpuwarden.protocol.messages import ErrorKind

ANY = "*"  # in `Problem.follows`: a consequence of any other problem


@dataclass(frozen=True)
class Cause:
    """Likely cause, with the checks of `gpuwarden doctor` whose result is evidence for or against it.

    `framework.build` and the like stand for that check of each framework.
    """

    text: str
    checks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Problem:
    """One class of errors.

    `kind` is its kind in metrics and run records. `causes` are ranked, the likeliest first. `first_step` is one
    imperative sentence. `follows` names the problems that it may be a consequence of, or ANY.
    """

    name: str
    kind: ErrorKind
    title: str
    causes: tuple[Cause, ...]
    first_step: str
    follows: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pattern:
    """Text of one problem, searched in the names of the exception's types and its message; case is ignored."""

    problem: Problem
    regex: str


def list_patterns(problem: Problem, *regexes: str) -> Iterator[Pattern]:
    """Yield a row for each text of a problem."""
    return (Pattern(problem, regex) for regex in regexes)
