"""Status of the box, its GPUs and its runs at one poll: what is wrong with each, by the table of conditions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from gpuwarden.config import thresholds
from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.health.model import SUBJECT_LABELS, Condition, Occurrence
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.state import State

Health = Literal["ok", "warning", "critical", "unknown"]
HEALTH_RANK: Mapping[Health, int] = {"critical": 0, "warning": 1, "unknown": 2, "ok": 3}


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that is wrong with the driver, a GPU or a run. The last three keys are in the box's list alone."""

    level: Annotated[Health, "How grave it is: warning or critical, as in the alerts."]
    text: Annotated[str, "What it is, in a few words."]
    name: Annotated[str | None, "What it is about: the driver, a GPU by its number, or a run by its name."] = None
    uuid: Annotated[str | None, "The GPU."] = None
    run_id: Annotated[str | None, "The run."] = None


@dataclass(frozen=True, slots=True)
class BoxStatus:
    """A poll with what is wrong: with each GPU, with each run, and with all of the box; the worst first."""

    state: State
    gpus: Sequence[tuple[Gpu, Sequence[Trouble]]]
    runs: Sequence[tuple[RunSnapshot, Sequence[Trouble]]]
    troubles: Sequence[Trouble]

    @property
    def health(self) -> Health:
        """The worst of all troubles; unknown where no GPU was asked, during a pause say."""
        found = worst(self.troubles)
        return found if found != "ok" or any(gpu.asked for gpu in self.state.snapshot.gpus) else "unknown"


def box_status(state: State, occurrences: Iterable[tuple[Condition, Occurrence]]) -> BoxStatus:
    """Return the status by what holds at a poll. A condition of severity info is no trouble."""
    of_subject: defaultdict[str, list[Trouble]] = defaultdict(list)
    for condition, found in occurrences:
        if found.text and condition.severity != "info":
            subject = found.labels.get(SUBJECT_LABELS[condition.subject], "")
            of_subject[subject].append(Trouble(condition.severity, found.text))
    gpus = [(gpu, _worst_first(of_subject[gpu.identity.uuid])) for gpu in state.snapshot.gpus]
    runs = [(run, _worst_first(of_subject[run.peer.run_id])) for run in state.runs]
    box = [replace(trouble, name="the driver") for trouble in of_subject[""]]
    for gpu, troubles in gpus:
        name, uuid = f"GPU {gpu.identity.index}", gpu.identity.uuid
        box += [replace(trouble, name=name, uuid=uuid) for trouble in troubles]
    for run, troubles in runs:
        if run.up or (run.ending and state.snapshot.time - run.ending.at < thresholds.DIED_SECONDS):
            name, run_id = f"run {run.hello.name}", run.peer.run_id
            box += [replace(trouble, name=name, run_id=run_id) for trouble in troubles]
    return BoxStatus(state, gpus, runs, _worst_first(box))


def worst(troubles: Iterable[Trouble]) -> Health:
    """Return the level of the worst of troubles."""
    return min((trouble.level for trouble in troubles), key=HEALTH_RANK.__getitem__, default="ok")


def _worst_first(troubles: Iterable[Trouble]) -> list[Trouble]:
    return sorted(troubles, key=lambda trouble: HEALTH_RANK[trouble.level])
