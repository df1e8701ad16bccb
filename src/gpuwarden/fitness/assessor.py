"""Assessor of fitness: runs the checks against a poll, and words the answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import chain

from gpuwarden.config.schema import CheckConfig
from gpuwarden.config.thresholds import STALE_POLLS
from gpuwarden.fitness.check_table import CHECKS
from gpuwarden.fitness.gpu_finders import nvlinks
from gpuwarden.fitness.model import (
    FIT,
    STATUSES,
    Action,
    Assessment,
    FitnessFinding,
    FitnessProblem,
    Node,
    Question,
    SlowFacts,
    Status,
)
from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.health.status import shown_text
from gpuwarden.nvml.troubleshooting import NO_DRIVER, suggest_fix
from gpuwarden.state import Alert, State
from gpuwarden.xid.codes import Action as XidAction
from gpuwarden.xid.codes import explain

STALE_SECONDS = 10.0  # minimum age of a stale poll: a scheduler needs a fresher one than the alert GpuwardenStale
MAX_NAMED = 3  # problems in the text
MAX_FINDINGS = 200


class FitnessAssessor:
    """Assessor that learns from polls which GPUs and links there are. Used by one event loop."""

    def __init__(self, config: CheckConfig) -> None:
        self.config = config
        self._throttled: dict[str, float] = {}  # last time (Unix), by UUID
        self._released: dict[str, float] = {}  # last time (Unix), by UUID
        self._pids: dict[str, frozenset[int]] = {}  # of the last poll, by UUID
        self._known: dict[str, str] = {}
        self._linked: set[tuple[str, str]] = set()
        self._read: dict[str, float] = {}  # the slow tier that was learned from, by UUID

    def add_poll(self, state: State) -> None:
        """Record which GPUs are throttled or released, and the links of those whose slow tier was read at this poll."""
        for alert in state.detection.holding:
            if alert.name == "GpuThrottled":
                self._throttled[alert.labels["uuid"]] = state.snapshot.time
        for gpu in state.snapshot.gpus:
            uuid, pids = gpu.identity.uuid, frozenset(process.pid for process in gpu.processes)
            if self._pids.get(uuid, pids) - pids:
                self._released[uuid] = state.snapshot.time
            self._pids[uuid] = pids
            if gpu.up and self._read.get(uuid) != gpu.slow_taken:
                self._read[uuid] = gpu.slow_taken
                self._known[uuid] = f"GPU {gpu.identity.index}"
                self._linked.update((uuid, link) for link, up in nvlinks(gpu).items() if up)

    def answer(self, state: State | None, facts: SlowFacts, question: Question, now: float) -> Assessment:
        """Assess the node, or the GPUs of a question, at `now` (Unix time). Raises ValueError for an unknown check."""
        for name in question.off:
            if name not in CHECKS:
                near = get_close_matches(name, CHECKS, n=1)
                raise ValueError(f"there is no check {name}" + (f"; did you mean {near[0]}?" if near else ""))
        if state is None:
            return Assessment("unknown", "no successful poll yet, or the last one failed")
        if not state.snapshot.asked:
            return Assessment("unknown", "the daemon does not poll GPUs now: it is paused, or they are asleep")
        age = now - state.snapshot.time
        if age > max(STALE_SECONDS, STALE_POLLS * state.poll_interval):
            return Assessment("unknown", f"the last poll is {age:.0f} s old")
        return self._assess(state, facts, question)

    def _assess(self, state: State, facts: SlowFacts, question: Question) -> Assessment:
        rows = [row for name, row in CHECKS.items() if name not in question.off and name not in self.config.off]
        node = Node(
            state=state,
            config=self.config,
            question=question,
            facts=facts,
            known=self._known,
            throttled=self._throttled,
            released=self._released,
            linked=self._linked,
        )
        chosen = {uuid: _find_gpu(state, uuid, by_minor=question.by_minor) for uuid in question.gpus or ()}
        uuids = {
            gpu.identity.uuid for gpu in (chosen.values() if question.gpus is not None else state.snapshot.gpus) if gpu
        }
        found = [
            FitnessFinding("gpu_count", "unfit", "reboot", FitnessProblem(f"GPU {name} is not there"))
            for name, gpu in chosen.items()
            if gpu is None and state.snapshot.fault is None
        ]
        by_condition = self._find_condition_problems(state)
        for row in rows:
            status: Status = "unfit" if row.name in self.config.unfit else row.status
            problems = [
                *chain.from_iterable(by_condition[name] for name in row.conditions),
                *(row.find(node) if row.find else ()),
            ]
            found += [
                FitnessFinding(row.name, problem.status or status, problem.action or row.action, problem)
                for problem in problems
                if not problem.uuid or question.gpus is None or problem.uuid in uuids
            ]
        found.sort(key=lambda each: -STATUSES.index(each.status))
        statuses = dict.fromkeys((row.name for row in rows), FIT) | {
            each.check: each.status for each in reversed(found)
        }
        text = _text(found) or f"{len(uuids)} GPUs, {len(rows)} checks"
        return Assessment(found[0].status if found else FIT, text, sorted(uuids), found[:MAX_FINDINGS], statuses)

    @staticmethod
    def _find_condition_problems(state: State) -> Mapping[str, Sequence[FitnessProblem]]:
        found: defaultdict[str, list[FitnessProblem]] = defaultdict(list)
        for alert in state.detection.holding:
            uuid, gpu = alert.labels.get("uuid", ""), alert.labels.get("gpu")
            problem = FitnessProblem(shown_text(alert, state), uuid, _required_action(alert))
            if gpu:
                problem = replace(problem, text=f"GPU {gpu}: {problem.text}")
            elif "collector" in alert.labels:
                problem = _driver_problem(problem.text, state.snapshot.fault or "")
            found[alert.name].append(problem)
        return found


def _driver_problem(text: str, fault: str) -> FitnessProblem:
    """Return a problem of the driver as a whole, with what mends its fault."""
    action: Action | None = "none" if fault in NO_DRIVER else None
    return FitnessProblem(": ".join(filter(None, [f"driver {text}", suggest_fix(fault)])), action=action)


def _required_action(alert: Alert) -> Action | None:
    """Return the action on an XID or on a recovery that the driver requests; None for other conditions."""
    if "xid" in alert.labels:
        return _XID_ACTIONS.get(explain(int(alert.labels["xid"]), alert.severity).action)
    return "reboot" if alert.labels.get("action", "").endswith("reboot") else None


_XID_ACTIONS: Mapping[XidAction, Action] = {
    XidAction.REBOOT_MACHINE: "reboot",
    XidAction.RESTART_VM: "reboot",
    XidAction.RESET_GPU: "reset",
    XidAction.CHECK_NVLINK: "reset",
    XidAction.RESET_WHEN_IDLE: "reset",
}


def _find_gpu(state: State, name: str, *, by_minor: bool) -> Gpu | None:
    """Return the GPU of a UUID, also of one of its MIG instances, of an index, or of a device file's number.

    As in CUDA, the first characters of a UUID are enough, if no other GPU has them.
    """
    found = state.snapshot.gpu_with(name)
    if found is None and name.startswith("GPU-"):
        several = [gpu for gpu in state.snapshot.gpus if gpu.identity.uuid.startswith(name)]
        found = several[0] if len(several) == 1 else None
    if found is not None:
        return found
    minors = {gpu.identity.minor_number: gpu for gpu in state.snapshot.gpus} if by_minor else {}
    return minors.get(name) or next((gpu for gpu in state.snapshot.gpus if str(gpu.identity.index) == name), None)


def _text(found: Sequence[FitnessFinding]) -> str:
    named = [each.problem.text + (f" ({each.action})" if each.action != "none" else "") for each in found[:MAX_NAMED]]
    return "; ".join(named) + (f"; {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else "")
