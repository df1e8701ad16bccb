"""Finding of an incident: which event was the root, and which followed from it, in plain words.

Pure functions of facts. The root is the fact that no other one explains (incidents/causes.py), and from which most of
what opened the incident follows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from gpuwarden.formatting import format_elapsed
from gpuwarden.incidents.causes import FALLEN_OFF_THE_BUS, Fact, explains, is_of_hardware

_PRESSURE = ("GpuMemoryPressureCritical", "GpuThermalPressureCritical")
MAX_NAMED = 3  # facts named in a part of the text; the others are counted


@dataclass(frozen=True, slots=True)
class FindingPart:
    """Event that is part of a finding."""

    timestamp_seconds: Annotated[float, "Time of the event."]
    kind: Annotated[str, "Kind of its event, as in `events`, or error or requested."]
    text: Annotated[str, "Description for people."]
    uuid: Annotated[str | None, "GPU concerned."] = None
    run_id: Annotated[str | None, "Run concerned."] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentFinding:
    """Root of an incident, and what followed from it."""

    text: Annotated[str, "The finding in plain words."]
    root: Annotated[FindingPart, "Event that explains the others."]
    followers: Annotated[tuple[FindingPart, ...], "Events that followed from it, in order of time."] = ()
    before: Annotated[tuple[FindingPart, ...], "Signs of it that came earlier, such as memory pressure."] = ()
    others: Annotated[tuple[FindingPart, ...], "Further events in that time that the root does not explain."] = ()


@dataclass(slots=True)
class _Tree:
    root: Fact
    explained: list[Fact] = field(default_factory=list)

    @property
    def rank(self) -> tuple[int, float]:
        """Sort key: the most that opened the incident first, then the earliest."""
        return -sum(fact.opened for fact in (self.root, *self.explained)), self.root.at


def find(facts: Iterable[Fact]) -> IncidentFinding:
    """Return the finding of an incident; at least one fact must have opened it.

    Its text has no time of day: a page or command shows that of the incident, in the time zone of its reader.
    """
    known = sorted(facts, key=lambda fact: fact.at)
    tree = min(_trees(known), key=lambda tree: tree.rank)
    root = tree.root
    before = [fact for fact in tree.explained if fact.at < root.at and fact.kind in _PRESSURE]
    followers = [fact for fact in tree.explained if fact not in before]
    others = [fact for fact in known if fact.opened and fact is not root and fact not in tree.explained]
    return IncidentFinding(
        text=_text(root, followers, before, others),
        root=_part(root),
        followers=tuple(map(_part, followers)),
        before=tuple(map(_part, before)),
        others=tuple(map(_part, others)),
    )


def root_of(facts: Iterable[Fact]) -> Fact:
    """Return the root."""
    return min(_trees(sorted(facts, key=lambda fact: fact.at)), key=lambda tree: tree.rank).root


def _trees(facts: Sequence[Fact]) -> list[_Tree]:
    """Return each fact that no other explains, with those that follow from it."""
    causes = {
        place: {other for other, cause in enumerate(facts) if other != place and explains(cause, fact)}
        for place, fact in enumerate(facts)
    }
    roots = [place for place in causes if not causes[place]] or [0]
    trees = []
    for place in roots:
        reached = {place}
        while more := {each for each in causes if each not in reached and causes[each] & reached}:
            reached |= more
        trees.append(_Tree(facts[place], [facts[each] for each in sorted(reached - {place})]))
    return trees


# Words.


def _part(fact: Fact) -> FindingPart:
    uuid = min(fact.gpus) if len(fact.gpus) == 1 else None
    return FindingPart(fact.at, fact.kind, _sentence(_clause(fact)), uuid, fact.run_id or None)


def _text(root: Fact, followers: Sequence[Fact], before: Sequence[Fact], others: Sequence[Fact]) -> str:
    of_run = [fact for fact in followers if root.run_id and fact.run_id == root.run_id]
    rest = [fact for fact in followers if fact not in of_run]
    fallen = {gpu for fact in (root, *rest) if fact.code == FALLEN_OFF_THE_BUS for gpu in fact.gpus}
    rest = [fact for fact in rest if not (fact.kind == "GpuDown" and fact.gpus & fallen)]
    clause = f"{_clause(root)}{_own_end(of_run)}"
    parts = [clause, *_follower_clauses(rest, root)]
    sentences = ["; ".join(parts)]
    if root.detail and root.kind != "run_ended":
        sentences.append(root.detail)
    if before:
        sentences.append(f"before: {_clause(before[0], root)}")
    if others:
        ranked = sorted(others, key=is_of_hardware, reverse=True)  # stable: by time; programs can have any number
        named = [_clause(fact, root) for fact in ranked[:MAX_NAMED]]
        more = len(others) - len(named)
        sentences.append(f"in that time also: {'; '.join([*named, *([f'{more} more'] if more else [])])}")
    return " ".join(map(_sentence, sentences))


def _own_end(of_run: Sequence[Fact]) -> str:
    """Return how the root's own run went on, to append."""
    end = next((fact for fact in of_run if fact.kind == "run_ended"), None)
    return f", and {_outcome_words(end)}" if end else ""


def _follower_clauses(followers: Sequence[Fact], root: Fact) -> Iterator[str]:
    lost = [fact for fact in followers if fact.kind == "GpuDown"]
    if len(lost) > 1:
        yield f"{len(lost)} GPUs then stopped answering"
    devices = [fact for fact in followers if not fact.run_id and (fact not in lost or len(lost) == 1)]
    for fact in devices[:MAX_NAMED]:
        yield f"then {_clause(fact)}"
    if len(devices) > MAX_NAMED:
        yield f"further events of GPUs: {len(devices) - MAX_NAMED}"
    runs: dict[str, list[Fact]] = {}
    for fact in followers:
        if fact.run_id:
            runs.setdefault(fact.run_id, []).append(fact)
    ends = [(_run_name(known[0]), _run_fate(known), known[0].job) for known in runs.values()]
    alike = Counter((fate, job) for _name, fate, job in ends)
    for name, fate, job in ends:
        count = alike.pop((fate, job), 0)
        if count == 1:
            yield f"{name} then {fate}"
        elif count:
            yield f"{count} {_runs_name(job, root)} then {fate.replace('was ', 'were ')}"


def _runs_name(job: str, root: Fact) -> str:
    if not job:
        return "runs"
    return "other ranks of its job" if job == root.job else f"ranks of job {job.partition(':')[2]}"


def _run_fate(known: Sequence[Fact]) -> str:
    """Return what happened to a run in a few words: its end, with its first error."""
    end = next((fact for fact in known if fact.kind == "run_ended"), None)
    first = next((fact for fact in known if fact.kind in ("error", "RunOutOfMemory", "RunStalled")), None)
    if end is None:
        fact = known[0]
        return f"stalled ({fact.what})" if fact.kind == "RunStalled" else f"had {_error_words(fact)}"
    if first is None:
        return _outcome_words(end)
    if first.kind == "RunStalled":
        return f"stalled and {_outcome_words(end)}"
    return f"{_outcome_words(end, short=True)} with {_error_words(first)}"


def _error_words(fact: Fact) -> str:
    if fact.kind == "RunOutOfMemory":
        return f"an out-of-memory error of {fact.what} memory"
    return fact.what


_OUTCOMES = {
    "failed": "failed",
    "killed": "was killed",
    "crashed": "crashed",
    "out_of_memory": "ended out of memory",
}


def _outcome_words(fact: Fact, *, short: bool = False) -> str:
    words = _OUTCOMES.get(fact.what, "ended")
    return words if short or not fact.detail else f"{words} ({fact.detail})"


def _run_name(fact: Fact) -> str:
    return f"run {fact.run}" + ("" if fact.rank is None else f" (rank {fact.rank})")


def _clause(fact: Fact, root: Fact | None = None) -> str:
    """Return a fact as a clause, with its time before or after the root if that is given."""
    seconds = fact.at - root.at if root else 0.0
    when = f" {format_elapsed(abs(seconds))} {'earlier' if seconds < 0 else 'later'}" if seconds else ""
    return _CLAUSES[fact.kind](fact, when)


def _xid_clause(fact: Fact, when: str) -> str:
    if fact.code == FALLEN_OFF_THE_BUS:
        return f"{fact.gpu} fell off the bus{when} (XID {fact.code})"
    return f"{fact.gpu} reported XID {fact.code}{when} ({fact.what})"


def _oom_clause(fact: Fact, when: str) -> str:
    place = f" on {fact.gpu}" if fact.gpu else ""
    return f"{_run_name(fact)} ran out of {fact.what} memory{place}{when}"


def _end_clause(fact: Fact, when: str) -> str:
    evidence = f" ({fact.detail})" if fact.detail else ""
    return f"{_run_name(fact)} {_outcome_words(fact, short=True)}{when}{evidence}"


_CLAUSES: Mapping[str, Callable[[Fact, str], str]] = {
    "GpuXidCritical": _xid_clause,
    "GpuXidWarning": _xid_clause,
    "GpuXidInfo": _xid_clause,
    "GpuDown": lambda fact, when: f"{fact.gpu} stopped answering{when} ({fact.what})",
    "GpuwardenDriverFault": lambda fact, when: f"the driver stopped answering{when} ({fact.what})",
    "GpuThrottled": lambda fact, when: f"{fact.gpu} was throttled{when} ({fact.what})",
    "GpuMemoryPressureCritical": lambda fact, when: f"{fact.gpu} was almost out of memory{when}",
    "GpuThermalPressureCritical": lambda fact, when: f"{fact.gpu} was critically hot{when}",
    "requested": lambda _fact, when: f"recording requested{when}",
    "RunOutOfMemory": _oom_clause,
    "RunStalled": lambda fact, when: f"{_run_name(fact)} stalled{when}: {fact.what}",
    "run_ended": _end_clause,
    "error": lambda fact, when: f"{_run_name(fact)} had {fact.what}{when}",
}


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}" + ("" if text.endswith((".", "!", "?")) else ".")
