"""Evidence, next step and code of a diagnosis."""

from __future__ import annotations

import ast
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from failure_contexts import (
    CO_TENANT,
    EAGER,
    EXPERTS,
    FIRST_STEP,
    GIANT,
    GIB,
    LARGE_BATCH,
    LEAK,
    MIB,
    PIECES,
    REPORTED_LEAK,
    WEIGHTS,
    change_context,
    memory,
    window,
)

from gpuwarden.analysis.oom.context import FailureContext
from gpuwarden.analysis.oom.diagnosis_rules import diagnose
from gpuwarden.protocol.messages import Allocation, DeviceMemory


def test_next_step_for_a_co_tenant_names_no_batch() -> None:
    """The co-tenant's memory is missing, so a smaller batch is not what to change first."""
    found = diagnose(FIRST_STEP)
    assert found.next_step == "Use a free GPU, or agree with the owner of python process 4711 of bob who uses this one."


def test_unknown_cause_before_any_step_has_the_figures_at_the_error() -> None:
    """Without steps there is no memory in use between them."""
    found = diagnose(change_context(EXPERTS, allocation=Allocation(6 * MIB, "2048,768", "float", "Sub", "CPU:0")))
    assert found.cause == "unknown"
    assert "240 MiB was available to the run, 238 MiB was in use. " in found.evidence


def test_the_advised_size_is_the_next_step() -> None:
    """Batch-size advice and diagnosis name the same size."""
    step = diagnose(replace(LARGE_BATCH, advised_batch_size=6144)).next_step
    assert step == "Try a batch size of 6144 or less; gradient accumulation keeps the effective batch size."


@pytest.mark.parametrize(
    ("known", "framework", "words"),
    [
        (LARGE_BATCH, "tensorflow 2.21.0 keras 3.15.1", "fit_with_oom_retry(model, make_dataset, 6144, "),
        (LARGE_BATCH, "torch 2.9", "@with_oom_retry(batch_size=6144)"),
        (WEIGHTS, "jax 0.8.1 keras 3.15.1", "keras.mixed_precision.set_global_policy("),
        (WEIGHTS, "torch 2.9", "torch.autocast("),
    ],
)
def test_code_of_the_next_step(known: FailureContext, framework: str, words: str) -> None:
    """The code is Python for the run's framework, with the size of the next step, and names that exist."""
    code = diagnose(replace(known, advised_batch_size=6144, framework=framework)).code or ""
    assert words in code
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            spec = find_spec(node.module or "")
            assert spec is not None
            assert f'"{node.names[0].name}"' in Path(spec.origin or "").read_text()  # in its __all__


def test_code_that_is_a_command() -> None:
    """A leak has the command that names its holder, fragmentation the allocator's setting; a co-tenant has none."""
    assert diagnose(LEAK).code == "gpuwarden run --census -- python train.py"
    assert diagnose(replace(PIECES, framework="tensorflow 2.21.0")).code == (
        "export TF_GPU_ALLOCATOR=cuda_malloc_async"
    )
    assert diagnose(CO_TENANT).code is None


def test_growth_over_many_steps_is_no_outsized_step() -> None:
    """Between two reports of an eager loop memory may grow step by step."""
    quick = replace(LEAK, windows=(), before=DeviceMemory(20 * MIB, 20 * MIB))
    quick = replace(quick, error=replace(quick.error, text=EAGER))
    assert not replace(quick, unreported_steps=40).is_outsized


def test_a_leak_that_is_not_the_cause_is_mentioned() -> None:
    """Fragmentation may hide a leak, which would end the run later."""
    found = diagnose(change_context(PIECES, leak=REPORTED_LEAK))
    assert found.cause == "fragmentation"
    assert found.evidence == f"{diagnose(PIECES).evidence[:-1]}; memory in use also grows, at 120 MiB a minute."
    leak = diagnose(change_context(LEAK, leak=REPORTED_LEAK))
    assert leak.cause == "leak"
    assert "grows too" not in leak.evidence


def test_size_that_fitted_is_advised() -> None:
    """The advised batch size is no smaller than one that has trained in the same fit."""
    tried = tuple(window(each, 12, 39.5, batch_size=2**each) for each in range(3, 9))
    found = diagnose(change_context(GIANT, windows=tried, batch_size=384, largest_batch_before=256))
    assert (found.cause, found.next_step.split(";")[0]) == ("batch_too_large", "Try a batch size of 256 or less")


def test_age_of_the_figures() -> None:
    """Figures from before the error are given with their age."""
    found = diagnose(change_context(WEIGHTS, after=memory(50, 50), memory_age=12.0))
    assert found.evidence.endswith("were already in use 12s before.")


def test_own_limit_with_room_on_the_device() -> None:
    """The next step is to raise the run's own limit if that was reached first."""
    limited = DeviceMemory(190 * MIB, 190 * MIB, 200 * MIB)
    found = diagnose(change_context(WEIGHTS, after=limited, before=limited, room=200 * MIB, size=GIB, free=800 * MIB))
    assert (found.cause, found.next_step) == (
        "too_big",
        "Raise the run's own memory limit: 800 MiB of the device are free.",
    )
