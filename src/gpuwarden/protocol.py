"""What a training run and the daemon say to each other: declared once, used by both halves.

One JSON object a SOCK_SEQPACKET message. Standard library only: the training process imports this. Identity (pid, uid)
is never part of a message; the daemon takes it from the kernel. Counts are totals since the run began, not increments,
so that a lost message or a restarted daemon loses nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Literal, TypeAlias, cast

VERSION = 1
MAX_MESSAGE_BYTES = 8192
MAX_TEXT = 120  # characters of a name, device or version
MAX_DEVICES = 64  # devices of one run
MAX_COUNT = 2**63  # and of seconds
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
]
Phase = Literal["train", "test", "predict", "idle"]
PHASES: tuple[Phase, ...] = ("train", "test", "predict", "idle")


class ProtocolError(ValueError):
    """A message that is refused; `reason` is the label it is counted under."""

    def __init__(self, reason: Rejection, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: Rejection = reason


def _checked(check: Callable[[Any], Any], default: Any = MISSING) -> Any:
    """Declare a message field: its check turns JSON into the field's value or raises ValueError."""
    return field(metadata={"check": check}, **({} if default is MISSING else {"default": default}))


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


def _seconds(value: Any) -> float:
    # Not math.isfinite: JSON has whole numbers that no float can hold, and those make it raise OverflowError.
    if type(value) not in (int, float) or not 0 <= value < MAX_COUNT:
        raise ValueError("want a number of seconds from 0 to 2^63")
    return float(value)


def _phase(value: Any) -> Phase:
    if value not in PHASES:
        raise ValueError(f"want one of {', '.join(PHASES)}")
    return cast("Phase", value)


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
    """What the framework's allocator says of one device, in bytes; `limit` where it has a limit of its own."""

    current: int = _checked(_count)
    peak: int = _checked(_count)
    limit: int | None = _checked(_optional(_count), None)


@dataclass(frozen=True, slots=True)
class Hello:
    """Who reports; the first message of every connection, and again when something of it has changed.

    `devices` maps the framework's device names to the GPU's UUID where the run was told it, else to None: then the
    daemon resolves it. `visible_devices` and `device_order` are the run's CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
    """

    name: str = _checked(_text)
    framework: str = _checked(_text)
    devices: Mapping[str, str | None] = _checked(_by_device(_optional(_text)))
    visible_devices: str | None = _checked(_optional(_up_to(MAX_LIST)), None)
    device_order: str | None = _checked(_optional(_text), None)


@dataclass(frozen=True, slots=True)
class Report:
    """Where the run stands. `steps`, `step_seconds` and `step_buckets` count training steps since the run began.

    `step_buckets` counts steps by duration, one entry a bound of STEP_BUCKETS and one above, not cumulative.
    `batch` and `epoch` count from 0; `dropped` counts reports that the socket could not take.
    """

    phase: Phase = _checked(_phase)
    steps: int = _checked(_count)
    step_seconds: float = _checked(_seconds)
    step_buckets: tuple[int, ...] = _checked(_buckets)
    memory: Mapping[str, DeviceMemory] = _checked(_by_device(lambda value: _build(DeviceMemory, value)))
    epoch: int | None = _checked(_optional(_count), None)
    batch: int | None = _checked(_optional(_count), None)
    dropped: int = _checked(_count, 0)


@dataclass(frozen=True, slots=True)
class End:
    """The run ends itself; without it the daemon sees the process die."""

    reason: str = _checked(_text)


Message: TypeAlias = "Hello | Report | End"
_TYPES: dict[str, type[Any]] = {"hello": Hello, "report": Report, "end": End}
_NAMES = {cls: name for name, cls in _TYPES.items()}


def _build(cls: type[Any], value: Any) -> Any:
    """Make a message from JSON; fields this version does not know are left alone: newer clients may add some."""
    if not isinstance(value, dict):
        raise ValueError("want an object")  # noqa: TRY004 - one error class for every wrong value
    known: dict[str, Any] = {}
    for each in fields(cls):
        if each.name in value:
            try:
                known[each.name] = each.metadata["check"](value[each.name])
            except ValueError as error:
                raise ValueError(f"{each.name}: {error}") from None
        elif each.default is MISSING:
            raise ValueError(f"{each.name}: missing")
    return cls(**known)


def clip(text: str, limit: int = MAX_TEXT) -> str:
    """Make any text fit for a message: unprintable characters become spaces, the rest is cut at `limit`."""
    return "".join(c if c.isprintable() else " " for c in text[:limit])


def encode(message: Message) -> bytes:
    """Write one message. Raises ProtocolError when it is longer than the daemon accepts."""
    data = json.dumps({"v": VERSION, "type": _NAMES[type(message)], **asdict(message)}, separators=(",", ":")).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError("too_long", f"{len(data)} bytes; at most {MAX_MESSAGE_BYTES}")
    return data


def decode(data: bytes) -> Message:
    """Read one message; whatever the bytes are, it returns a message or raises ProtocolError."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError("too_long", f"at most {MAX_MESSAGE_BYTES} bytes")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("not_json", str(error)) from None
    if not isinstance(value, dict):
        raise ProtocolError("not_json", "want an object")
    if value.get("v") != VERSION:
        raise ProtocolError("unknown_version", f"this daemon speaks version {VERSION}, the run {value.get('v')!r:.20}")
    kind = value.get("type")
    cls = _TYPES.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ProtocolError("unknown_type", f"{kind!r:.40}; want one of {', '.join(_TYPES)}")
    try:
        return cast("Message", _build(cls, value))
    except ValueError as error:
        raise ProtocolError("invalid", str(error)) from None
