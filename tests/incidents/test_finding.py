"""Root and followers of facts, and the text about them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuwarden.incidents.causes import Fact, explains
from gpuwarden.incidents.finding import find

GPU = frozenset({"GPU-3"})
FALLEN = Fact(at=100.0, kind="GpuXidCritical", code=79, gpu="GPU 3", gpus=GPU, opened=True)
LOST = Fact(at=90.0, kind="GpuDown", what="GPU is lost", gpu="GPU 3", gpus=GPU, opened=True)
FAILED = Fact(at=101.0, kind="run_ended", what="failed", detail="exit status 1", gpus=GPU, run="resnet", run_id="1-1")
NCCL = Fact(
    at=101.0, kind="error", what="an NCCL error", is_collective=True, run="llama", run_id="2-1", job="1:j", rank=1
)


def rank(number: int, at: float) -> Fact:
    """Return the NCCL error of a rank."""
    return replace(NCCL, at=at, rank=number, run_id=f"{number}-1")


def text(*facts: Fact) -> str:
    """Return the finding's text with times in seconds."""
    return find(facts).text


def test_example_of_the_docs() -> None:
    """The XID is the root though the lost GPU was noticed earlier; the ranks' errors are one clause."""
    error = replace(FAILED, at=100.5, kind="error", what="CUDA_ERROR_LAUNCH_FAILED", detail="", job="1:j", rank=0)
    ended = replace(FAILED, job="1:j", rank=0)
    assert text(LOST, FALLEN, error, ended, *(rank(number, 102.0) for number in (2, 3, 4))) == (
        "GPU 3 fell off the bus (XID 79); run resnet (rank 0) then failed with CUDA_ERROR_LAUNCH_FAILED; "
        "3 ranks of job j then had an NCCL error."
    )


def test_signs_before_and_others_are_named() -> None:
    """Pressure before an out-of-memory announced it; what the root does not explain is not hidden."""
    pressure = Fact(at=50.0, kind="GpuMemoryPressureCritical", gpu="GPU 3", gpus=GPU, opened=True)
    oom = Fact(at=80.0, kind="RunOutOfMemory", what="device", detail="It grew.", gpus=GPU, run="a", run_id="9-1")
    stray = Fact(at=70.0, kind="RunStalled", what="no step for 61 s", run="b", run_id="8-1", opened=True)
    finding = find([pressure, replace(oom, opened=True), stray])
    assert finding.text == (
        "Run a ran out of device memory. It grew. Before: GPU 3 was almost out of memory 30s earlier. "
        "In that time also: run b stalled 10s earlier: no step for 61 s."
    )
    assert [part.kind for part in finding.before] == ["GpuMemoryPressureCritical"]
    assert [part.kind for part in finding.others] == ["RunStalled"]


def test_flood_of_a_program_does_not_hide_the_hardware() -> None:
    """Among what the root does not explain, a GPU that failed is named before what programs did earlier."""
    oom = Fact(at=10.0, kind="RunOutOfMemory", what="device", run="a", run_id="9-1", opened=True)
    flood = [replace(oom, at=11.0 + number, run=f"b{number}", run_id=f"{number}-2") for number in range(20)]
    assert "In that time also: GPU 3 fell off the bus 1m30s later (XID 79); run b" in text(oom, *flood, FALLEN)


@pytest.mark.parametrize(
    ("cause", "effect", "follows"),
    [
        (FALLEN, LOST, True),  # noticed earlier by a call that failed
        (LOST, FALLEN, False),
        (FALLEN, FAILED, True),
        (FALLEN, replace(FAILED, gpus=frozenset({"GPU-1"})), False),
        (FALLEN, replace(FAILED, at=1000.0), False),
        (FALLEN, replace(FAILED, at=80.0), False),  # it had failed before
        (replace(FALLEN, code=45, kind="GpuXidInfo"), FAILED, False),  # the end of a program causes it
        (FAILED, replace(FALLEN, code=45, kind="GpuXidInfo"), True),
        (replace(FAILED, job="1:j"), NCCL, True),
        (NCCL, replace(FAILED, job="1:j", what="crashed"), False),  # at the same time: the crash is the cause
        (NCCL, replace(FAILED, job="1:j", what="killed", at=110.0), True),
        (replace(FAILED, job="2:j"), NCCL, False),  # a job of another user with the same name
    ],
)
def test_causes(cause: Fact, effect: Fact, follows: bool) -> None:  # noqa: FBT001 - the expectation
    """An effect follows by kind, subject and time."""
    assert explains(cause, effect) is follows


def test_hundreds_of_facts_take_little_time_and_text() -> None:
    """A job of 120 ranks is three clauses."""
    ranks = [rank(number, 101.0 + number / 100) for number in range(120)]
    found = text(FALLEN, *(replace(each, gpus=GPU) for each in ranks))
    assert found == "GPU 3 fell off the bus (XID 79); 120 ranks of job j then had an NCCL error."
