"""What an exception is told to be: by rules that no single message shows. Real messages: test_error_messages.py."""

from __future__ import annotations

import builtins
import sys
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
    """Named as TensorFlow's."""


def told(exception: BaseException, **settings: Any) -> Error:
    """Describe an exception of training."""
    error = error_from_exception(exception, "train", 7, **settings)
    assert decode(encode(error)) == error
    return error


def oom(device: str, shape: str = "20000,4000", rest: str = "") -> str:
    """Write an out-of-memory as TensorFlow does."""
    return f"OOM when allocating tensor with shape[{shape}] and type float on {ON}{device} by allocator GPU_0_bfc{rest}"


def test_allocation() -> None:
    """An allocation that failed is told with all the message says, and with its exact bytes."""
    error = told(ResourceExhaustedError(f"Graph execution error:\n{oom('GPU:0')}\n\t [[{{{{node wide/Relu}}}}]]\nHint"))
    assert (error.kind, error.phase, error.steps) == ("device_oom", "train", 7)
    assert error.allocations == (
        Allocation(320_000_000, "20000,4000", "float", "wide/Relu", f"{ON}GPU:0", "GPU_0_bfc"),
    )


def test_eager_operation() -> None:
    """An eager error names its operation at the end; the name of a traced function is none."""
    assert told(ResourceExhaustedError(oom("GPU:0", rest=" [Op:Fill] name: "))).allocations[0].op == "Fill"
    traced = told(ResourceExhaustedError(oom("GPU:0", rest=" [Op:__inference_one_step_12]")))
    assert traced.allocations[0].op is None


def test_several_devices() -> None:
    """Each replica that failed is told once, with its own operation."""
    roots = [f"({n}) RESOURCE_EXHAUSTED:  {oom(f'GPU:{n % 2}')}\n\t [[{{{{node r{n % 2}}}}}]]" for n in range(4)]
    error = told(ResourceExhaustedError("4 root error(s) found.\n" + "\n".join(roots)))
    assert [(each.device, each.op) for each in error.allocations] == [(f"{ON}GPU:0", "r0"), (f"{ON}GPU:1", "r1")]


def test_bounds() -> None:
    """Of many allocations as many are told as a message takes."""
    error = told(ResourceExhaustedError(" ".join(oom(f"GPU:{n}") for n in range(100))))
    assert len(error.allocations) == MAX_ALLOCATIONS


def test_cpu() -> None:
    """A CPU's memory is the host's, unless the CPU stands for a GPU, or a GPU failed beside it."""
    assert told(ResourceExhaustedError(oom("CPU:0"))).kind == "host_oom"
    assert told(ResourceExhaustedError(oom("CPU:0")), memory=MEMORY).kind == "device_oom"
    assert told(ResourceExhaustedError(f"{oom('CPU:0')} {oom('GPU:0')}")).kind == "device_oom"


def test_input_pipeline() -> None:
    """An input pipeline runs on the host, even where the CPU stands for a GPU."""
    where = (
        "Error in user-defined function passed to ParallelMapDatasetV2:21 transformation with iterator: Iterator::Root"
    )
    assert told(ResourceExhaustedError(f"{where}: {oom('CPU:0')}"), memory=MEMORY).kind == "host_oom"


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
    """Bytes are read in each framework's way, the exact figure where there is one."""
    error = told(RuntimeError(text))
    assert error.kind == "device_oom"
    assert [each.requested for each in error.allocations] == [requested]


def test_operation_alone() -> None:
    """Of an out-of-memory that says little, the operation is told."""
    error = told(ResourceExhaustedError("failed to allocate memory [Op:AddV2]"))
    assert (error.kind, error.allocations) == ("device_oom", (Allocation(op="AddV2"),))


def test_unknown_type() -> None:
    """Of a type whose width is not known the bytes are not told."""
    text = oom("GPU:0").replace("float", "variant")
    assert told(ResourceExhaustedError(text)).allocations[0].requested is None


def test_scalar() -> None:
    """A scalar has one element."""
    allocation = told(ResourceExhaustedError(oom("GPU:0", shape=""))).allocations[0]
    assert (allocation.requested, allocation.shape) == (4, "")


def test_number_too_large() -> None:
    """Whatever figure a message claims, it becomes a message of the protocol or none."""
    for shape in (",".join(["9" * 18] * 3), "9" * 5000):
        assert told(ResourceExhaustedError(oom("GPU:0", shape=shape))).allocations[0].requested is None
    error = told(RuntimeError(f"Out of memory while trying to allocate {'9' * 400}.00GiB"))
    assert error.allocations[0].requested is None


def test_cause() -> None:
    """A cause that says what went wrong is told instead of what followed from it."""
    error = RuntimeError("training failed")
    error.__cause__ = ResourceExhaustedError(oom("GPU:0"))
    described = told(error)
    assert (described.kind, described.exception) == ("device_oom", "ResourceExhaustedError")


def test_context() -> None:
    """So is what was being handled, but not where it was put aside on purpose."""
    error = KeyError("a follower")
    error.__context__ = MemoryError()
    assert told(error).kind == "host_oom"
    error.__suppress_context__ = True
    assert told(error).kind == "other"


def test_own_kind_first() -> None:
    """What the exception says itself holds, whatever came before it."""
    error = ResourceExhaustedError(oom("GPU:0"))
    error.__cause__ = ValueError("Incompatible shapes: [2] vs. [3]")
    assert told(error).kind == "device_oom"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no groups")
def test_group() -> None:
    """Of a group, as asyncio's tasks raise it, that one is told which says what went wrong, else the first."""
    group = getattr(builtins, "ExceptionGroup")  # noqa: B009 - mypy checks for Python 3.10
    oom_within = group("a task", [KeyError("a follower"), ResourceExhaustedError(oom("GPU:0"))])
    error = told(group("tasks", [ValueError("another"), oom_within]))
    assert (error.kind, error.exception) == ("device_oom", "ResourceExhaustedError")
    first = told(group("tasks", [group("a task", [KeyError("first")]), ValueError("second")]))
    assert (first.kind, first.exception, first.text) == ("other", "KeyError", "'first'")


def test_endless_chain() -> None:
    """A chain that bites its tail ends."""
    first, second = KeyError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    assert told(first).exception == "KeyError"


def test_type_alone() -> None:
    """Disks and messages are exhausted too: TensorFlow's type alone is no out-of-memory; Python's is."""
    assert told(ResourceExhaustedError("/data/checkpoint; No space left on device")).kind == "other"
    assert told(MemoryError()).kind == "host_oom"


def test_words_alone() -> None:
    """Whose memory it was must be said: a program's own words may be of anything that is short of it."""
    assert told(RuntimeError("the tokenizer's worker ran out of memory")).kind == "other"
    assert told(RuntimeError("Ran out of memory in memory space hbm. Used 2.00G of 1.00G hbm.")).kind == "device_oom"
    assert told(RuntimeError("Allocator (GPU_0_bfc) ran out of memory trying to allocate 1GiB")).kind == "device_oom"


def test_told_by_itself() -> None:
    """What was only being handled as an error was raised is not what that error is."""
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
    """A type is known by the types it is derived from."""

    class MyMemoryError(MemoryError):
        pass

    assert told(MyMemoryError()).kind == "host_oom"


def test_text_of_no_known_kind() -> None:
    """Of a long message that nobody knows front and end are kept, on one line and without a terminal's colors."""
    hint = "Hint: If you want to see a list of allocated tensors when OOM happens, add this."
    error = told(ResourceExhaustedError("the front" + "x" * 9000 + f"\n\x1b[1mthe end\x1b[0m\n{hint}\n"))
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
    """Wherever the kind shows, that place is kept and told, with the front and the end of the message."""
    error = told(RuntimeError(f"front {filler * before} {ILLEGAL} {filler * after} end"))
    assert error.kind == "illegal_address"
    assert error.at is not None
    assert error.text[error.at :].startswith("illegal memory access was encountered")
    assert error.text.startswith("front ")
    assert error.text.endswith(" end")
    assert error.text.count("illegal") == 1
    if filler == "x":
        assert len(error.text) >= min(MAX_ERROR_CHARACTERS - 10, before + after)


def test_huge_text() -> None:
    """Of a message of megabytes both ends are searched."""
    assert told(RuntimeError("y" * 5_000_000 + oom("GPU:0"))).kind == "device_oom"
    assert told(RuntimeError(oom("GPU:0") + "y" * 5_000_000)).kind == "device_oom"


@pytest.mark.parametrize("character", ['"', "\\", "é", "\U0001f40d", "\x00", "\ud800"])
def test_message_fits(character: str) -> None:
    """Text that JSON writes at length, and many devices, make a message that the daemon accepts."""
    memory = {f"GPU:{n}": DeviceMemory(2**62, 2**62, 2**62, 2**62) for n in range(MAX_DEVICES)}
    ooms = " ".join(oom(f"GPU:{n}", rest=f" [[{{{{node {character * 200}}}}}]]") for n in range(9))
    error = told(ResourceExhaustedError(character * 5000 + ooms), memory=memory)
    assert error.kind == "device_oom"
    assert error.allocations
    assert error.text


def test_broken_exception() -> None:
    """An exception that cannot be written is told by its type."""

    class Broken(Exception):  # noqa: N818 - its name is what is told
        def __str__(self) -> str:
            raise ValueError("no text")

    assert (told(Broken()).exception, told(Broken()).text) == ("Broken", "")
