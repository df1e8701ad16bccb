"""Status of the host, its GPUs and its runs at one poll: the problems of each, from the table of conditions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from gpuwarden.config import thresholds
from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.health.conditions import CONDITIONS
from gpuwarden.health.model import SUBJECT_LABELS, ago_text
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.state import Alert, State

Health = Literal["ok", "warning", "critical", "unknown"]
HEALTH_RANK: Mapping[Health, int] = {"critical": 0, "warning": 1, "unknown": 2, "ok": 3}


@dataclass(frozen=True, slots=True)
class Trouble:
    """Problem of the driver, a GPU or a run. The last three keys are only in the list of the whole host."""

    level: Annotated[Health, "Severity: warning or critical, as of alerts."]
    text: Annotated[str, "Description in a few words."]
    alert: Annotated[str | None, "Name of its condition, whose page /alerts/NAME says what to do."] = None
    name: Annotated[str | None, "Subject: the driver, a GPU by index, or a run by name."] = None
    uuid: Annotated[str | None, "UUID of the GPU."] = None
    run_id: Annotated[str | None, "Id of the run."] = None


@dataclass(frozen=True, slots=True)
class BoxStatus:
    """State of a poll with its problems by GPU, by run and of the whole host, the worst first."""

    state: State
    gpus: Sequence[tuple[Gpu, Sequence[Trouble]]]
    runs: Sequence[tuple[RunSnapshot, Sequence[Trouble]]]
    troubles: Sequence[Trouble]

    @property
    def health(self) -> Health:
        """Highest severity of all problems; unknown if no GPU has a reading, for example during a pause."""
        found = worst(self.troubles)
        return (
            found if found != "ok" or any(gpu.asked and gpu.readings for gpu in self.state.snapshot.gpus) else "unknown"
        )


def box_status(state: State) -> BoxStatus:
    """Return the status by the conditions that hold at a poll, without those of severity info and inhibited ones.

    A GPU that does not respond is also a problem of each run on it, and a driver that does not respond one of its GPUs;
    the list of the host has each once.
    """
    of_subject: defaultdict[str, list[Trouble]] = defaultdict(list)
    for alert in state.detection.holding:
        if alert.text and alert.severity != "info" and not alert.inhibited_by:
            subject = alert.labels.get(SUBJECT_LABELS[CONDITIONS[alert.name].subject], "")
            of_subject[subject].append(Trouble(alert.severity, shown_text(alert, state), alert.name))
    gpus, down = [], {}
    for gpu in state.snapshot.gpus:
        is_down = gpu.asked and not gpu.up
        troubles = _worst_first(of_subject[gpu.identity.uuid] or (of_subject[""] if is_down else ()))
        gpus.append((gpu, troubles))
        if is_down and troubles:
            down[gpu.identity.uuid] = replace(troubles[0], text=f"GPU {gpu.identity.index} is not responding")
    runs = []
    for run in state.runs:
        of_its_gpus = [down[uuid] for uuid in run.devices if uuid in down] if run.up else []
        runs.append((run, _worst_first([*of_subject[run.peer.run_id], *of_its_gpus])))
    box = [replace(trouble, name="the driver") for trouble in of_subject[""]]
    recent = [
        each for each in state.runs if each.ending and state.snapshot.time - each.ending.at < thresholds.DIED_SECONDS
    ]
    box += _list_run_troubles(
        (run for run in state.runs if run.up), of_subject
    )  # before all else: what they lose can be saved
    for gpu in state.snapshot.gpus:
        name, uuid = f"GPU {gpu.identity.index}", gpu.identity.uuid
        box += [replace(trouble, name=name, uuid=uuid) for trouble in of_subject[uuid]]
    box += _list_run_troubles((run for run in recent if not run.up), of_subject)
    return BoxStatus(state, gpus, runs, _worst_first(box))


def _list_run_troubles(runs: Iterable[RunSnapshot], of_subject: Mapping[str, Collection[Trouble]]) -> Iterator[Trouble]:
    for run in runs:
        for trouble in of_subject.get(run.peer.run_id, ()):
            yield replace(trouble, name=f"run {run.hello.name}", run_id=run.peer.run_id)


def shown_text(alert: Alert, state: State) -> str:
    """Return the text of an alert, with the time since its last event."""
    return f"{alert.text} {ago_text(state, alert.last)}" if alert.last else alert.text


def gpu_health(gpu: Gpu, troubles: Collection[Trouble]) -> Health:
    """Return the highest severity of a GPU's problems; unknown if this poll knows nothing of it."""
    return worst(troubles) if gpu.asked and (gpu.readings or troubles) else "unknown"


def worst(troubles: Iterable[Trouble]) -> Health:
    """Return the highest severity of problems; ok without any."""
    return min((trouble.level for trouble in troubles), key=HEALTH_RANK.__getitem__, default="ok")


def _worst_first(troubles: Iterable[Trouble]) -> list[Trouble]:
    return sorted(troubles, key=lambda trouble: HEALTH_RANK[trouble.level])
