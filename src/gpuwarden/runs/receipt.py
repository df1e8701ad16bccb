"""The run receipt: the form in which it is kept and served what one run was, did and cost.

A field's name is its key in JSON, with its unit; what is not known has no key. Receipts come back from files that
anybody may have changed: reading one checks every field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

VERSION = 1
MAX_TEXT = 4096  # characters of a text in a receipt
MAX_ENTRIES = 512  # of a list or an object in a receipt
MAX_NUMBER = 2.0**72  # more than all devices of a run may come to together
MAX_TIME = 253402300800.0  # the end of the year 9999, in Unix time: what comes after has no date

T = TypeVar("T")
_Check = Callable[[Any], Any]


class ReceiptError(ValueError):
    """What was read is no receipt that this version knows; the text says why."""


def _said(check: _Check, meaning: str) -> Any:
    """Declare a field that a receipt may lack."""
    return field(default=None, metadata={"check": check, "meaning": meaning})


def _must(check: _Check, meaning: str) -> Any:
    """Declare a field that every receipt has."""
    return field(metadata={"check": check, "meaning": meaning})


def _several(check: _Check, meaning: str) -> Any:
    """Declare a list that a receipt lacks where it is empty."""
    return field(default=(), metadata={"check": check, "meaning": meaning})


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise ReceiptError(f"want text of at most {MAX_TEXT} characters")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise ReceiptError("want a whole number of 0 or more")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value <= MAX_NUMBER:
        raise ReceiptError("want a number of 0 or more")
    return float(value)


def _truth(value: Any) -> bool:
    if type(value) is not bool:
        raise ReceiptError("want true or false")
    return value


def _time(value: Any) -> float:
    if _number(value) >= MAX_TIME:
        raise ReceiptError("want Unix time")
    return float(value)


def _signed(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= MAX_NUMBER:
        raise ReceiptError("want a number")
    return float(value)


def _each(check: Callable[[Any], T]) -> Callable[[Any], dict[str, T]]:
    def checked(value: Any) -> dict[str, T]:
        if not isinstance(value, dict) or len(value) > MAX_ENTRIES:
            raise ReceiptError(f"want an object of at most {MAX_ENTRIES} entries")
        return {_text(key): check(entry) for key, entry in value.items()}

    return checked


def _xids(value: Any) -> dict[str, int]:
    if not all(code.isascii() and code.isdigit() for code in _each(_whole)(value)):
        raise ReceiptError("want codes for keys")
    return dict(value)


def _list(cls: Callable[[], type[T]]) -> Callable[[Any], tuple[T, ...]]:
    def checked(value: Any) -> tuple[T, ...]:
        if not isinstance(value, list) or len(value) > MAX_ENTRIES:
            raise ReceiptError(f"want a list of at most {MAX_ENTRIES} entries")
        return tuple(_read(cls(), each) for each in value)

    return checked


def _part(cls: Callable[[], type[T]]) -> Callable[[Any], T]:
    return lambda value: _read(cls(), value)


def _column(check: Callable[[Any], T]) -> Callable[[Any], tuple[T | None, ...]]:
    """Check a list of which each entry may be unknown."""

    def checked(value: Any) -> tuple[T | None, ...]:
        if not isinstance(value, list) or len(value) > MAX_ENTRIES:
            raise ReceiptError(f"want a list of at most {MAX_ENTRIES} entries")
        return tuple(None if each is None else check(each) for each in value)

    return checked


def _full(check: Callable[[Any], T]) -> Callable[[Any], tuple[T, ...]]:
    """Check a list of which each entry is known."""

    def checked(value: Any) -> tuple[T, ...]:
        entries = _column(check)(value)
        if None in entries:
            raise ReceiptError("want no null")
        return tuple(each for each in entries if each is not None)

    return checked


@dataclass(frozen=True, slots=True)
class FailedAllocation:
    """An allocation that failed, as far as the framework's message tells."""

    requested_bytes: int | None = _said(_whole, "How much was asked for.")
    shape: str | None = _said(_text, "Shape of the tensor, `20000,4000` say.")
    dtype: str | None = _said(_text, "Its type.")
    op: str | None = _said(_text, "The operation that asked.")
    device: str | None = _said(_text, "Where, in the framework's words.")
    allocator: str | None = _said(_text, "The allocator that was asked.")


@dataclass(frozen=True, slots=True)
class DeviceMemoryThen:
    """What an allocator said of one device."""

    in_use_bytes: int = _must(_whole, "Handed out.")
    peak_bytes: int = _must(_whole, "Most ever handed out.")
    limit_bytes: int | None = _said(_whole, "The allocator's own limit.")
    reserved_bytes: int | None = _said(_whole, "What it holds of the device, used or not.")


@dataclass(frozen=True, slots=True)
class ToldVerdict:
    """Why the memory was out, as far as evidence supports it."""

    name: str = _must(_text, "One of the verdicts (verdicts.md).")
    evidence: str = _must(_text, "What it rests on, with numbers.")
    next_step: str = _must(_text, "What to do.")


@dataclass(frozen=True, slots=True)
class ToldError:
    """One error that the run told."""

    timestamp_seconds: float = _must(_time, "When it came, in Unix time.")
    kind: str = _must(_text, "What kind of error it is, as in `errors`.")
    exception: str = _must(_text, "Name of the exception's type.")
    text: str = _must(_text, "What matters of its message: the place where its kind shows, the front and the end.")
    phase: str | None = _said(_text, "What the run did then.")
    steps: int | None = _said(_whole, "Steps it had made.")
    headroom_bytes: Mapping[str, float] | None = _said(
        _each(_number), "Headroom of the poll before it less what the run took since, by UUID."
    )
    least_headroom_bytes: Mapping[str, float] | None = _said(
        _each(_number), "The least that can have been left meanwhile, within a step: the same at the run's peak."
    )
    allocations: tuple[FailedAllocation, ...] = _several(
        _list(lambda: FailedAllocation), "Allocations that failed, of an out-of-memory."
    )
    memory: Mapping[str, DeviceMemoryThen] | None = _said(
        _each(_part(lambda: DeviceMemoryThen)),
        "What the allocators said afterwards, by the framework's device.",
    )
    verdict: ToldVerdict | None = _said(
        _part(lambda: ToldVerdict), "Why, of an out-of-memory, as far as evidence supports it."
    )


@dataclass(frozen=True, slots=True)
class MemoryStory:
    """What the run's memory on the device did over its whole life, at most 60 stretches of time in their order.

    Each key has a list with an entry a stretch, null where that is not known. Times are seconds since the run began.
    """

    began_seconds: tuple[float, ...] = _must(_full(_number), "When the stretch began.")
    ended_seconds: tuple[float, ...] = _must(_full(_number), "When it ended; a gap before the next had no daemon.")
    lowest_bytes: tuple[int, ...] = _must(_full(_whole), "The least that the allocator had handed out at a report.")
    highest_bytes: tuple[int, ...] = _must(_full(_whole), "The most; reports come between steps.")
    peak_bytes: tuple[int, ...] = _must(
        _full(_whole), "The most that it had ever handed out by then, as the allocator says: within steps."
    )
    phase: tuple[str, ...] = _must(_full(_text), "What the run did at its end.")
    headroom_bytes: tuple[float | None, ...] = _several(_column(_number), "The least headroom of any poll.")
    others_bytes: tuple[float | None, ...] = _several(
        _column(_number),
        "The most that other processes held on the device; null where the driver did not list the run's own.",
    )
    epoch: tuple[int | None, ...] = _several(_column(_whole), "The epoch at its end, from 0.")
    batch_size: tuple[int | None, ...] = _several(_column(_whole), "The largest batch that was seen.")

    def __post_init__(self) -> None:
        points = len(self.began_seconds)
        for each in fields(self):
            lengths = {points, 0} if each.default == () else {points}
            if not points or len(getattr(self, each.name)) not in lengths:
                raise ReceiptError("want lists of one length, and not of none")


@dataclass(frozen=True, slots=True)
class BatchMemorySeen:
    """What batches of a size took on the device, of those sizes under which the run's peak rose."""

    batch_size: int = _must(_whole, "Examples of a step.")
    floor_bytes: int = _must(_whole, "In use between steps.")
    peak_bytes: int = _must(_whole, "Most in use within steps.")


@dataclass(frozen=True, slots=True)
class ToldBatchSizeAdvice:
    """Which batch size fits, by what the run and its predecessors showed (batch-size.md)."""

    batch_size: int = _must(_whole, "The size that the run has now, or had last.")
    advised: int = _must(_whole, "The largest usual size that should fit with a margin.")
    too_large: bool = _must(_truth, "Whether the present size does not fit.")
    confidence: str = _must(_text, "high, medium or low.")
    sizes: int = _must(_whole, "How many different sizes were seen.")
    needed_bytes: float = _must(_number, "The peak to be expected with the size that is advised.")
    capacity_bytes: float = _must(_number, "What the run can have in use at most.")
    per_example_bytes: float = _must(_number, "What each further example takes.")
    residual_bytes: float = _must(_number, "By how much a size that was seen misses the line.")
    text: str = _must(_text, "All of it in a sentence.")


@dataclass(frozen=True, slots=True)
class ToldMark:
    """Something that happened to the run's memory."""

    at_seconds: float = _must(_number, "When, in seconds since the run began.")
    kind: str = _must(_text, "phase, batch_size, retry, oom, neighbour, pressure or event.")
    text: str = _must(_text, "What it was.")
    uuid: str | None = _said(_text, "The GPU or MIG instance that it is about.")


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """What the run had of one GPU or MIG instance."""

    uuid: str = _must(_text, "UUID of the GPU or MIG instance.")
    name: str = _must(_text, "What kind of GPU it is.")
    gpu_seconds: float | None = _said(
        _number, "Time that the run held memory there, from poll to poll; of one that only one poll saw none is known."
    )
    busy_seconds: float | None = _said(_number, "Of that, time with a kernel of any program running.")
    idle_seconds: float | None = _said(_number, "Of that, time without one.")
    energy_joules: float | None = _said(
        _number, "Energy that the whole GPU has drawn meanwhile; a MIG instance has none of its own."
    )
    energy_by_power_joules: float | None = _said(
        _number,
        "The part of it that is power added up over the polls: all of it where the GPU has no energy counter, "
        "else what its counter had not told yet at the run's end.",
    )
    throttled_seconds: Mapping[str, float] | None = _said(
        _each(_number), "Time that each clock event reason has slowed the GPU down meanwhile."
    )
    throttled_step_seconds: Mapping[str, float] | None = _said(
        _each(_number), "Of that, time with training steps under way."
    )
    memory_peak_bytes: int | None = _said(_whole, "Most bytes that the run's allocator ever had handed out.")
    memory_limit_bytes: int | None = _said(_whole, "The allocator's own limit.")
    headroom_at_peak_bytes: float | None = _said(_number, "What the run could have allocated on top of that peak.")
    lowest_headroom_bytes: float | None = _said(_number, "The least headroom of any poll.")
    xids: Mapping[str, int] | None = _said(_xids, "XIDs of the GPU while the run lived, by code.")
    memory_growth_bytes_per_second: float | None = _said(
        _number, "How fast what is in use grows for good, while the run lives and does so (foresight.md)."
    )
    seconds_to_oom: float | None = _said(_number, "How long it is to the limit at that rate.")
    seconds_to_oom_lower: float | None = _said(_number, "At least so long.")
    seconds_to_oom_upper: float | None = _said(_number, "At most so long; not there where it may never come.")
    batch_memory: tuple[BatchMemorySeen, ...] = _several(
        _list(lambda: BatchMemorySeen), "What batches of each size took there, as far as the peak showed it."
    )
    story: MemoryStory | None = _said(
        _part(lambda: MemoryStory),
        "What the run's memory did there over time; only in the answer for one run, and in files.",
    )


@dataclass(frozen=True, slots=True)
class Receipt:
    """One run, so far or as a whole.

    It begins when a daemon first hears of it. Where that comes later than the run, or the daemon was killed before it
    wrote the run down (within a minute), the run's own totals (steps, step times, examples, compiling, input wait,
    errors) hold more than its duration.
    """

    version: int = _must(_whole, f"Version of this form: {VERSION}. A later one may add keys, and no other change.")
    run_id: str = _must(_text, "The run on this box since it was booted; the label of the metrics.")
    name: str = _must(_text, "What the run calls itself.")
    framework: str = _must(_text, "What it trains with.")
    pid: int = _must(_whole, "Its process; 0 for one that this daemon cannot see.")
    uid: int = _must(_whole, "Whose process that is.")
    began_timestamp_seconds: float = _must(_time, "When it first reported, in Unix time.")
    updated_timestamp_seconds: float = _must(_time, "Of when the receipt is, in Unix time.")
    duration_seconds: float = _must(
        _number, "From its begin to its end, or so far; by a clock that nobody sets, where the other was set meanwhile."
    )
    boot_id: str | None = _said(_text, "Which boot of the box that was (/proc/sys/kernel/random/boot_id).")
    began_uptime_seconds: float | None = _said(
        _number, "When it first reported, in seconds since that boot (CLOCK_BOOTTIME): a clock that nobody sets."
    )
    user: str | None = _said(_text, "The user's name.")
    job: str | None = _said(_text, "Job of several processes that it is part of.")
    rank: int | None = _said(_whole, "Its place in the job, from 0.")
    world_size: int | None = _said(_whole, "How many processes the job has.")
    ended_timestamp_seconds: float | None = _said(
        _time, "When it ended, in Unix time; not there so far, nor where no daemon saw the end."
    )
    outcome: str | None = _said(_text, "How it ended; not there so far.")
    evidence: str | None = _said(_text, "What that was concluded from.")
    phase: str | None = _said(_text, "What it did last: train, test, predict or idle.")
    phase_seconds: Mapping[str, float] | None = _said(_each(_number), "Time in each phase, as polled.")
    epoch: int | None = _said(_whole, "The epoch it was in last, from 0.")
    steps: int | None = _said(_whole, "Training steps.")
    examples: int | None = _said(_whole, "Examples that went through them, where the batch size is known.")
    step_seconds: float | None = _said(_number, "Time in steps, without those that compiled.")
    step_median_seconds: float | None = _said(_number, "What half of the steps did not exceed.")
    step_p95_seconds: float | None = _said(_number, "What 95 % of the steps did not exceed.")
    compile_seconds: float | None = _said(_number, "What steps took that traced or compiled.")
    stalls: int | None = _said(_whole, "How often a step hung, as far as this daemon has seen it.")
    loss: float | None = _said(_signed, "The last loss, where the user lets it be told.")
    input_wait_seconds: float | None = _said(_number, "How long steps waited for their input, where that is known.")
    input_observed_seconds: float | None = _said(_number, "The time of stepping in which it was.")
    input_wait_ratio: float | None = _said(_number, "The one by the other.")
    gpu_seconds: float | None = _said(_number, "Time that it held GPUs, summed over them.")
    gpu_idle_ratio: float | None = _said(_number, "The part of that in which no kernel ran, of GPUs that tell.")
    energy_joules: float | None = _said(_number, "What they drew meanwhile; on a shared GPU it counts for each run.")
    throttled_seconds: Mapping[str, float] | None = _said(
        _each(_number), "Time that each clock event reason has slowed one down, summed over them; several may at once."
    )
    throttled_step_seconds: Mapping[str, float] | None = _said(
        _each(_number), "Of that, time with training steps under way: step time lost, at least in part."
    )
    devices: tuple[DeviceShare, ...] = _several(
        _list(lambda: DeviceShare), "Each GPU or MIG instance that it held; a shared one counts for each run."
    )
    errors: Mapping[str, int] | None = _said(_each(_whole), "Errors that steps raised, by kind.")
    errors_told: tuple[ToldError, ...] = _several(_list(lambda: ToldError), "The last of them, oldest first.")
    headroom_unknown: Mapping[str, str] | None = _said(
        _each(_text), "Why no headroom can be told while it lives, by UUID; empty for what is no certain GPU."
    )
    batch_size_advice: ToldBatchSizeAdvice | None = _said(
        _part(lambda: ToldBatchSizeAdvice), "Which batch size fits, where there is evidence."
    )
    marks: tuple[ToldMark, ...] = _several(
        _list(lambda: ToldMark),
        "What happened to its memory, in the order of time; of each kind the first and the last; where `story` is.",
    )
    xids: Mapping[str, int] | None = _said(_xids, "XIDs of its GPUs while it lived, by code.")
    host_memory_growth_bytes_per_second: float | None = _said(
        _number, "How fast the memory of its processes grows for good, while it lives and does so."
    )
    seconds_to_host_oom: float | None = _said(_number, "How long it is at that rate until the host has no more.")
    host_memory_peak_bytes: int | None = _said(_whole, "Most host memory resident in its processes at any look.")
    cpu_seconds: float | None = _said(_number, "CPU time of its processes, ended ones too.")
    read_bytes: int | None = _said(_whole, "Bytes they had fetched from storage.")
    written_bytes: int | None = _said(_whole, "Bytes they had sent to storage.")
    reports_dropped: int | None = _said(_whole, "Reports it could not send because the daemon did not read.")


PARTS = (
    Receipt,
    DeviceShare,
    MemoryStory,
    BatchMemorySeen,
    ToldBatchSizeAdvice,
    ToldMark,
    ToldError,
    ToldVerdict,
    FailedAllocation,
    DeviceMemoryThen,
)
_NAMES = {part: tuple(each.name for each in fields(part)) for part in PARTS}  # asked for once: a list has many runs


_PLAIN = {int, str, type(None)}


def to_plain(value: Any) -> Any:
    """Return a receipt as JSON has it, without what is not known."""
    kind = type(value)
    if kind is float:
        return round(value, 6)
    if kind is str or kind is int or kind is bool or value is None:
        return value
    if names := _NAMES.get(kind):
        found = ((name, getattr(value, name)) for name in names)
        return {name: to_plain(said) for name, said in found if said is not None and said != () and said != {}}  # noqa: PLR1714 - a tuple would ask for a hash
    if isinstance(value, Mapping):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if set(map(type, value)) <= _PLAIN:  # a column of a story, as most lists are
        return list(value)
    return [to_plain(entry) for entry in value]


def from_plain(value: Any) -> Receipt:
    """Read a receipt; keys that this version does not know are left alone. Raises ReceiptError."""
    if isinstance(value, dict) and value.get("version") != VERSION:
        raise ReceiptError(f"its version is {value.get('version')!s:.20}; this gpuwarden knows {VERSION}")
    return _read(Receipt, value)


def _read(cls: type[T], value: Any) -> T:
    if not isinstance(value, dict):
        raise ReceiptError("want an object")
    known: dict[str, Any] = {}
    for each in fields(cls):  # type: ignore[arg-type] # one of PARTS
        if each.name in value:
            try:
                known[each.name] = each.metadata["check"](value[each.name])
            except ReceiptError as error:
                raise ReceiptError(f"{each.name}: {error}") from None
    try:
        return cls(**known)
    except TypeError:
        raise ReceiptError("it lacks what every receipt has") from None
