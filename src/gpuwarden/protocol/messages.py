"""Messages between a training run and the daemon, and their JSON encoding.

A run sends hellos, reports, errors and its end. The daemon sends advice to runs whose hello sets `hears`.

Each message is one JSON object in one SOCK_SEQPACKET packet. This module uses the standard library only, because the
training process imports it. Identity (pid, uid) is never part of a message: the daemon reads it from the kernel. Counts
are totals since the run began, not increments, so a lost message or a restart of the daemon loses nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, TypeAlias, cast, get_args

VERSION = 1
MAX_MESSAGE_BYTES = 8192
MAX_TEXT = 120  # characters of a name, device or version
MAX_DEVICES = 64  # devices of one run
MAX_COUNT = 2**63  # and of seconds
MAX_ERROR_TEXT = 2000  # characters of an error's message: of a long one what its kind shows by, the front and the end
MAX_ALLOCATIONS = 8  # that failed in one error: several replicas may fail at once
MAX_ADVICE_TEXT = 500  # characters
MAX_LIST = 41 * MAX_DEVICES  # characters of CUDA_VISIBLE_DEVICES: UUIDs with their commas
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds

Rejection = Literal[
    "too_long",
    "not_json",
    "unknown_version",
    "unknown_type",
    "invalid",
    "no_hello",
    "too_many_runs",
    "internal",  # a fault of the daemon's own
]
Phase = Literal["train", "test", "predict", "idle"]
PHASES: tuple[Phase, ...] = ("train", "test", "predict", "idle")
ErrorKind = Literal[
    "device_oom",
    "host_oom",
    "kernel_launch",
    "illegal_address",
    "library_mismatch",
    "no_device",
    "shape_dtype",
    "other",
]
ERROR_KINDS: tuple[ErrorKind, ...] = get_args(ErrorKind)
Farewell = Literal["finished", "failed"]
Level = Literal["none", "some", "critical"]
LEVELS: tuple[Level, ...] = get_args(Level)
Resource = Literal["memory", "thermal"]
RESOURCES: tuple[Resource, ...] = get_args(Resource)
AdviceKind = Literal["pressure", "xid", "neighbour", "gpu_lost"]
ADVICE_KINDS: tuple[AdviceKind, ...] = get_args(AdviceKind)
Stage = Literal["weights", "optimizer", "forward", "backward", "input"]
STAGES: tuple[Stage, ...] = get_args(Stage)
Action = Literal["checkpoint", "stop", "call"]
ACTIONS: tuple[Action, ...] = get_args(Action)


class ProtocolError(ValueError):
    """A message that is refused; `reason` is the label it is counted under."""

    def __init__(self, reason: Rejection, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: Rejection = reason


def _checked(check: Callable[[Any], Any], **default: Any) -> Any:
    """Declare a message field; `check` turns JSON into the field's value or raises ValueError.

    `default` is as of `dataclasses.field`. A field whose default is None may also be null.
    """
    return field(metadata={"check": check}, **default)


def _up_to(limit: int) -> Callable[[Any], str]:
    def checked(value: Any) -> str:
        if not isinstance(value, str) or len(value) > limit or not value.isprintable():
            raise ValueError(f"want printable text of at most {limit} characters")
        return value

    return checked


_text = _up_to(MAX_TEXT)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_COUNT:
        raise ValueError("want a whole number from 0 to 2^63")
    return value


def _number_from(lowest: int) -> Callable[[Any], float]:
    def checked(value: Any) -> float:
        # math.isfinite raises OverflowError for a whole number that no float can hold.
        if type(value) not in (int, float) or not lowest <= value < MAX_COUNT:
            raise ValueError(f"want a number from {'0' if lowest == 0 else '-2^63'} to 2^63")
        return float(value)

    return checked


_seconds = _number_from(0)
_number = _number_from(-MAX_COUNT)


def _truth(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("want true or false")
    return value


def _one_of(*choices: str) -> Callable[[Any], Any]:
    def checked(value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"want one of {', '.join(choices)}")
        return value

    return checked


_phase = _one_of(*PHASES)


def _kind(value: Any) -> Any:
    """Return a kind of error; a kind that only newer clients know becomes "other"."""
    return value if _text(value) in ERROR_KINDS else "other"


def _stage(value: Any) -> Any:
    """Return a stage; one that only newer clients know becomes None."""
    return value if _text(value) in STAGES else None


def _by_kind(value: Any) -> dict[str, int]:
    if not isinstance(value, dict):
        raise ValueError("want an object of counts by kind of error")  # noqa: TRY004 - one error class for every wrong value
    counts: dict[str, int] = {}
    for kind, count in value.items():
        counts[_kind(kind)] = counts.get(_kind(kind), 0) + _count(count)
    return counts


def _by_action(value: Any) -> dict[str, int]:
    """Return counts by action; an action that only newer clients know is left out."""
    if not isinstance(value, dict):
        raise ValueError("want an object of counts by action")  # noqa: TRY004 - one error class for every wrong value
    return {_text(action): _count(count) for action, count in value.items() if action in ACTIONS}


def _buckets(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) != len(STEP_BUCKETS) + 1:
        raise ValueError(f"want {len(STEP_BUCKETS) + 1} counts")
    return tuple(map(_count, value))


def _optional(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else check(value)


def _by_device(check: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    def checked(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > MAX_DEVICES:
            raise ValueError(f"want an object of at most {MAX_DEVICES} devices")
        return {_text(device): check(entry) for device, entry in value.items()}

    return checked


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of the framework's allocator on one device, in bytes.

    `limit` where the allocator has a limit of its own; `reserved` is what it holds of the device, used or not, where it
    says so (torch, JAX).
    """

    current: int = _checked(_count)
    peak: int = _checked(_count)
    limit: int | None = _checked(_count, default=None)
    reserved: int | None = _checked(_count, default=None)


def _memory(value: Any) -> DeviceMemory:
    return cast("DeviceMemory", _message(DeviceMemory, value))


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation that failed, as far as the framework's message tells. `shape` is written "20000,4000"."""

    requested: int | None = _checked(_count, default=None)
    shape: str | None = _checked(_text, default=None)
    dtype: str | None = _checked(_text, default=None)
    op: str | None = _checked(_text, default=None)
    device: str | None = _checked(_text, default=None)
    allocator: str | None = _checked(_text, default=None)


def _allocations(value: Any) -> tuple[Allocation, ...]:
    if not isinstance(value, list) or len(value) > MAX_ALLOCATIONS:
        raise ValueError(f"want a list of at most {MAX_ALLOCATIONS} allocations")
    return tuple(_message(Allocation, each) for each in value)


@dataclass(frozen=True, slots=True)
class Hello:
    """Introduction of a run; the first message of every connection, and again when something of it has changed.

    `devices` maps the framework's device names to the GPU's UUID where the run was told it, else to None: then the
    daemon resolves it. `visible_devices` and `device_order` are the run's CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
    Of a job with several processes `job` is what they have in common, `rank` this one's place from 0 in `world_size`.
    `hears`: it reads advice; to a run that does not say so none is sent.
    """

    name: str = _checked(_text)
    framework: str = _checked(_text)
    devices: Mapping[str, str | None] = _checked(_by_device(_optional(_text)))
    visible_devices: str | None = _checked(_up_to(MAX_LIST), default=None)
    device_order: str | None = _checked(_text, default=None)
    job: str | None = _checked(_text, default=None)
    rank: int | None = _checked(_count, default=None)
    world_size: int | None = _checked(_count, default=None)
    hears: bool = _checked(_truth, default=False)


@dataclass(frozen=True, slots=True)
class Report:
    """State of a run. All counts are since the run began.

    `step_buckets` counts steps by duration, one entry a bound of STEP_BUCKETS and one above, not cumulative.
    `batch` and `epoch` count from 0; `dropped` counts reports that the socket could not take. `examples` is how many
    went through the steps, where the batch size is known. `step_median` and `step_p95` are seconds, of all steps so
    far. `compile_seconds` is what steps took that traced or compiled, which are in no duration. `input_wait_seconds` is
    how long steps waited for their input in the `input_observed_seconds` of stepping where that could be known;
    `input_buffered` of `input_buffer_size` batches stood ready. `loss` is the last one the user let it have.
    `stepping`: a step is under way, so a long silence means that it hangs. `batch_size` is the examples of the last
    step whose size is known, `largest_batch_size` of the largest. `advice_heard` counts advice that came, `actions`
    what the run did on it because its user had asked for that. `oom_retries` counts tries that began anew with a
    smaller batch after an out-of-memory.
    """

    phase: Phase = _checked(_phase)
    steps: int = _checked(_count)
    step_seconds: float = _checked(_seconds)
    step_buckets: tuple[int, ...] = _checked(_buckets)
    memory: Mapping[str, DeviceMemory] = _checked(_by_device(_memory))
    epoch: int | None = _checked(_count, default=None)
    batch: int | None = _checked(_count, default=None)
    dropped: int = _checked(_count, default=0)
    stepping: bool = _checked(_truth, default=False)
    examples: int | None = _checked(_count, default=None)
    step_median: float | None = _checked(_seconds, default=None)
    step_p95: float | None = _checked(_seconds, default=None)
    compile_seconds: float | None = _checked(_seconds, default=None)
    input_wait_seconds: float | None = _checked(_seconds, default=None)
    input_observed_seconds: float | None = _checked(_seconds, default=None)
    input_buffered: int | None = _checked(_count, default=None)
    input_buffer_size: int | None = _checked(_count, default=None)
    loss: float | None = _checked(_number, default=None)
    errors: Mapping[str, int] = _checked(_by_kind, default_factory=dict)
    batch_size: int | None = _checked(_count, default=None)
    largest_batch_size: int | None = _checked(_count, default=None)
    advice_heard: int = _checked(_count, default=0)
    actions: Mapping[str, int] = _checked(_by_action, default_factory=dict)
    oom_retries: int = _checked(_count, default=0)


@dataclass(frozen=True, slots=True)
class Error:
    """One error that a step raised, told when it happens; that there were more of them is in the reports' `errors`.

    `exception` is the type's name, `text` what matters of its message. `allocations` are those that failed, `memory` is
    what the allocators said afterwards. `at` is the place in the text where its kind shows, where it does.
    `batch_size` is the examples of the step that failed, where that is known. `stage` says in which part of the program
    it was raised: where weights are made or moved, where the optimizer works, in the passes, in the input; None where
    its traceback does not show one. `weights` is bytes of the variables of model and optimizer, `trainable` of those
    that get gradients, `like_weight` whether what failed has the shape of one; all where the model is known.
    """

    kind: ErrorKind = _checked(_kind)
    exception: str = _checked(_text)
    text: str = _checked(_up_to(MAX_ERROR_TEXT))
    phase: Phase = _checked(_phase)
    steps: int = _checked(_count)
    allocations: tuple[Allocation, ...] = _checked(_allocations, default=())
    memory: Mapping[str, DeviceMemory] = _checked(_by_device(_memory), default_factory=dict)
    at: int | None = _checked(_count, default=None)
    batch_size: int | None = _checked(_count, default=None)
    stage: Stage | None = _checked(_stage, default=None)
    weights: int | None = _checked(_count, default=None)
    trainable: int | None = _checked(_count, default=None)
    like_weight: bool | None = _checked(_truth, default=None)


@dataclass(frozen=True, slots=True)
class End:
    """The run ends itself; without it the daemon sees the process die. `outcome` says whether an exception ended it."""

    reason: str = _checked(_text)
    outcome: Farewell = _checked(_one_of(*get_args(Farewell)), default="finished")


@dataclass(frozen=True, slots=True)
class Advice:
    """Advice of the daemon to a run on one of its GPUs or MIG instances.

    Pressure names the `resource` whose `level` has changed, and is told again when it ends; of anything else, which is
    an event, `level` says how grave it is. `text` is one sentence for the run's log. `serial` counts the advice that
    the run was sent.
    """

    serial: int = _checked(_count)
    kind: AdviceKind = _checked(_one_of(*ADVICE_KINDS))
    level: Level = _checked(_one_of(*LEVELS))
    uuid: str = _checked(_text)
    text: str = _checked(_up_to(MAX_ADVICE_TEXT))
    resource: Resource | None = _checked(_one_of(*RESOURCES), default=None)
    headroom: int | None = _checked(_count, default=None)
    seconds_to_oom: float | None = _checked(_seconds, default=None)


Message: TypeAlias = "Hello | Report | Error | End"
_TYPES: dict[str, type[Any]] = {"hello": Hello, "report": Report, "error": Error, "end": End}
_NAMES = {**{cls: name for name, cls in _TYPES.items()}, Advice: "advice"}
_FIELDS = {cls: fields(cls) for cls in (DeviceMemory, Allocation, *_NAMES)}


def _message(cls: type[Any], value: Any) -> Any:
    """Return the message that a JSON object holds; unknown fields are ignored, since newer clients may add some."""
    if not isinstance(value, dict):
        raise ValueError("want an object")  # noqa: TRY004 - one error class for every wrong value
    checked = {}
    for each in _FIELDS[cls]:
        name = each.name
        if name not in value:
            if each.default is MISSING and each.default_factory is MISSING:
                raise ValueError(f"{name}: missing")
        elif value[name] is not None or each.default is not None:
            try:
                checked[name] = each.metadata["check"](value[name])
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
    return cls(**checked)


def _plain(message: Any) -> dict[str, Any]:
    """Return the fields of a message that differ from their defaults."""
    return {
        each.name: value
        for each in _FIELDS[type(message)]
        if (value := getattr(message, each.name)) != each.default
        and (each.default_factory is MISSING or value != each.default_factory())
    }


_JSON = json.JSONEncoder(separators=(",", ":"), default=_plain)


def clip(text: str, limit: int = MAX_TEXT) -> str:
    """Return text fit for a message: unprintable characters become spaces, the rest is cut at `limit`."""
    return "".join(c if c.isprintable() else " " for c in text[:limit])


def encode(message: Message | Advice) -> bytes:
    """Return one message as bytes. Raises ProtocolError where it is longer than MAX_MESSAGE_BYTES."""
    data = _JSON.encode({"v": VERSION, "type": _NAMES[type(message)], **_plain(message)}).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError("too_long", f"{len(data)} bytes; at most {MAX_MESSAGE_BYTES}")
    return data


def decode(data: bytes) -> Message:
    """Return the message of a run that the bytes hold. Raises ProtocolError, and nothing else, for any other bytes."""
    return cast("Message", _decode(data, _TYPES, "the run"))


def decode_advice(data: bytes) -> Advice:
    """Return the advice that the bytes hold. Raises ProtocolError, and nothing else, for any other bytes."""
    return cast("Advice", _decode(data, {"advice": Advice}, "the daemon"))


def _decode(data: bytes, types: Mapping[str, type[Any]], other: str) -> Any:
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError("too_long", f"at most {MAX_MESSAGE_BYTES} bytes")
    try:
        value = json.loads(data.decode())  # json.loads would take UTF-16 bytes too
    except (ValueError, RecursionError) as error:
        raise ProtocolError("not_json", str(error)) from None
    if not isinstance(value, dict):
        raise ProtocolError("not_json", "want an object")
    if value.get("v") != VERSION:
        raise ProtocolError(
            "unknown_version",
            f"this side speaks version {VERSION}, {other} {value.get('v')!r:.20}: update gpuwarden on the older side",
        )
    kind = value.get("type")
    cls = types.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ProtocolError("unknown_type", f"{kind!r:.40}; want one of {', '.join(types)}")
    try:
        return _message(cls, value)
    except ValueError as error:
        raise ProtocolError("invalid", str(error)) from None
