"""Troubles of a GPU, a run or the box, with their level: judged once, for the status page and the terminal.

Levels follow the alert rules and the thresholds that these share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

from gpuwarden.config import thresholds
from gpuwarden.formatting import format_bytes, format_elapsed, format_forecast, format_ratio
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.protocol.messages import RESOURCES, Level
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.state import State
from gpuwarden.xid.codes import Severity, explain

Gravity = Literal["ok", "warning", "critical"]
Condition = Literal["ok", "warning", "critical", "unknown"]
GRAVITIES: tuple[Gravity, ...] = get_args(Gravity)

_BY_LEVEL: Mapping[Level, Gravity] = {"none": "ok", "some": "warning", "critical": "critical"}
_BY_SEVERITY: Mapping[Severity, Gravity] = {"info": "ok", "warn": "warning", "page": "critical"}
_SLOWED = ("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown", "reliability")
_OOM = ("device_oom", "host_oom")


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that is wrong with the driver, a GPU or a run. The last three keys are in the box's list alone."""

    level: Annotated[Gravity, "How grave it is: warning or critical, as in the alerts."]
    text: Annotated[str, "What it is, in a few words."]
    name: Annotated[str | None, "What it is about: the driver, a GPU by its number, or a run by its name."] = None
    uuid: Annotated[str | None, "The GPU."] = None
    run_id: Annotated[str | None, "The run."] = None


def gravest(troubles: Iterable[Trouble]) -> Gravity:
    """Return how grave the worst of them is."""
    return max((trouble.level for trouble in troubles), key=GRAVITIES.index, default="ok")


def box_condition(state: State, troubles: Iterable[Trouble]) -> Condition:
    """Return how the box is: the worst of its troubles; unknown where no GPU was asked, during a pause say."""
    worst = gravest(troubles)
    return worst if worst != "ok" or any(gpu.asked for gpu in state.snapshot.gpus) else "unknown"


@dataclass(frozen=True, slots=True)
class Judged:
    """A poll's GPUs and runs, each with what is wrong with it, the worst first."""

    state: State
    gpus: Sequence[tuple[Gpu, Sequence[Trouble]]]
    runs: Sequence[tuple[RunSnapshot, Sequence[Trouble]]]


def judge(state: State) -> Judged:
    """Find out what is wrong."""
    return Judged(
        state,
        [(gpu, _worst_first(_of_gpu(gpu, state))) for gpu in state.snapshot.gpus],
        [(run, _worst_first(_of_run(run, state))) for run in state.runs],
    )


def _worst_first(troubles: Iterable[Trouble]) -> list[Trouble]:
    return sorted(troubles, key=lambda trouble: -GRAVITIES.index(trouble.level))


def box_troubles(judged: Judged) -> list[Trouble]:
    """Say what is wrong with the driver, GPUs and runs, the worst first; of runs that ended only those of late."""
    return _worst_first(_of_box(judged))


def _of_box(judged: Judged) -> Iterator[Trouble]:
    snapshot = judged.state.snapshot
    if snapshot.fault is not None:
        yield Trouble("critical", f"does not answer: {snapshot.fault}", "the driver")
    for gpu, troubles in judged.gpus:
        for trouble in troubles:
            yield replace(trouble, name=f"GPU {gpu.identity.index}", uuid=gpu.identity.uuid)
    for run, of_run in judged.runs:
        if run.up or (run.ending and snapshot.time - run.ending.at < thresholds.DIED_SECONDS):
            for trouble in of_run:
                yield replace(trouble, name=f"run {run.hello.name}", run_id=run.peer.run_id)


def _of_gpu(gpu: Gpu, state: State) -> Iterator[Trouble]:
    if gpu.fault is not None:
        yield Trouble("critical", f"does not answer: {gpu.fault}")
    for code, count in gpu.xids.items():
        level = _BY_SEVERITY[explain(code).severity]
        age = state.snapshot.time - count.last
        if level != "ok" and age < thresholds.XID_SECONDS:
            yield Trouble(level, f"XID {code} {format_elapsed(max(age, 0.0))} ago")
    for uuid in (gpu.identity.uuid, *(each.identity.uuid for each in gpu.mig)):
        for resource in RESOURCES:
            pressure = state.pressure.levels.get((uuid, resource), "none")
            if pressure != "none":
                numbers = _heat(gpu) if resource == "thermal" else _room(uuid, state)
                yield Trouble(_BY_LEVEL[pressure], f"{resource} pressure {pressure}{numbers and f': {numbers}'}")
    if slowed := [reason for reason in _SLOWED if gpu.value(GpuReadings.clock_event_active, reason)]:
        yield Trouble("warning", f"slowed down: {', '.join(slowed)}")
    yield from _of_memory_cells(gpu)
    if gpu.value(GpuReadings.reset_required):
        yield Trouble("warning", "the driver wants a reset")


def _of_memory_cells(gpu: Gpu) -> Iterator[Trouble]:
    """Say what is broken of its memory."""
    if gpu.value(GpuReadings.row_remap_failed):
        yield Trouble("critical", "a row of memory could not be replaced")
    if gpu.value(GpuReadings.memory_unrepairable):
        yield Trouble("critical", "memory cannot be repaired")
    if gpu.value(GpuReadings.ecc_sram_threshold_exceeded):
        yield Trouble("critical", "too many errors of memory on the chip")
    if gpu.value(GpuReadings.row_remap_pending):
        yield Trouble("warning", "a row of memory waits for a reset")
    if gpu.value(GpuReadings.retired_pages_pending):
        yield Trouble("warning", "a page of memory waits for a reset")


def _heat(gpu: Gpu) -> str:
    """Say how hot it is, and how far that is from where it slows itself down."""
    core = gpu.value(GpuReadings.temperature_celsius, "core")
    margin = gpu.value(GpuReadings.temperature_margin_celsius)
    told = "" if core is None else f"{core:.0f} °C"
    if margin is None:
        return told
    return ", ".join(filter(None, (told, f"{abs(margin):.0f} °C {'below' if margin >= 0 else 'above'} slowdown")))


def _room(uuid: str, state: State) -> str:
    """Say how much the run there can still allocate that is closest to out of memory."""
    there = [each for (_run_id, of), each in state.pressure.of_runs.items() if of == uuid]
    if not there:
        return ""
    tightest = min(there, key=lambda each: each.share)
    return f"{format_bytes(tightest.headroom)} of headroom, {format_ratio(tightest.share)}"


def _of_run(run: RunSnapshot, state: State) -> Iterator[Trouble]:
    if run.ending is not None and run.ending.outcome not in ("finished", "unknown"):
        age = max(state.snapshot.time - run.ending.at, 0.0)
        yield Trouble("warning", f"{run.ending.outcome.replace('_', ' ')} {format_elapsed(age)} ago")
    if not run.up:
        return
    if run.stall is not None:
        yield Trouble("warning", f"no step for {format_elapsed(run.stall.seconds)} ({run.stall.cause})")
    for kind in _OOM:
        told = run.last_errors.get(kind)  # type: ignore[call-overload] # both are kinds of errors
        if told is not None and state.snapshot.time - told < thresholds.ERROR_SECONDS:
            yield Trouble("warning", f"{kind} {format_elapsed(max(state.snapshot.time - told, 0.0))} ago")
    for uuid in run.headroom:
        pressure = state.pressure.of_runs.get((run.peer.run_id, uuid))
        if pressure is not None and pressure.level != "none":
            left = pressure.seconds_to_oom
            when = "" if left is None else f", out of memory {_when(run, uuid)}"
            yield Trouble(_BY_LEVEL[pressure.level], f"{format_ratio(pressure.share)} of memory left{when}")
    growth = run.host_growth
    if growth is not None and growth.left and growth.left.seconds <= thresholds.OUT_OF_MEMORY_AHEAD_SECONDS:
        left_now = format_forecast(growth.left.seconds, growth.left.lower, growth.left.upper)
        yield Trouble("warning", f"out of host memory {left_now}")


def _when(run: RunSnapshot, uuid: str) -> str:
    growth = run.growth.get(uuid)
    return format_forecast(growth.left.seconds, growth.left.lower, growth.left.upper) if growth and growth.left else ""
