"""Diagnosis of an out-of-memory: its cause, with the evidence and the next step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gpuwarden.analysis.oom.context import FailureContext
from gpuwarden.protocol.messages import ErrorKind


@dataclass(frozen=True, slots=True)
class Finding:
    """Evidence that a rule found, with numbers, and one next step, a sentence each, with its code if any."""

    evidence: str
    next_step: str
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Cause of an out-of-memory in one word, with the evidence and the next step, a sentence each, and its code."""

    cause: str
    evidence: str
    next_step: str
    code: str | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One cause of failures of a kind: when it holds and an example, for the docs, and the function that finds it.

    `find` is pure, and returns None where the rule does not hold.
    """

    cause: str
    kind: ErrorKind
    holds: str
    example: str
    find: Callable[[FailureContext], Finding | None]
