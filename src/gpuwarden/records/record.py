"""Run record: what one run was, did and cost, in the form in which it is kept and served.

A field's name is its key in JSON, with its unit; what is not known has no key. Records come from a database that a
user may have changed: reading one checks every field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

VERSION = 1
MAX_LISTED = 1000  # ended runs in one answer of the API
MAX_TEXT = 4096  # characters of a text
MAX_ENTRIES = 512  # of a list or an object
MAX_NUMBER = 2.0**72  # more than all devices of a run may come to together
MAX_TIME = 253402300800.0  # the end of the year 9999, in Unix time: what comes after has no date

T = TypeVar("T")
_Check = Callable[[Any], Any]


class RunRecordError(ValueError):
    """JSON that is no run record of a version known here; the text says why."""


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise RunRecordError(f"want text of at most {MAX_TEXT} characters")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise RunRecordError("want a whole number of 0 or more")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= MAX_NUMBER:
        raise RunRecordError("want a number of 0 or more")
    return float(value)


def _signed(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= MAX_NUMBER:
        raise RunRecordError("want a number")
    return float(value)


def _truth(value: Any) -> bool:
    if type(value) is not bool:
        raise RunRecordError("want true or false")
    return value


def _time(value: Any) -> float:
    if _number(value) >= MAX_TIME:
        raise RunRecordError("want Unix time")
    return float(value)


def _xid_code(value: Any) -> str:
    if not (_text(value).isascii() and value.isdigit()):
        raise RunRecordError("want codes for keys")
    return str(value)


# A check in an annotation takes the place of its type's own.
UnixTime = Annotated[float, _time]
Signed = Annotated[float, _signed]
XidCode = Annotated[str, _xid_code]
_CHECKS: dict[Any, _Check] = {str: _text, int: _whole, float: _number, bool: _truth}


@dataclass(frozen=True, slots=True)
class RecordedAllocation:
    """An allocation that failed, as far as the framework's message tells."""

    requested_bytes: Annotated[int | None, "How much was asked for."] = None
    shape: Annotated[str | None, "Shape of the tensor, `20000,4000` say."] = None
    dtype: Annotated[str | None, "Its type."] = None
    op: Annotated[str | None, "The operation that asked."] = None
    device: Annotated[str | None, "Where, in the framework's words."] = None
    allocator: Annotated[str | None, "The allocator that was asked."] = None


@dataclass(frozen=True, slots=True)
class RecordedDeviceMemory:
    """Figures of an allocator for one device."""

    in_use_bytes: Annotated[int, "Handed out."]
    peak_bytes: Annotated[int, "Most ever handed out."]
    limit_bytes: Annotated[int | None, "The allocator's own limit."] = None
    reserved_bytes: Annotated[int | None, "What it holds of the device, used or not."] = None


@dataclass(frozen=True, slots=True)
class RecordedDiagnosis:
    """Cause of the out-of-memory, as far as evidence supports one."""

    name: Annotated[str, "One of the verdicts (verdicts.md)."]
    evidence: Annotated[str, "What it rests on, with numbers."]
    next_step: Annotated[str, "What to do."]


@dataclass(frozen=True, slots=True)
class RecordedError:
    """Error that the run reported."""

    timestamp_seconds: Annotated[UnixTime, "When it came, in Unix time."]
    kind: Annotated[str, "What kind of error it is, as in `errors`."]
    exception: Annotated[str, "Name of the exception's type."]
    text: Annotated[str, "What matters of its message: the place where its kind shows, the front and the end."]
    phase: Annotated[str | None, "What the run did then."] = None
    steps: Annotated[int | None, "Steps it had made."] = None
    headroom_bytes: Annotated[Mapping[str, float] | None, "Headroom just before, by UUID."] = None
    least_headroom_bytes: Annotated[
        Mapping[str, float] | None, "The least it can have been within a step, by UUID."
    ] = None
    allocations: Annotated[tuple[RecordedAllocation, ...], "Allocations that failed, of an out-of-memory."] = ()
    memory: Annotated[
        Mapping[str, RecordedDeviceMemory] | None, "State of the allocators after it, by the framework's device."
    ] = None
    verdict: Annotated[RecordedDiagnosis | None, "Why, of an out-of-memory, as far as evidence supports it."] = None


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """Memory of the run on the device over its whole life: at most 60 stretches of time, in their order.

    Each key has a list with an entry a stretch, null where that is not known. Times are seconds since the run began.
    """

    began_seconds: Annotated[tuple[float, ...], "When the stretch began."]
    ended_seconds: Annotated[tuple[float, ...], "When it ended; a gap before the next had no daemon."]
    lowest_bytes: Annotated[tuple[int, ...], "The least that the allocator had handed out at a report."]
    highest_bytes: Annotated[tuple[int, ...], "The most; reports come between steps."]
    peak_bytes: Annotated[tuple[int, ...], "The allocator's own peak by then, which lies within steps."]
    phase: Annotated[tuple[str, ...], "What the run did at its end."]
    headroom_bytes: Annotated[tuple[float | None, ...], "The least headroom of any poll."] = ()
    others_bytes: Annotated[tuple[float | None, ...], "Most memory of other processes; null if unknown."] = ()
    epoch: Annotated[tuple[int | None, ...], "The epoch at its end, from 0."] = ()
    batch_size: Annotated[tuple[int | None, ...], "The largest batch that was seen."] = ()

    def __post_init__(self) -> None:
        points = len(self.began_seconds)
        for each in fields(self):
            lengths = {points, 0} if each.default == () else {points}
            if not points or len(getattr(self, each.name)) not in lengths:
                raise RunRecordError("want lists of one length, and not of none")


@dataclass(frozen=True, slots=True)
class RecordedBatchMemory:
    """Memory that batches of a size took on the device, of those sizes under which the run's peak rose."""

    batch_size: Annotated[int, "Examples of a step."]
    floor_bytes: Annotated[int, "In use between steps."]
    peak_bytes: Annotated[int, "Most in use within steps."]


@dataclass(frozen=True, slots=True)
class RecordedBatchSizeAdvice:
    """Batch size that fits, by what the run and earlier ones showed (batch-size.md)."""

    batch_size: Annotated[int, "The size that the run has now, or had last."]
    advised: Annotated[int, "The largest usual size that should fit with a margin."]
    too_large: Annotated[bool, "Whether the present size does not fit."]
    confidence: Annotated[str, "high, medium or low."]
    sizes: Annotated[int, "How many different sizes were seen."]
    needed_bytes: Annotated[float, "The peak to be expected with the size that is advised."]
    capacity_bytes: Annotated[float, "What the run can have in use at most."]
    per_example_bytes: Annotated[float, "What each further example takes."]
    residual_bytes: Annotated[float, "By how much a size that was seen misses the line."]
    text: Annotated[str, "All of it in a sentence."]


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """Event in the life of the run's memory."""

    at_seconds: Annotated[float, "When, in seconds since the run began."]
    kind: Annotated[str, "phase, batch_size, retry, oom, neighbour, pressure or event."]
    text: Annotated[str, "What it was."]
    uuid: Annotated[str | None, "The GPU or MIG instance that it is about."] = None


@dataclass(frozen=True, slots=True)
class RecordedDevice:
    """Usage of one GPU or MIG instance by the run."""

    uuid: Annotated[str, "UUID of the GPU or MIG instance."]
    name: Annotated[str, "What kind of GPU it is."]
    gpu_seconds: Annotated[float | None, "Time that the run held memory there; needs two polls."] = None
    busy_seconds: Annotated[float | None, "Of that, time with a kernel of any program running."] = None
    idle_seconds: Annotated[float | None, "Of that, time without one."] = None
    energy_joules: Annotated[float | None, "Energy of the whole GPU in that time; none of a MIG instance."] = None
    energy_by_power_joules: Annotated[float | None, "Part of it computed from power, without an energy counter."] = None
    throttled_seconds: Annotated[Mapping[str, float] | None, "Time slowed down, by clock event reason."] = None
    throttled_step_seconds: Annotated[Mapping[str, float] | None, "Of that, time with training steps under way."] = None
    memory_peak_bytes: Annotated[int | None, "Most bytes that the run's allocator ever had handed out."] = None
    memory_limit_bytes: Annotated[int | None, "The allocator's own limit."] = None
    headroom_at_peak_bytes: Annotated[float | None, "What the run could have allocated on top of that peak."] = None
    lowest_headroom_bytes: Annotated[float | None, "The least headroom of any poll."] = None
    xids: Annotated[Mapping[XidCode, int] | None, "XIDs of the GPU while the run lived, by code."] = None
    memory_growth_bytes_per_second: Annotated[float | None, "Rate of a leak, while the run lives (foresight.md)."] = (
        None
    )
    seconds_to_oom: Annotated[float | None, "How long it is to the limit at that rate."] = None
    seconds_to_oom_lower: Annotated[float | None, "At least so long."] = None
    seconds_to_oom_upper: Annotated[float | None, "At most so long; not there where it may never come."] = None
    batch_memory: Annotated[tuple[RecordedBatchMemory, ...], "Memory of batches by their size, as far as known."] = ()
    story: Annotated[MemoryTimeline | None, "Memory over time; only in the answer for one run."] = None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run, so far or as a whole.

    It begins when a daemon first hears of it. Where that comes later than the run, or the daemon was killed before it
    wrote the run down (within a minute), the run's own totals (steps, step times, examples, compiling, input wait,
    errors) hold more than its duration.
    """

    version: Annotated[int, f"Version of this form: {VERSION}. A later one may add keys, and no other change."]
    run_id: Annotated[str, "The run on this box since it was booted; the label of the metrics."]
    name: Annotated[str, "What the run calls itself."]
    framework: Annotated[str, "What it trains with."]
    pid: Annotated[int, "Its process; 0 for one that this daemon cannot see."]
    uid: Annotated[int, "Whose process that is."]
    began_timestamp_seconds: Annotated[UnixTime, "When it first reported, in Unix time."]
    updated_timestamp_seconds: Annotated[UnixTime, "Of when the receipt is, in Unix time."]
    duration_seconds: Annotated[float, "From its begin to its end, or until now; right also where the clock was set."]
    boot_id: Annotated[str | None, "Which boot of the box that was (/proc/sys/kernel/random/boot_id)."] = None
    began_uptime_seconds: Annotated[float | None, "When it first reported, in seconds since boot (CLOCK_BOOTTIME)."] = (
        None
    )
    user: Annotated[str | None, "The user's name."] = None
    job: Annotated[str | None, "Job of several processes that it is part of."] = None
    rank: Annotated[int | None, "Its place in the job, from 0."] = None
    world_size: Annotated[int | None, "How many processes the job has."] = None
    ended_timestamp_seconds: Annotated[UnixTime | None, "When it ended, in Unix time, if a daemon saw that."] = None
    state: Annotated[
        str | None, "running or stalled; once it has ended, its outcome. Absent in records of earlier versions."
    ] = None
    outcome: Annotated[
        str | None, "How it ended: finished, failed, out_of_memory, killed, crashed or unknown; absent while it runs."
    ] = None
    evidence: Annotated[str | None, "What that was concluded from."] = None
    phase: Annotated[str | None, "What it did last: train, test, predict or idle."] = None
    phase_seconds: Annotated[Mapping[str, float] | None, "Time in each phase, as polled."] = None
    epoch: Annotated[int | None, "The epoch it was in last, from 0."] = None
    steps: Annotated[int | None, "Training steps."] = None
    examples: Annotated[int | None, "Examples that went through them, where the batch size is known."] = None
    step_seconds: Annotated[float | None, "Time in steps, without those that compiled."] = None
    step_median_seconds: Annotated[float | None, "What half of the steps did not exceed."] = None
    step_p95_seconds: Annotated[float | None, "What 95 % of the steps did not exceed."] = None
    compile_seconds: Annotated[float | None, "What steps took that traced or compiled."] = None
    stalls: Annotated[int | None, "How often a step hung, as far as this daemon has seen it."] = None
    loss: Annotated[Signed | None, "The last loss, where the user has it reported."] = None
    input_wait_seconds: Annotated[float | None, "How long steps waited for their input, where that is known."] = None
    input_observed_seconds: Annotated[float | None, "The time of stepping in which it was."] = None
    input_wait_ratio: Annotated[float | None, "The one by the other."] = None
    gpu_seconds: Annotated[float | None, "Time that it held GPUs, summed over them."] = None
    gpu_idle_ratio: Annotated[float | None, "The part of that in which no kernel ran, of GPUs that report it."] = None
    energy_joules: Annotated[float | None, "What they drew meanwhile; on a shared GPU it counts for each run."] = None
    throttled_seconds: Annotated[
        Mapping[str, float] | None, "Time slowed down, by clock event reason, over its GPUs."
    ] = None
    throttled_step_seconds: Annotated[Mapping[str, float] | None, "Of that, time with training steps under way."] = None
    devices: Annotated[tuple[RecordedDevice, ...], "Each GPU or MIG instance that it held, shared or not."] = ()
    errors: Annotated[Mapping[str, int] | None, "Errors that steps raised, by kind."] = None
    errors_told: Annotated[tuple[RecordedError, ...], "The last of them, oldest first."] = ()
    headroom_unknown: Annotated[Mapping[str, str] | None, 'Why headroom is unknown, by UUID; "" is no certain GPU.'] = (
        None
    )
    batch_size_advice: Annotated[RecordedBatchSizeAdvice | None, "Which batch size fits, where there is evidence."] = (
        None
    )
    marks: Annotated[tuple[RecordedEvent, ...], "What happened to its memory, in order; where `story` is."] = ()
    xids: Annotated[Mapping[XidCode, int] | None, "XIDs of its GPUs while it lived, by code."] = None
    host_memory_growth_bytes_per_second: Annotated[float | None, "Rate of a leak on the host, while it lives."] = None
    seconds_to_host_oom: Annotated[float | None, "Time until the host has no memory left, at that rate."] = None
    host_memory_peak_bytes: Annotated[int | None, "Most host memory resident in its processes at any look."] = None
    cpu_seconds: Annotated[float | None, "CPU time of its processes, ended ones too."] = None
    read_bytes: Annotated[int | None, "Bytes they had fetched from storage."] = None
    written_bytes: Annotated[int | None, "Bytes they had sent to storage."] = None
    reports_dropped: Annotated[int | None, "Reports it could not send because the daemon did not read."] = None


@cache
def _check(hint: Any) -> _Check:
    """Return the function that checks a value from JSON by the type of its field, and converts it to that."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return next((each for each in arguments[1:] if callable(each)), None) or _check(arguments[0])
    if origin in (Union, UnionType):
        known = _check(arguments[0])
        return lambda value: None if value is None else known(value)
    if origin is tuple:
        entry = _check(arguments[0])
        return lambda value: tuple(entry(each) for each in _bounded(value, list, "a list"))
    if origin is not None:  # a mapping
        key, entry = map(_check, arguments)
        return lambda value: {key(name): entry(each) for name, each in _bounded(value, dict, "an object").items()}
    return _CHECKS.get(hint) or (lambda value: _read(hint, value))


def _bounded(value: Any, kind: type[T], name: str) -> T:
    if not isinstance(value, kind) or len(value) > MAX_ENTRIES:  # type: ignore[arg-type] # a list or a dict
        raise RunRecordError(f"want {name} of at most {MAX_ENTRIES} entries")
    return value


@cache
def _checks(cls: type[Any]) -> dict[str, _Check]:
    return {name: _check(hint) for name, hint in get_type_hints(cls, include_extras=True).items()}


def json_from_record(value: Any) -> Any:
    """Return a record, or a part of it, as JSON has it, without what is not known."""
    if isinstance(value, float):
        return round(value, 6)
    if is_dataclass(value):
        found = ((each.name, getattr(value, each.name)) for each in fields(value))
        return {name: json_from_record(each) for name, each in found if each not in (None, (), {})}
    if isinstance(value, Mapping):
        return {str(key): json_from_record(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [json_from_record(each) for each in value]
    return value


def record_from_json(value: Any) -> RunRecord:
    """Return the record that JSON has; keys that this version does not know are left out. Raises RunRecordError."""
    if isinstance(value, dict) and value.get("version") != VERSION:
        raise RunRecordError(f"its version is {value.get('version')!s:.20}; this gpuwarden knows {VERSION}")
    return _read(RunRecord, value)


def _read(cls: type[T], value: Any) -> T:
    if not isinstance(value, dict):
        raise RunRecordError("want an object")
    known: dict[str, Any] = {}
    for name, check in _checks(cls).items():  # type: ignore[arg-type] # likewise
        if name in value:
            try:
                known[name] = check(value[name])
            except RunRecordError as error:
                raise RunRecordError(f"{name}: {error}") from None
    try:
        return cls(**known)
    except TypeError:
        raise RunRecordError("it lacks what every receipt has") from None
