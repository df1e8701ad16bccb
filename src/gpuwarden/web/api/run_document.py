"""Training runs in `/api/v1/state`, as they are now; a run's receipt says what it did so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import quote

from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.health.status import HEALTH_RANK, BoxStatus, Trouble, worst
from gpuwarden.protocol.messages import Report
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.state import State
from gpuwarden.web.api.api_paths import RUNS
from gpuwarden.web.api.gpu_document import Number, headroom_ratio

MAX_RUNS = 100  # the API has the others, and the page all: an answer is written on the loop


# fmt: off
@dataclass(frozen=True, slots=True)
class StallDocument:
    """Step that takes much longer than the run's steps usually do (runs.md)."""

    seconds: Annotated[float, "Time without a step."]
    cause: Annotated[str, "What the run seems to do instead."]


@dataclass(frozen=True, slots=True)
class VerdictDocument:
    """Reason of the run's last out-of-memory (verdicts.md)."""

    name: Annotated[str, "One of the verdicts."]
    evidence: Annotated[str, "What it rests on, with numbers."]
    next_step: Annotated[str, "What to do."]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDocument:
    """The run on one GPU or MIG instance. What follows from its last report is there while that holds."""

    uuid: Annotated[str, "UUID of the GPU or MIG instance."]
    memory_in_use_bytes: Annotated[int | None, "What its allocator has handed out."] = None
    memory_peak_bytes: Annotated[int | None, "Most that it ever had handed out."] = None
    memory_limit_bytes: Annotated[int | None, "Its allocator's own limit."] = None
    memory_reserved_bytes: Annotated[int | None, "What its allocator holds of the device, where it says so."] = None
    headroom_bytes: Annotated[Number, "What it can still allocate (headroom.md)."] = None
    headroom_ratio: Annotated[Number, "Of what it uses and can still allocate, the part that it can still allocate."] = None
    headroom_at_peak_bytes: Annotated[Number, "What it could still allocate if it used as much as at its peak."] = None
    headroom_unknown: Annotated[str | None, "Why headroom is unknown."] = None
    pressure: Annotated[str | None, "How close it is to the end of that memory: none, warning or critical."] = None
    memory_growth_bytes_per_second: Annotated[Number, "Rate of a leak, while it lasts (foresight.md)."] = None
    memory_grown_bytes: Annotated[int | None, "What it has grown by so far."] = None
    seconds_to_oom: Annotated[Number, "How long it is to the limit at that rate."] = None
    seconds_to_oom_lower: Annotated[Number, "At least so long."] = None
    seconds_to_oom_upper: Annotated[Number, "At most so long; not there where it may never come."] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDocument:
    """Training run that goes on, or has ended lately (`runs.expiry`)."""

    run_id: Annotated[str, "The run on this box since it was booted; the label of the metrics."]
    name: Annotated[str, "What the run calls itself."]
    framework: Annotated[str, "What it trains with."]
    state: Annotated[str, "running or stalled; once it has ended, how: finished, failed, out_of_memory, killed, crashed or unknown (runs.md)."]
    up: Annotated[bool, "Whether its process lives and has not said its end."]
    current: Annotated[bool, "Whether its last report is recent."]
    condition: Annotated[str, "ok, warning or critical: the worst of its troubles."]
    troubles: Annotated[Sequence[Trouble], "What is wrong with it, the worst first."] = ()
    receipt: Annotated[str, "Path of its receipt: all else that is known of it (receipts.md)."]
    pid: Annotated[int, "Its process; 0 for one that this daemon cannot see."]
    uid: Annotated[int, "Whose process that is."]
    user: Annotated[str | None, "The user's name."] = None
    job: Annotated[str | None, "Job of several processes that it is part of."] = None
    rank: Annotated[int | None, "Its place in the job, from 0."] = None
    began_timestamp_seconds: Annotated[float, "When it first reported to this daemon, in Unix time."]
    last_report_timestamp_seconds: Annotated[Number, "When it last reported, in Unix time."] = None
    ended_timestamp_seconds: Annotated[Number, "When it ended, in Unix time."] = None
    outcome: Annotated[str | None, "How it ended (runs.md); may change for some seconds."] = None
    evidence: Annotated[str | None, "What that was concluded from."] = None
    phase: Annotated[str | None, "What it does now: train, test, predict or idle."] = None
    epoch: Annotated[int | None, "The epoch it is in, from 0."] = None
    batch: Annotated[int | None, "The batch of the epoch it is at, from 0."] = None
    batch_size: Annotated[int | None, "Examples of its last step."] = None
    steps: Annotated[int | None, "Training steps so far."] = None
    steps_per_second: Annotated[Number, "Steps a second over the last minute, or since it began; not there for its first seconds."] = None
    step_median_seconds: Annotated[Number, "What half of its steps did not exceed."] = None
    step_p95_seconds: Annotated[Number, "What 95 % of its steps did not exceed."] = None
    input_wait_ratio: Annotated[Number, "Of the time of its steps, the part in which they waited for input, where that is known (slow.md)."] = None
    loss: Annotated[Number, "The last loss, where the user has it reported."] = None
    errors: Annotated[Mapping[str, int] | None, "Errors that steps raised, by kind (troubleshooting.md)."] = None
    stall: Annotated[StallDocument | None, "There while a step hangs."] = None
    verdict: Annotated[VerdictDocument | None, "There once it was out of memory."] = None
    batch_size_advice: Annotated[str | None, "Which batch size would fit, in a sentence (batch-size.md)."] = None
    host_memory_bytes: Annotated[Number, "Host memory resident in its processes."] = None
    host_memory_growth_bytes_per_second: Annotated[Number, "Rate of a leak there, while it lasts."] = None
    host_memory_grown_bytes: Annotated[int | None, "What it has grown by so far."] = None
    seconds_to_host_oom: Annotated[Number, "Time until the host has no memory left, at that rate."] = None
    seconds_to_host_oom_lower: Annotated[Number, "At least so long."] = None
    seconds_to_host_oom_upper: Annotated[Number, "At most so long; not there where it may never come."] = None
    unresolved_devices: Annotated[int | None, "Devices of the run that could not be identified as a GPU."] = None
    devices: Annotated[Sequence[DeviceDocument], "Its GPUs and MIG instances."] = ()
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
    peer, hello, ending, verdict = run.peer, run.hello, run.ending, run.verdict
    user = user_name(peer.uid)
    uuids = dict.fromkeys((*run.devices, *run.memory, *run.headroom_unknown))
    present = run.usage.present if run.usage and run.up else None
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
        verdict=VerdictDocument(verdict.cause, verdict.evidence, verdict.next_step) if verdict else None,
        batch_size_advice=run.batch_size_advice.text if run.batch_size_advice else None,
        host_memory_bytes=present.memory if present else None,
        unresolved_devices=run.unresolved or None,
        devices=[_device(run, uuid, state) for uuid in uuids if uuid],
        **(_progress(run.report, current=run.current) if run.report else {}),
        **_growth(run.host_growth, "host_memory", "seconds_to_host_oom"),
    )


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
    return DeviceDocument(
        uuid=uuid,
        memory_in_use_bytes=memory.current if memory else None,
        memory_peak_bytes=memory.peak if memory else None,
        memory_limit_bytes=memory.limit if memory else None,
        memory_reserved_bytes=memory.reserved if memory else None,
        headroom_bytes=headroom,
        headroom_ratio=headroom_ratio(headroom, memory.current) if memory and headroom is not None else None,
        headroom_at_peak_bytes=run.headroom_at_peak.get(uuid),
        headroom_unknown=run.headroom_unknown.get(uuid),
        pressure=pressure.level if pressure else None,
        **_growth(run.growth.get(uuid), "memory", "seconds_to_oom"),
    )
