"""Errors reported by runs: device, time and log line."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from gpuwarden.analysis.oom.failed_allocation import Oom, resolve_device
from gpuwarden.client.errors.classifier import error_from_exception
from gpuwarden.host.process_key import ProcessKey
from gpuwarden.protocol.messages import STEP_BUCKETS, Allocation, DeviceMemory, Error, Hello, Report
from gpuwarden.runs.registry import RunRegistry
from gpuwarden.runs.run_snapshot import KEPT_ERRORS
from snapshots import GIB, gpu, snapshot

ALICE = ProcessKey(pid=7, uid=1000, start=1)
HELLO = Hello("resnet", "tensorflow 2.21.0", {"GPU:0": "GPU-0"})
BOX = snapshot(gpu(0, free=10 * GIB, held={7: 30 * GIB}), gpu(1))
REPORT = Report("train", 5, 1.5, (0,) * (len(STEP_BUCKETS) + 1), {"GPU:0": DeviceMemory(20 * GIB, 28 * GIB, 38 * GIB)})
ON = "/job:localhost/replica:0/task:0/device:"
OOM = Error(
    "device_oom",
    "ResourceExhaustedError",
    "OOM when allocating",
    "train",
    5,
    (Allocation(20 * GIB, "20000,4000", "float", "wide/Relu", f"{ON}GPU:0", "GPU_0_bfc"),),
    {"GPU:0": DeviceMemory(21 * GIB, 28 * GIB, 38 * GIB)},
)
OTHER = Error("other", "ValueError", "loss is nan", "train", 5)


class Clock:
    """Unix time that a test sets."""

    time = 1000.0


@pytest.fixture
def runs() -> RunRegistry:
    """Make a registry with one run that has been polled, with a headroom of 18 GiB."""
    registry = RunRegistry(limit=10, expiry=60.0, overhead=GIB, wall=lambda: Clock.time)
    registry.receive(ALICE, HELLO, 0.0)
    registry.receive(ALICE, REPORT, 1.0)
    (run,) = registry.add_poll(BOX, 2.0)
    assert run.headroom == {"GPU-0": 18 * GIB}  # up to the allocator's limit
    return registry


def test_headroom_before_the_error(runs: RunRegistry) -> None:
    """An out-of-memory error has the headroom of the poll before it, minus the run's growth since."""
    runs.receive(ALICE, OOM, 2.5)
    runs.receive(ALICE, replace(REPORT, memory={"GPU:0": DeviceMemory(0, 28 * GIB)}, errors={"device_oom": 1}), 2.6)
    for _ in range(2):
        (run,) = runs.add_poll(BOX, 3.0)
        assert run.ooms == {"GPU-0": Oom(20 * GIB, 17 * GIB, 10 * GIB)}
        assert run.errors[0].headroom == {"GPU-0": 17 * GIB}


def test_before_the_first_poll() -> None:
    """An out-of-memory error before a poll has resolved the run's devices gets its GPU at the next poll."""
    runs = RunRegistry(limit=10, expiry=60.0, overhead=GIB)
    runs.receive(ALICE, HELLO, 0.0)
    runs.receive(ALICE, OOM, 0.1)
    (run,) = runs.add_poll(BOX, 1.0)
    assert run.ooms == {"GPU-0": Oom(20 * GIB, None)}


def test_process_is_gone(runs: RunRegistry) -> None:
    """The last out-of-memory error stays while the run is listed, even when its device cannot be resolved."""
    runs.receive(ALICE, OOM, 2.5)
    runs.exited(ALICE, 2.6)
    (run,) = runs.add_poll(snapshot(), 3.0)
    assert (run.up, run.ooms) == (False, {"GPU-0": Oom(20 * GIB, 17 * GIB, 10 * GIB)})


def test_last_errors(runs: RunRegistry) -> None:
    """Each kind has the time of its last error, reported on its own or counted in a report."""
    Clock.time = 1010.0
    runs.receive(ALICE, OTHER, 2.0)
    Clock.time = 1020.0
    runs.receive(ALICE, OOM, 3.0)
    Clock.time = 1030.0
    runs.receive(ALICE, replace(REPORT, errors={"other": 30}), 4.0)
    Clock.time = 1040.0
    runs.receive(ALICE, replace(REPORT, errors={"other": 30}), 5.0)
    (run,) = runs.add_poll(BOX, 6.0)
    assert run.last_errors == {"other": 1030.0, "device_oom": 1020.0}


def test_errors_of_unknown_age() -> None:
    """Errors counted in a first report happened before the daemon started."""
    runs = RunRegistry(limit=10, expiry=60.0, overhead=GIB)
    runs.receive(ALICE, HELLO, 0.0)
    runs.receive(ALICE, replace(REPORT, errors={"other": 3}), 1.0)
    (run,) = runs.add_poll(BOX, 2.0)
    assert run.last_errors == {}


def test_others_are_no_oom(runs: RunRegistry) -> None:
    """Host memory errors are not the GPU's; later errors do not hide an out-of-memory error."""
    runs.receive(ALICE, replace(OOM, kind="host_oom"), 2.5)
    assert runs.add_poll(BOX, 3.0)[0].ooms == {}
    runs.receive(ALICE, OOM, 3.5)
    for _ in range(2 * KEPT_ERRORS):
        runs.receive(ALICE, OTHER, 4.0)
    (run,) = runs.add_poll(BOX, 5.0)
    assert run.ooms == {"GPU-0": Oom(20 * GIB, 17 * GIB, 10 * GIB)}
    assert len(run.errors) == KEPT_ERRORS


def test_several_devices() -> None:
    """Each GPU has its own figures; of two failures on one GPU the larger counts."""
    runs = RunRegistry(limit=10, expiry=60.0, overhead=GIB)
    runs.receive(ALICE, replace(HELLO, devices={"GPU:0": "GPU-0", "GPU:1": "GPU-1"}), 0.0)
    runs.add_poll(BOX, 1.0)
    asked = [Allocation(1, device="GPU:0"), Allocation(3, device="GPU:1"), Allocation(2, device="GPU:1"), Allocation(9)]
    runs.receive(ALICE, replace(OOM, allocations=tuple(asked)), 2.0)
    assert runs.add_poll(BOX, 3.0)[0].ooms == {"GPU-0": Oom(1, None), "GPU-1": Oom(3, None)}


def test_device() -> None:
    """A device in a message is resolved among those the run uses; an ambiguous one is not."""
    cases: list[tuple[list[str], str | None, str | None]] = [
        (["GPU:0"], f"{ON}GPU:0", "GPU:0"),
        (["GPU:0"], None, "GPU:0"),
        (["GPU:3"], f"{ON}GPU:0", "GPU:3"),
        (["GPU:0"], f"{ON}GPU:1", "GPU:0"),  # cut in two
        (["GPU:2", "GPU:3"], "GPU:1", "GPU:3"),
        (["GPU:1", "GPU:2"], "GPU:1", "GPU:2"),
        (["GPU:0", "GPU:1"], None, None),
        (["GPU:0", "GPU:1"], "GPU:2", None),
        (["GPU:0", "GPU:1"], "something", None),
        (["GPU:0"], f"{ON}CPU:0", None),
        (["GPU:0", "CPU:0"], f"{ON}CPU:0", "CPU:0"),
        ([], f"{ON}GPU:0", None),
        ([], None, None),
    ]
    found = [
        (used, named, resolve_device(replace(HELLO, devices=dict.fromkeys(used)), named)) for used, named, _ in cases
    ]
    assert found == cases


def test_line_of_an_oom(runs: RunRegistry, caplog: pytest.LogCaptureFixture) -> None:
    """The log line of an out-of-memory error has its diagnosis."""
    runs.receive(ALICE, OOM, 2.5)
    (line,) = caplog.messages
    assert line == (
        "run error run=7-1 name=resnet kind=device_oom phase=train steps=5 "
        'error="ResourceExhaustedError: OOM when allocating" cause=batch_too_large '
        "evidence=\"20.0 GiB for shape [20000,4000] is a layer's output, which grows with the batch, "
        'and did not fit: 21.0 GiB of 38.0 GiB were in use between steps." next_step="Halve the batch size; gradient '
        'accumulation keeps the effective batch size."'
    )


def test_line_of_another_error(runs: RunRegistry, caplog: pytest.LogCaptureFixture) -> None:
    """The log line of another error has its type; a long message of no known kind is cut in the middle."""
    runs.receive(ALICE, replace(OTHER, text="the front " + "x" * 1980 + " the end"), 2.5)
    (line,) = caplog.messages
    assert line.startswith(
        'run error run=7-1 name=resnet kind=other phase=train steps=5 error="ValueError: the front xxx'
    )
    assert line.endswith('xxx the end"')
    assert len(line) < 450


TORCH = (
    "CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress' in "
    "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.\n"
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
)  # PyTorch 2.11
TENSORFLOW = (
    "Graph execution error:\n\nDetected at node wide/MatMul defined at (most recent call last):\n"
    + '  File "train.py", line 7, in <module>\n' * 100
    + "\nAn illegal memory access was encountered\n\t [[{{node wide/MatMul}}]] [Op:__inference_one_step_12]"
)


@pytest.mark.parametrize(
    ("text", "front"), [(TORCH, "CUDA error: an illegal memory"), (TENSORFLOW, "... ")], ids=["torch", "tensorflow"]
)
def test_line_shows_the_kind(runs: RunRegistry, caplog: pytest.LogCaptureFixture, text: str, front: str) -> None:
    """The log line of a long message shows the text that identifies its kind, at any position."""
    runs.receive(ALICE, error_from_exception(RuntimeError(text), "train", 5), 2.5)
    (line,) = caplog.messages
    head = 'run error run=7-1 name=resnet kind=illegal_address phase=train steps=5 error="RuntimeError: '
    assert line.startswith(head + front)
    assert "n illegal memory access was encountered" in line
    assert len(line) <= len(head) + 300 + 20  # marks of the cut, and escapes


def test_line_of_a_client_with_a_wrong_position(runs: RunRegistry, caplog: pytest.LogCaptureFixture) -> None:
    """A client's wrong position of the kind still gives a line with part of the message."""
    for minute, at in enumerate((0, 1999, 2000, 2**62), start=1):
        runs.receive(ALICE, replace(OTHER, text="x" * 2000, at=at), minute * 60.0)
    assert [line.count("x") for line in caplog.messages] == [300] * 4


def test_lines_are_limited(runs: RunRegistry, caplog: pytest.LogCaptureFixture) -> None:
    """Repeated errors give one line a minute and kind."""
    for tenth in range(1500):
        runs.receive(ALICE, OTHER, tenth / 10)
    runs.receive(ALICE, OOM, 150.0)
    assert [re.findall(r"kind=(\w+)", line) for line in caplog.messages] == [["other"]] * 3 + [["device_oom"]]


def test_batch_advice_after_another_cause(runs: RunRegistry) -> None:
    """After an out-of-memory that no batch size avoids, none is advised until a step succeeds."""
    trained = replace(REPORT, batch_size=64, largest_batch_size=64)
    runs.receive(ALICE, replace(trained, steps=4), 2.1)
    runs.receive(ALICE, replace(trained, memory={"GPU:0": DeviceMemory(20 * GIB, 30 * GIB, 38 * GIB)}), 2.2)
    (run,) = runs.add_poll(BOX, 20.0)
    assert run.batch_size_advice is not None
    runs.receive(ALICE, replace(OOM, stage="weights", batch_size=64), 20.5)
    (run,) = runs.add_poll(BOX, 21.0)
    assert run.diagnosis is not None
    assert (run.diagnosis.cause, run.batch_size_advice) == ("too_big", None)
    runs.receive(ALICE, replace(trained, steps=6, errors={"device_oom": 1}), 22.0)
    (run,) = runs.add_poll(BOX, 40.0)
    assert run.batch_size_advice is not None
