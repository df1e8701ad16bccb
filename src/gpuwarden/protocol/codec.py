"""JSON encoding of messages: one object a message, one message a SOCK_SEQPACKET packet."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, cast

from gpuwarden.protocol.messages import (
    Advice,
    Allocation,
    Census,
    DeviceMemory,
    End,
    Error,
    Headroom,
    Hello,
    Message,
    NonFiniteLoss,
    Reply,
    Report,
    Summary,
    TensorGroup,
)
from gpuwarden.protocol.validators import parse_object

VERSION = 1
MAX_MESSAGE_BYTES = 8192

Rejection = Literal[
    "too_long",
    "not_json",
    "unknown_version",
    "unknown_type",
    "invalid",
    "no_hello",
    "too_many_runs",
    "too_many_new_runs",
    "internal",  # a fault of the daemon's own
]

_RUN_TYPES: dict[str, type[Any]] = {
    "hello": Hello,
    "report": Report,
    "error": Error,
    "census": Census,
    "end": End,
}
_DAEMON_TYPES: dict[str, type[Any]] = {"advice": Advice, "summary": Summary, "headroom": Headroom}
_TYPE_NAMES = {cls: name for name, cls in (_RUN_TYPES | _DAEMON_TYPES).items()}
_FIELDS = {cls: fields(cls) for cls in (*_TYPE_NAMES, DeviceMemory, Allocation, NonFiniteLoss, TensorGroup)}


class ProtocolError(ValueError):
    """A message that is refused; `reason` is the label it is counted under."""

    def __init__(self, reason: Rejection, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: Rejection = reason


def receive_packet(connection: socket.socket, flags: int = 0) -> bytes:
    """Return the next packet of a SOCK_SEQPACKET socket; empty once its peer has closed and all packets are read.

    A peer that closes with unread packets resets the connection. Linux reports that once, before the packets that the
    peer sent, which are still there. Raises BlockingIOError where a non-blocking call finds none yet, and OSError.
    """
    try:
        return connection.recv(MAX_MESSAGE_BYTES + 1, flags)
    except ConnectionResetError:
        return connection.recv(MAX_MESSAGE_BYTES + 1, flags)


def encode(message: Message | Reply) -> bytes:
    """Return one message as bytes. Raises ProtocolError where it is longer than MAX_MESSAGE_BYTES."""
    data = _JSON.encode({"v": VERSION, "type": _TYPE_NAMES[type(message)], **_set_fields(message)}).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError("too_long", f"{len(data)} bytes; maximum {MAX_MESSAGE_BYTES}")
    return data


def decode(data: bytes) -> Message:
    """Return the message of a run that the bytes hold. Raises ProtocolError, and nothing else, for any other bytes."""
    return cast("Message", _decode(data, _RUN_TYPES, "the run"))


def decode_reply(data: bytes) -> Reply:
    """Return the daemon's message that the bytes hold. Raises ProtocolError, and nothing else, for any other bytes."""
    return cast("Reply", _decode(data, _DAEMON_TYPES, "the daemon"))


def _set_fields(message: Any) -> dict[str, Any]:
    """Return the fields of a message that differ from their defaults."""
    return {
        each.name: value
        for each in _FIELDS[type(message)]
        if (value := getattr(message, each.name)) != each.default
        and (each.default_factory is MISSING or value != each.default_factory())
    }


_JSON = json.JSONEncoder(separators=(",", ":"), default=_set_fields)


def _decode(data: bytes, types: Mapping[str, type[Any]], sender: str) -> Any:
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError("too_long", f"maximum {MAX_MESSAGE_BYTES} bytes")
    try:
        value = json.loads(data.decode())  # json.loads would take UTF-16 bytes too
    except (ValueError, RecursionError) as error:
        raise ProtocolError("not_json", str(error)) from None
    if not isinstance(value, dict):
        raise ProtocolError("not_json", "expected an object")
    if value.get("v") != VERSION:
        raise ProtocolError(
            "unknown_version",
            f"protocol version {VERSION} here, {sender} has {value.get('v')!r:.20}: update gpuwarden on the older side",
        )
    kind = value.get("type")
    cls = types.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise ProtocolError("unknown_type", f"{kind!r:.40}; expected one of {', '.join(types)}")
    try:
        return parse_object(cls, value)
    except ValueError as error:
        raise ProtocolError("invalid", str(error)) from None
