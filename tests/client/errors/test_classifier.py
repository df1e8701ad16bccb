"""Classification of exceptions: rules that no single message shows. Real messages are in test_error_messages.py."""

from __future__ import annotations

import builtins
import sys
import time
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpuwarden.client.errors.classifier import error_from_exception, has_known_kind
from gpuwarden.protocol.codec import decode, encode
from gpuwarden.protocol.messages import (
    MAX_ALLOCATIONS,
    MAX_ERROR_CHARACTERS,
    Allocation,
    DeviceMemory,
    Error,
)
from gpuwarden.protocol.validators import MAX_DEVICES

ON = "/job:localhost/replica:0/task:0/device:"
MEMORY = {"CPU:0": DeviceMemory(1, 2)}


class ResourceExhaustedError(Exception):
    """Exception with the name of TensorFlow's."""


def classify(exception: BaseException, **settings: Any) -> Error:
    """Describe an exception of training."""
    error = error_from_exception(exception, "train", 7, **settings)
    assert decode(encode(error)) == error
    return error


def oom(device: str, shape: str = "20000,4000", rest: str = "") -> str:
    """Write an out-of-memory as TensorFlow does."""
    return f"OOM when allocating tensor with shape[{shape}] and type float on {ON}{device} by allocator GPU_0_bfc{rest}"


def test_allocation() -> None:
    """A failed allocation is reported with everything in the message, and with its exact bytes."""
    error = classify(
        ResourceExhaustedError(f"Graph execution error:\n{oom('GPU:0')}\n\t [[{{{{node wide/Relu}}}}]]\nHint")
    )
    assert (error.kind, error.phase, error.steps) == ("device_oom", "train", 7)
    assert error.allocations == (
        Allocation(320_000_000, "20000,4000", "float", "wide/Relu", f"{ON}GPU:0", "GPU_0_bfc"),
    )


def test_eager_operation() -> None:
    """An eager error names its operation at the end; the name of a traced function is none."""
    assert classify(ResourceExhaustedError(oom("GPU:0", rest=" [Op:Fill] name: "))).allocations[0].op == "Fill"
    traced = classify(ResourceExhaustedError(oom("GPU:0", rest=" [Op:__inference_one_step_12]")))
    assert traced.allocations[0].op is None


def test_several_devices() -> None:
    """Each replica that failed is reported once, with its own operation."""
    roots = [f"({n}) RESOURCE_EXHAUSTED:  {oom(f'GPU:{n % 2}')}\n\t [[{{{{node r{n % 2}}}}}]]" for n in range(4)]
    error = classify(ResourceExhaustedError("4 root error(s) found.\n" + "\n".join(roots)))
    assert [(each.device, each.op) for each in error.allocations] == [(f"{ON}GPU:0", "r0"), (f"{ON}GPU:1", "r1")]


def test_bounds() -> None:
    """The number of reported allocations is limited to what a message can hold."""
    error = classify(ResourceExhaustedError(" ".join(oom(f"GPU:{n}") for n in range(100))))
    assert len(error.allocations) == MAX_ALLOCATIONS


def test_cpu() -> None:
    """A CPU's memory is the host's, unless the CPU stands for a GPU, or a GPU failed too."""
    assert classify(ResourceExhaustedError(oom("CPU:0"))).kind == "host_oom"
    assert classify(ResourceExhaustedError(oom("CPU:0")), memory=MEMORY).kind == "device_oom"
    assert classify(ResourceExhaustedError(f"{oom('CPU:0')} {oom('GPU:0')}")).kind == "device_oom"


def test_input_pipeline() -> None:
    """An input pipeline runs on the host, even if the CPU stands for a GPU."""
    where = (
        "Error in user-defined function passed to ParallelMapDatasetV2:21 transformation with iterator: Iterator::Root"
    )
    assert classify(ResourceExhaustedError(f"{where}: {oom('CPU:0')}"), memory=MEMORY).kind == "host_oom"


@pytest.mark.parametrize(
    ("text", "requested"),
    [
        ("Out of memory while trying to allocate 1.85GiB.", 1986422374),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4770354232 bytes.", 4770354232),
        ("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.93 GiB total capacity)", 20 << 20),
        ("Failed to allocate request for 1.00GiB (1073741825B) on device ordinal 0", 1073741825),
        ("failed to allocate 7.81G (8387559424 bytes) from device: CUDA_ERROR_OUT_OF_MEMORY", 8387559424),
        ("cuMemAllocAsync failed to allocate 1048576 bytes: CUDA_ERROR_OUT_OF_MEMORY", 1 << 20),
        ("Out of memory allocating 1,024,000 bytes (allocated so far: 5 bytes). CUDA_ERROR_OUT_OF_MEMORY", 1024000),
    ],
)
def test_requested(text: str, requested: int) -> None:
    """Bytes are parsed in each framework's format; the exact figure comes first."""
    error = classify(RuntimeError(text))
    assert error.kind == "device_oom"
    assert [each.requested for each in error.allocations] == [requested]


def test_operation_alone() -> None:
    """The operation of an out-of-memory without other facts is reported."""
    error = classify(ResourceExhaustedError("failed to allocate memory [Op:AddV2]"))
    assert (error.kind, error.allocations) == ("device_oom", (Allocation(op="AddV2"),))


def test_unknown_type() -> None:
    """The bytes of a type with an unknown width are unknown."""
    text = oom("GPU:0").replace("float", "variant")
    assert classify(ResourceExhaustedError(text)).allocations[0].requested is None


def test_scalar() -> None:
    """A scalar has one element."""
    allocation = classify(ResourceExhaustedError(oom("GPU:0", shape=""))).allocations[0]
    assert (allocation.requested, allocation.shape) == (4, "")


def test_number_too_large() -> None:
    """A number of any size in a message gives a valid protocol message, or is dropped."""
    for shape in (",".join(["9" * 18] * 3), "9" * 5000):
        assert classify(ResourceExhaustedError(oom("GPU:0", shape=shape))).allocations[0].requested is None
    error = classify(RuntimeError(f"Out of memory while trying to allocate {'9' * 400}.00GiB"))
    assert error.allocations[0].requested is None


def test_cause() -> None:
    """A cause of a known kind is reported in place of its consequence."""
    error = RuntimeError("training failed")
    error.__cause__ = ResourceExhaustedError(oom("GPU:0"))
    described = classify(error)
    assert (described.kind, described.exception) == ("device_oom", "ResourceExhaustedError")


def test_context() -> None:
    """An error that was being handled is reported too, unless it was suppressed."""
    error = KeyError("a follower")
    error.__context__ = MemoryError()
    assert classify(error).kind == "host_oom"
    error.__suppress_context__ = True
    assert classify(error).kind == "other"


def test_own_kind_first() -> None:
    """The kind of the exception itself comes first, whatever was raised before it."""
    error = ResourceExhaustedError(oom("GPU:0"))
    error.__cause__ = ValueError("Incompatible shapes: [2] vs. [3]")
    assert classify(error).kind == "device_oom"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no groups")
def test_group() -> None:
    """The member of a known kind of a group, as asyncio's tasks raise it, is reported, else the first member."""
    group = getattr(builtins, "ExceptionGroup")  # noqa: B009 - mypy checks for Python 3.10
    oom_within = group("a task", [KeyError("a follower"), ResourceExhaustedError(oom("GPU:0"))])
    error = classify(group("tasks", [ValueError("another"), oom_within]))
    assert (error.kind, error.exception) == ("device_oom", "ResourceExhaustedError")
    first = classify(group("tasks", [group("a task", [KeyError("first")]), ValueError("second")]))
    assert (first.kind, first.exception, first.text) == ("other", "KeyError", "'first'")


def test_endless_chain() -> None:
    """A chain that bites its tail ends."""
    first, second = KeyError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    assert classify(first).exception == "KeyError"


def test_type_alone() -> None:
    """Disks and messages are exhausted too: TensorFlow's type alone is no out-of-memory; Python's is."""
    assert classify(ResourceExhaustedError("/data/checkpoint; No space left on device")).kind == "other"
    assert classify(MemoryError()).kind == "host_oom"


def test_words_alone() -> None:
    """The owner of the memory must be in the text: a program may call anything "out of memory"."""
    assert classify(RuntimeError("the tokenizer's worker ran out of memory")).kind == "other"
    assert (
        classify(RuntimeError("Ran out of memory in memory space hbm. Used 2.00G of 1.00G hbm.")).kind == "device_oom"
    )
    assert (
        classify(RuntimeError("Allocator (GPU_0_bfc) ran out of memory trying to allocate 1GiB")).kind == "device_oom"
    )


def test_told_by_itself() -> None:
    """An error that was being handled when another one was raised does not classify the other."""
    oom, follower = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), KeyError("cleaning up")
    assert has_known_kind(oom)
    follower.__context__ = oom
    assert not has_known_kind(follower)
    follower.__cause__ = oom
    assert has_known_kind(follower)
    oom.__cause__ = follower
    assert has_known_kind(oom)
    assert not has_known_kind(KeyError("alone"))


def test_subclass() -> None:
    """A type is classified by its base classes."""

    class MyMemoryError(MemoryError):
        pass

    assert classify(MyMemoryError()).kind == "host_oom"


def test_text_of_no_known_kind() -> None:
    """A long message of an unknown kind keeps its front and end, on one line and without terminal colors."""
    hint = "Hint: If you want to see a list of allocated tensors when OOM happens, add this."
    error = classify(ResourceExhaustedError("the front" + "x" * 9000 + f"\n\x1b[1mthe end\x1b[0m\n{hint}\n"))
    assert (error.kind, error.at) == ("other", None)
    assert error.text.startswith("the frontxxx")
    assert error.text.endswith("xxx the end")
    assert " ... " in error.text
    assert MAX_ERROR_CHARACTERS - 5 <= len(error.text) <= MAX_ERROR_CHARACTERS


ILLEGAL = "an illegal memory access was encountered"


@given(before=st.integers(0, 30_000), after=st.integers(0, 30_000), filler=st.sampled_from(["x", "\N{SNAKE}"]))
@example(before=340, after=1980, filler="x")
@example(before=0, after=0, filler="\N{SNAKE}")
def test_text_shows_the_kind(before: int, after: int, filler: str) -> None:
    """The part of a message that shows the kind is kept, with its position, and the front and the end."""
    error = classify(RuntimeError(f"front {filler * before} {ILLEGAL} {filler * after} end"))
    assert error.kind == "illegal_address"
    assert error.at is not None
    assert error.text[error.at :].startswith("illegal memory access was encountered")
    assert error.text.startswith("front ")
    assert error.text.endswith(" end")
    assert error.text.count("illegal") == 1
    if filler == "x":
        assert len(error.text) >= min(MAX_ERROR_CHARACTERS - 10, before + after)


def test_huge_text() -> None:
    """Both ends of a message of megabytes are searched."""
    assert classify(RuntimeError("y" * 5_000_000 + oom("GPU:0"))).kind == "device_oom"
    assert classify(RuntimeError(oom("GPU:0") + "y" * 5_000_000)).kind == "device_oom"


@pytest.mark.parametrize("character", ['"', "\\", "é", "\U0001f40d", "\x00", "\ud800"])
def test_message_fits(character: str) -> None:
    """Text that JSON writes at length, and many devices, make a message that the daemon accepts."""
    memory = {f"GPU:{n}": DeviceMemory(2**62, 2**62, 2**62, 2**62) for n in range(MAX_DEVICES)}
    ooms = " ".join(oom(f"GPU:{n}", rest=f" [[{{{{node {character * 200}}}}}]]") for n in range(9))
    error = classify(ResourceExhaustedError(character * 5000 + ooms), memory=memory)
    assert error.kind == "device_oom"
    assert error.allocations
    assert error.text


def test_broken_exception() -> None:
    """An exception that cannot be converted to text is reported by its type."""

    class Broken(Exception):  # noqa: N818 - its name is what is reported
        def __str__(self) -> str:
            raise ValueError("no text")

    assert (classify(Broken()).exception, classify(Broken()).text) == ("Broken", "")


@pytest.mark.parametrize("filler", [" ", "\n", "x ", "[[", "OOM when allocating "])
def test_long_text_takes_no_time(filler: str) -> None:
    """A text of the most characters that are searched takes a fraction of a second, whatever it repeats."""
    text = "OOM when allocating" + filler * (60_000 // len(filler))
    began = time.process_time()
    error_from_exception(RuntimeError(text), "train", 0)
    assert time.process_time() - began < 2
