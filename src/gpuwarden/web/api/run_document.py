"""Training runs in `/api/v1/state`, as of the last poll."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeVar
from urllib.parse import quote

from gpuwarden.analysis.findings import list_findings
from gpuwarden.analysis.memory.headroom import HeadroomLimit
from gpuwarden.analysis.memory.oom_forecast import TimeLeft
from gpuwarden.health.status import HEALTH_RANK, BoxStatus, Trouble, worst
from gpuwarden.pressure.levels import headroom_ratio
from gpuwarden.protocol.messages import DeviceMemory
from gpuwarden.records.figure import FigureOf
from gpuwarden.records.part_readers import read_diagnosis
from gpuwarden.records.record import DeviceFigures, DeviceSource, RunFigures, RunSource
from gpuwarden.records.record_parts import RecordedDiagnosis, RecordedHeadline
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.state import State
from gpuwarden.web.api.api_paths import RUNS
from gpuwarden.web.api.gpu_document import Number

T = TypeVar("T")

MAX_RUNS = 100  # limits the time on the event loop; /api/v1/runs has all


# fmt: off
@dataclass(frozen=True, slots=True)
class StallDocument:
    """Stall: no training step for much longer than usual."""

    seconds: Annotated[float, "Time since the last step."]
    cause: Annotated[str, "What the run seems to do instead (docs/use/runs.md)."]


@dataclass(frozen=True, slots=True)
class FindingDocument:
    """Finding about the run that needs an action (docs/use/troubleshooting.md)."""

    name: Annotated[str, "nonfinite_loss, no_gpu, or error: the last one, if it is no out-of-memory error."]
    text: Annotated[str, "Description in a sentence."]
    next_step: Annotated[str, "What to do."]
# fmt: on


@dataclass(frozen=True, slots=True)
class _StateSource(RunSource):
    """Source of a run in the state; `steps_per_second` is its pace."""

    state: State
    troubles: Sequence[Trouble]
    steps_per_second: float | None
    headline: RecordedHeadline | None


@dataclass(frozen=True, slots=True)
class _DeviceStateSource(DeviceSource):
    """Source of a run's device in the state."""

    state: State

    @property
    def memory(self) -> DeviceMemory | None:
        """Memory of its allocator, while its report is current."""
        return self.run.memory.get(self.uuid)

    @property
    def is_unverified(self) -> bool:
        """True if the driver's list of processes cannot show whether the run is there."""
        return self.run.devices.get(self.uuid) is False


_run = FigureOf[_StateSource]()
_device = FigureOf[_DeviceStateSource]()


def _memory(read: Callable[[DeviceMemory], T]) -> Callable[[_DeviceStateSource], T | None]:
    return lambda of: read(of.memory) if of.memory else None


def _limit(read: Callable[[HeadroomLimit], T]) -> Callable[[_DeviceStateSource], T | None]:
    return lambda of: read(of.limit) if of.limit else None


def _grown(of: _DeviceStateSource) -> int | None:
    leak = of.run.leaks.get(of.uuid)
    return leak.grown if leak else None


def _headroom_ratio(of: _DeviceStateSource) -> float | None:
    headroom = of.run.headroom.get(of.uuid)
    return headroom_ratio(headroom, of.memory.current) if of.memory and headroom is not None else None


def _pressure(of: _DeviceStateSource) -> str | None:
    pressure = of.state.pressure.of_runs.get((of.run.peer.run_id, of.uuid))
    return pressure.level if pressure else None


def _is_unused(of: _DeviceStateSource) -> bool | None:
    return (of.run.headroom_unknown.get(of.uuid) == "process_unlisted" and not of.is_unverified) or None


def _host_left(read: Callable[[TimeLeft], T]) -> Callable[[_StateSource], T | None]:
    return lambda of: read(leak.left) if (leak := of.run.host_leak) and leak.left else None


def _host_memory(of: _StateSource) -> int | None:
    usage = of.run.host_usage
    return usage.present.memory if usage and usage.present and of.run.up else None


def _findings(run: RunSnapshot) -> list[FindingDocument]:
    loss, error = run.nonfinite_loss, run.errors[-1].error if run.errors else None
    found = list_findings(loss, run.no_gpu, error)
    return [FindingDocument(each.name, each.text, each.next_step) for each in found]


def _devices(of: _StateSource) -> list[DeviceDocument]:
    run = of.run
    uuids = dict.fromkeys((*run.devices, *run.memory, *run.headroom_unknown))
    limits = {uuid: limit for uuid, limit in run.headroom_limits.items() if uuid in run.headroom}
    return [
        _device.read(DeviceDocument, _DeviceStateSource(run, uuid, limits.get(uuid), of.state))
        for uuid in uuids
        if uuid
    ]


# fmt: off
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDocument(DeviceFigures):
    """A run on one GPU or MIG instance. Values of its last report are only there while that is current."""

    unverified: bool | None = _device(
        lambda of: of.is_unverified or None, "True if the driver's list of processes cannot show whether the run is there. `gpuwarden_run_device_verified`.")
    unused: bool | None = _device(_is_unused, "True if the driver does not list the run there, so that it does not count for the GPU.")
    memory_in_use_bytes: int | None = _device(_memory(lambda memory: memory.current), "Memory in use by its allocator.")
    memory_peak_bytes: int | None = _device(_memory(lambda memory: memory.peak), "Highest memory in use so far.")
    memory_limit_bytes: int | None = _device(_memory(lambda memory: memory.limit), "The allocator's own limit.")
    memory_reserved_bytes: int | None = _device(_memory(lambda memory: memory.reserved), "Memory reserved by its allocator, if reported.")
    headroom_bytes: Number = _device(lambda of: of.run.headroom.get(of.uuid), "Headroom: memory that it can still allocate.")
    headroom_ratio: Number = _device(_headroom_ratio, "Headroom as a share of used memory plus headroom.")
    headroom_at_peak_bytes: Number = _device(lambda of: of.run.headroom_at_peak.get(of.uuid), "Headroom at the memory peak.")
    headroom_in_step_bytes: Number = _device(lambda of: of.run.headroom_in_step.get(of.uuid), "Headroom that the last steps left, while memory grows with them.")
    headroom_limit_text: str | None = _device(_limit(lambda limit: limit.text.strip() or None), "That limit in words, such as: under its cgroup's limit of 24.0 GiB.")
    headroom_limit_used_bytes: Number = _device(_limit(lambda limit: limit.used), "Memory charged to the cgroup with that limit.")
    headroom_unknown: str | None = _device(lambda of: of.run.headroom_unknown.get(of.uuid), "Reason why headroom is unknown (docs/understand/headroom.md).")
    pressure: str | None = _device(_pressure, "Pressure on that memory: none, warning or critical.")
    memory_grown_bytes: int | None = _device(_grown, "Growth of the leak so far.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDocument(RunFigures):
    """Training run that is running, or ended less than `runs.expiry` ago.

    Its last phase, epoch, batch, batch size and loss are only there while its last report is current.
    """

    up: bool = _run(lambda of: of.run.up, "True while its process is alive and has not reported its end.", required=True)
    current: bool = _run(lambda of: of.run.current, "True while its last report is recent.", required=True)
    condition: str = _run(lambda of: worst(of.troubles), "Worst severity of its problems: ok, warning or critical.", required=True)
    troubles: Sequence[Trouble] = _run(lambda of: of.troubles, "Problems of the run, the worst first.", default=())
    record: str = _run(lambda of: f"{RUNS}/{quote(of.run.peer.run_id, safe='')}", "Path of its run record.", required=True)
    last_report_timestamp_seconds: Number = _run(lambda of: of.run.last_report, "Last report.")
    batch: int | None = _run(lambda of: of.latest.batch if of.latest else None, "Current batch of the epoch, from 0.")
    steps_per_second: Number = _run(lambda of: of.steps_per_second, "Steps per second over the last minute, or since its start; absent in its first seconds.")
    findings: Sequence[FindingDocument] = _run(lambda of: _findings(of.run), "Findings about the run, each with its next step.", default=())
    stall: StallDocument | None = _run(lambda of: StallDocument(of.run.stall.seconds, of.run.stall.cause) if of.run.stall else None, "Present while it is stalled.")
    headline: RecordedHeadline | None = _run(
        lambda of: replace(of.headline, holder=None) if of.headline else None, "Headline of a run that has ended, without `holder`.")
    diagnosis: RecordedDiagnosis | None = _run(lambda of: read_diagnosis(of.run.diagnosis), "Diagnosis of its last out-of-memory error.")
    batch_size_advice: str | None = _run(lambda of: of.run.batch_size_advice.text if of.run.batch_size_advice else None, "Batch size that would fit, in a sentence.")
    host_memory_bytes: Number = _run(_host_memory, "Host memory of its processes (resident).")
    host_memory_grown_bytes: int | None = _run(lambda of: of.run.host_leak.grown if of.run.host_leak else None, "Growth of that leak so far.")
    seconds_to_host_oom_lower: Number = _run(_host_left(lambda left: left.lower), "Lower bound of the forecast.")
    seconds_to_host_oom_upper: Number = _run(_host_left(lambda left: left.upper), "Upper bound of the forecast; absent if it may never happen.")
    unresolved_devices: int | None = _run(lambda of: of.run.unresolved or None, "Number of its devices that match no GPU for certain.")
    devices: Sequence[DeviceDocument] = _run(_devices, "GPUs and MIG instances of the run.", default=())
# fmt: on


def run_documents(
    status: BoxStatus,
    user_name: Callable[[int], str],
    pace: Callable[[str], float | None],
    find_headline: Callable[[str], RecordedHeadline | None],
) -> tuple[list[RunDocument], int]:
    """Return the runs of a poll, those that go on first, then the worst, then the newest; and how many are left out.

    `pace` returns the steps a second of a run by its id, `find_headline` its headline.
    """
    ordered = sorted(status.runs, key=lambda each: (not each[0].up, HEALTH_RANK[worst(each[1])], -each[0].began))
    chosen = []
    for run, troubles in ordered[:MAX_RUNS]:
        user, run_id = user_name(run.peer.uid), run.peer.run_id
        source = _StateSource(
            run,
            None if user == str(run.peer.uid) else user,
            run.report if run.current else None,
            status.state,
            troubles,
            pace(run_id) if run.up else None,
            None if run.up else find_headline(run_id),
        )
        chosen.append(_run.read(RunDocument, source))
    return chosen, len(ordered) - len(chosen)
