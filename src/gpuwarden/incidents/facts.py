"""Facts of an incident, gathered from the events of the history and from the runs of a poll."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import TypedDict

from gpuwarden.config import thresholds
from gpuwarden.errors.kind_guides import ERROR_KIND_WORDS
from gpuwarden.errors.recognition import find_problem
from gpuwarden.fairness.subordinate_uids import find_user
from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.snapshot import Gpu
from gpuwarden.health.run_conditions import END_CONDITIONS
from gpuwarden.history.event_log import RUN_ENDED, Event
from gpuwarden.incidents.causes import STALL_REACH_SECONDS, Fact, is_of_hardware
from gpuwarden.incidents.incident import INCIDENT_KINDS
from gpuwarden.protocol.messages import OOM_KINDS, ErrorKind
from gpuwarden.runs.run_snapshot import RunSnapshot, SeenError
from gpuwarden.state import State
from gpuwarden.xid.codes import Action, explain

MAX_FACTS = 128  # of an incident
HARDWARE = "hardware"  # tie of all GPUs: power, the bus, the driver
HOST = "host"  # tie of all runs: host memory

_OF_HARDWARE = ("GpuDown", "GpuwardenDriverFault", "GpuXidCritical")
_THERMAL = ("hw_thermal_slowdown", "sw_thermal_slowdown")
# Only names of this list leave the private message of an error.
_CUDA_ERROR = re.compile(
    r"\bCUDA_ERROR_(?:LAUNCH_FAILED|LAUNCH_TIMEOUT|ILLEGAL_ADDRESS|ILLEGAL_INSTRUCTION|MISALIGNED_ADDRESS|ASSERT|"
    r"ECC_UNCORRECTABLE|HARDWARE_STACK_ERROR|NVLINK_UNCORRECTABLE|NOT_INITIALIZED|NO_DEVICE|INVALID_DEVICE|"
    r"DEVICE_UNAVAILABLE|SYSTEM_DRIVER_MISMATCH|SYSTEM_NOT_READY|INVALID_HANDLE|NO_BINARY_FOR_GPU|UNKNOWN)\b"
)
_COLLECTIVE = ("collective_failed", "collective_timeout", "rank_failed")  # problems of errors/run_problems.py


def incident_kind(event: Event, state: State) -> str | None:
    """Return the kind of incident that an event opens; None for none."""
    if event.kind == RUN_ENDED:
        run = find_run(state, event.run_id)
        return _kind_of_end(run) if run else None
    if event.kind == "GpuThrottled":
        gpu = state.snapshot.gpu(event.uuid or "")
        return event.kind if gpu is not None and _is_hot(gpu) else None
    if event.xid is not None:
        return (
            None
            if explain(event.xid, event.level).action in (Action.IGNORE, Action.FOLLOW_OTHER, Action.RECOVER)
            else event.kind
        )
    return event.kind if event.kind in INCIDENT_KINDS and event.level != "info" else None


def find_run(state: State, run_id: str | None) -> RunSnapshot | None:
    """Return the run of an id."""
    return next((run for run in state.runs if run.peer.run_id == run_id), None) if run_id else None


def _kind_of_end(run: RunSnapshot) -> str | None:
    ending = run.ending
    if ending is None or ending.outcome not in END_CONDITIONS:
        return None
    # The end that follows from an out-of-memory error is the same trouble.
    oom = max((run.last_errors.get(kind, 0.0) for kind in OOM_KINDS), default=0.0)
    is_oom = ending.outcome == "out_of_memory" or ending.at - oom < thresholds.OOM_END_SECONDS
    return "RunOutOfMemory" if is_oom else END_CONDITIONS[ending.outcome]


def _is_hot(gpu: Gpu) -> bool:
    return any(gpu.value(GpuReadings.clock_event_active, name) for name in _THERMAL)


def gpus_of(run: RunSnapshot, state: State) -> frozenset[str]:
    """Return the UUIDs of a run's GPUs; of MIG instances, those of their GPUs."""
    uuids = run.devices.keys() | run.memory_windows.keys() | run.ooms.keys()
    return frozenset(_whole(uuid, state) for uuid in uuids)


def _whole(uuid: str, state: State) -> str:
    gpu = state.snapshot.gpu_with(uuid)
    return gpu.identity.uuid if gpu else uuid


def job_of(run: RunSnapshot) -> str:
    """Return what identifies a run's job among those of all users; empty for a run of one process."""
    return f"{find_user(run.peer.uid)}:{run.hello.job}" if run.hello.job else ""


def ties_of(event: Event, kind: str, state: State) -> frozenset[str]:
    """Return what an event has to share with an incident to join it: a GPU, run or job, the hardware, the host."""
    ties = set()
    if event.run_id is None:
        if event.uuid:
            ties = {_whole(event.uuid, state)}
        elif event.kind == "GpuwardenDriverFault":  # of all GPUs
            ties = {gpu.identity.uuid for gpu in state.snapshot.gpus}
        for run in state.runs:
            if ties & gpus_of(run, state):
                ties |= {run.peer.run_id, *filter(None, [job_of(run)])}
    own = find_run(state, event.run_id)
    if own is not None:
        ties |= {own.peer.run_id, *gpus_of(own, state), *filter(None, [job_of(own)])}
        if kind == "RunOutOfMemory" and _is_out_of_host_memory(own):
            ties.add(HOST)
    if kind in _OF_HARDWARE:
        ties.add(HARDWARE)
    return frozenset(ties)


def gather(
    events: Iterable[Event],
    state: State,
    ties: Collection[str],
    opened: Collection[Event],
    *,
    since: float,
) -> list[Fact]:
    """Return the facts since a Unix time that share a tie with an incident; those of `opened` events opened it."""
    found = chain(_device_facts(events, state, ties, opened), _run_facts(state, ties, opened))
    facts = [fact for fact in found if fact.at >= since]
    if len(facts) > MAX_FACTS:
        facts = sorted(facts, key=lambda fact: (not is_of_hardware(fact), not fact.opened, fact.at))[:MAX_FACTS]
    return facts


def _device_facts(
    events: Iterable[Event], state: State, ties: Collection[str], opened: Collection[Event]
) -> Iterator[Fact]:
    for event in dict.fromkeys((*events, *opened)):
        is_fact = event.kind in INCIDENT_KINDS and event.kind != "RunOutOfMemory"
        if not is_fact or (event.level == "info" and event.xid is None):
            continue
        run = find_run(state, event.run_id)
        gpus = gpus_of(run, state) if run else frozenset([_whole(event.uuid, state)] if event.uuid else [])
        is_tied = (
            event in opened or bool(gpus & set(ties)) or event.run_id in ties or event.kind == "GpuwardenDriverFault"
        )
        if not is_tied and not (HARDWARE in ties and event.kind in ("GpuXidCritical", "GpuDown")):
            continue
        yield Fact(
            at=event.timestamp_seconds,
            kind=event.kind,
            what=_what(event),
            gpu=_gpu_name(event, state),
            gpus=gpus,
            code=event.xid,
            opened=event in opened,
            **_run_fields(run),
        )


def _what(event: Event) -> str:
    if event.xid is not None:
        meaning = explain(event.xid, event.level).meaning.rstrip(".")
        return meaning if meaning[1:2].isupper() else f"{meaning[:1].lower()}{meaning[1:]}"
    return event.text.partition(": ")[2]


def _gpu_name(event: Event, state: State) -> str:
    gpu = state.snapshot.gpu_with(event.uuid) if event.uuid else None
    return f"GPU {gpu.identity.index}" if gpu else "GPU"


class _RunFields(TypedDict, total=False):
    """Fields of a fact that name its run."""

    run: str
    run_id: str
    job: str
    rank: int | None


def _run_fields(run: RunSnapshot | None) -> _RunFields:
    if run is None:
        return {}
    return {"run": run.hello.name, "run_id": run.peer.run_id, "job": job_of(run), "rank": run.hello.rank}


def _run_facts(state: State, ties: Collection[str], opened: Collection[Event]) -> Iterator[Fact]:
    tied = set(ties)
    openers = {(event.kind, event.run_id) for event in opened}
    for run in state.runs:
        run_id, gpus = run.peer.run_id, gpus_of(run, state)
        if not ({run_id, job_of(run), *gpus} & tied or (HOST in tied and _is_out_of_host_memory(run))):
            continue
        for seen in run.errors:
            is_opener = seen.error.kind in OOM_KINDS and ("RunOutOfMemory", run_id) in openers
            yield _error_fact(run, seen, gpus, state, opened=is_opener)
        ending = run.ending
        if ending is not None and ending.outcome in END_CONDITIONS:
            yield Fact(
                at=ending.at,
                kind=RUN_ENDED,
                what=ending.outcome,
                detail=ending.evidence.split("; ")[0],
                gpus=gpus,
                is_collective=bool(run.errors) and error_words(run.errors[-1])[1],
                opened=(RUN_ENDED, run_id) in openers,
                **_run_fields(run),
            )


def _is_out_of_host_memory(run: RunSnapshot) -> bool:
    is_killed = run.ending is not None and run.ending.outcome == "out_of_memory" and "device_oom" not in run.last_errors
    return is_killed or "host_oom" in run.last_errors


def _error_fact(run: RunSnapshot, seen: SeenError, gpus: frozenset[str], state: State, *, opened: bool) -> Fact:
    error, fields = seen.error, _run_fields(run)
    if error.kind in OOM_KINDS:
        gpu = state.snapshot.gpu_with(next(iter(run.ooms), "")) if error.kind == "device_oom" else None
        return Fact(
            at=seen.at,
            kind="RunOutOfMemory",
            what="device" if error.kind == "device_oom" else "host",
            detail=f"{seen.diagnosis.evidence} {seen.diagnosis.next_step}" if seen.diagnosis else "",
            gpu=f"GPU {gpu.identity.index}" if gpu else "",
            gpus=gpus,
            opened=opened,
            **fields,
        )
    what, is_collective = error_words(seen)
    return Fact(
        at=seen.at,
        kind="error",
        what=what,
        gpus=gpus,
        is_collective=is_collective,
        **fields,
    )


def error_words(seen: SeenError) -> tuple[str, bool]:
    """Return an error in a few words without its private message, and whether it is of communication of ranks."""
    return _describe(seen.error.kind, seen.error.exception, seen.error.text)


@lru_cache(maxsize=256)  # an incident is built several times, and a job's ranks have the same message
def _describe(kind: ErrorKind, exception: str, text: str) -> tuple[str, bool]:
    if code := _CUDA_ERROR.search(text):
        return code[0], False
    problem = find_problem(f"{exception}: {text}") if kind == "other" else None
    if problem is not None and problem.name in _COLLECTIVE:
        return f"an NCCL error ({exception})", True
    words = ERROR_KIND_WORDS.get(kind)
    return (f"{words} ({exception})" if words else exception), False


def window_start(opened: Sequence[Event]) -> float:
    """Return the Unix time from which facts can explain an incident."""
    return min(event.timestamp_seconds for event in opened) - STALL_REACH_SECONDS
