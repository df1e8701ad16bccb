"""Diagnoses of PyTorch and JAX, which report no shape: by the traceback and memory in use."""

from __future__ import annotations

from typing import Any

import pytest
from failure_contexts import MIB, change_context, make_failure

from gpuwarden.analysis.oom.context import FailureContext
from gpuwarden.analysis.oom.diagnosis_rules import diagnose
from gpuwarden.protocol.messages import Allocation, DeviceMemory


def torch_failure(mib: float, *, in_use: float, reserved: float, before: float, **changes: Any) -> FailureContext:
    """Make an out-of-memory of PyTorch on 1 GiB, which has no shape; it keeps its memory in use."""
    failure = make_failure(
        None, mib, after=(in_use, in_use), before=(before, before), room=1024, text="CUDA out of memory."
    )
    after = DeviceMemory(round(in_use * MIB), round(in_use * MIB), None, round(reserved * MIB))
    allocation = Allocation(round(mib * MIB), device="GPU:0")
    return change_context(failure, framework="torch 2.11.0", after=after, allocation=allocation, **changes)


def jax_failure(
    mib: float, *, in_use: tuple[float, float], before: tuple[float, float], **changes: Any
) -> FailureContext:
    """Make an out-of-memory of JAX on 1 GiB, which requests the memory of a whole program."""
    failure = make_failure(
        None, mib, after=in_use, before=before, room=1024, text="Out of memory while trying to allocate"
    )
    return change_context(failure, framework="jax 0.11.0", allocation=Allocation(round(mib * MIB)), **changes)


@pytest.mark.parametrize(
    ("known", "name"),
    [
        pytest.param(
            torch_failure(100, in_use=980, reserved=1000, before=200, stage="forward"), "batch_too_large", id="forward"
        ),
        pytest.param(
            torch_failure(100, in_use=980, reserved=1000, before=200, stage="backward"),
            "batch_too_large",
            id="backward",
        ),
        pytest.param(
            torch_failure(100, in_use=980, reserved=1000, before=960, stage="forward"), "too_big", id="full before"
        ),
        pytest.param(
            torch_failure(100, in_use=980, reserved=1000, before=200, stage="weights"), "too_big", id="model.to"
        ),
        pytest.param(
            torch_failure(100, in_use=980, reserved=1000, before=700, stage="optimizer"), "too_big", id="Adam"
        ),
        pytest.param(
            torch_failure(100, in_use=600, reserved=1000, before=200, stage="forward"), "fragmentation", id="fragmented"
        ),
        pytest.param(
            torch_failure(40, in_use=965, reserved=1005, before=200, stage="forward"),
            "batch_too_large",
            id="slightly fragmented",
        ),
        pytest.param(torch_failure(100, in_use=980, reserved=1000, before=200), "unknown", id="unknown stage"),
        pytest.param(
            jax_failure(900, in_use=(200, 200), before=(200, 200)), "batch_too_large", id="more than all weights"
        ),
        pytest.param(
            jax_failure(900, in_use=(1, 200), before=(200, 200)), "batch_too_large", id="its weights are lost"
        ),
        pytest.param(jax_failure(2000, in_use=(0, 0), before=(0, 0)), "unknown", id="weights are created, or used"),
        pytest.param(jax_failure(100, in_use=(950, 950), before=(950, 950)), "too_big", id="weights fill it"),
        pytest.param(jax_failure(500, in_use=(400, 450), before=(400, 450)), "fragmentation", id="memory was free"),
        pytest.param(jax_failure(700, in_use=(700, 700), before=(700, 700)), "unknown", id="weights or a batch"),
        pytest.param(
            jax_failure(700, in_use=(300, 700), before=(300, 700), weights=280 * MIB),
            "batch_too_large",
            id="a model's step",
        ),
    ],
)
def test_torch_and_jax(known: FailureContext, name: str) -> None:
    """Without a shape, the traceback and memory in use before the step separate a batch from a model."""
    diagnosis = diagnose(known)
    assert diagnosis.cause == name, diagnosis
    if name == "fragmentation":
        setting = "expandable_segments:True" if known.framework.startswith("torch") else "ALLOCATOR=cuda_async"
        assert setting in diagnosis.next_step
