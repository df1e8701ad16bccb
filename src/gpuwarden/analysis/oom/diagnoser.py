"""Diagnoser of one run's out-of-memory errors: collects their context from reports and polls.

It diagnoses when the error arrives, by the last poll, and once more at the next poll, as a co-tenant may have come in
between. Then the diagnosis is final.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from gpuwarden.analysis.batch_size.cost_model import BatchSizeAdvice
from gpuwarden.analysis.memory.device_memory import is_listed, sum_by_gpu, sum_held_by_others
from gpuwarden.analysis.memory.headroom import read_space
from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.analysis.memory.leak_watch import HOST
from gpuwarden.analysis.memory.memory_history import MemoryHistory
from gpuwarden.analysis.oom.co_tenants import CoTenants
from gpuwarden.analysis.oom.context import FailureContext
from gpuwarden.analysis.oom.diagnosis import Diagnosis
from gpuwarden.analysis.oom.diagnosis_rules import diagnose
from gpuwarden.analysis.oom.failed_allocation import find_largest_allocation
from gpuwarden.gpu.snapshot import Snapshot
from gpuwarden.protocol.messages import DeviceMemory, Error, Hello, Report


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Facts of one device at a poll, for one run; bytes, None if unknown.

    `separable`: the memory of other processes can be separated from the run's.
    """

    room: float | None = None  # memory available to the run
    size: float | None = None
    free: float | None = None
    separable: bool = False


@dataclass(frozen=True, slots=True)
class PollFacts:
    """Facts of a run's devices at a poll, evaluated only for an out-of-memory error."""

    memory: Mapping[str, DeviceMemory]  # by UUID, as the run last reported it
    headroom: Mapping[str, float]
    own: Collection[int]  # pids of the run's processes
    snapshot: Snapshot
    uuids: Mapping[str, str] = field(default_factory=dict)  # by device, also of a run that has ended
    gone: bool = False  # the run's process has ended: all listed processes are others
    co_tenants: CoTenants = field(default_factory=CoTenants)

    def device(self, uuid: str, after: DeviceMemory | None = None) -> DeviceFacts:
        """Return the facts of a device; `after` is the allocator's memory after an error, if no report has any.

        Without headroom, as of a run that has been silent for long, the room is the allocator's limit, or the device's
        size less the memory of others if that is less.
        """
        memory = self.memory.get(uuid) or after
        if memory is None:
            return DeviceFacts()
        gpu = self.snapshot.gpu_with(uuid)
        if gpu is None or not gpu.up:
            return DeviceFacts(memory.limit or None)
        space = read_space(gpu, uuid)
        separable = self.gone or is_listed(self.own, uuid, self.snapshot)
        others = sum_held_by_others(self.own, uuid, self.snapshot) if separable else None
        headroom = self.headroom.get(uuid)
        limits: list[float] = [memory.limit] if memory.limit else []
        if headroom is not None:
            limits = [headroom + memory.current]
        elif space.size is not None and separable:
            limits.append(max(space.size - (others or 0), 0))
        room = min(limits, default=None)
        return DeviceFacts(room, space.size, space.free, separable)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts of a run when an error arrives: its last report, and by UUID its memory and its leaks.

    It arrives `now`, and the run's first message came at `began`; both monotonic.
    """

    hello: Hello
    uuids: Mapping[str, str]
    report: Report | None
    histories: Mapping[str, MemoryHistory]  # of a device without a UUID by its name
    began: float
    now: float
    leaks: Mapping[str, Leak] = field(default_factory=dict)  # also of HOST
    host_memory: int | None = None
    host_size: int | None = None
    advice: BatchSizeAdvice | None = None


@dataclass(frozen=True, slots=True)
class _Pending:
    """Failure that the next poll may diagnose differently, with the run's name and the UUID of its device."""

    failure: FailureContext
    device: str | None
    uuid: str | None
    separable: bool  # as of the first diagnosis
    run_began: float  # monotonic, as when it failed
    at: float


@dataclass(slots=True)
class Diagnoser:
    """Out-of-memory errors of one run. Used by one event loop; times are seconds since the run's first message."""

    diagnosis: Diagnosis | None = None  # of the last one
    _poll: PollFacts | None = None  # the last
    _fit_began: int = 0  # steps that the run had made when its fit began
    _largest_in_fit: int | None = None  # batch
    _pending: _Pending | None = None  # until the next poll
    _failed_peaks: dict[str, int] = field(default_factory=dict)  # by UUID, or by device without one

    def handle_report(self, report: Report, before: Report | None) -> None:
        """Update with a report and the one before it."""
        if before is None or (before.phase == "idle" and report.phase != "idle"):
            self._fit_began, self._largest_in_fit = report.steps, None
            return
        largest = report.largest_batch_size or 0
        if largest <= (before.largest_batch_size or 0):
            largest = 0
        if report.steps > self._fit_began:
            self._largest_in_fit = max(report.batch_size or 0, self._largest_in_fit or 0, largest) or None

    def handle_error(self, error: Error, run: RunFacts) -> Diagnosis:
        """Return the diagnosis by the current facts, and keep it open until the next poll."""
        device, failure = self._context(error, run)
        uuid = run.uuids.get(device) if device is not None else None
        if failure.after and device is not None:
            self._failed_peaks[uuid or device] = failure.after.peak
        separable = uuid is not None and self._poll is not None and self._poll.device(uuid, failure.after).separable
        self._pending = _Pending(failure, device, uuid, separable, run.began, run.now)
        self.diagnosis = diagnose(_add_poll(self._pending, uuid, self._poll))
        return self.diagnosis

    def handle_poll(self, poll: PollFacts, *, up: bool) -> Diagnosis | None:
        """Update with a poll; return the diagnosis if it changed. `up`: the run has not ended."""
        self._poll = poll
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        uuid = pending.uuid
        # The error came before the first poll that knew its devices.
        if uuid is None and pending.device is not None and pending.device in poll.uuids:
            uuid = poll.uuids[pending.device]
        elif not up or (
            uuid is not None and (uuid not in poll.memory or (pending.separable and not poll.device(uuid).separable))
        ):
            return None  # it has ended, or is ending, as it is no longer listed
        before, self.diagnosis = self.diagnosis, diagnose(_add_poll(pending, uuid, poll))
        return self.diagnosis if self.diagnosis != before else None

    def _context(self, error: Error, run: RunFacts) -> tuple[str | None, FailureContext]:
        """Return the run's name of the failed device, if certain, and the facts known without a poll."""
        report = run.report
        allocation, device = find_largest_allocation(error, run.hello)
        uuid = run.uuids.get(device, "") if device is not None else ""
        after = sum_by_gpu(error.memory, run.uuids).get(uuid) or error.memory.get(device or "")
        history = run.histories.get(uuid) or run.histories.get(device or "")
        before = history.last if history else None
        after = after or before
        return device, FailureContext(
            error=error,
            framework=run.hello.framework,
            allocation=allocation,
            after=after,
            before=before,
            room=(after.limit if after else None) or None,
            windows=tuple(history.windows) if history else (),
            training_peak=history.training_peak if history else None,
            batch_size=error.batch_size or (report.batch_size if report else None),
            largest_batch_before=self._largest_in_fit,
            fit_steps=max(error.steps - self._fit_began, 0),
            unreported_steps=max(error.steps - report.steps, 0) if report else 0,
            failed_peak=self._failed_peaks.get(uuid or device or "", 0),
            leak=run.leaks.get(uuid),
            host_leak=run.leaks.get(HOST),
            host_memory=run.host_memory,
            host_size=run.host_size,
            advised_batch_size=run.advice.advised if run.advice and run.advice.too_large else None,
        )


def _add_poll(pending: _Pending, uuid: str | None, poll: PollFacts | None) -> FailureContext:
    """Return the failure with a poll's facts of the device."""
    failure = pending.failure
    if poll is None or uuid is None:
        return failure
    facts = poll.device(uuid, failure.after)
    room = facts.room if facts.room is not None else failure.room
    if room is not None and failure.after is not None:  # it may have allocated memory that others freed since the poll
        room = max(room, failure.after.current)
    failure = replace(failure, room=room, size=facts.size, free=facts.free)
    if failure.base is None or not facts.separable:
        return failure
    need = failure.needed or 0
    had_room = [each.ended for each in failure.windows if each.headroom is not None and each.headroom >= need]
    since = pending.run_began + max(had_room, default=0.0)
    return replace(
        failure,
        grown_co_tenants=poll.co_tenants.taken(uuid, poll.own, since, pending.at),
        co_tenants=poll.co_tenants.taken(uuid, poll.own, None, pending.at),
    )
