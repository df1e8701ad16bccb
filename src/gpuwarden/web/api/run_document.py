"""Training runs in `/api/v1/state`, as of the last poll."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote

from gpuwarden.analysis.findings import list_findings
from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.health.status import HEALTH_RANK, BoxStatus, Trouble, worst
from gpuwarden.pressure.levels import headroom_ratio
from gpuwarden.protocol.messages import Report
from gpuwarden.records.builder import record_diagnosis
from gpuwarden.records.record import RecordedDiagnosis
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.state import State
from gpuwarden.web.api.api_paths import RUNS
from gpuwarden.web.api.gpu_document import Number

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


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDocument:
    """A run on one GPU or MIG instance. Values of its last report are only there while that is current."""

    uuid: Annotated[str, "UUID of the GPU or MIG instance."]
    unverified: Annotated[bool | None, "True if the driver's list of processes cannot show whether the run is there. `gpuwarden_run_device_verified`."] = None
    unused: Annotated[bool | None, "True if the driver does not list the run there, so that it does not count for the GPU."] = None
    memory_in_use_bytes: Annotated[int | None, "Memory in use by its allocator."] = None
    memory_peak_bytes: Annotated[int | None, "Highest memory in use so far."] = None
    memory_limit_bytes: Annotated[int | None, "The allocator's own limit."] = None
    memory_reserved_bytes: Annotated[int | None, "Memory reserved by its allocator, if reported."] = None
    headroom_bytes: Annotated[Number, "Headroom: memory that it can still allocate."] = None
    headroom_ratio: Annotated[Number, "Headroom as a share of used memory plus headroom."] = None
    headroom_at_peak_bytes: Annotated[Number, "Headroom at the memory peak."] = None
    headroom_in_step_bytes: Annotated[Number, "Headroom that the last steps left, while memory grows with them."] = None
    headroom_limit: Annotated[str | None, "Limit that is reached first: device, allocator, cgroup or mps."] = None
    headroom_limit_bytes: Annotated[Number, "That limit, unless it is the device's memory."] = None
    headroom_limit_text: Annotated[str | None, "That limit in words, such as: under its cgroup's limit of 24.0 GiB."] = None
    headroom_limit_used_bytes: Annotated[Number, "Memory charged to the cgroup with that limit."] = None
    headroom_unknown: Annotated[str | None, "Reason why headroom is unknown (docs/understand/headroom.md)."] = None
    pressure: Annotated[str | None, "Pressure on that memory: none, warning or critical."] = None
    memory_growth_bytes_per_second: Annotated[Number, "Growth rate of a leak, while it lasts."] = None
    memory_grown_bytes: Annotated[int | None, "Growth of the leak so far."] = None
    seconds_to_oom: Annotated[Number, "OOM forecast: time to the limit at that rate."] = None
    seconds_to_oom_lower: Annotated[Number, "Lower bound of the forecast."] = None
    seconds_to_oom_upper: Annotated[Number, "Upper bound of the forecast; absent if it may never happen."] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDocument:
    """Training run that is running, or ended less than `runs.expiry` ago."""

    run_id: Annotated[str, "Id of the run, as in the metrics; unique until the host is rebooted."]
    name: Annotated[str, "Name of the run."]
    framework: Annotated[str, "Framework, such as tensorflow."]
    state: Annotated[str, "State: running or stalled; after its end finished, failed, out_of_memory, killed, crashed or unknown."]
    up: Annotated[bool, "True while its process is alive and has not reported its end."]
    current: Annotated[bool, "True while its last report is recent."]
    condition: Annotated[str, "Worst severity of its problems: ok, warning or critical."]
    troubles: Annotated[Sequence[Trouble], "Problems of the run, the worst first."] = ()
    receipt: Annotated[str, "Path of its run record."]
    pid: Annotated[int, "Process id; 0 if not visible to this daemon."]
    uid: Annotated[int, "User id of the process."]
    user: Annotated[str | None, "User name."] = None
    job: Annotated[str | None, "Job of several processes that it belongs to."] = None
    rank: Annotated[int | None, "Rank in the job, from 0."] = None
    began_timestamp_seconds: Annotated[float, "First report to this daemon."]
    last_report_timestamp_seconds: Annotated[Number, "Last report."] = None
    ended_timestamp_seconds: Annotated[Number, "End of the run."] = None
    outcome: Annotated[str | None, "Outcome: how it ended; may change for some seconds."] = None
    evidence: Annotated[str | None, "Evidence for the outcome."] = None
    phase: Annotated[str | None, "Current phase: train, test, predict or idle."] = None
    epoch: Annotated[int | None, "Current epoch, from 0."] = None
    batch: Annotated[int | None, "Current batch of the epoch, from 0."] = None
    batch_size: Annotated[int | None, "Batch size of the last step."] = None
    steps: Annotated[int | None, "Training steps in total."] = None
    steps_per_second: Annotated[Number, "Steps per second over the last minute, or since its start; absent in its first seconds."] = None
    step_median_seconds: Annotated[Number, "Median step time."] = None
    step_p95_seconds: Annotated[Number, "95th percentile of the step time."] = None
    input_wait_ratio: Annotated[Number, "Share of step time spent waiting for input, if known."] = None
    loss: Annotated[Number, "Last loss, if the user reports it."] = None
    errors: Annotated[Mapping[str, int] | None, "Errors of steps by kind."] = None
    findings: Annotated[Sequence[FindingDocument], "Findings about the run, each with its next step."] = ()
    stall: Annotated[StallDocument | None, "Present while it is stalled."] = None
    verdict: Annotated[RecordedDiagnosis | None, "Diagnosis of its last out-of-memory error."] = None
    batch_size_advice: Annotated[str | None, "Batch size that would fit, in a sentence."] = None
    host_memory_bytes: Annotated[Number, "Host memory of its processes (resident)."] = None
    host_memory_growth_bytes_per_second: Annotated[Number, "Growth rate of a host memory leak, while it lasts."] = None
    host_memory_grown_bytes: Annotated[int | None, "Growth of that leak so far."] = None
    seconds_to_host_oom: Annotated[Number, "Forecast: time until host memory is used up at that rate."] = None
    seconds_to_host_oom_lower: Annotated[Number, "Lower bound of the forecast."] = None
    seconds_to_host_oom_upper: Annotated[Number, "Upper bound of the forecast; absent if it may never happen."] = None
    unresolved_devices: Annotated[int | None, "Number of its devices that match no GPU for certain."] = None
    devices: Annotated[Sequence[DeviceDocument], "GPUs and MIG instances of the run."] = ()
# fmt: on


def run_documents(
    status: BoxStatus, user_name: Callable[[int], str], pace: Callable[[str], float | None]
) -> tuple[list[RunDocument], int]:
    """Return the runs of a poll, those that go on first, then the worst, then the newest; and how many are left out.

    `pace` returns the steps a second of a run by its id.
    """
    ordered = sorted(status.runs, key=lambda each: (not each[0].up, HEALTH_RANK[worst(each[1])], -each[0].began))
    chosen = [_run(run, troubles, status.state, user_name, pace) for run, troubles in ordered[:MAX_RUNS]]
    return chosen, len(ordered) - len(chosen)


def _run(
    run: RunSnapshot,
    troubles: Sequence[Trouble],
    state: State,
    user_name: Callable[[int], str],
    pace: Callable[[str], float | None],
) -> RunDocument:
    peer, hello, ending, diagnosis = run.peer, run.hello, run.ending, run.diagnosis
    user = user_name(peer.uid)
    uuids = dict.fromkeys((*run.devices, *run.memory, *run.headroom_unknown))
    present = run.host_usage.present if run.host_usage and run.up else None
    return RunDocument(
        run_id=peer.run_id,
        name=hello.name,
        framework=hello.framework,
        state=run.state,
        up=run.up,
        current=run.current,
        condition=worst(troubles),
        troubles=troubles,
        receipt=f"{RUNS}/{quote(peer.run_id, safe='')}",
        pid=peer.pid,
        uid=peer.uid,
        user=None if user == str(peer.uid) else user,
        job=hello.job,
        rank=hello.rank,
        began_timestamp_seconds=run.began,
        last_report_timestamp_seconds=run.last_report,
        ended_timestamp_seconds=ending.at if ending else None,
        outcome=ending.outcome if ending else None,
        evidence=ending.evidence if ending else None,
        steps_per_second=pace(peer.run_id) if run.up else None,
        stall=StallDocument(run.stall.seconds, run.stall.cause) if run.stall else None,
        verdict=record_diagnosis(diagnosis) if diagnosis else None,
        findings=_findings(run),
        batch_size_advice=run.batch_size_advice.text if run.batch_size_advice else None,
        host_memory_bytes=present.memory if present else None,
        unresolved_devices=run.unresolved or None,
        devices=[_device(run, uuid, state) for uuid in uuids if uuid],
        **(_progress(run.report, current=run.current) if run.report else {}),
        **_growth(run.host_leak, "host_memory", "seconds_to_host_oom"),
    )


def _findings(run: RunSnapshot) -> list[FindingDocument]:
    loss, error = run.nonfinite_loss, run.errors[-1].error if run.errors else None
    found = list_findings(loss, run.no_gpu, error)
    return [FindingDocument(each.name, each.text, each.next_step) for each in found]


def _progress(report: Report, *, current: bool) -> dict[str, Any]:
    """Return what a report says; what is so now only while the report is current."""
    waited, observed = report.input_wait_seconds, report.input_observed_seconds
    found: dict[str, Any] = {
        "steps": report.steps,
        "step_median_seconds": report.step_median,
        "step_p95_seconds": report.step_p95,
        "input_wait_ratio": min(waited / observed, 1.0) if waited is not None and observed else None,
        "errors": dict(report.errors),
    }
    if current:
        found |= {name: getattr(report, name) for name in ("phase", "epoch", "batch", "batch_size", "loss")}
    return found


def _growth(growth: Leak | None, memory: str, seconds: str) -> dict[str, Any]:
    """Return growth of memory and the time it leaves, by keys that begin with `memory` and `seconds`."""
    if growth is None:
        return {}
    found: dict[str, Any] = {f"{memory}_growth_bytes_per_second": growth.bytes_per_second}
    found[f"{memory}_grown_bytes"] = growth.grown
    if left := growth.left:
        found |= {seconds: left.seconds, f"{seconds}_lower": left.lower, f"{seconds}_upper": left.upper}
    return found


def _device(run: RunSnapshot, uuid: str, state: State) -> DeviceDocument:
    memory, headroom = run.memory.get(uuid), run.headroom.get(uuid)
    pressure = state.pressure.of_runs.get((run.peer.run_id, uuid))
    limit = run.headroom_limits.get(uuid) if headroom is not None else None
    unverified, unknown = run.devices.get(uuid) is False, run.headroom_unknown.get(uuid)
    return DeviceDocument(
        uuid=uuid,
        unverified=unverified or None,
        unused=(unknown == "process_unlisted" and not unverified) or None,
        memory_in_use_bytes=memory.current if memory else None,
        memory_peak_bytes=memory.peak if memory else None,
        memory_limit_bytes=memory.limit if memory else None,
        memory_reserved_bytes=memory.reserved if memory else None,
        headroom_bytes=headroom,
        headroom_ratio=headroom_ratio(headroom, memory.current) if memory and headroom is not None else None,
        headroom_at_peak_bytes=run.headroom_at_peak.get(uuid),
        headroom_in_step_bytes=run.headroom_in_step.get(uuid),
        headroom_limit=limit.kind if limit else None,
        headroom_limit_bytes=limit.limit if limit else None,
        headroom_limit_text=(limit.text.strip() or None) if limit else None,
        headroom_limit_used_bytes=limit.used if limit else None,
        headroom_unknown=unknown,
        pressure=pressure.level if pressure else None,
        **_growth(run.leaks.get(uuid), "memory", "seconds_to_oom"),
    )
