"""Messages survive the way there and back, and nothing that is no message gets through."""

import json
from dataclasses import fields
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.protocol import (
    MAX_MESSAGE_BYTES,
    MAX_TEXT,
    STEP_BUCKETS,
    VERSION,
    Advice,
    DeviceMemory,
    End,
    Hello,
    Message,
    ProtocolError,
    Report,
    clip,
    decode,
    decode_advice,
    encode,
)

printable = st.text(max_size=MAX_TEXT).map(clip)
count = st.integers(0, 2**63 - 1)
memory = st.builds(DeviceMemory, count, count, st.none() | count)
messages = st.one_of(
    st.builds(
        Hello,
        printable,
        printable,
        st.dictionaries(printable, st.none() | printable, max_size=4),
        st.none() | printable,
        st.none() | printable,
    ),
    st.builds(
        Report,
        phase=st.sampled_from(("train", "test", "predict", "idle")),
        steps=count,
        step_seconds=st.floats(0, 2**63, exclude_max=True),
        step_buckets=st.tuples(*[count] * (len(STEP_BUCKETS) + 1)),
        memory=st.dictionaries(printable, memory, max_size=4),
        epoch=st.none() | count,
        batch=st.none() | count,
        dropped=count,
    ),
    st.builds(End, printable),
)
HELLO = {"v": VERSION, "type": "hello", "name": "resnet", "framework": "tensorflow 2.21.0", "devices": {"GPU:0": None}}


@given(messages)
def test_message_survives(message: Message) -> None:
    """What one half encodes the other half decodes to the same message."""
    assert decode(encode(message)) == message


@given(
    st.builds(
        Advice,
        serial=count,
        kind=st.sampled_from(("pressure", "xid", "neighbour", "gpu_lost")),
        level=st.sampled_from(("none", "some", "critical")),
        uuid=printable,
        text=printable,
        resource=st.none() | st.sampled_from(("memory", "thermal")),
        headroom=st.none() | count,
        seconds_to_oom=st.none() | st.floats(0, 2**63, exclude_max=True),
    )
)
def test_advice_goes_one_way(advice: Advice) -> None:
    """A run reads the advice that the daemon encodes, and the daemon takes none."""
    assert decode_advice(encode(advice)) == advice
    with pytest.raises(ProtocolError, match="unknown_type"):
        decode(encode(advice))


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    """No bytes whatever raise anything but ProtocolError."""
    try:
        decode(data)
    except ProtocolError:
        return


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.sampled_from(["hello", "report", "end"]),
    st.dictionaries(
        st.sampled_from(
            [
                "name",
                "framework",
                "devices",
                "phase",
                "steps",
                "step_seconds",
                "step_buckets",
                "memory",
                "reason",
                "epoch",
            ]
        ),
        json_values,
    ),
)
def test_any_json_is_a_message_or_refused(kind: str, fields: dict[str, Any]) -> None:
    """Wrong values in known fields never raise anything but ProtocolError."""
    try:
        decode(json.dumps({"v": VERSION, "type": kind, **fields}).encode())
    except ProtocolError:
        return


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not_json"),
        (b"hello", "not_json"),
        (b"[" * 5000, "not_json"),
        (b"\xff\xfe", "not_json"),
        (b"[]", "not_json"),
        (b"{}", "unknown_version"),
        (json.dumps({**HELLO, "v": 2}).encode(), "unknown_version"),
        (json.dumps({**HELLO, "type": "advice"}).encode(), "unknown_type"),
        (json.dumps({**HELLO, "type": ["hello"]}).encode(), "unknown_type"),
        (json.dumps({**HELLO, "name": "a\nb"}).encode(), "invalid"),
        (json.dumps({**HELLO, "name": "x" * (MAX_TEXT + 1)}).encode(), "invalid"),
        (json.dumps({**HELLO, "devices": {f"GPU:{n}": None for n in range(65)}}).encode(), "invalid"),
        (json.dumps({"v": 1, "type": "end"}).encode(), "invalid"),
        (b" " * (MAX_MESSAGE_BYTES + 1), "too_long"),
    ],
)
def test_refusal_is_counted_under_its_reason(data: bytes, reason: str) -> None:
    """Each kind of wrong message has its own reason."""
    with pytest.raises(ProtocolError) as caught:
        decode(data)
    assert caught.value.reason == reason


@pytest.mark.parametrize("wrong", [-1, 2**63, 1.0, True, "1", None, float("nan"), float("inf")])
def test_counts_are_whole_and_bounded(wrong: Any) -> None:
    """A count that is negative, huge, fractional or no number is refused."""
    message = {**HELLO, "type": "report", "phase": "train", "steps": wrong, "step_seconds": 0.0}
    message |= {"step_buckets": [0] * 16, "memory": {}}
    with pytest.raises(ProtocolError, match="steps"):
        decode(json.dumps(message).encode())


@pytest.mark.parametrize("wrong", [-0.5, 2**63, 10**400, True, "1", None, float("nan"), float("inf")])
def test_seconds_are_bounded(wrong: Any) -> None:
    """A duration that is negative, no number, or more than a float can hold is refused."""
    message = {**HELLO, "type": "report", "phase": "train", "steps": 1, "step_seconds": wrong}
    message |= {"step_buckets": [0] * 16, "memory": {}}
    with pytest.raises(ProtocolError, match="step_seconds"):
        decode(json.dumps(message).encode())


@pytest.mark.parametrize("wrong", [-1, 2**63, 1.0, True, "1", None, [0]])
def test_buckets_are_counts(wrong: Any) -> None:
    """So is each count of a histogram, one by one."""
    message = {**HELLO, "type": "report", "phase": "train", "steps": 1, "step_seconds": 1.0, "memory": {}}
    for buckets in ([0] * 15, [0] * 17, [wrong] * 16, [*[0] * 15, wrong], wrong):
        with pytest.raises(ProtocolError, match="step_buckets"):
            decode(json.dumps({**message, "step_buckets": buckets}).encode())


def test_what_may_be_absent_may_be_null() -> None:
    """A field that is None unless said; one that has another default, or none, may not."""
    message = {**HELLO, "type": "report", "phase": "train", "steps": 1, "step_seconds": 1.0, "step_buckets": [0] * 16}
    message["memory"] = {"GPU:0": {"current": 1, "peak": 2}}
    said = decode(json.dumps(message).encode())
    none = {each.name: None for each in fields(Report) if each.default is None}
    assert len(none) > 9
    message["memory"] = {"GPU:0": {"current": 1, "peak": 2, "limit": None, "reserved": None}}
    assert decode(json.dumps({**message, **none}).encode()) == said
    for name in ("dropped", "stepping", "errors"):
        with pytest.raises(ProtocolError, match=name):
            decode(json.dumps({**message, name: None}).encode())


def test_messages_share_nothing_that_can_be_changed() -> None:
    """What one does not say is its own: a mistake with one run's must not show with all others'."""
    message = {**HELLO, "type": "report", "phase": "train", "steps": 1, "step_seconds": 1.0, "step_buckets": [0] * 16}
    one, other = (cast("Report", decode(json.dumps({**message, "memory": {}}).encode())) for _ in range(2))
    assert one.errors is not other.errors
    assert one.actions is not other.actions


def test_unknown_fields_are_left_alone() -> None:
    """A newer client may say more than this daemon understands."""
    assert decode(json.dumps({**HELLO, "future": 1}).encode()) == decode(json.dumps(HELLO).encode())


def test_message_too_long_is_refused_by_the_sender() -> None:
    """A message that the daemon would refuse is not even sent."""
    device = DeviceMemory(2**62, 2**62, 2**62)
    devices = {f"{n:0>{MAX_TEXT}}": device for n in range(60)}
    with pytest.raises(ProtocolError, match="too_long"):
        encode(Report("train", 1, 1.0, (0,) * (len(STEP_BUCKETS) + 1), devices))
