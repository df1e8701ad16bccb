"""Advisor of runs: advice on changes of their pressure and on faults of their GPUs, once per episode.

Only runs whose hello sets `hears` get advice, each about its own GPUs and MIG instances. Advice that could not be sent
is tried again at the next poll, while it is current. So that a run need not wait for a poll, the advisor computes the
memory in use above which there would be new advice. Pressure and GPU faults are events in the record of every run on
the GPU; a growing co-tenant is one in the record of a run that was advised of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from gpuwarden.advice.delivery_state import AdviceMessage, AdviceRound, AdviceSubject, DeliveryState
from gpuwarden.advice.wording import (
    co_tenant_text,
    leak_text,
    loss_text,
    memory_text,
    name_with_uuid,
    short_name,
    thermal_text,
    unknown_gpu_text,
    xid_text,
)
from gpuwarden.analysis.oom.co_tenants import REST_SECONDS, CoTenant, CoTenants
from gpuwarden.config.schema import PressureConfig as Limits
from gpuwarden.gpu.memory_sampler import NO_LIMIT
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import HUNG, Gpu, Snapshot
from gpuwarden.host import procfs
from gpuwarden.pressure.levels import Pressure, RunPressure
from gpuwarden.protocol.messages import MAX_ADVICE_CHARACTERS, Advice, AdviceKind, Level
from gpuwarden.protocol.validators import clip
from gpuwarden.runs.run_events import RunEvent, RunEventKind
from gpuwarden.runs.run_snapshot import JoinedPoll, RunSnapshot
from gpuwarden.state import Alert, Detection
from gpuwarden.xid.codes import Action, explain

MIN_GROWTH_BYTES = 64 * 2**20  # growth of a co-tenant that is always ignored
HUNG_SECONDS = 10.0  # after which a hanging GPU counts as lost: one that is only slow comes back
_FAULTS = ("GpuwardenDriverFault", "GpuDown", "GpuXidCritical", "GpuXidWarning")
# XIDs after which a GPU is unusable, now or soon, until an operator acts.
_GRAVITY: Mapping[Action, Level] = {
    Action.RESET_GPU: "critical",
    Action.REBOOT_MACHINE: "critical",
    Action.RESTART_VM: "critical",
    Action.RESET_WHEN_IDLE: "warning",
}


@dataclass(frozen=True, slots=True)
class SubjectState:
    """Level of a subject for a run; `text` makes its sentence from a GPU's name, `memory` is set for memory advice.

    `gpu` is None for one that is not known here.
    """

    level: Level
    text: Callable[[str], str]
    gpu: Gpu | None
    memory: RunPressure | None = None

    def write(self, name: Callable[[Gpu], str]) -> str:
        """Return the sentence, with the GPU's name as `name` makes it."""
        return self.text(name(self.gpu) if self.gpu else "")


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts of one poll: `gpus` are by their UUIDs and those of their MIG instances, `faults` also of the driver."""

    poll: JoinedPoll
    gpus: Mapping[str, Gpu]
    pressure: Pressure
    faults: Sequence[Alert]

    def gpus_of(self, run: RunSnapshot) -> dict[str, Gpu]:
        """Return the GPUs of a run, by UUID of its GPU or MIG instance."""
        return {uuid: gpu for uuid in run.devices if (gpu := self.gpus.get(uuid))}


class Advisor:
    """Advisor of runs: decides at each poll what to send to each. Used by one event loop.

    `alerting`: pressure is also sent as alerts, whether the runs read advice or not. `nearest_above` returns which
    run's process one belongs to, by pids.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        alerting: bool = False,
        nearest_above: Callable[[int, Collection[int]], int] = procfs.find_nearest_ancestor,
    ) -> None:
        self._alerting = alerting
        self._nearest_above = nearest_above
        self._belongs: dict[int, int] = {}  # process to its run's process, by pids; of this poll
        self._roots: set[int] = set()  # the runs' processes
        self.limits = limits
        self._states: dict[str, DeliveryState] = {}  # by run id
        self._hung: dict[str, float] = {}  # start (monotonic), by UUID
        self._divided: dict[str, str] = {}  # GPUs by their instances' UUIDs; kept as a lost GPU lists none

    @property
    def sent(self) -> dict[str, Mapping[AdviceKind, int]]:
        """Counts of messages sent to each run of the last poll, by run id and kind."""
        return {run_id: dict(state.sent) for run_id, state in self._states.items()}

    def evaluate(self, poll: JoinedPoll, pressure: Pressure, detection: Detection) -> AdviceRound:
        """Return the new advice of a poll; call `confirm` with the messages that were sent."""
        self._states = {run.peer.run_id: self._states.get(run.peer.run_id) or DeliveryState() for run in poll.runs}
        living = [run for run in poll.runs if run.up]
        if not living:
            return AdviceRound()
        hung = [gpu.identity.uuid for gpu in poll.snapshot.gpus if gpu.fault == HUNG]
        self._hung = {uuid: self._hung.get(uuid, poll.now) for uuid in hung}
        self._belongs, self._roots = {}, {run.peer.pid for run in living} - {0}
        faults = [alert for alert in detection.holding if alert.name in _FAULTS]
        facts = _Facts(poll, self._gpus_by_uuid(poll.snapshot), pressure, faults)
        messages: list[AdviceMessage] = []
        events: dict[str, tuple[RunEvent, ...]] = {}
        gpu_limits: dict[str, float] = {}
        run_limits: dict[str, Mapping[str, float]] = {}
        for run in living:
            state, gpus = self._states[run.peer.run_id], facts.gpus_of(run)
            subjects = dict(self._subjects(run, gpus, facts))
            events[run.peer.run_id] = tuple(_events(run, state, subjects))
            own: list[AdviceMessage] = []
            if run.hello.hears:
                subjects |= dict(_leaks(run, gpus)) | dict(self._co_tenants(run, gpus, facts))
                own = self._messages(run, state, subjects, poll.now)
                messages += own
            if run.hello.hears or self._alerting:
                listens = run.hello.hears and _may_report_co_tenants(state, own, poll.now)
                run_limits[run.peer.run_id] = self._limit(run, gpus, facts, gpu_limits, listens=listens)
        return AdviceRound(tuple(messages), events, gpu_limits, run_limits)

    def confirm(self, sent: Iterable[AdviceMessage], now: float) -> None:
        """Record which messages of the last poll were sent; the others are tried again while they are current."""
        for message in sent:
            state = self._states[message.run.run_id]
            state.serial = message.advice.serial
            state.levels[message.subject] = message.advice.level
            state.sent[message.subject.kind] += 1
            if message.subject.kind == "co_tenant":
                state.co_tenant_at = now

    def _gpus_by_uuid(self, snapshot: Snapshot) -> Mapping[str, Gpu]:
        found = {gpu.identity.uuid: gpu for gpu in snapshot.gpus}
        now = {each.identity.uuid: gpu.identity.uuid for gpu in snapshot.gpus for each in gpu.mig}
        before = {uuid: whole for uuid, whole in self._divided.items() if whole in found and not found[whole].up}
        self._divided = now | before
        return found | {uuid: found[whole] for uuid, whole in self._divided.items()}

    def _limit(
        self, run: RunSnapshot, gpus: Mapping[str, Gpu], facts: _Facts, gpu_limits: dict[str, float], *, listens: bool
    ) -> dict[str, float]:
        """Return the bytes in use of a run's allocator, by device, above which there may be new advice.

        Lowers `gpu_limits`, the same for all memory in use on a GPU. `listens`: include advice on co-tenants.
        """
        limits: dict[str, float] = {}
        for uuid, gpu in gpus.items():
            whole = gpu.identity.uuid
            gpu_limits.setdefault(whole, NO_LIMIT)  # at least a loss of the GPU must be noticed
            if (memory := facts.pressure.of_runs.get((run.peer.run_id, uuid))) is not None:
                others, own = memory.slack(self.limits)
                limits[uuid] = memory.in_use + own
                if listens:
                    others = min(others, self._co_tenant_slack(run, uuid, gpu, memory, facts.poll.co_tenants))
                used = gpu.value(GpuReadings.memory_used_bytes)
                if used is not None:
                    # On a MIG instance this is a lower bound: memory freed by others is unknown.
                    gpu_limits[whole] = min(gpu_limits[whole], used + others)
        return limits

    def _messages(
        self, run: RunSnapshot, state: DeliveryState, subjects: Mapping[AdviceSubject, SubjectState], now: float
    ) -> list[AdviceMessage]:
        """Return the new messages for a run that reads advice."""
        messages: list[AdviceMessage] = []
        if state.connection != run.advice_connection:
            state.connection = run.advice_connection
            state.levels.clear()
        for subject, each in _news(state.levels, subjects):
            memory, is_co_tenant = each.memory, subject.kind == "co_tenant"
            if is_co_tenant and not _may_report_co_tenants(state, messages, now):
                continue
            advice = Advice(
                serial=state.serial + len(messages) + 1,
                kind=subject.kind,
                level=each.level,
                uuid=subject.uuid,
                text=clip(each.write(name_with_uuid), MAX_ADVICE_CHARACTERS),
                resource=None if subject.kind != "pressure" else "memory" if memory else "thermal",
                headroom=round(memory.headroom) if memory else None,
                seconds_to_oom=memory.seconds_to_oom if memory else None,
            )
            text = each.write(short_name)
            event = RunEvent(run.lasted, "co_tenant", text, subject.uuid, "warning") if is_co_tenant else None
            messages.append(AdviceMessage(run.peer, subject, advice, event))
        return messages

    def _subjects(
        self, run: RunSnapshot, gpus: Mapping[str, Gpu], facts: _Facts
    ) -> Iterator[tuple[AdviceSubject, SubjectState]]:
        """Yield the subjects of a run that are not about co-tenants."""
        for uuid, gpu in gpus.items():
            whole = gpu.identity.uuid  # heat is the GPU's, whatever instances of it the run has
            if (level := facts.pressure.levels.get((whole, "thermal"))) is not None:
                yield (
                    AdviceSubject("pressure", whole, "thermal"),
                    SubjectState(level, partial(thermal_text, gpu, level), gpu),
                )
            if (memory := facts.pressure.of_runs.get((run.peer.run_id, uuid))) is not None:
                text = partial(memory_text, self.limits, memory)
                yield AdviceSubject("pressure", uuid, "memory"), SubjectState(memory.level, text, gpu, memory)
        for gpu in {gpu.identity.uuid: gpu for gpu in gpus.values()}.values():
            yield from self._faults(run, gpu, facts)
        for device, uuid in run.unknown_gpus.items():
            text = partial(unknown_gpu_text, device, uuid)
            yield AdviceSubject("unknown_gpu", uuid, device), SubjectState("warning", text, None)

    def _faults(self, run: RunSnapshot, gpu: Gpu, facts: _Facts) -> Iterator[tuple[AdviceSubject, SubjectState]]:
        """Yield the loss of a GPU, also with the driver as a whole, and its XIDs since the run began."""
        uuid = gpu.identity.uuid
        for alert in facts.faults:
            if alert.labels.get("uuid", uuid) != uuid:  # that of the driver as a whole has none
                continue
            if "xid" in alert.labels:
                code = int(alert.labels["xid"])
                level = _GRAVITY.get(explain(code, alert.severity).action)
                if level and alert.last >= run.began:
                    text = partial(xid_text, code, alert.severity)
                    yield AdviceSubject("xid", uuid, str(code)), SubjectState(level, text, gpu)
            elif gpu.fault is not None and facts.poll.now - self._hung.get(uuid, -HUNG_SECONDS) >= HUNG_SECONDS:
                yield AdviceSubject("gpu_lost", uuid), SubjectState("critical", partial(loss_text, gpu.fault), gpu)

    def _co_tenants(
        self, run: RunSnapshot, gpus: Mapping[str, Gpu], facts: _Facts
    ) -> Iterator[tuple[AdviceSubject, SubjectState]]:
        """Yield the processes that allocated much of the memory available to the run."""
        for uuid, gpu in gpus.items():
            memory = facts.pressure.of_runs.get((run.peer.run_id, uuid))
            if memory is None or (memory.limit and memory.limit.kind != "device"):
                continue  # a limit of the run's comes first, and is not affected by processes that it does not cover
            pid, co_tenant = self._largest(run, uuid, gpu, facts.poll.co_tenants)
            if co_tenant is None or facts.poll.now - co_tenant.rose > facts.poll.snapshot.time - run.began:
                continue  # growth before the run started does not count
            if co_tenant.grown >= self._min_growth(memory, co_tenant.grown):
                text = partial(co_tenant_text, memory, pid, co_tenant, facts.poll.owners.by_pid.get(pid))
                yield AdviceSubject("co_tenant", uuid, str(pid)), SubjectState("warning", text, gpu, memory)

    def _largest(self, run: RunSnapshot, uuid: str, gpu: Gpu, co_tenants: CoTenants) -> tuple[int, CoTenant | None]:
        """Return the co-tenant of a run that has grown most; None without one, or if the run's process is not listed.

        The run's children are no co-tenants, including those started after its processes were read.
        """
        grown = co_tenants.grown(uuid)
        if not grown or not gpu.holds(run.peer.pid, uuid):
            return 0, None
        own = run.host_usage.present.pids if run.host_usage and run.host_usage.present else ()
        for pid, co_tenant in grown:
            if pid not in own and self._root_of(pid) != run.peer.pid:
                return pid, co_tenant
        return 0, None

    def _root_of(self, pid: int) -> int:
        if pid not in self._belongs:
            self._belongs[pid] = self._nearest_above(pid, self._roots)
        return self._belongs[pid]

    def _min_growth(self, memory: RunPressure, grown: float) -> float:
        """Return the growth in bytes from which a co-tenant that has `grown` so far is reported."""
        return max(MIN_GROWTH_BYTES, self.limits.co_tenant_share * (memory.headroom + grown))

    def _co_tenant_slack(
        self, run: RunSnapshot, uuid: str, gpu: Gpu, memory: RunPressure, co_tenants: CoTenants
    ) -> float:
        """Return the bytes by which a co-tenant may grow until it is reported; infinite if it already is."""
        _pid, co_tenant = self._largest(run, uuid, gpu, co_tenants)
        grown = co_tenant.grown if co_tenant else 0
        more = self._min_growth(memory, grown) - grown
        return more if more > 0 else float("inf")  # already sent


def _leaks(run: RunSnapshot, gpus: Mapping[str, Gpu]) -> Iterator[tuple[AdviceSubject, SubjectState]]:
    """Yield the leaks of a run that takes a census; others get none, as pressure follows where a leak is urgent."""
    for uuid, leak in run.leaks.items() if run.hello.census else ():
        if uuid in gpus:
            yield AdviceSubject("leak", uuid), SubjectState("warning", partial(leak_text, leak), gpus[uuid])


def _events(
    run: RunSnapshot, state: DeliveryState, subjects: Mapping[AdviceSubject, SubjectState]
) -> Iterator[RunEvent]:
    """Yield the new events for the record of a run."""
    for subject, each in _news(state.recorded, subjects):
        state.recorded[subject] = each.level
        kind: RunEventKind = "pressure" if subject.kind == "pressure" else "event"
        level = None if each.level == "none" else each.level
        yield RunEvent(run.lasted, kind, each.write(short_name), subject.uuid, level)


def _news(
    known: dict[AdviceSubject, Level], subjects: Mapping[AdviceSubject, SubjectState]
) -> list[tuple[AdviceSubject, SubjectState]]:
    """Return the changed subjects, and drop those that are over; pressure does not end by being absent."""
    for over in [each for each in known if each.kind != "pressure" and each not in subjects]:
        del known[over]
    return [(subject, each) for subject, each in subjects.items() if known.get(subject, "none") != each.level]


def _may_report_co_tenants(state: DeliveryState, messages: Iterable[AdviceMessage], now: float) -> bool:
    """Return whether the last message about a co-tenant was long ago; `messages` are about to be sent."""
    if any(message.subject.kind == "co_tenant" for message in messages):
        return False
    return state.co_tenant_at is None or now - state.co_tenant_at >= REST_SECONDS
