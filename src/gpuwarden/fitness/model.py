"""Model of the fitness checks: the question, what the checks know, their table rows, and the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Literal, get_args

from gpuwarden.config.schema import CheckConfig
from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.state import State

Status = Literal["fit", "warning", "unfit", "unknown"]
STATUSES: Sequence[Status] = get_args(Status)  # the position is the exit status
FIT: Status = "fit"
Action = Literal["none", "reset", "reboot", "drain", "rma"]
# When a job's GPUs must be free: before it (prolog, preflight) or after it (epilog); none while jobs may run.
Stage = Literal["none", "prolog", "epilog", "preflight"]


@dataclass(frozen=True, slots=True)
class FitnessProblem:
    """Problem that a check found, in a few words that name its subject; `uuid` is empty for the node.

    `action` is what it needs, and `status` its weight, where they differ from what its check says: what a check cannot
    see is `fit`.
    """

    text: str
    uuid: str = ""
    action: Action | None = None
    status: Status | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """Question of a scheduler or a person.

    `gpus` are UUIDs, indexes or, with `by_minor`, numbers of device files; None for all. `job` is the Slurm job's id.
    `off` are names of checks to leave out.
    """

    gpus: tuple[str, ...] | None = None
    by_minor: bool = False
    stage: Stage = "none"
    job: str = ""
    off: AbstractSet[str] = frozenset()


@dataclass(frozen=True, slots=True)
class SlowFacts:
    """Facts that are read less often than polls, on a thread.

    `free` is the free space in bytes by path, or why it is unknown. `is_library_replaced`: the daemon's loaded NVML
    library is no longer on disk. `losses` are the Unix times of each GPU's failures, by UUID, from incidents.
    """

    free: Mapping[str, int | str] = field(default_factory=dict)
    is_library_replaced: bool = False
    losses: Mapping[str, Sequence[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Node:
    """All that the checks know: a poll, the configuration, what earlier polls showed, and the question.

    `known` are the names of all GPUs that have answered since the daemon started, by UUID. `throttled` is the last time
    of throttling by UUID (Unix time), `released` that at which a process left the list of a GPU, `linked` the NVLinks
    that were up, as UUID and link.
    """

    state: State
    config: CheckConfig
    question: Question = Question()
    facts: SlowFacts = SlowFacts()
    known: Mapping[str, str] = field(default_factory=dict)
    throttled: Mapping[str, float] = field(default_factory=dict)
    released: Mapping[str, float] = field(default_factory=dict)
    linked: AbstractSet[tuple[str, str]] = frozenset()

    @property
    def gpus(self) -> Sequence[Gpu]:
        """GPUs that answer."""
        return [gpu for gpu in self.state.snapshot.gpus if gpu.up]


Find = Callable[[Node], Iterable[FitnessProblem]]


@dataclass(frozen=True, slots=True)
class FitnessCheck:
    """Row of the table of checks.

    It finds the problems of the `conditions` that hold (health/conditions.py), and those that `find` returns.
    `threshold` says when it finds a problem, `source` who set that threshold.
    """

    name: str
    status: Status
    action: Action
    threshold: str
    source: str
    conditions: tuple[str, ...] = ()
    find: Find | None = None


@dataclass(frozen=True, slots=True)
class FitnessFinding:
    """Check that found a problem."""

    check: str
    status: Status
    action: Action
    problem: FitnessProblem


@dataclass(frozen=True, slots=True)
class Assessment:
    """Answer: the worst status, the sentence for one line, and all findings, the worst first.

    `statuses` are by check; empty if the answer is unknown.
    """

    status: Status
    text: str
    gpus: Sequence[str] = ()
    findings: Sequence[FitnessFinding] = ()
    statuses: Mapping[str, Status] = field(default_factory=dict)
