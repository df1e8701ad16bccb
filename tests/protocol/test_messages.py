"""Messages between runs and daemon: wire format, and rejection of invalid ones."""

import json
from dataclasses import fields
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from services import ROOT

from gpuwarden.protocol.codec import MAX_MESSAGE_BYTES, ProtocolError, decode, decode_reply, encode
from gpuwarden.protocol.messages import (
    STEP_BUCKETS,
    Advice,
    Allocation,
    Census,
    DeviceMemory,
    End,
    Error,
    Hello,
    Report,
    TensorGroup,
)
from gpuwarden.protocol.validators import MAX_COUNT, MAX_TEXT_CHARACTERS, clip

BUCKETS = (0,) * (len(STEP_BUCKETS) + 1)
# One line each in recorded_messages.jsonl, as written by earlier clients and daemons.
MESSAGES: tuple[Any, ...] = (
    Hello("resnet", "tensorflow 2.21.0", {"GPU:0": None, "GPU:1": "GPU-5"}, "0,1", "PCI_BUS_ID", "job", 1, 2, True),
    Report("idle", 0, 0.0, BUCKETS, {}),
    Report(
        *("train", 7, 1.5, BUCKETS, {"GPU:0": DeviceMemory(1, 2, reserved=4)}, 1, 2, 3),
        stepping=True,
        examples=8,
        loss=-0.5,
        errors={"device_oom": 1},
        actions={"stop": 1},
        oom_retries=1,
    ),
    Error("device_oom", "OutOfMemory", "é", "train", 7, (Allocation(9, "2,3", op="MatMul"),), at=0, stage="forward"),
    Error("device_oom", "XlaRuntimeError", "", "train", 7, memory={"GPU:0": DeviceMemory(1, 2)}, memory_age=12.5),
    Census(7, 0.12, 3, 4096, 8192, groups=(TensorGroup(2, 4096, "2,3", "float32", "list `history`", "train.py:8"),)),
    End("completed"),
    End("interrupt", "failed"),
    Advice(3, "pressure", "warning", "GPU-5", "Low.", "memory", 1024, 2.5),
)
HELLO = {"v": 1, "type": "hello", "name": "resnet", "framework": "tensorflow 2.21.0", "devices": {"GPU:0": None}}
REPORT = {"v": 1, "type": "report", "phase": "train", "steps": 1, "step_seconds": 1.0, "step_buckets": [0] * 16}
REPORT |= {"memory": {"GPU:0": {"current": 1, "peak": 2}}}

printable = st.text(max_size=MAX_TEXT_CHARACTERS).map(clip)
count = st.integers(0, MAX_COUNT - 1)
seconds = st.floats(0, MAX_COUNT, exclude_max=True)
memory = st.dictionaries(printable, st.builds(DeviceMemory, count, count, st.none() | count), max_size=4)
tensors = st.builds(TensorGroup, count, count, st.none() | printable, printable, printable, st.none() | printable)
messages = st.one_of(
    st.builds(Hello, printable, printable, st.dictionaries(printable, st.none() | printable, max_size=4)),
    st.builds(
        Report,
        phase=st.sampled_from(("train", "test", "predict", "idle")),
        steps=count,
        step_seconds=seconds,
        step_buckets=st.tuples(*[count] * len(BUCKETS)),
        memory=memory,
        epoch=st.none() | count,
        dropped=count,
    ),
    st.builds(Census, count, seconds, count, count, st.none() | count, groups=st.tuples(tensors)),
    st.builds(End, printable),
    st.builds(Advice, count, st.just("xid"), st.just("critical"), printable, printable, seconds_to_oom=seconds),
)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
field_names = sorted({each.name for cls in (Hello, Report, Error, End) for each in fields(cls)})


def decode_any(data: bytes) -> Any:
    """Decode a message with the function for its type."""
    return decode_reply(data) if b'"type":"advice"' in data[:30] else decode(data)


def rejection(data: bytes) -> str:
    """Return the reason and detail of a rejection."""
    with pytest.raises(ProtocolError) as caught:
        decode(data)
    return str(caught.value)


def test_wire_format_is_as_recorded() -> None:
    """Each message is encoded and decoded as by earlier clients and daemons."""
    recorded = (ROOT / "tests/protocol/recorded_messages.jsonl").read_bytes().splitlines()
    assert [encode(message) for message in MESSAGES] == recorded
    assert tuple(map(decode_any, recorded)) == MESSAGES


@given(messages)
def test_message_survives(message: Any) -> None:
    """Each side decodes the other side's messages unchanged; the daemon rejects advice."""
    data = encode(message)
    assert decode_any(data) == message
    if isinstance(message, Advice):
        assert rejection(data).startswith("unknown_type")


@given(
    st.binary(max_size=200)
    | st.text(max_size=200).map(str.encode)
    | st.builds(
        lambda kind, said: json.dumps({"v": 1, "type": kind, **said}).encode(),
        st.sampled_from(["hello", "report", "error", "end"]),
        st.dictionaries(st.sampled_from(field_names), json_values),
    )
)
def test_any_bytes_are_decoded_or_rejected(data: bytes) -> None:
    """Arbitrary bytes raise nothing but ProtocolError."""
    try:
        decode(data)
    except ProtocolError:
        return


def test_rejections() -> None:
    """Each kind of invalid message has its own reason."""
    cases = [
        (b"", "not_json"),
        (b"hello", "not_json"),
        (b"[" * 5000, "not_json"),
        (b"\xff\xfe", "not_json"),
        (json.dumps(HELLO).encode("utf-16"), "not_json"),
        (b"[]", "not_json"),
        (json.dumps(HELLO).encode() + b"{}", "not_json"),
        (b"{}", "unknown_version"),
        (json.dumps({**HELLO, "v": 2}).encode(), "unknown_version"),
        (json.dumps({**HELLO, "type": "advice"}).encode(), "unknown_type"),
        (json.dumps({**HELLO, "type": ["hello"]}).encode(), "unknown_type"),
        (json.dumps({**HELLO, "name": "a\nb"}).encode(), "invalid: name"),
        (json.dumps({**HELLO, "name": "x" * (MAX_TEXT_CHARACTERS + 1)}).encode(), "invalid: name"),
        (json.dumps({**HELLO, "devices": {f"GPU:{n}": None for n in range(65)}}).encode(), "invalid: devices"),
        (json.dumps({**REPORT, "memory": {"GPU:0": {"current": 1}}}).encode(), "invalid: memory: peak: missing"),
        (b'{"v":1,"type":"end"}', "invalid: reason: missing"),
        (b" " * (MAX_MESSAGE_BYTES + 1), "too_long"),
    ]
    assert [(data, reason) for data, reason in cases if not rejection(data).startswith(reason)] == []


def test_numbers_are_bounded() -> None:
    """A number that is negative, huge, not finite or of another type is rejected, and the field is named."""
    wrong: list[Any] = [-1, MAX_COUNT, True, "1", None, float("nan"), float("inf")]
    cases = [("steps", each) for each in (*wrong, 1.0)]
    cases += [("step_seconds", each) for each in (*wrong, -0.5, 10**400)]
    cases += [("step_buckets", each) for each in ([0] * 15, [0] * 17, None, 1, "1")]
    cases += [("step_buckets", [*[0] * 15, each]) for each in (*wrong, 1.0, [0])]
    cases += [("errors", {"other": -1}), ("loss", -1e30), ("loss", float("nan"))]
    messages = [(case, json.dumps({**REPORT, case[0]: case[1]}).encode()) for case in cases]
    assert [case for case, data in messages if not rejection(data).startswith(f"invalid: {case[0]}: ")] == []


def test_optional_fields_may_be_null() -> None:
    """A field whose default is None may be null; one with another default, or none, may not."""
    none = {each.name: None for each in fields(Report) if each.default is None}
    assert len(none) > 9
    memory = {"GPU:0": {"current": 1, "peak": 2, "limit": None, "reserved": None}}
    assert decode(json.dumps({**REPORT, **none, "memory": memory}).encode()) == decode(json.dumps(REPORT).encode())
    for name in ("dropped", "stepping", "errors"):
        assert rejection(json.dumps({**REPORT, name: None}).encode()).startswith(f"invalid: {name}")


def test_messages_of_the_first_clients() -> None:
    """Messages of the first clients, with null for unknown values, are decoded as they were meant."""
    hello = '"name":"train.py","framework":"keras 3","devices":{"GPU:0":null},"visible_devices":"0","device_order":null'
    assert decode(f'{{"v":1,"type":"hello",{hello}}}'.encode()) == Hello("train.py", "keras 3", {"GPU:0": None}, "0")
    report = {**REPORT, "epoch": None, "batch": None, "dropped": 0}
    report["memory"] = {"GPU:0": {"current": 1, "peak": 2, "limit": None}}
    assert decode(json.dumps(report).encode()) == decode(json.dumps(REPORT).encode())


def test_messages_of_newer_clients() -> None:
    """Unknown fields are ignored, unknown error kinds count as other, unknown actions are dropped."""
    said = {**REPORT, "future": 1, "errors": {"new": 2, "other": 1}, "actions": {"new": 1, "stop": 2}}
    report = cast("Report", decode(json.dumps(said).encode()))
    assert (report.errors, report.actions) == ({"other": 3}, {"stop": 2})
    error = {"v": 1, "type": "error", "kind": "new", "exception": "E", "text": "", "phase": "train", "steps": 1}
    assert decode(json.dumps({**error, "stage": "new"}).encode()) == Error("other", "E", "", "train", 1)


def test_messages_share_no_mutable_defaults() -> None:
    """Each message has its own mutable defaults."""
    one, other = (cast("Report", decode(json.dumps(REPORT).encode())) for _ in range(2))
    assert one.errors is not other.errors
    assert one.actions is not other.actions


def test_oversized_message_is_rejected_by_the_sender() -> None:
    """A message that the daemon would reject is not sent."""
    devices = {f"{n:0>{MAX_TEXT_CHARACTERS}}": DeviceMemory(2**62, 2**62, 2**62) for n in range(60)}
    with pytest.raises(ProtocolError, match="too_long"):
        encode(Report("train", 1, 1.0, BUCKETS, devices))
