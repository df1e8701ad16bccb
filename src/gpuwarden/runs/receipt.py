"""The run receipt: what one run was, did and cost, in a form that is kept and served.

A field's name is its key in JSON, with its unit; what is not known has no key. Receipts come back from files that
anybody may have changed: reading one checks every field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from gpuwarden.protocol import Allocation, DeviceMemory
from gpuwarden.runs.run import KEPT_ERRORS, Run, SeenError
from gpuwarden.runs.share import Account, Share

VERSION = 1
MAX_TEXT = 4096  # characters of a text in a receipt
MAX_ENTRIES = 512  # of a list or an object in a receipt
MAX_NUMBER = 2.0**64
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
class ToldError:
    """One error that the run told."""

    timestamp_seconds: float = _must(_time, "When it came, in Unix time.")
    kind: str = _must(_text, "What kind of error it is, as in `errors`.")
    exception: str = _must(_text, "Name of the exception's type.")
    text: str = _must(_text, "What matters of its message: the place where its kind shows, the front and the end.")
    phase: str | None = _said(_text, "What the run did then.")
    steps: int | None = _said(_whole, "Steps it had made.")
    headroom_bytes: Mapping[str, float] | None = _said(
        _each(_number), "Headroom that the daemon had known before it, by UUID."
    )
    allocations: tuple[FailedAllocation, ...] = _several(
        _list(lambda: FailedAllocation), "Allocations that failed, of an out-of-memory."
    )
    memory: Mapping[str, DeviceMemoryThen] | None = _said(
        _each(lambda entry: _read(DeviceMemoryThen, entry)),
        "What the allocators said afterwards, by the framework's device.",
    )


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """What the run had of one GPU or MIG instance."""

    uuid: str = _must(_text, "UUID of the GPU or MIG instance.")
    name: str = _must(_text, "What kind of GPU it is.")
    gpu_seconds: float = _must(_number, "Time that the run held memory there.")
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


@dataclass(frozen=True, slots=True)
class Receipt:
    """One run, so far or as a whole."""

    version: int = _must(_whole, f"Version of this form: {VERSION}. A later one may add keys, and no other change.")
    run_id: str = _must(_text, "The run on this box since it was booted; the label of the metrics.")
    name: str = _must(_text, "What the run calls itself.")
    framework: str = _must(_text, "What it trains with.")
    pid: int = _must(_whole, "Its process; 0 for one that this daemon cannot see.")
    uid: int = _must(_whole, "Whose process that is.")
    began_timestamp_seconds: float = _must(_time, "When it first reported, in Unix time.")
    updated_timestamp_seconds: float = _must(_time, "Of when the receipt is, in Unix time.")
    duration_seconds: float = _must(_number, "From its begin to its end, or so far.")
    boot_id: str | None = _said(_text, "Which boot of the box that was (/proc/sys/kernel/random/boot_id).")
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
    xids: Mapping[str, int] | None = _said(_xids, "XIDs of its GPUs while it lived, by code.")
    host_memory_peak_bytes: int | None = _said(_whole, "Most host memory resident in its processes at any look.")
    cpu_seconds: float | None = _said(_number, "CPU time of its processes, ended ones too.")
    read_bytes: int | None = _said(_whole, "Bytes they had fetched from storage.")
    written_bytes: int | None = _said(_whole, "Bytes they had sent to storage.")
    reports_dropped: int | None = _said(_whole, "Reports it could not send because the daemon did not read.")

    @property
    def account(self) -> Account:
        """What the run had had of GPUs, to go on with."""
        shares = {each.uuid: _share(each) for each in self.devices}
        return Account(shares, self.phase_seconds or {}, self.host_memory_peak_bytes)


PARTS = (Receipt, DeviceShare, ToldError, FailedAllocation, DeviceMemoryThen)
_NAMES = {part: tuple(each.name for each in fields(part)) for part in PARTS}  # asked for once: a list has many runs


def receipt_of(run: Run, now: float, *, boot_id: str | None, user: str | None, account: Account) -> Receipt:
    """Return the receipt of a run so far, or as a whole once it has ended; `now` is Unix time."""
    report, hello, ending, usage = run.report, run.hello, run.ending, run.usage
    until = ending.at if ending else now
    shares = account.shares.values()
    busy, idle = (_total(getattr(each, name) for each in shares) for name in ("busy", "idle"))
    waited, observed = (report.input_wait_seconds, report.input_observed_seconds) if report else (None, None)
    return Receipt(
        version=VERSION,
        run_id=run.peer.run_id,
        name=hello.name,
        framework=hello.framework,
        pid=run.peer.pid,
        uid=run.peer.uid,
        began_timestamp_seconds=run.began,
        updated_timestamp_seconds=until,
        duration_seconds=max(until - run.began, 0.0),
        boot_id=boot_id,
        user=user,
        job=hello.job,
        rank=hello.rank,
        world_size=hello.world_size,
        ended_timestamp_seconds=ending.at if ending else None,
        outcome=ending.outcome if ending else None,
        evidence=ending.evidence if ending else None,
        phase=report.phase if report else None,
        phase_seconds=account.phases,
        epoch=report.epoch if report else None,
        steps=report.steps if report else None,
        examples=report.examples if report else None,
        step_seconds=report.step_seconds if report else None,
        step_median_seconds=report.step_median if report else None,
        step_p95_seconds=report.step_p95 if report else None,
        compile_seconds=report.compile_seconds if report else None,
        stalls=run.stalls if report else None,
        loss=report.loss if report else None,
        input_wait_seconds=waited,
        input_observed_seconds=observed,
        input_wait_ratio=min(waited / observed, 1.0) if waited is not None and observed else None,
        gpu_seconds=_total(each.seconds for each in shares),
        gpu_idle_ratio=idle / (busy + idle) if busy is not None and idle is not None and busy + idle else None,
        energy_joules=_total(each.joules for each in shares),
        throttled_seconds=_by_key(each.throttled for each in shares),
        throttled_step_seconds=_by_key(each.throttled_steps for each in shares),
        devices=tuple(_device(uuid, share) for uuid, share in account.shares.items()),
        errors=report.errors if report else None,
        errors_told=tuple(map(_told, run.errors)),
        xids=_counts(account),
        host_memory_peak_bytes=account.host_memory_peak,
        cpu_seconds=usage.cpu_seconds if usage else None,
        read_bytes=usage.read_bytes if usage else None,
        written_bytes=usage.written_bytes if usage else None,
        reports_dropped=report.dropped if report else None,
    )


def continued(before: Receipt, since: Receipt) -> Receipt:
    """Return a run's receipt where an earlier daemon has written one of it; its account has been taken up already."""
    said = ((each.name, getattr(before, each.name)) for each in fields(Receipt))
    missed = {name: value for name, value in said if value is not None and getattr(since, name) is None}
    began = min(before.began_timestamp_seconds, since.began_timestamp_seconds)
    return replace(
        since,
        **missed,
        began_timestamp_seconds=began,
        duration_seconds=max(since.updated_timestamp_seconds - began, 0.0),
        errors_told=(before.errors_told + since.errors_told)[-KEPT_ERRORS:],
    )


def concluded(receipt: Receipt, evidence: str) -> Receipt:
    """Return the receipt of a run whose end nobody saw: it lasted until it was last seen, at least."""
    return replace(receipt, outcome="unknown", evidence=evidence)


def to_plain(value: Any) -> Any:
    """Return a receipt as JSON has it, without what is not known."""
    kind = type(value)
    if kind is float:
        return round(value, 6)
    if kind is str or kind is int:
        return value
    if names := _NAMES.get(kind):
        found = ((name, getattr(value, name)) for name in names)
        return {name: to_plain(said) for name, said in found if said is not None and said != () and said != {}}  # noqa: PLR1714 - a tuple would ask for a hash
    if isinstance(value, Mapping):
        return {str(key): to_plain(entry) for key, entry in value.items()}
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


def _device(uuid: str, share: Share) -> DeviceShare:
    return DeviceShare(
        uuid=uuid,
        name=share.name,
        gpu_seconds=share.seconds,
        busy_seconds=share.busy,
        idle_seconds=share.idle,
        energy_joules=share.joules,
        energy_by_power_joules=share.joules_by_power,
        throttled_seconds=share.throttled,
        throttled_step_seconds=share.throttled_steps,
        memory_peak_bytes=share.memory_peak,
        memory_limit_bytes=share.memory_limit,
        headroom_at_peak_bytes=share.headroom_at_peak,
        lowest_headroom_bytes=share.lowest_headroom,
        xids={str(code): count for code, count in share.xids.items()},
    )


def _share(device: DeviceShare) -> Share:
    """Return what `_device` was made of."""
    return Share(
        name=device.name,
        seconds=device.gpu_seconds,
        busy=device.busy_seconds,
        idle=device.idle_seconds,
        joules=device.energy_joules,
        joules_by_power=device.energy_by_power_joules,
        throttled=device.throttled_seconds or {},
        throttled_steps=device.throttled_step_seconds or {},
        memory_peak=device.memory_peak_bytes,
        memory_limit=device.memory_limit_bytes,
        headroom_at_peak=device.headroom_at_peak_bytes,
        lowest_headroom=device.lowest_headroom_bytes,
        xids={int(code): count for code, count in (device.xids or {}).items()},
    )


def _told(seen: SeenError) -> ToldError:
    error = seen.error
    return ToldError(
        timestamp_seconds=seen.at,
        kind=error.kind,
        exception=error.exception,
        text=error.text,
        phase=error.phase,
        steps=error.steps,
        headroom_bytes=seen.headroom,
        allocations=tuple(map(_allocation, error.allocations)),
        memory={device: _memory(memory) for device, memory in error.memory.items()},
    )


def _allocation(each: Allocation) -> FailedAllocation:
    return FailedAllocation(each.requested, each.shape, each.dtype, each.op, each.device, each.allocator)


def _memory(each: DeviceMemory) -> DeviceMemoryThen:
    return DeviceMemoryThen(each.current, each.peak, each.limit, each.reserved)


def _total(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _by_key(mappings: Any) -> dict[str, float]:
    total: dict[str, float] = {}
    for mapping in mappings:
        for key, value in mapping.items():
            total[key] = total.get(key, 0.0) + value
    return total


def _counts(account: Account) -> dict[str, int]:
    """Count XIDs over all of a run's GPUs."""
    return {str(code): int(n) for code, n in _by_key(share.xids for share in account.shares.values()).items()}
