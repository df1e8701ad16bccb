"""Advice to runs: their pressure as it changes, and what happens to their GPUs, once an episode.

Only runs whose hello says that they hear get it, each of its own GPUs and MIG instances. What could not be sent is
tried again at the next poll, for as long as it holds. So that a run need not wait for a poll, the adviser computes
beyond which use of memory there would be news. Pressure and faults of a GPU are marked in the story of every run on it,
a neighbour that grows in that of a run that was advised of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from gpuwarden.advice.delivery_state import DeliveryState, Matter
from gpuwarden.analysis.oom.co_tenants import REST_SECONDS, CoTenant, CoTenants
from gpuwarden.config.schema import PressureConfig as Limits
from gpuwarden.config.thresholds import XID_SECONDS
from gpuwarden.formatting import format_bytes, format_elapsed, format_ratio
from gpuwarden.gpu.memory_sampler import NEVER
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import HUNG, Gpu, Snapshot
from gpuwarden.host import procfs
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.owners.resolver import UNKNOWN, ProcessOwners
from gpuwarden.pressure.levels import RANK, Pressure, RunPressure, memory_level
from gpuwarden.protocol.messages import MAX_ADVICE_CHARACTERS, Advice, Level
from gpuwarden.protocol.validators import clip
from gpuwarden.runs.run_events import MarkKind
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.xid.codes import Action, explain

LEAST_GROWTH = 64 * 2**20  # bytes that a neighbour has to take, however little there is
HUNG_SECONDS = 10.0  # that a GPU has to hang for it to count as lost: one that is only slow comes back
# The XIDs after which a GPU is good for nothing, or not for long, until somebody does something about it.
_GRAVITY: Mapping[Action, Level] = {
    Action.RESET_GPU: "critical",
    Action.REBOOT_MACHINE: "critical",
    Action.RESTART_VM: "critical",
    Action.RESET_WHEN_IDLE: "some",
}


@dataclass(frozen=True, slots=True)
class Standing:
    """Level of a matter for a run; `text` makes its sentence from a GPU's name, `memory` is set where it matters."""

    level: Level
    text: Callable[[str], str]
    gpu: Gpu
    memory: RunPressure | None = None


@dataclass(frozen=True, slots=True)
class _Poll:
    """One poll: `gpus` by their UUIDs and those of their MIG instances, `owners` by pid."""

    gpus: Mapping[str, Gpu]
    pressure: Pressure
    owners: Mapping[int, ProcessOwners]
    time: float  # Unix
    now: float  # monotonic


class Advisor:
    """Sender of advice to runs. Used by one event loop.

    `send` sends a message to a run's process without blocking, and returns whether it could; `mark` adds what happened
    at a time (monotonic), on a GPU or MIG instance, to a run's story. `neighbours` is updated with each poll before the
    adviser. `alerting`: pressure is also sent as alerts, whether the runs read advice or not. `nearest_above` returns
    which run's process one belongs to, by pids.
    """

    def __init__(
        self,
        limits: Limits,
        send: Callable[[ProcessKey, Advice], bool],
        mark: Callable[[ProcessKey, MarkKind, str, float, str | None], object],
        neighbours: CoTenants,
        *,
        alerting: bool = False,
        nearest_above: Callable[[int, Collection[int]], int] = procfs.nearest_above,
    ) -> None:
        self._alerting = alerting
        self._nearest_above = nearest_above
        self._belongs: dict[int, int] = {}  # to which run's process a process belongs, by pids; of this poll
        self._roots: set[int] = set()  # the runs' processes
        self._limits = limits
        self._send = send
        self._mark = mark
        self._processes = neighbours
        self._hung: dict[str, float] = {}  # since when, monotonic, by UUID
        self._divided: dict[str, str] = {}  # GPUs by their instances' UUIDs: one that is lost tells of none
        self.dropped = 0  # messages that a run's connection did not take
        self.limits: dict[str, float] = {}  # bytes in use by UUID of a GPU, beyond which there may be news

    def see(
        self,
        snapshot: Snapshot,
        runs: Iterable[RunSnapshot],
        pressure: Pressure,
        owners: Mapping[int, ProcessOwners],
        now: float,
    ) -> None:
        """Tell the runs of a poll what is new to them; `owners` are those of processes by pid. Does not block."""
        self.limits = {}
        living = [run for run in runs if run.up]
        if not living:
            return
        hung = [gpu.identity.uuid for gpu in snapshot.gpus if gpu.fault == HUNG]
        self._hung = {uuid: self._hung.get(uuid, now) for uuid in hung}
        self._belongs, self._roots = {}, {run.peer.pid for run in living} - {0}
        poll = _Poll(self._by_uuid(snapshot), pressure, owners, snapshot.time, now)
        for run in living:
            self._advise(run, poll)

    def _by_uuid(self, snapshot: Snapshot) -> Mapping[str, Gpu]:
        found = {gpu.identity.uuid: gpu for gpu in snapshot.gpus}
        now = {each.identity.uuid: gpu.identity.uuid for gpu in snapshot.gpus for each in gpu.mig}
        before = {uuid: whole for uuid, whole in self._divided.items() if whole in found and not found[whole].up}
        self._divided = now | before
        return found | {uuid: found[whole] for uuid, whole in self._divided.items()}

    def _advise(self, run: RunSnapshot, poll: _Poll) -> None:
        ear, hears = run.ear, run.hello.hears
        ear.alarms.clear()
        gpus = {uuid: gpu for uuid in run.devices if (gpu := poll.gpus.get(uuid))}
        standing = dict(self._standing(run, gpus, poll))
        for matter, each in _news(ear.marked, standing):
            ear.marked[matter] = each.level
            kind: MarkKind = "pressure" if matter.kind == "pressure" else "event"
            self._mark(run.peer, kind, each.text(_short(each.gpu)), poll.now, matter.uuid)
        if hears:
            standing.update(self._neighbours(run, gpus, poll))
            for matter, each in _news(ear.told, standing):
                self._tell(run, matter, each, poll.now)
        if hears or self._alerting:
            for uuid, gpu in gpus.items():
                self.limits.setdefault(gpu.identity.uuid, NEVER)  # that it does not answer is to be sent at least
                if (memory := poll.pressure.of_runs.get((run.peer.run_id, uuid))) is not None:
                    self._arm(run, uuid, gpu, memory, poll.now)

    def _standing(self, run: RunSnapshot, gpus: Mapping[str, Gpu], poll: _Poll) -> Iterator[tuple[Matter, Standing]]:
        """Yield how the matters of a run stand that are not about its neighbours."""
        for uuid, gpu in gpus.items():
            whole = gpu.identity.uuid  # heat is the GPU's, whatever instances of it the run has
            if (level := poll.pressure.levels.get((whole, "thermal"))) is not None:
                yield Matter("pressure", whole, "thermal"), Standing(level, partial(_heat, gpu, level), gpu)
            if (memory := poll.pressure.of_runs.get((run.peer.run_id, uuid))) is not None:
                text = partial(_memory, self._limits, memory)
                yield Matter("pressure", uuid, "memory"), Standing(memory.level, text, gpu, memory)
        for gpu in {gpu.identity.uuid: gpu for gpu in gpus.values()}.values():
            yield from self._faults(run, gpu, poll)

    def _tell(self, run: RunSnapshot, matter: Matter, standing: Standing, now: float) -> None:
        memory, neighbour = standing.memory, matter.kind == "neighbour"
        if neighbour and not _listens_to_neighbours(run.ear, now):
            return
        advice = Advice(
            serial=sum(run.ear.sent.values()) + 1,
            kind=matter.kind,
            level=standing.level,
            uuid=matter.uuid,
            text=clip(standing.text(_name(standing.gpu)), MAX_ADVICE_CHARACTERS),
            resource=None if matter.kind != "pressure" else "memory" if memory else "thermal",
            headroom=round(memory.headroom) if memory else None,
            seconds_to_oom=memory.seconds_to_oom if memory else None,
        )
        if self._send(run.peer, advice):
            run.ear.told[matter] = standing.level
            run.ear.sent[matter.kind] += 1
            if neighbour:
                run.ear.neighbour_at = now
                self._mark(run.peer, "neighbour", standing.text(_short(standing.gpu)), now, matter.uuid)
        else:
            self.dropped += 1

    def _faults(self, run: RunSnapshot, gpu: Gpu, poll: _Poll) -> Iterator[tuple[Matter, Standing]]:
        uuid = gpu.identity.uuid
        if gpu.fault is not None and poll.now - self._hung.get(uuid, -HUNG_SECONDS) >= HUNG_SECONDS:
            yield Matter("gpu_lost", uuid), Standing("critical", partial(_loss, gpu.fault), gpu)
        for code, count in gpu.xids.items():
            level = _GRAVITY.get(explain(code).action)
            if level and count.last >= run.began and poll.time - count.last < XID_SECONDS:
                yield Matter("xid", uuid, str(code)), Standing(level, partial(_xid, code), gpu)

    def _neighbours(self, run: RunSnapshot, gpus: Mapping[str, Gpu], poll: _Poll) -> Iterator[tuple[Matter, Standing]]:
        """Yield which processes have taken much of what the run could have had."""
        for uuid, gpu in gpus.items():
            memory = poll.pressure.of_runs.get((run.peer.run_id, uuid))
            limit = run.memory[uuid].limit if uuid in run.memory else None
            if memory is None or (limit and memory.headroom >= limit - memory.in_use):
                continue  # a limit of its own ends it, from which other processes take nothing
            pid, growth = self._largest(run, uuid, gpu)
            if growth is None or poll.now - growth.rose > poll.time - run.began:
                continue  # what was taken before the run began is none of its own
            if growth.grown >= self._least_growth(memory, growth.grown):
                text = partial(_neighbour, memory, pid, growth, poll.owners.get(pid))
                yield Matter("neighbour", uuid, str(pid)), Standing("some", text, gpu, memory)

    def _largest(self, run: RunSnapshot, uuid: str, gpu: Gpu) -> tuple[int, CoTenant | None]:
        """Return the neighbour of a run that has grown most; None where none has, or where the run may be any of them.

        The run's children are no neighbours, and one that has begun since its processes were looked at is a child too.
        """
        grown = self._processes.grown(uuid)
        if not grown or not gpu.holds(run.peer.pid, uuid):
            return 0, None
        own = run.usage.present.pids if run.usage and run.usage.present else ()
        for pid, growth in grown:
            if pid not in own and self._root_of(pid) != run.peer.pid:
                return pid, growth
        return 0, None

    def _root_of(self, pid: int) -> int:
        if pid not in self._belongs:
            self._belongs[pid] = self._nearest_above(pid, self._roots)
        return self._belongs[pid]

    def _least_growth(self, memory: RunPressure, grown: float) -> float:
        """Return the bytes that a neighbour that has grown by so much must have grown by, to be told."""
        return max(LEAST_GROWTH, self._limits.neighbour_share * (memory.headroom + grown))

    def _arm(self, run: RunSnapshot, uuid: str, gpu: Gpu, memory: RunPressure, now: float) -> None:
        """Note how much more may be in use on the GPU, and in the run's allocator, until there may be news."""
        others, own = memory.slack(self._limits)
        run.ear.alarms[uuid] = memory.in_use + own
        if run.hello.hears and _listens_to_neighbours(run.ear, now):
            _pid, growth = self._largest(run, uuid, gpu)
            grown = growth.grown if growth else 0
            more = self._least_growth(memory, grown) - grown
            others = min(others, more) if more > 0 else others  # else it has been told, and may go on
        used = gpu.value(GpuReadings.memory_used_bytes)
        if used is not None:
            # On a MIG instance it takes as much at least: what others give back meanwhile is not known.
            whole = gpu.identity.uuid
            self.limits[whole] = min(self.limits[whole], used + others)


def _news(known: dict[Matter, Level], standing: Mapping[Matter, Standing]) -> list[tuple[Matter, Standing]]:
    """Return what stands otherwise than is known, and forget what is over: pressure alone is not by being absent."""
    for over in [each for each in known if each.kind != "pressure" and each not in standing]:
        del known[over]
    return [(matter, each) for matter, each in standing.items() if known.get(matter, "none") != each.level]


def _listens_to_neighbours(ear: DeliveryState, now: float) -> bool:
    """Tell whether the last word on neighbours was long ago."""
    return ear.neighbour_at is None or now - ear.neighbour_at >= REST_SECONDS


_MEMORY_IS: Mapping[Level, str] = {
    "critical": "device memory of {} is nearly used up",
    "some": "device memory of {} becomes scarce",
    "none": "device memory of {} is no longer scarce",
}
_AHEAD_IS: Mapping[Level, str] = {
    "critical": "device memory of {} will very soon be used up",
    "some": "device memory of {} will soon be used up",
}
_HEAT_IS: Mapping[Level, str] = {
    "critical": "{} is too hot and slows itself down",
    "some": "{} is hot",
    "none": "{} is no longer hot",
}


def _name(gpu: Gpu) -> str:
    return f"GPU {gpu.identity.index} ({gpu.identity.uuid})"


def _short(gpu: Gpu) -> str:
    return f"GPU {gpu.identity.index}"


def _memory(limits: Limits, memory: RunPressure, name: str) -> str:
    ahead = memory.seconds_to_oom
    by_time = ahead is not None and RANK[memory_level(limits, memory.share, None)] < RANK[memory.level]
    what = (_AHEAD_IS if by_time else _MEMORY_IS)[memory.level]
    return (
        f"{what.format(name)}: {format_bytes(memory.headroom)} can still be allocated, "
        f"{format_ratio(memory.share)} of what the run uses and could get"
        + (f"; as it grows now that lasts {format_elapsed(ahead)}" if ahead is not None else "")
    )


def _heat(gpu: Gpu, level: Level, name: str) -> str:
    margin = gpu.value(GpuReadings.temperature_margin_celsius)
    return _HEAT_IS[level].format(name) + (f": {margin:.0f} °C below its slowdown" if margin is not None else "")


def _neighbour(memory: RunPressure, pid: int, growth: CoTenant, owners: ProcessOwners | None, name: str) -> str:
    who = f" of user {owners.get('user', UNKNOWN)}" if owners else ""
    if owners and "run" in owners:
        who += f", run {owners['run']}"
    took = format_elapsed(growth.rose - growth.since)
    return (
        f"process {pid}{who} has taken {format_bytes(growth.grown)} of {name} within {took}: "
        f"{format_bytes(memory.headroom)} can still be allocated"
    )


def _loss(fault: str, name: str) -> str:
    return f"{name} does not answer the driver any more: {fault}"


def _xid(code: int, name: str) -> str:
    xid = explain(code)
    return f"{name} met XID {code}: {xid.meaning} {xid.action.value}"
