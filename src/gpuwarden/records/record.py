"""Run record: identity, outcome and usage of one run, as stored and served.

A field's name is its key in JSON, with its unit; unknown values have no key. Records come from a database that a user
may have changed, so reading one checks every field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from gpuwarden.protocol.messages import NonFiniteLoss

VERSION = 1
MAX_LISTED = 1000  # ended runs in one answer of the API
MAX_TEXT = 4096  # characters of a text
MAX_ENTRIES = 512  # of a list or an object
MAX_NUMBER = 2.0**72  # more than the sum over all devices of a run
MAX_TIME = 253402300800.0  # Unix time of the end of the year 9999, the last with a date

T = TypeVar("T")
_Check = Callable[[Any], Any]


class RunRecordError(ValueError):
    """JSON that is no run record of a known version; the text has the reason."""


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise RunRecordError(f"expected text of at most {MAX_TEXT} characters")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise RunRecordError("expected a whole number of 0 or more")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= MAX_NUMBER:
        raise RunRecordError("expected a number of 0 or more")
    return float(value)


def _signed(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= MAX_NUMBER:
        raise RunRecordError("expected a number")
    return float(value)


def _truth(value: Any) -> bool:
    if type(value) is not bool:
        raise RunRecordError("expected true or false")
    return value


def _time(value: Any) -> float:
    if _number(value) >= MAX_TIME:
        raise RunRecordError("expected Unix time")
    return float(value)


def _xid_code(value: Any) -> str:
    if not (_text(value).isascii() and value.isdigit()):
        raise RunRecordError("expected XID codes as keys")
    return str(value)


class Private(str):
    """Meaning of a field that only the run's user and root may read: it can have passwords and paths."""

    __slots__ = ()


# A check in an annotation takes the place of its type's own.
UnixTime = Annotated[float, _time]
Signed = Annotated[float, _signed]
XidCode = Annotated[str, _xid_code]
_CHECKS: dict[Any, _Check] = {str: _text, int: _whole, float: _number, bool: _truth}


# fmt: off
@dataclass(frozen=True, slots=True)
class RecordedAllocation:
    """Failed allocation, as far as the framework's message describes it."""

    requested_bytes: Annotated[int | None, "Requested size."] = None
    shape: Annotated[str | None, "Shape of the tensor, such as `20000,4000`."] = None
    dtype: Annotated[str | None, "Data type of the tensor."] = None
    op: Annotated[str | None, Private("Operation that made the request, with the user's names of layers.")] = None
    device: Annotated[str | None, "Device, as the framework names it."] = None
    allocator: Annotated[str | None, "Allocator of the request."] = None


@dataclass(frozen=True, slots=True)
class RecordedDeviceMemory:
    """Figures of an allocator for one device."""

    in_use_bytes: Annotated[int, "Memory in use."]
    peak_bytes: Annotated[int, "Peak of memory in use."]
    limit_bytes: Annotated[int | None, "The allocator's own limit."] = None
    reserved_bytes: Annotated[int | None, "Memory reserved on the device, used or not."] = None


@dataclass(frozen=True, slots=True)
class RecordedDiagnosis:
    """Diagnosis of an out-of-memory error."""

    name: Annotated[str, "Cause ([diagnosis](../understand/oom-diagnosis.md))."]
    evidence: Annotated[str, "Evidence, with numbers."]
    next_step: Annotated[str, "Next step."]
    code: Annotated[str | None, "Code or command of the next step, if any."] = None


@dataclass(frozen=True, slots=True)
class RecordedNonFiniteLoss:
    """Training steps and validations with a loss of NaN or infinity; bounds where not every step's loss is known."""

    steps: Annotated[int, "Number of such steps, at least."]
    max_steps: Annotated[int, "Number of such steps, at most."]
    after_step: Annotated[int, "Last step known to be before the first such one; steps count from 1."]
    first_step: Annotated[int, "Step by which the first one had occurred; the step itself if it is `after_step` + 1."]
    first_timestamp_seconds: Annotated[UnixTime, "When it was noticed, in Unix time."]
    validations: Annotated[int, "Number of validations with such a loss; where no step had one, the first followed `first_step`."] = 0

    @property
    def reported(self) -> NonFiniteLoss:
        """Figures as the run reported them."""
        return NonFiniteLoss(
            self.steps, self.max_steps, self.after_step, self.first_step, validations=self.validations
        )


@dataclass(frozen=True, slots=True)
class RecordedError:
    """Error that the run reported."""

    timestamp_seconds: Annotated[UnixTime, "Time of the error, in Unix time."]
    kind: Annotated[str, "Kind of the error, as in `errors`."]
    exception: Annotated[str, "Name of the exception's type."]
    text: Annotated[str, Private("Excerpt of the message: the part that shows its kind, its front and its end.")]
    frame: Annotated[str | None, Private("Innermost place in the user's own code: file, line and function.")] = None
    phase: Annotated[str | None, "Phase of the run at that time."] = None
    steps: Annotated[int | None, "Training steps up to then."] = None
    headroom_bytes: Annotated[Mapping[str, float] | None, "Headroom just before, by UUID."] = None
    least_headroom_bytes: Annotated[Mapping[str, float] | None, "Lower bound of the headroom within the step, by UUID."] = None
    allocations: Annotated[tuple[RecordedAllocation, ...], "Failed allocations of an out-of-memory error."] = ()
    memory: Annotated[Mapping[str, RecordedDeviceMemory] | None, "Allocators after the error, by the framework's device."] = None
    verdict: Annotated[RecordedDiagnosis | None, "Diagnosis of an out-of-memory error."] = None
    next_step: Annotated[str | None, "Next step of another error."] = None


@dataclass(frozen=True, slots=True)
class RecordedTensors:
    """Live tensors that one object of the program keeps, or of one shape and dtype whose holder was not found."""

    count: Annotated[int, "Number of tensors; those that share a buffer count once."]
    size_bytes: Annotated[int, "Their size."]
    shape: Annotated[str | None, "Shape, such as `64,512,512`; absent if they have several."] = None
    dtype: Annotated[str | None, "Data type; likewise."] = None
    holder: Annotated[str | None, Private("Name in the program that keeps them.")] = None
    place: Annotated[str | None, Private("File and lines that put them there, by the source.")] = None


@dataclass(frozen=True, slots=True)
class RecordedCensus:
    """Census of the run's live tensors ([leaks](../understand/leaks.md#who-holds-the-memory))."""

    timestamp_seconds: Annotated[UnixTime, "Time of the census, in Unix time."]
    steps: Annotated[int, "Training steps up to then."]
    census_seconds: Annotated[float, "Time that the census took."]
    tensors: Annotated[int, "Number of all tensors seen."]
    tensor_bytes: Annotated[int, "Their size."]
    in_use_bytes: Annotated[int | None, "Memory in use of the framework's allocators."] = None
    cut: Annotated[bool, "Whether its time limit ended it, so that tensors or holders are missing."] = False
    groups: Annotated[tuple[RecordedTensors, ...], "Largest groups, by size."] = ()


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """Memory of the run on the device over its whole duration: at most 60 time windows, in order.

    Each key has a list with one entry per window, null if unknown. Times are seconds since the run started.
    """

    began_seconds: Annotated[tuple[float, ...], "Start of the window."]
    ended_seconds: Annotated[tuple[float, ...], "End of the window; in a gap before the next one no daemon was running."]
    lowest_bytes: Annotated[tuple[int, ...], "Lowest memory in use at a report."]
    highest_bytes: Annotated[tuple[int, ...], "Highest memory in use at a report; reports come between steps."]
    peak_bytes: Annotated[tuple[int, ...], "Peak of the allocator up to then, reached within steps."]
    phase: Annotated[tuple[str, ...], "Phase at the end of the window."]
    headroom_bytes: Annotated[tuple[float | None, ...], "Lowest headroom of any poll."] = ()
    others_bytes: Annotated[tuple[float | None, ...], "Highest memory of other processes; null if unknown."] = ()
    epoch: Annotated[tuple[int | None, ...], "Epoch at the end of the window, from 0."] = ()
    batch_size: Annotated[tuple[int | None, ...], "Largest batch size."] = ()

    def __post_init__(self) -> None:
        points = len(self.began_seconds)
        for each in fields(self):
            lengths = {points, 0} if each.default == () else {points}
            if not points or len(getattr(self, each.name)) not in lengths:
                raise RunRecordError("expected lists of the same length, not empty")


@dataclass(frozen=True, slots=True)
class RecordedBatchMemory:
    """Memory of one batch size on the device, for sizes at which the run's peak rose."""

    batch_size: Annotated[int, "Examples per step."]
    floor_bytes: Annotated[int, "Memory in use between steps."]
    peak_bytes: Annotated[int, "Peak memory in use within steps."]


@dataclass(frozen=True, slots=True)
class RecordedBatchSizeAdvice:
    """Batch size that fits, estimated from this run and earlier ones ([batch size](../use/batch-size.md))."""

    batch_size: Annotated[int, "Current or last batch size."]
    advised: Annotated[int, "Largest usual size that should fit with a margin."]
    too_large: Annotated[bool, "Whether the current size does not fit."]
    confidence: Annotated[str, "high, medium or low."]
    sizes: Annotated[int, "Number of different sizes seen."]
    needed_bytes: Annotated[float, "Expected peak with the advised size."]
    capacity_bytes: Annotated[float, "Memory available to the run."]
    per_example_bytes: Annotated[float, "Memory per example."]
    residual_bytes: Annotated[float, "Largest deviation of a seen size from the estimate."]
    text: Annotated[str, "Summary in a sentence."]


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """Event of the run that concerns its memory."""

    at_seconds: Annotated[float, "Time, in seconds since the run started."]
    kind: Annotated[str, "phase, batch_size, retry, out_of_memory, neighbour, pressure or event."]
    text: Annotated[str, "Description."]
    uuid: Annotated[str | None, "GPU or MIG instance of the event."] = None
    level: Annotated[str | None, "Severity of a problem, as of alerts: warning or critical."] = None


@dataclass(frozen=True, slots=True)
class RecordedDevice:
    """Usage of one GPU or MIG instance by the run."""

    uuid: Annotated[str, "UUID of the GPU or MIG instance."]
    name: Annotated[str, "Model name of the GPU."]
    gpu_seconds: Annotated[float | None, "Time that the run had memory allocated there; needs two polls."] = None
    busy_seconds: Annotated[float | None, "Of that, time with a kernel of any program running."] = None
    idle_seconds: Annotated[float | None, "Of that, time without one."] = None
    energy_joules: Annotated[float | None, "Energy of the whole GPU in that time; not for MIG instances."] = None
    energy_by_power_joules: Annotated[float | None, "Part of it computed from power, without an energy counter."] = None
    throttled_seconds: Annotated[Mapping[str, float] | None, "Throttled time, by clock event reason."] = None
    throttled_step_seconds: Annotated[Mapping[str, float] | None, "Of that, time in training steps."] = None
    memory_peak_bytes: Annotated[int | None, "Peak memory in use of the run's allocator."] = None
    memory_limit_bytes: Annotated[int | None, "The allocator's own limit."] = None
    headroom_at_peak_bytes: Annotated[float | None, "Headroom on top of that peak."] = None
    lowest_headroom_bytes: Annotated[float | None, "Lowest headroom of any poll."] = None
    headroom_limit: Annotated[str | None, "Limit that the run would have reached first, as last known: device, allocator, cgroup or mps."] = None
    headroom_limit_bytes: Annotated[float | None, "That limit, unless it was the device's memory."] = None
    xids: Annotated[Mapping[XidCode, int] | None, "XIDs of the GPU during the run, by code."] = None
    memory_growth_bytes_per_second: Annotated[float | None, "Rate of a leak, while running ([leaks](../understand/leaks.md))."] = None
    seconds_to_oom: Annotated[float | None, "OOM forecast: time to the limit at that rate."] = None
    seconds_to_oom_lower: Annotated[float | None, "Lower bound."] = None
    seconds_to_oom_upper: Annotated[float | None, "Upper bound; absent if it may never come."] = None
    batch_memory: Annotated[tuple[RecordedBatchMemory, ...], "Memory by batch size, as far as known."] = ()
    story: Annotated[MemoryTimeline | None, "Memory over time; only in the response for one run."] = None

    @property
    def highest_peak_bytes(self) -> int | None:
        """The highest peak that is known: the total and the timeline come from different reports."""
        return max([self.memory_peak_bytes or 0, *(self.story.peak_bytes if self.story else ())]) or None

    @property
    def min_headroom_bytes(self) -> float | None:
        """The least headroom that is known, of any poll or at the allocator's peak."""
        known = (self.lowest_headroom_bytes, self.headroom_at_peak_bytes)
        return min((each for each in known if each is not None), default=None)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run, up to now or complete.

    A record starts when a daemon first receives a message of the run. If that is later than the run's start, or the
    daemon was killed before it saved the record (within a minute), the run's own totals (steps, step times, examples,
    compile time, input wait, errors) cover more time than the duration.
    """

    version: Annotated[int, f"Version of the format: {VERSION}. Later ones only add keys."]
    run_id: Annotated[str, "ID of the run, unique on this host until it reboots; the label of the metrics."]
    name: Annotated[str, "Name of the run."]
    framework: Annotated[str, "Framework and version."]
    pid: Annotated[int, "Process ID; 0 if the daemon cannot see the process."]
    uid: Annotated[int, "User ID of the process."]
    began_timestamp_seconds: Annotated[UnixTime, "First message, in Unix time."]
    updated_timestamp_seconds: Annotated[UnixTime, "Time of the record, in Unix time."]
    duration_seconds: Annotated[float, "Time from start to end, or until now; correct even if the clock was changed."]
    boot_id: Annotated[str | None, "Boot ID of the host (/proc/sys/kernel/random/boot_id)."] = None
    began_uptime_seconds: Annotated[float | None, "First message, in seconds since boot (CLOCK_BOOTTIME)."] = None
    user: Annotated[str | None, "User name."] = None
    job: Annotated[str | None, "Job of several processes."] = None
    rank: Annotated[int | None, "Rank in the job, from 0."] = None
    world_size: Annotated[int | None, "Number of processes of the job."] = None
    ended_timestamp_seconds: Annotated[UnixTime | None, "End, in Unix time, if a daemon saw it."] = None
    state: Annotated[str | None, "running or stalled; once it has ended, its outcome. Absent in records of earlier versions."] = None
    outcome: Annotated[str | None, "How it ended: finished, failed, out_of_memory, killed, crashed or unknown; absent while it runs."] = None
    evidence: Annotated[str | None, "Evidence for the outcome."] = None
    exit_signal: Annotated[str | None, "Signal that ended its process, such as SIGTERM, if known."] = None
    phase: Annotated[str | None, "Last phase: train, test, predict or idle."] = None
    phase_seconds: Annotated[Mapping[str, float] | None, "Time in each phase, by polls."] = None
    epoch: Annotated[int | None, "Last epoch, from 0."] = None
    steps: Annotated[int | None, "Training steps."] = None
    examples: Annotated[int | None, "Training examples, if the batch size is known."] = None
    batch_size: Annotated[int | None, "Batch size of the last step with a known one."] = None
    step_seconds: Annotated[float | None, "Time in steps, without those that compiled."] = None
    step_median_seconds: Annotated[float | None, "Median step time."] = None
    step_p95_seconds: Annotated[float | None, "95th percentile of the step time."] = None
    compile_seconds: Annotated[float | None, "Time of steps that traced or compiled."] = None
    stalls: Annotated[int | None, "Number of stalls seen by this daemon."] = None
    loss: Annotated[Signed | None, "Last loss, if the user reports it."] = None
    nonfinite_loss: Annotated[RecordedNonFiniteLoss | None, "Steps with a loss of NaN or infinity, if any."] = None
    no_gpu: Annotated[str | None, "Why it trained on the CPU of a host with GPUs ([reasons](../use/runs.md#training-without-a-gpu))."] = None
    input_wait_seconds: Annotated[float | None, "Time that steps waited for input, where known."] = None
    input_observed_seconds: Annotated[float | None, "Step time for which the wait is known."] = None
    input_wait_ratio: Annotated[float | None, "Ratio of the two."] = None
    gpu_seconds: Annotated[float | None, "Time with memory allocated, summed over GPUs."] = None
    gpu_idle_ratio: Annotated[float | None, "Part of it without a running kernel, for GPUs that report it."] = None
    energy_joules: Annotated[float | None, "Energy of its GPUs in that time; on a shared GPU it counts for each run."] = None
    throttled_seconds: Annotated[Mapping[str, float] | None, "Throttled time, by clock event reason, summed over GPUs."] = None
    throttled_step_seconds: Annotated[Mapping[str, float] | None, "Of that, time in training steps."] = None
    devices: Annotated[tuple[RecordedDevice, ...], "GPUs and MIG instances of the run, shared or not."] = ()
    errors: Annotated[Mapping[str, int] | None, "Errors raised by steps, by kind."] = None
    actions: Annotated[Mapping[str, int] | None, "Actions on advice, as configured by `on_pressure`, by kind."] = None
    errors_told: Annotated[tuple[RecordedError, ...], "Last errors, oldest first."] = ()
    census: Annotated[RecordedCensus | None, "Last census of its tensors, if it takes any."] = None
    headroom_unknown: Annotated[Mapping[str, str] | None, 'Reason for unknown headroom, by UUID; "" for devices not identified as a GPU.'] = None
    batch_size_advice: Annotated[RecordedBatchSizeAdvice | None, "Batch size that fits, if there is evidence."] = None
    marks: Annotated[tuple[RecordedEvent, ...], "Events of its memory, in order; only with `story`."] = ()
    xids: Annotated[Mapping[XidCode, int] | None, "XIDs of its GPUs during the run, by code."] = None
    host_memory_growth_bytes_per_second: Annotated[float | None, "Rate of a leak of host memory, while running."] = None
    seconds_to_host_oom: Annotated[float | None, "Time until host memory is used up at that rate."] = None
    host_memory_peak_bytes: Annotated[int | None, "Peak host memory of its processes, by samples."] = None
    cpu_seconds: Annotated[float | None, "CPU time of its processes, including ended ones."] = None
    read_bytes: Annotated[int | None, "Bytes read from storage."] = None
    written_bytes: Annotated[int | None, "Bytes written to storage."] = None
    reports_dropped: Annotated[int | None, "Reports dropped because the daemon did not read them."] = None
# fmt: on


@cache
def _check(hint: Any) -> _Check:
    """Return the function that checks and converts a value from JSON by the type of its field."""
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
        raise RunRecordError(f"expected {name} of at most {MAX_ENTRIES} entries")
    return value


@cache
def _checks(cls: type[Any]) -> dict[str, _Check]:
    return {name: _check(hint) for name, hint in get_type_hints(cls, include_extras=True).items()}


def json_from_record(value: Any) -> Any:
    """Return a record, or a part of it, as JSON values, without unknown ones."""
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
    """Return the record of a JSON value; unknown keys are ignored. Raises RunRecordError."""
    if isinstance(value, dict) and value.get("version") != VERSION:
        raise RunRecordError(
            f"version {value.get('version')!s:.20} is not supported; this gpuwarden supports {VERSION}"
        )
    return _read(RunRecord, value)


def census_from_json(value: Any) -> RecordedCensus:
    """Return the census of a record's JSON. Raises RunRecordError."""
    return _read(RecordedCensus, value)


def _read(cls: type[T], value: Any) -> T:
    if not isinstance(value, dict):
        raise RunRecordError("expected an object")
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
        raise RunRecordError("a required key is missing") from None
