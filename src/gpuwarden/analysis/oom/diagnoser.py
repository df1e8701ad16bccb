"""The inquiry into a run's out-of-memories: what is noted for it as reports and polls come, and its verdict.

A verdict is given when the error comes, by what the last poll knew of the device, and once more at the next poll, whose
facts are fresher: a neighbour may have come in between. Then it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from gpuwarden.analysis.batch_size.cost_model import BatchSizeAdvice
from gpuwarden.analysis.memory.device_memory import by_gpu, held_by_others, is_listed
from gpuwarden.analysis.memory.leak_detector import Growth
from gpuwarden.analysis.memory.memory_history import MemoryHistory
from gpuwarden.analysis.oom.context import FailureContext, Taken
from gpuwarden.analysis.oom.diagnosis import Diagnosis, judge
from gpuwarden.analysis.oom.failed_allocation import named
from gpuwarden.gpu.metrics import GpuReadings, MigReadings
from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.protocol.messages import Allocation, DeviceMemory, Error, Hello, Report

# Says what others took of a device since a time of the run's life, in seconds since it was first heard of; since None
# is all that they hold.
TakenSince = Callable[[str, float | None], tuple[Taken, ...]]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a poll knows of one device, for one run; bytes, None where it does not.

    `apart` tells that what others hold there can be told from what the run holds.
    """

    room: float | None = None  # the most that the run's allocator could have in use
    size: float | None = None
    free: float | None = None
    others: float | None = None
    apart: bool = False


@dataclass(frozen=True, slots=True)
class Poll:
    """What a poll and the run's last report say of its devices; looked into when there is an out-of-memory."""

    memory: Mapping[str, DeviceMemory]  # by UUID
    headroom: Mapping[str, float]
    own: Collection[int]  # the run's processes
    snapshot: Snapshot
    uuids: Mapping[str, str] = field(default_factory=dict)  # by device, also of a run that has ended
    gone: bool = False  # the run's process: what is listed is others'

    def facts(self, uuid: str, told: DeviceMemory | None = None) -> Facts:
        """Return what is known of a device; `told` is what an error says of it, where no report does."""
        memory = self.memory.get(uuid) or told
        if memory is None:
            return Facts()
        return facts_of(uuid, memory, self.headroom.get(uuid), self.own, self.snapshot, gone=self.gone)


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of the run when an error comes: its last report, and by UUID its histories and their growth."""

    hello: Hello
    uuids: Mapping[str, str]
    report: Report | None
    histories: Mapping[str, MemoryHistory]
    taken: TakenSince
    growth: Callable[[str], Growth | None]
    host_growth: Growth | None = None
    host_memory: int | None = None
    fitting: BatchSizeAdvice | None = None


def facts_of(
    uuid: str, memory: DeviceMemory, headroom: float | None, own: Collection[int], snapshot: Snapshot, *, gone: bool
) -> Facts:
    """Return what a poll knows of a device that a run with the processes `own` uses, or did and is `gone`.

    Without headroom the room is the allocator's limit, or what others leave.
    """
    gpu = snapshot.gpu_with(uuid)
    if gpu is None or not gpu.up:
        return Facts(memory.limit or None)
    instance = gpu.instance(uuid)
    rows = MigReadings if instance else GpuReadings
    free, size = ((instance or gpu).value(row) for row in (rows.memory_free_bytes, rows.memory_size_bytes))
    apart = gone or is_listed(own, uuid, snapshot)
    others = held_by_others(own, uuid, snapshot) if apart else None
    room: float | None = memory.limit or None
    if headroom is not None:
        room = headroom + memory.current
    elif room is None and size is not None and apart:
        room = max(size - (others or 0), 0)
    return Facts(room, size, free, others, apart)


@dataclass(frozen=True, slots=True)
class _Open:
    """A case whose verdict the next poll may change, and which device it is about, by the run's name and by UUID."""

    case: FailureContext
    device: str | None
    uuid: str | None
    apart: bool  # whether others were told apart from the run when it was judged


@dataclass(slots=True)
class Diagnoser:
    """Of one run. Used by one event loop; times are seconds since the run was first heard of."""

    verdict: Diagnosis | None = None  # of its last out-of-memory
    _poll: Poll | None = None  # the last, while it has something
    _stay_began: int = 0  # steps that the run had made as its stay in training began
    _largest_in_stay: int | None = None  # batch
    _open: _Open | None = None  # until the next poll
    _taken: TakenSince | None = None
    _failed_peaks: dict[str, int] = field(default_factory=dict)  # by UUID

    def hear(self, report: Report, before: Report | None) -> None:
        """Take a report and the one before it."""
        if before is None or (before.phase == "idle" and report.phase != "idle"):
            self._stay_began, self._largest_in_stay = report.steps, None
            return
        largest = report.largest_batch_size or 0
        if largest <= (before.largest_batch_size or 0):
            largest = 0
        if report.steps > self._stay_began:
            self._largest_in_stay = max(report.batch_size or 0, self._largest_in_stay or 0, largest) or None

    def judge(self, error: Error, known: Known) -> Diagnosis:
        """Give the verdict by what is known now, and keep it open until the next poll."""
        hello, uuids, report = known.hello, known.uuids, known.report
        asked, device = _failed(error, hello)
        uuid = uuids.get(device) if device is not None else None
        after = by_gpu(error.memory, uuids).get(uuid or "") or error.memory.get(device or "")
        history = known.histories.get(uuid or "")
        reported = by_gpu(report.memory, uuids).get(uuid or "") if report else None
        before = history.last if history else reported
        case = FailureContext(
            error=error,
            framework=hello.framework,
            asked=asked,
            after=after or before,
            before=before,
            windows=tuple(history.windows) if history else (),
            training_peak=history.training_peak if history else None,
            batch_size=error.batch_size or (report.batch_size if report else None),
            largest_before=self._largest_in_stay,
            stay_steps=max(error.steps - self._stay_began, 0),
            unseen_steps=max(error.steps - report.steps, 0) if report else 0,
            failed_peak=self._failed_peaks.get(uuid or "", 0),
            growth=known.growth(uuid or ""),
            host_growth=known.host_growth,
            host_memory=known.host_memory,
            fitting=known.fitting.advised if known.fitting and known.fitting.too_large else None,
        )
        if case.after and uuid is not None:
            self._failed_peaks[uuid] = case.after.peak
        if case.after and case.after.limit:
            case = replace(case, room=case.after.limit)
        apart = uuid is not None and self._poll is not None and self._poll.facts(uuid, case.after).apart
        self._open, self._taken = _Open(case, device, uuid, apart), known.taken
        self.verdict = judge(self._with(case, uuid, self._poll))
        return self.verdict

    def see(self, poll: Poll, *, fresh: bool) -> Diagnosis | None:
        """Take a poll; return a verdict that came out otherwise by it. `fresh`: the run still lives."""
        self._poll = poll if poll.memory else None
        if self._open is None:
            return None
        opened, self._open = self._open, None
        uuid = opened.uuid
        # It came before the first poll that knew its devices.
        if uuid is None and opened.device is not None and opened.device in poll.uuids:
            uuid = poll.uuids[opened.device]
        elif not fresh or (
            uuid is not None and (uuid not in poll.memory or (opened.apart and not poll.facts(uuid).apart))
        ):
            return None  # it has ended, or is about to as it is not listed any more
        before, self.verdict = self.verdict, judge(self._with(opened.case, uuid, poll))
        return self.verdict if self.verdict != before else None

    def _with(self, case: FailureContext, uuid: str | None, poll: Poll | None) -> FailureContext:
        if poll is None or uuid is None:
            return case
        facts = poll.facts(uuid, case.after)
        room = facts.room if facts.room is not None else case.room
        if room is not None and case.after is not None:  # it may have taken what others let go since the poll
            room = max(room, case.after.current)
        case = replace(case, room=room, size=facts.size, free=facts.free, others=facts.others)
        if self._taken is None or case.base is None or not facts.apart:
            return case
        need = max(case.requested or 0, 0 if case.by_itself else case.usual or 0)
        could = [each.ended for each in case.windows if each.headroom is not None and each.headroom >= need]
        taken = self._taken(uuid, max(could, default=0.0))
        return replace(case, taken=taken, holders=self._taken(uuid, None))


def _failed(error: Error, hello: Hello) -> tuple[Allocation | None, str | None]:
    """Return the largest allocation that failed, and the run's device that it means where that is sure."""
    found = [(each, named(hello, each.device)) for each in error.allocations]
    if not found:
        return None, named(hello, None)
    return max(found, key=lambda each: (each[1] is not None, each[0].requested or 0))
