"""What holds now of that which the rules alert on: a row an alert, from one poll, with the labels of the rule's result.

Pure. The rules stay the reference: a test runs both beside each other and finds each alert once. Thresholds are those
of the section `pressure` where that has them, whose defaults are the rules'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from gpuwarden.alerts import owner_text
from gpuwarden.config import thresholds
from gpuwarden.config.schema import PressureConfig as Limits
from gpuwarden.formatting import amount, lasting, ratio
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu, Snapshot
from gpuwarden.health.alert import Alert
from gpuwarden.host import procfs
from gpuwarden.protocol.messages import ErrorKind
from gpuwarden.runs.outcome import Outcome
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.state import State
from gpuwarden.xid.codes import Severity, explain

Condition = Callable[[State, Limits], Iterator[Alert]]

_NVML = {"collector": "nvml"}

_MEMORY: Mapping[ErrorKind, str] = {"device_oom": "device", "host_oom": "host"}
_DEATHS: Mapping[Outcome, str] = {
    "failed": "RunDied",
    "oom_killed": "RunDied",
    "aborted": "RunDied",
    "crashed": "RunDied",
    "killed": "RunKilled",
}


def _run_near_out_of_memory(state: State, limits: Limits) -> Iterator[Alert]:
    devices = dict(_devices(state.snapshot))
    for run in state.runs:
        for uuid in run.headroom:
            memory = state.pressure.of_runs.get((run.peer.run_id, uuid))
            if memory is None or memory.share > limits.memory_critical or uuid not in devices:
                continue
            gpu = devices[uuid]
            there = None if uuid == gpu.identity.uuid else uuid  # of a MIG instance: what others hold of that one
            others = sum(
                each.memory or 0 for each in gpu.processes if each.pid != run.peer.pid and each.instance == there
            )
            beside = f", where other processes hold {amount(others)}" if others else ""
            yield Alert(
                "RunNearOutOfMemory",
                {**_of_run(run), **_of_device(uuid, gpu)},
                f"{_named(run)} can allocate only {amount(memory.headroom)} more on {_gpu_named(gpu)}, "
                f"{ratio(memory.share)} of what it uses and could get{beside}.",
                state.snapshot.time,
                owner_text.of_run(state, run),
            )


def _run_out_of_memory(state: State, _limits: Limits) -> Iterator[Alert]:
    for run in state.runs:
        for kind, memory in _MEMORY.items():
            at = run.last_errors.get(kind)
            if at is None or state.snapshot.time - at >= thresholds.ERROR_SECONDS:
                continue
            told = next((each for each in reversed(run.errors) if each.error.kind == kind), None)
            yield Alert(
                "RunOutOfMemory",
                {**_of_run(run), "kind": kind},
                f"{_named(run)} ran out of {memory} memory {_ago(state, at)}."
                + (f" {told.verdict.evidence} {told.verdict.next_step}" if told and told.verdict else ""),
                at,
                owner_text.of_run(state, run),
                last=at,
            )


def _run_stalled(state: State, _limits: Limits) -> Iterator[Alert]:
    for run in state.runs:
        if run.up and run.report and run.stall:
            yield Alert(
                "RunStalled",
                _of_run(run),
                f"{_named(run)} has made no step for {lasting(run.stall.seconds)}, much longer than its steps take; "
                f"what it does instead: {run.stall.cause}.",
                state.snapshot.time - run.stall.seconds,
                owner_text.of_run(state, run),
            )


def _runs_ended(name: str) -> Condition:
    def holds(state: State, _limits: Limits) -> Iterator[Alert]:
        for run in state.runs:
            ending = run.ending
            if ending is None or not ending.settled or _DEATHS.get(ending.outcome) != name:
                continue
            yield Alert(
                name,
                {**_of_run(run), "outcome": ending.outcome},
                f"{_named(run)} ended as {ending.outcome} {_ago(state, ending.at)}: {ending.evidence}.",
                ending.at,
                owner_text.of_run(state, run),
                last=ending.at,
            )

    return holds


def _gpu_near_thermal_slowdown(state: State, limits: Limits) -> Iterator[Alert]:
    for gpu in state.snapshot.gpus:
        margin = gpu.value(GpuReadings.temperature_margin_celsius)
        if margin is not None and margin <= limits.thermal_some:
            text = f"{_gpu_named(gpu)} is {margin:.0f} °C below the temperature at which it slows itself down."
            yield _gpu_alert(state, "GpuNearThermalSlowdown", gpu, text)


def _gpu_down(state: State, _limits: Limits) -> Iterator[Alert]:
    if state.snapshot.fault is not None:
        return  # GpuwardenDriverFault says so once
    for gpu in state.snapshot.gpus:
        if gpu.asked and not gpu.up:
            text = f"{_gpu_named(gpu)} ({gpu.identity.uuid}) does not answer the driver: {gpu.fault}."
            yield _gpu_alert(state, "GpuDown", gpu, text)


def end_is_known(alert: Alert, state: State) -> bool:
    """Say whether this poll can tell that an alert is over whose condition does not hold.

    A GPU that is down is well once it answers: not while the driver as a whole is silent, or let go of, and not while
    it may be one of those that the driver counts and that have not said yet who they are. A run that hangs says
    nothing to a daemon that was started anew: it goes on once it reports, and is over with its process.
    """
    snapshot = state.snapshot
    if alert.name == "GpuDown":
        gpu = snapshot.gpu(alert.labels.get("uuid", ""))
        if gpu is not None:
            return gpu.up
        return snapshot.asked and snapshot.fault is None and _unidentified(snapshot) <= 0
    if alert.name == "RunStalled":
        run_id = alert.labels.get("run_id", "")
        pid, _, start = run_id.partition("-")
        if not pid.isdecimal():
            return True  # nobody's: what was kept of it has been changed by hand
        return any(run.peer.run_id == run_id for run in state.runs) or not procfs.lives(int(pid), start)
    return True


def ending_of(alert: Alert, state: State) -> str:
    """Say how an alert ended, where that is not that it was seen to be over."""
    if alert.name == "GpuDown" and state.snapshot.gpu(alert.labels.get("uuid", "")) is None:
        return "not seen to be well: the driver lists it no more"
    return ""


def _gpu_missing(state: State, _limits: Limits) -> Iterator[Alert]:
    snapshot = state.snapshot
    count = _unidentified(snapshot)
    if snapshot.enumerated is not None and count > 0 and not snapshot.asleep_count:
        text = f"{count} of the {snapshot.enumerated} GPUs that the driver enumerates could not be read at all so far."
        yield Alert("GpuMissing", {}, text, snapshot.time)


def _unidentified(snapshot: Snapshot) -> int:
    """Count the GPUs that the driver has and that could not be read since the daemon started; below 0 if some went."""
    return (snapshot.enumerated or 0) - len(snapshot.gpus)


def _driver_fault(state: State, _limits: Limits) -> Iterator[Alert]:
    snapshot = state.snapshot
    if snapshot.fault is not None:
        text = f"The NVIDIA driver does not answer ({snapshot.fault}): no GPU of the box can be read."
        yield Alert("GpuwardenDriverFault", _NVML, text, snapshot.time)


def _no_gpus(state: State, _limits: Limits) -> Iterator[Alert]:
    snapshot = state.snapshot
    if snapshot.asked and snapshot.fault is None and not snapshot.enumerated and not snapshot.asleep_count:
        text = "The NVIDIA driver answers, and knows of no GPU in the box."
        yield Alert("GpuwardenNoGpus", _NVML, text, snapshot.time)


def _gpu_xids(name: str, severity: Severity) -> Condition:
    def holds(state: State, _limits: Limits) -> Iterator[Alert]:
        for gpu in state.snapshot.gpus:
            for code, seen in gpu.xids.items():
                xid = explain(code)
                if xid.severity != severity or state.snapshot.time - seen.last >= thresholds.XID_SECONDS:
                    continue
                text = (
                    f"{_gpu_named(gpu)} ({gpu.identity.uuid}) had XID {code} {_ago(state, seen.last)}: {xid.meaning} "
                    f"{xid.action.value}"
                )
                alert = _gpu_alert(state, name, gpu, text, xid=str(code))
                yield replace(alert, since=seen.last, last=seen.last)

    return holds


# All that the daemon knows at once and by itself; the other rules need a history, or another machine.
CONDITIONS: Mapping[str, Condition] = {
    "RunNearOutOfMemory": _run_near_out_of_memory,
    "RunOutOfMemory": _run_out_of_memory,
    "RunStalled": _run_stalled,
    "RunDied": _runs_ended("RunDied"),
    "RunKilled": _runs_ended("RunKilled"),
    "GpuNearThermalSlowdown": _gpu_near_thermal_slowdown,
    "GpuDown": _gpu_down,
    "GpuMissing": _gpu_missing,
    "GpuwardenDriverFault": _driver_fault,
    "GpuwardenNoGpus": _no_gpus,
    "GpuXidCritical": _gpu_xids("GpuXidCritical", "page"),
    "GpuXidWarning": _gpu_xids("GpuXidWarning", "warn"),
}

# How long they are told of after their condition held last, in seconds: a run that ended is forgotten soon.
TOLD_ON: Mapping[str, float] = {"RunDied": thresholds.DIED_SECONDS, "RunKilled": thresholds.DIED_SECONDS}

# How long an alert of an event is told, in seconds since: a daemon that starts anew may not know of the event.
OF_EVENTS: Mapping[str, float] = {
    **TOLD_ON,
    "RunOutOfMemory": thresholds.ERROR_SECONDS,
    "GpuXidCritical": thresholds.XID_SECONDS,
    "GpuXidWarning": thresholds.XID_SECONDS,
}


def _gpu_alert(state: State, name: str, gpu: Gpu, description: str, **labels: str) -> Alert:
    named = {**_of_device(gpu.identity.uuid, gpu), **labels}
    return Alert(name, named, description, state.snapshot.time, owner_text.of_gpu(state, gpu))


def _devices(snapshot: Snapshot) -> Iterator[tuple[str, Gpu]]:
    """Give GPUs by their UUIDs, and by those of their MIG instances."""
    for gpu in snapshot.gpus:
        yield gpu.identity.uuid, gpu
        for instance in gpu.mig:
            yield instance.identity.uuid, gpu


def _of_run(run: RunSnapshot) -> dict[str, str]:
    return {"run_id": run.peer.run_id, "run_name": run.hello.name}


def _of_device(uuid: str, gpu: Gpu) -> dict[str, str]:
    """Return the labels of a device; a MIG instance has the index and the name of its GPU."""
    return {"uuid": uuid, "gpu": str(gpu.identity.index), "name": gpu.identity.name}


def _named(run: RunSnapshot) -> str:
    return f"Run {run.hello.name} ({run.peer.run_id})"


def _gpu_named(gpu: Gpu) -> str:
    return f"GPU {gpu.identity.index} ({gpu.identity.name})"


def _ago(state: State, at: float) -> str:
    return f"{lasting(max(state.snapshot.time - at, 0.0))} ago"
