"""Problem that an error text shows, with its likely causes and what to do first, and the patterns of its texts.

The other modules of the package have the rows, by subject, and patterns.py the texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpuwarden.protocol.messages import ErrorKind

ANY = "*"  # in `Problem.follows`: a consequence of any other problem
FRAMEWORK_REGEXES = {  # JAX first: TensorFlow's paths are in its messages, and Keras runs on it
    "jax": r"\bjax|external/(org_tensorflow|xla)/|XlaRuntimeError",
    "torch": r"torch|\bc10\b",
    "tensorflow": r"tensorflow|keras",
}
_INSTALL_COMMANDS = {
    "jax": "`pip install -U 'jax[cuda13]'`",
    "torch": "`pip install torch --index-url https://download.pytorch.org/whl/cu130`",
    "tensorflow": "`pip install 'tensorflow[and-cuda]'`",
}
MOMENT_PREFIX = "memory."  # of checks of this moment: memory that is free now may have been full when a run died


@dataclass(frozen=True)
class Cause:
    """Likely cause, with the checks of `gpuwarden doctor` whose result is evidence for or against it.

    `framework.build` and the like stand for that check of each framework.
    """

    text: str
    checks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """First step for texts of one form. Its named groups, such as `{path}`, are filled in; case is ignored."""

    regex: str
    text: str


@dataclass(frozen=True)
class Problem:
    """One class of errors.

    `kind` is its kind in metrics and run records. `causes` are ranked, the likeliest first. `first_step` is one
    imperative sentence. `follows` names the problems that it may be a consequence of, or ANY. The first of `steps` that
    fits the text takes the place of `first_step`.
    """

    name: str
    kind: ErrorKind
    title: str
    causes: tuple[Cause, ...]
    first_step: str
    follows: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()


def install_steps(sentence: str) -> tuple[Step, ...]:
    """Return a step for each framework, with its install command in the place of {}."""
    return tuple(Step(FRAMEWORK_REGEXES[name], sentence.format(text)) for name, text in _INSTALL_COMMANDS.items())


@dataclass(frozen=True, slots=True)
class Pattern:
    """Text of one problem, searched in the names of the exception's types and its message; case is ignored."""

    problem: Problem
    regex: str


def list_patterns(problem: Problem, *regexes: str) -> Iterator[Pattern]:
    """Yield a row for each text of a problem."""
    return (Pattern(problem, regex) for regex in regexes)
