"""Classifier of exceptions: their kind and the failed allocations, from the type's name and the message only.

TensorFlow, XLA, JAX, torch, the CUDA libraries, NumPy and Python word their errors differently; errors/patterns.py
has the texts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from gpuwarden.client.errors.traceback_stage import find_stage
from gpuwarden.client.errors.user_frame import find_user_frame
from gpuwarden.errors.patterns import find_pattern
from gpuwarden.protocol.codec import ProtocolError, encode
from gpuwarden.protocol.messages import (
    MAX_ALLOCATIONS,
    MAX_ERROR_CHARACTERS,
    OOM_KINDS,
    Allocation,
    DeviceMemory,
    Error,
    ErrorKind,
    Phase,
    Stage,
)
from gpuwarden.protocol.validators import MAX_COUNT, clip

_MAX_CHAIN = 8  # exceptions to read: the error or those of a group, its cause, that one's cause and so on
_CUT = " ... "
_MAX_SEARCHED_CHARACTERS = 1 << 16  # XLA's messages may list every buffer


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_WIDTHS = {  # bytes of an element, by TensorFlow's and NumPy's names
    **dict.fromkeys(("bool", "int8", "uint8", "qint8", "quint8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("half", "float16", "bfloat16", "int16", "uint16", "qint16", "quint16"), 2),
    **dict.fromkeys(("float", "float32", "int32", "uint32", "qint32"), 4),
    **dict.fromkeys(("double", "float64", "int64", "uint64", "complex64", "resource"), 8),
    **dict.fromkeys(("complex128",), 16),
}
_OP = r"\[\[\{\{node ([^}]+)\}\}|\[\[Node:? (\S+)|\[Op:(?!__)(\w+)\]"
# Colors, and the hint that TensorFlow appends to every out-of-memory error.
_NOISE = r"\x1b\[[0-9;]*[A-Za-z]|Hint: If you want to see a list of allocated tensors[^\n]*"
# Named groups: `size` and `unit`, or `bytes` where it is exact, `shape`, `dtype`, `device` or `gpu`, `allocator`, `op`.
# All matches of the first pattern that matches are used: several replicas may have failed.
_SIZE = r"(?P<size>[\d.,]+) ?(?P<unit>bytes|[KMGTP]?i?B|[KMGTP])\b"
_ALLOCATIONS = (  # tests/error_messages has the texts
    (
        r"OOM when allocating (?:temporary )?tensor (?:with shape|of shape) ?\[(?P<shape>[\d,]*)\]"
        r"(?: and type (?P<dtype>\w+))?(?: on (?P<device>\S+))?(?: by allocator (?P<allocator>\w+))?"
    ),
    r"from \S+ to (?P<device>\S*device:\S+) in order to run (?P<op>\w+): Dst tensor is not initialized",
    rf"(?<!you )Tried to allocate {_SIZE}(?:\. GPU (?P<gpu>\d+)| \((?:GPU (?P<gpu_too>\d+)))?",
    rf"Failed to allocate request for {_SIZE} \((?P<bytes>\d+)B\) on device ordinal (?P<gpu>\d+)",
    rf"Out of memory (?:while )?(?:trying to allocate|allocating) {_SIZE}",
    rf"Unable to allocate {_SIZE} for an array with shape \((?P<shape>[\d, ]*)\) and data type (?P<dtype>\w+)",
    rf"(?:(?P<allocator>\w+): .{{1,60}})?you tried to allocate {_SIZE}",
    rf"Allocation on device (?P<gpu>\d+) would exceed(?s:.*?)Requested +: {_SIZE}",
    rf"fail(?:ed)? to (?:CUDA )?(?:host )?[mc]?alloc(?:ate)?(?: async)? {_SIZE}(?: \((?P<bytes>\d+) bytes\))?",
    rf"(?:Attempting to (?:reserve|allocate)|unable to mmap|pinned host memory of size:) {_SIZE}",
    r"Allocation \(size=(?P<bytes>\d+)\) would exceed memory",
)


@dataclass(frozen=True, slots=True)
class _Reading:
    """One classified exception of a chain."""

    kind: ErrorKind
    exception: str
    text: str
    at: int | None  # position in the text that shows the kind


def error_from_exception(
    exception: BaseException,
    phase: Phase,
    steps: int,
    memory: Mapping[str, DeviceMemory] | None = None,
    batch_size: int | None = None,
) -> Error:
    """Return the error message for an exception, which is neither kept nor changed. Takes some ms, never raises.

    `memory` is the allocators' current figures. A CPU in it stands for a GPU, as the user mapped it; otherwise a CPU's
    memory is the host's. `batch_size` is the number of examples of the step that raised, if known.
    """
    memory = memory or {}
    described, cause = _find_cause(exception)
    kind = cause.kind
    allocations: tuple[Allocation, ...] = ()
    stage: Stage | None = None
    if kind in OOM_KINDS:
        stage = find_stage(exception)
        allocations = tuple(dict.fromkeys(_find_allocations(cause.text)))[:MAX_ALLOCATIONS]
        if kind == "device_oom" and _are_all_on_host(allocations, memory):
            kind = "host_oom"
    error = Error(
        kind,
        clip(cause.exception),
        "",
        phase,
        steps,
        allocations,
        dict(memory),
        batch_size=batch_size,
        stage=stage,
        frame=find_user_frame(cause.text, described, exception),
    )
    return _shorten_to_fit(cause, error)


def has_known_kind(exception: BaseException) -> bool:
    """Return whether an exception, or a cause that it was raised from, is of a known kind.

    Its context does not count: an exception that was raised while another was handled is a different error.
    """
    each: BaseException | None = exception
    for _ in range(_MAX_CHAIN):
        if each is None:
            break
        if _list_group(each) or _classify(type(each), _read_text(each)).kind != "other":
            return True
        each = each.__cause__
    return False


def _find_cause(exception: BaseException) -> tuple[BaseException, _Reading]:
    """Return the first exception of a known kind in the chain, or else the first exception."""
    first: tuple[BaseException, _Reading] | None = None
    for each in _walk_chain(exception):
        reading = _classify(type(each), _read_text(each))
        if reading.kind != "other":
            return each, reading
        first = first or (each, reading)
    return first or (exception, _classify(type(exception), _read_text(exception)))  # only groups in groups


def _walk_chain(exception: BaseException) -> Iterator[BaseException]:
    """Yield the exception, its causes and contexts; of a group, such as asyncio's TaskGroup raises, the members."""
    waiting = [exception]
    for _ in range(_MAX_CHAIN):
        if not waiting:
            return
        each = waiting.pop(0)
        members = _list_group(each)
        if not members:
            yield each
        earlier = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
        waiting = [*members, *waiting, *([] if earlier is None else [earlier])]


def _list_group(exception: BaseException) -> Sequence[BaseException]:
    # By name: Python 3.10 has no such class.
    if all(each.__name__ != "BaseExceptionGroup" for each in type(exception).__mro__):
        return ()
    return cast("Sequence[BaseException]", getattr(exception, "exceptions", ()))


def _read_text(exception: BaseException) -> str:
    try:
        text = str(exception)
    except Exception:  # noqa: BLE001 - the exception's own __str__
        return ""
    text = re.sub(_NOISE, "", text).strip()
    if len(text) <= _MAX_SEARCHED_CHARACTERS:
        return text
    half = _MAX_SEARCHED_CHARACTERS // 2
    return text[:half] + _CUT + text[-half:]


def _classify(cls: type[BaseException], text: str) -> _Reading:
    names = " ".join(each.__name__ for each in cls.__mro__ if each.__module__ != "builtins" or each is MemoryError)
    searched = f"{names or cls.__name__}: {text}"
    if found := find_pattern(searched):
        problem, match = found
        at = max(match.start() - (len(searched) - len(text)), 0)
        return _Reading(problem.kind, cls.__name__, text, at)
    return _Reading("other", cls.__name__, text, None)


def _cut_excerpt(cause: _Reading, limit: int) -> tuple[str, int | None]:
    """Return an excerpt of a text, and the position in it that shows the kind.

    A long text is cut to the part that shows the kind, the front, where torch and CUDA put the facts, and the end,
    where TensorFlow does.
    """
    text, at = "", None
    for start, stop in _choose_parts(len(cause.text), cause.at, limit):
        text += _CUT if start else ""
        if cause.at is not None and start <= cause.at < max(stop, start + 1):
            at = len(text) + cause.at - start
        text += clip(cause.text[start:stop], limit)
    return text.rstrip(), at


def _choose_parts(length: int, at: int | None, limit: int) -> list[tuple[int, int]]:
    """Choose the parts of a text to keep, in order; the end gets the room that the others leave."""
    if length <= limit:
        return [(0, length)]
    room = limit - 2 * len(_CUT)
    front = room // 6
    start, stop = (0, 0) if at is None else (max(at - room // 10, 0), min(at + room // 3, length))
    if start <= front + len(_CUT):
        front = max(front, stop)
        return [(0, front), (length - room + front, length)]
    end = room - front - (stop - start)
    if length - end <= stop + len(_CUT):
        return [(0, front), (length - room + front, length)]
    return [(0, front), (start, stop), (length - end, length)]


def _find_allocations(text: str) -> Iterator[Allocation]:
    for regex in _ALLOCATIONS:
        found = list(re.finditer(regex, text, re.IGNORECASE))
        for index, match in enumerate(found):
            after = text[match.end() : found[index + 1].start() if index + 1 < len(found) else None]
            yield _parse_allocation(
                {name: value for name, value in match.groupdict().items() if value is not None}, after
            )
        if found:
            return
    if op := _find_op(text):
        yield Allocation(op=clip(op))


def _parse_allocation(groups: Mapping[str, str], after: str) -> Allocation:
    shape = groups["shape"].replace(" ", "").rstrip(",") if "shape" in groups else None
    gpu = groups.get("gpu") or groups.get("gpu_too")
    device = f"GPU:{gpu}" if gpu else groups.get("device", "").rstrip(".,;") or None
    return Allocation(
        requested=_parse_requested(groups, shape),
        shape=_clip_optional(shape),
        dtype=_clip_optional(groups.get("dtype")),
        op=_clip_optional(groups.get("op") or _find_op(after)),
        device=_clip_optional(device),
        allocator=_clip_optional(groups.get("allocator")),
    )


def _clip_optional(text: str | None) -> str | None:
    return None if text is None else clip(text)


def _parse_requested(groups: Mapping[str, str], shape: str | None) -> int | None:
    try:
        requested = _compute_requested(groups, shape)
    except (KeyError, ValueError, OverflowError):  # not in the text, or not a number
        return None
    return requested if requested < MAX_COUNT else None


def _compute_requested(groups: Mapping[str, str], shape: str | None) -> int:
    """Return the requested bytes, from shape and type if both are known: other figures may be rounded."""
    if shape is not None and groups.get("dtype") in _WIDTHS:
        return math.prod(int(each) for each in shape.split(",") if each) * _WIDTHS[groups["dtype"]]
    if "bytes" in groups:
        return int(groups["bytes"])
    return round(float(groups["size"].rstrip(".").replace(",", "")) * _UNITS[groups["unit"].upper().rstrip("BYTESI")])


def _find_op(after: str) -> str | None:
    found = re.search(_OP, after, re.IGNORECASE)
    return next((each for each in found.groups() if each), None) if found else None


def _are_all_on_host(allocations: tuple[Allocation, ...], memory: Mapping[str, DeviceMemory]) -> bool:
    devices = [re.search(r"(CPU:\d+)$", each.device or "") for each in allocations]
    return bool(devices) and all(cpu and cpu[1] not in memory for cpu in devices)


def _shorten_to_fit(cause: _Reading, error: Error) -> Error:
    """Add the text, and shorten it until the message fits: many devices or escaped characters make it too long."""
    for limit, shorter in (
        (MAX_ERROR_CHARACTERS, error),
        (MAX_ERROR_CHARACTERS // 2, error),
        (MAX_ERROR_CHARACTERS // 10, replace(error, allocations=error.allocations[:2])),
        (MAX_ERROR_CHARACTERS // 10, replace(error, allocations=error.allocations[:1], memory={})),
    ):
        text, at = _cut_excerpt(cause, limit)
        fitting = replace(shorter, text=text, at=at)
        try:
            encode(fitting)
        except ProtocolError:
            continue
        return fitting
    return replace(error, allocations=(), memory={})
