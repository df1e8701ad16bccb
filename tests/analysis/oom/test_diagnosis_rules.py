"""Diagnosis rules: each cause just met and just missed, and their order, with figures of real runs."""

from __future__ import annotations

import ast
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.analysis.memory.memory_history import MemoryWindow
from gpuwarden.analysis.oom.context import CoTenantMemory, FailureContext
from gpuwarden.analysis.oom.diagnosis_rules import diagnose
from gpuwarden.protocol.messages import Allocation, DeviceMemory, Error, Phase

MIB = 1 << 20
GIB = 1 << 30
GRAPH = "Graph execution error: [[{{node sequential/dense/Relu}}]] [Op:__inference_multi_step_on_iterator_405]"
EAGER = "{{function_node __wrapped__Fill_device_/job:localhost}} OOM when allocating tensor [Op:Fill] name: "


def window(steps: int, lowest: float, peak: float, **changes: Any) -> MemoryWindow:
    """Make a window of half a second; in MiB."""
    made = MemoryWindow(0, 0.5, steps, "train", 0, round(lowest * MIB), round(lowest * MIB), round(peak * MIB))
    return replace(made, **changes)


def uniform_steps(peak: float, base: float = 12.0) -> tuple[MemoryWindow, ...]:
    """Make a run of 40 steps with the same peak."""
    return tuple(window(10 * each, base, peak) for each in range(1, 5))


def case(
    shape: str | None,
    mib: float | None,
    *,
    after: tuple[float, float],
    before: tuple[float, float] | None = None,
    room: float | None = 256.0,
    steps: int = 0,
    phase: Phase = "train",
    text: str = GRAPH,
    error: Any = None,
    **changes: Any,
) -> FailureContext:
    """Make the context of a failure; bytes in MiB, `after` and `before` are memory in use and its peak."""
    allocation = Allocation(None if mib is None else round(mib * MIB), shape, "float", "sequential/dense/Relu", "CPU:0")
    failure = Error("device_oom", "ResourceExhaustedError", text, phase, steps, (allocation,))
    made = FailureContext(
        replace(failure, **(error or {})),
        "tensorflow 2.21.0 keras 3.15.1",
        allocation,
        after=memory(*after),
        before=memory(*(before or after)),
        room=None if room is None else room * MIB,
    )
    return replace(made, **changes)


def memory(current: float, peak: float) -> DeviceMemory:
    """Return an allocator's figures, in MiB."""
    return DeviceMemory(round(current * MIB), round(peak * MIB), 256 * MIB)


# After 40 steps of a small batch: 12 MiB of weights, a peak of 39.5.
TRAINED: dict[str, Any] = {
    "steps": 40,
    "fit_steps": 40,
    "windows": uniform_steps(39.5),
    "training_peak": round(39.5 * MIB),
}
LARGE_BATCH = case("16000,1000", 61, after=(11.9, 203.9), before=(11.7, 193.6), batch_size=16000)
LEAK = case(
    "2000,1000",
    7.6,
    after=(214.1, 252.1),
    before=(213, 250),
    steps=80,
    fit_steps=80,
    windows=tuple(window(20 * each, 12 + 50 * each, 50 + 50 * each) for each in range(1, 5)),
    training_peak=250 * MIB,
)
JOINED = case(
    "385024,1,32",
    47,
    after=(184.3, 231.3),
    before=(138.7, 186),
    room=234.4,
    steps=93,
    text=EAGER,
    batch_size=4096,
    fit_steps=93,
    windows=tuple(window(23 * each, 34.5 * each, 46.5 * each) for each in range(1, 5)),
    training_peak=186 * MIB,
    leak=Leak(11.5 * MIB, round(79.5 * MIB)),
)
PIECES = case("51,262144", 51, after=(104, 216), text=EAGER)
VALIDATION = case("40000,1000", 152.6, after=(12.2, 206.2), before=(12.2, 39.5), phase="test", **TRAINED)
GIANT = case("20000,1000", 76.3, after=(7.7, 233.8), before=(8, 39.5), **TRAINED)
WEIGHTS = case("4200,4200", 67.3, after=(254, 254), before=(0, 0), text=EAGER, error={"stage": "weights"})
CO_TENANT = case(
    "2000,1000",
    20,
    after=(12, 39.5),
    room=25,
    grown_co_tenants=(CoTenantMemory(4711, "python process 4711 of bob", 100 * MIB, 200 * MIB, 12.0),),
    **TRAINED,
)
PIPELINE = case(None, 381.7, after=(1, 2), text="passed to ParallelMapDatasetV2:21 transformation with iterator: OOM")
PIPELINE = replace(PIPELINE, error=replace(PIPELINE.error, kind="host_oom"))
NUMPY = "Unable to allocate 29.1 TiB for an array with shape (2000000, 2000000) and data type float64"
FETCH = "OOM when allocating tensor with shape[512,600000,1] and type float [[{{node IteratorGetNext}}]]"
KEPT = case("1024,256", 1, after=(233, 234), before=(4, 13), room=234.0, steps=300, phase="idle", text=EAGER)
SLOTS = case("1920,1920", 14, after=(233, 233), before=(115, 171), room=234.0, text=EAGER, **TRAINED)
SLOTS = replace(SLOTS, windows=uniform_steps(171, base=115), training_peak=171 * MIB)
EXPERTS = case("2048,768", 6, after=(238, 238), before=(0, 0), room=240.0, text=EAGER)
EXPERTS = replace(EXPERTS, allocation=Allocation(6 * MIB, "2048,768", "float", "Fill", "CPU:0"))
REPORTED_LEAK = Leak(2.0 * MIB, 200 * MIB)


@pytest.mark.parametrize(
    ("known", "name", "evidence", "next_step"),
    [
        (
            LARGE_BATCH,
            "batch_too_large",
            (
                "61.0 MiB for shape [16000,1000] grows with the batch size (16000) and did not fit: 11.9 MiB of "
                "256 MiB were in use between steps."
            ),
            "Try a batch size of 8000 or less; gradient accumulation keeps the effective batch size.",
        ),
        (
            LEAK,
            "leak",
            (
                "Memory in use between steps had grown by 152 MiB over 60 steps, to 214 MiB of the 256 MiB available "
                "to the run. Without this growth 7.60 MiB for shape [2000,1000] would have fitted."
            ),
            (
                "Find what the program keeps from step to step: tensors in lists, results joined to a tensor that "
                "grows (`concat`), losses kept as tensors (use `float(loss)`), models rebuilt every step."
            ),
        ),
        (
            PIECES,
            "fragmentation",
            (
                "51.0 MiB for shape [51,262144] did not fit in one piece, although 152 MiB of 256 MiB were free in "
                "total; 104 MiB was in use."
            ),
            "Start the run with TF_GPU_ALLOCATOR=cuda_malloc_async: this allocator does not need one piece.",
        ),
        (
            VALIDATION,
            "phase_peak",
            (
                "Validation requested 153 MiB for shape [40000,1000] with 256 MiB available to the run, while "
                "training (40 steps) peaked at 39.5 MiB."
            ),
            "Use a smaller batch size for validation: validation_batch_size, or the batch size of its dataset.",
        ),
        (
            GIANT,
            "phase_peak",
            (
                "One step was much larger than the others: it requested 76.3 MiB for shape [20000,1000] with "
                "256 MiB available to the run, at least 302 MiB in total, while the 40 steps before had 27.5 MiB."
            ),
            "Limit the size of a batch: drop or cut outliers, pad to a maximum length, or use buckets.",
        ),
        (
            WEIGHTS,
            "too_big",
            (
                "67.3 MiB for shape [4200,4200] for the model's weights did not fit: 254 MiB of the 256 MiB available "
                "to the run were already in use."
            ),
            "Use a smaller model, lower precision, an optimizer with less state, or a GPU with more memory.",
        ),
        (
            CO_TENANT,
            "neighbour",
            (
                "The run needed 27.5 MiB on top of 12.0 MiB, but only 13.0 MiB was left: python process 4711 of bob "
                "allocated 100 MiB on the device in the 12s before and now uses 200 MiB."
            ),
            (
                "Move one of the two to another GPU, or agree with the owner of python process 4711 of bob who uses "
                "this one."
            ),
        ),
        (
            PIPELINE,
            "host_input",
            "The host (not the GPU) could not allocate 382 MiB for a tf.data function.",
            (
                "Use smaller shuffle buffers, caches and prefetching, or fewer loader workers; in a container raise "
                "the memory limit or --shm-size."
            ),
        ),
    ],
    ids=["batch", "leak", "fragmentation", "validation", "giant", "weights", "co-tenant", "pipeline"],
)
def test_each_rule(known: FailureContext, name: str, evidence: str, next_step: str) -> None:
    """Each diagnosis has its evidence in numbers and one next step."""
    diagnosis = diagnose(known)
    assert (diagnosis.cause, diagnosis.evidence, diagnosis.next_step) == (name, evidence, next_step)


def changed(known: FailureContext, **changes: Any) -> FailureContext:
    """Change facts of a context; those of its error go there."""
    error_changes = {
        name: changes.pop(name) for name in list(changes) if hasattr(known.error, name) and name != "batch_size"
    }
    return replace(known, error=replace(known.error, **error_changes), **changes)


def torch_failure(mib: float, *, in_use: float, reserved: float, before: float, **changes: Any) -> FailureContext:
    """Make an out-of-memory of PyTorch on 1 GiB, which has no shape; it keeps its memory in use."""
    failure = case(None, mib, after=(in_use, in_use), before=(before, before), room=1024, text="CUDA out of memory.")
    after = DeviceMemory(round(in_use * MIB), round(in_use * MIB), None, round(reserved * MIB))
    allocation = Allocation(round(mib * MIB), device="GPU:0")
    return changed(failure, framework="torch 2.11.0", after=after, allocation=allocation, **changes)


def jax_failure(
    mib: float, *, in_use: tuple[float, float], before: tuple[float, float], **changes: Any
) -> FailureContext:
    """Make an out-of-memory of JAX on 1 GiB, which requests the memory of a whole program."""
    failure = case(None, mib, after=in_use, before=before, room=1024, text="Out of memory while trying to allocate")
    return changed(failure, framework="jax 0.11.0", allocation=Allocation(round(mib * MIB)), **changes)


SUDDEN = tuple(window(20 * each, 12 if each < 4 else 200, 250) for each in range(1, 5))
LATE_LEAK = tuple(window(20 * each, 12 + 50 * max(each - 8, 0), 250) for each in range(1, 12))
UP_AND_DOWN = tuple(window(20 * each, 12 if each % 2 else 200, 250) for each in range(1, 9))
SUDDEN_LATE = tuple(window(20 * each, 12 if each < 9 else 100, 250) for each in range(1, 10))


@pytest.mark.parametrize(
    ("known", "name"),
    [
        pytest.param(changed(LARGE_BATCH, batch_size=1), "too_big", id="a batch of one example"),
        pytest.param(
            changed(LARGE_BATCH, after=memory(240, 250)), "too_big", id="weights alone leave no room for any batch"
        ),
        pytest.param(
            changed(LARGE_BATCH, batch_size=2, allocation=Allocation(600 * MIB, "2,75000000")),
            "too_big",
            id="half of a batch of two does not fit either",
        ),
        pytest.param(
            changed(LARGE_BATCH, batch_size=4, allocation=Allocation(600 * MIB, "4,37500000")),
            "batch_too_large",
            id="a quarter of a batch of four does",
        ),
        pytest.param(
            changed(LARGE_BATCH, batch_size=None, like_weight=False), "batch_too_large", id="no weight's shape"
        ),
        pytest.param(
            changed(LARGE_BATCH, after=memory(12, 240), batch_size=1000, allocation=Allocation(8 * MIB, "2000,1000")),
            "unknown",
            id="a multiple of the batch, or a weight",
        ),
        pytest.param(
            changed(
                LARGE_BATCH,
                after=memory(12, 240),
                batch_size=1000,
                allocation=Allocation(8 * MIB, "2000,1000"),
                like_weight=False,
            ),
            "batch_too_large",
            id="a multiple of the batch",
        ),
        pytest.param(
            changed(LARGE_BATCH, like_weight=True, weights=60 * MIB, trainable=30 * MIB),
            "batch_too_large",
            id="a gradient that came on top of activations",
        ),
        pytest.param(
            changed(LARGE_BATCH, like_weight=True, weights=180 * MIB, trainable=60 * MIB),
            "too_big",
            id="a gradient of a model that fills the device",
        ),
        pytest.param(
            changed(LARGE_BATCH, like_weight=False, weights=280 * MIB, trainable=90 * MIB),
            "too_big",
            id="activations of a model that does not fit",
        ),
        pytest.param(
            changed(LARGE_BATCH, phase="idle", batch_size=None, stage=None), "unknown", id="no phase, no room"
        ),
        pytest.param(changed(LEAK, windows=SUDDEN), "too_big", id="a sudden rise is no leak"),
        pytest.param(changed(LEAK, windows=LATE_LEAK), "leak", id="a leak that started late"),
        pytest.param(changed(LEAK, windows=SUDDEN_LATE), "too_big", id="a sudden rise, early after it"),
        pytest.param(changed(LEAK, windows=UP_AND_DOWN), "unknown", id="memory that had been as high before"),
        pytest.param(
            changed(LEAK, windows=SUDDEN, after=memory(240, 250)), "too_big", id="memory that was free at first"
        ),
        pytest.param(changed(LEAK, after=memory(190, 252)), "leak", id="leaked, with room between steps"),
        pytest.param(changed(LEAK, windows=(), leak=REPORTED_LEAK), "leak", id="a reported leak"),
        pytest.param(
            changed(LEAK, windows=SUDDEN, leak=replace(REPORTED_LEAK, grown=4 * MIB)),
            "too_big",
            id="a very small leak",
        ),
        pytest.param(changed(LEAK, batch_size=64, largest_batch_before=32), "leak", id="the usual batch is no sign"),
        pytest.param(JOINED, "leak", id="a tensor that each step joins to a larger one"),
        pytest.param(changed(JOINED, leak=None), "leak", id="a tensor with the examples of all steps"),
        pytest.param(
            changed(JOINED, leak=None, fit_steps=80), "phase_peak", id="a larger step, without a reported leak"
        ),
        pytest.param(
            changed(JOINED, leak=replace(REPORTED_LEAK, grown=40 * MIB), windows=JOINED.windows[-1:]),
            "phase_peak",
            id="a larger step next to a leak smaller than the request",
        ),
        pytest.param(
            changed(JOINED, leak=replace(REPORTED_LEAK, grown=60 * MIB), windows=JOINED.windows[-1:], fit_steps=80),
            "phase_peak",
            id="a step that is larger by more than a leak",
        ),
        pytest.param(
            replace(JOINED, error=replace(JOINED.error, batch_size=8192), largest_batch_before=4096),
            "phase_peak",
            id="a larger batch next to a leak",
        ),
        pytest.param(
            changed(PIECES, allocation=Allocation(160 * MIB, "160,262144")),
            "unknown",
            id="more than the total free memory",
        ),
        pytest.param(
            changed(PIECES, before=memory(246, 250), after=memory(246, 250)),
            "too_big",
            id="some MiB are always fragmented",
        ),
        pytest.param(
            changed(PIECES, text=GRAPH, before=memory(104, 216)), "fragmentation", id="an old peak of memory in use"
        ),
        pytest.param(
            changed(PIECES, text=GRAPH, before=memory(104, 150), like_weight=False),
            "batch_too_large",
            id="a peak that the step itself reached",
        ),
        pytest.param(
            changed(
                LARGE_BATCH,
                before=memory(11.9, 20),
                after=memory(11.9, 150),
                allocation=Allocation(50 * MIB, "16000,1000"),
            ),
            "fragmentation",
            id="twice as much as failed was free",
        ),
        pytest.param(
            changed(
                LARGE_BATCH,
                before=memory(11.9, 20),
                after=memory(11.9, 170),
                allocation=Allocation(50 * MIB, "16000,1000"),
            ),
            "batch_too_large",
            id="a first step would have asked for more",
        ),
        pytest.param(
            changed(VALIDATION, steps=0, fit_steps=0, like_weight=False),
            "batch_too_large",
            id="prediction without training",
        ),
        pytest.param(changed(VALIDATION, text=EAGER, phase="idle"), "phase_peak", id="a large tensor outside of steps"),
        pytest.param(
            changed(VALIDATION, text=EAGER, phase="idle", training_peak=None),
            "unknown",
            id="outside of steps, where the peak of training is unknown",
        ),
        pytest.param(
            changed(VALIDATION, training_peak=380 * MIB), "unknown", id="a validation that needed less than training"
        ),
        pytest.param(
            changed(SLOTS, stage="optimizer"), "too_big", id="slots that are made after steps are no larger step"
        ),
        pytest.param(SLOTS, "phase_peak", id="a larger step"),
        pytest.param(changed(EXPERTS, phase="train"), "too_big", id="weights that are filled before any step"),
        pytest.param(changed(EXPERTS, steps=20), "unknown", id="a tensor that is filled after steps"),
        pytest.param(
            changed(GIANT, allocation=Allocation(20 * MIB, "500,10000"), like_weight=False),
            "phase_peak",
            id="a step that had taken far more than the others",
        ),
        pytest.param(
            changed(GIANT, after=memory(8, 39.5), allocation=Allocation(20 * MIB, "500,10000"), like_weight=False),
            "fragmentation",
            id="a step like the others",
        ),
        pytest.param(
            changed(GIANT, after=memory(12, 39.5), room=41.0 * MIB, allocation=Allocation(8 * MIB, "500,10000")),
            "batch_too_large",
            id="steps that had only just fitted",
        ),
        pytest.param(
            changed(GIANT, fit_steps=0, like_weight=False), "batch_too_large", id="the first step of another fit"
        ),
        pytest.param(
            changed(
                GIANT,
                windows=tuple(window(each, 12, 39.5, batch_size=2**each) for each in range(3, 9)),
                batch_size=20000,
            ),
            "batch_too_large",
            id="sizes that are being tried out",
        ),
        pytest.param(changed(WEIGHTS, stage=None, phase="idle"), "too_big", id="before any training"),
        pytest.param(changed(WEIGHTS, after=memory(50, 50)), "fragmentation", id="weights for which there was room"),
        pytest.param(changed(CO_TENANT, grown_co_tenants=()), "unknown", id="no co-tenant grew"),
        pytest.param(
            changed(CO_TENANT, grown_co_tenants=(replace(CO_TENANT.grown_co_tenants[0], grown=10 * MIB),)),
            "unknown",
            id="the co-tenant grew too little",
        ),
        pytest.param(
            changed(CO_TENANT, after=DeviceMemory(12 * MIB, 39 * MIB, 25 * MIB)),
            "unknown",
            id="its own limit was reached first",
        ),
        pytest.param(
            changed(PIECES, after=memory(3, 40), before=memory(3, 40), free=10 * MIB),
            "fragmentation",
            id="a pool of small pieces",
        ),
        pytest.param(
            changed(PIECES, after=memory(3, 216), before=memory(3, 216), free=10 * MIB, phase="idle"),
            "unknown",
            id="one piece that nearly nothing uses",
        ),
        pytest.param(changed(PIECES, memory_age=12.0), "batch_too_large", id="memory in use is from before"),
        pytest.param(
            changed(WEIGHTS, after=memory(50, 50), memory_age=12.0), "too_big", id="weights, after figures that are old"
        ),
        pytest.param(KEPT, "leak", id="outputs of a phase that are kept"),
        pytest.param(changed(KEPT, allocation=Allocation(20 * MIB, "20480,256")), "unknown", id="a few large outputs"),
        pytest.param(changed(KEPT, phase="train"), "batch_too_large", id="what a training step keeps"),
        pytest.param(changed(PIPELINE, text=NUMPY), "unknown", id="an array of the program's own"),
        pytest.param(
            changed(PIPELINE, text=NUMPY, allocation=Allocation(32 << 40, "2000000,2000000"), host_size=64 * GIB),
            "too_big",
            id="an array larger than the host",
        ),
        pytest.param(
            changed(PIPELINE, text=NUMPY, allocation=Allocation(32 << 40), host_size=64 * GIB, stage="input"),
            "host_input",
            id="an array larger than the host, in a loader",
        ),
        pytest.param(changed(PIPELINE, text=FETCH), "host_input", id="tf.data within a compiled step"),
        pytest.param(changed(PIPELINE, text="std::bad_alloc"), "unknown", id="the host, not the input"),
        pytest.param(
            changed(PIPELINE, text="std::bad_alloc", host_leak=REPORTED_LEAK), "leak", id="a leak on the host"
        ),
        pytest.param(changed(PIPELINE, text="std::bad_alloc", stage="input"), "host_input", id="raised in a loader"),
        pytest.param(
            changed(case(None, None, after=(1, 2), room=None), allocation=None), "unknown", id="nothing is known"
        ),
    ],
)
def test_rule_boundaries(known: FailureContext, name: str) -> None:
    """A changed fact changes the diagnosis where it should."""
    assert diagnose(known).cause == name, diagnose(known)


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


LARGE_CO_TENANT = CoTenantMemory(4711, "python process 4711 of bob", 190 * MIB, 190 * MIB, 4000.0)
FIRST_STEP = replace(
    case("2048,4096", 32, after=(4, 5), room=34, error={"like_weight": False}), co_tenants=(LARGE_CO_TENANT,)
)
FIRST_STEP = replace(FIRST_STEP, after=DeviceMemory(4 * MIB, 5 * MIB))  # no limit of its own
ATTENTION = case("2,1,10000,10000", 763, after=(0.6, 4.6), room=240, error={"like_weight": False})
EMPTY_POOL = DeviceMemory(0, 0)
NO_SIZE = replace(
    FIRST_STEP, allocation=None, room=4.05 * MIB, size=240.0 * MIB
)  # as from a library below the framework
EMPTY = case("7864320", 30, after=(0, 0), before=(0, 0), room=240, text=EAGER)


@pytest.mark.parametrize(
    ("known", "name"),
    [
        pytest.param(FIRST_STEP, "neighbour", id="allocated before the run"),
        pytest.param(replace(FIRST_STEP, co_tenants=()), "batch_too_large", id="no co-tenant"),
        pytest.param(NO_SIZE, "neighbour", id="no size, co-tenants use most of the device"),
        pytest.param(
            replace(NO_SIZE, after=EMPTY_POOL, before=EMPTY_POOL), "neighbour", id="no size, and nothing in use"
        ),
        pytest.param(replace(NO_SIZE, room=100.0 * MIB), "unknown", id="no size, and memory was free"),
        pytest.param(replace(NO_SIZE, co_tenants=()), "too_big", id="no size, no co-tenant"),
        pytest.param(
            replace(NO_SIZE, co_tenants=(replace(LARGE_CO_TENANT, held=2 * MIB),)),
            "too_big",
            id="no size, a small co-tenant",
        ),
        pytest.param(
            replace(GIANT, after=DeviceMemory(8 * MIB, 110 * MIB), room=120.0 * MIB, co_tenants=(LARGE_CO_TENANT,)),
            "neighbour",
            id="a larger step where co-tenants use most of the device",
        ),
        pytest.param(
            replace(
                GIANT,
                after=DeviceMemory(8 * MIB, 110 * MIB),
                room=120.0 * MIB,
                co_tenants=(replace(LARGE_CO_TENANT, held=60 * MIB),),
            ),
            "phase_peak",
            id="a larger step where co-tenants use less than the run",
        ),
        pytest.param(
            replace(
                FIRST_STEP,
                room=60.0 * MIB,
                after=DeviceMemory(24 * MIB, 25 * MIB),
                co_tenants=(replace(LARGE_CO_TENANT, held=20 * MIB),),
            ),
            "batch_too_large",
            id="a small co-tenant",
        ),
        pytest.param(
            replace(FIRST_STEP, after=DeviceMemory(4 * MIB, 5 * MIB, 34 * MIB)), "batch_too_large", id="its own limit"
        ),
        pytest.param(
            replace(FIRST_STEP, allocation=Allocation(900 * MIB, "2048,4096", "float", "x", "CPU:0")),
            "batch_too_large",
            id="more than is available without the co-tenant",
        ),
        pytest.param(ATTENTION, "too_big", id="one of two examples is larger than the device"),
        pytest.param(
            case("2000000,64", 488, after=(0, 0), before=(0, 0), room=240, text=EAGER, size=256.0 * MIB),
            "too_big",
            id="one tensor is larger than the device",
        ),
        pytest.param(EMPTY, "unknown", id="all was free, and not allocated"),
        pytest.param(changed(EMPTY, **TRAINED), "unknown", id="after steps"),
        pytest.param(replace(EMPTY, free=20.0 * MIB), "fragmentation", id="a pool that grew in pieces"),
    ],
)
def test_co_tenants_and_device_size(known: FailureContext, name: str) -> None:
    """On an empty pool, co-tenants, the size of an example and free memory decide."""
    assert diagnose(known).cause == name, diagnose(known)


JACOBIAN = changed(
    GIANT, batch_size=2, size=256.0 * MIB, allocation=Allocation(512 * MIB, "1024,131072", "float", "pfor/MatMul")
)
LAYER_CALL = f"{EAGER} Arguments received by Dense.call():"


@pytest.mark.parametrize(
    ("known", "name"),
    [
        pytest.param(JACOBIAN, "too_big", id="a multiple of two is no sign of a batch"),
        pytest.param(changed(JACOBIAN, batch_size=64), "phase_peak", id="a multiple of the batch"),
        pytest.param(changed(JACOBIAN, batch_size=1024), "phase_peak", id="the batch"),
        pytest.param(changed(JACOBIAN, like_weight=False), "phase_peak", id="in a model's step"),
        pytest.param(changed(JACOBIAN, text=LAYER_CALL), "phase_peak", id="in a layer's call"),
        pytest.param(changed(JACOBIAN, phase="test"), "phase_peak", id="of a validation, which has a batch of its own"),
        pytest.param(changed(JACOBIAN, size=float(GIB)), "phase_peak", id="smaller than the device"),
        pytest.param(
            changed(JACOBIAN, batch_size=64, allocation=Allocation(16 << 40, "4194304,1048576")),
            "too_big",
            id="larger than any device",
        ),
    ],
)
def test_tensor_larger_than_the_device(known: FailureContext, name: str) -> None:
    """One tensor that no device of this size can hold is too big, unless a smaller batch may make it smaller."""
    assert diagnose(known).cause == name, diagnose(known)


# A step that had been near the peak once, in a pool that grew to 66 MiB next to a co-tenant.
GROWING_POOL = replace(
    case("284,1024,24", 26.6, after=(3.8, 65.8), before=(0.4, 65.8), room=74, **TRAINED),
    after=DeviceMemory(round(3.8 * MIB), round(65.8 * MIB)),
    windows=uniform_steps(65.8, base=0.4),
    training_peak=round(65.8 * MIB),
    free=8 * MIB,
    co_tenants=(LARGE_CO_TENANT,),
)


@pytest.mark.parametrize(
    ("known", "name"),
    [
        pytest.param(GROWING_POOL, "neighbour", id="the co-tenant has what the pool could have grown by"),
        pytest.param(replace(GROWING_POOL, co_tenants=()), "fragmentation", id="no co-tenant"),
        pytest.param(replace(GROWING_POOL, free=40 * MIB), "fragmentation", id="the pool could have grown"),
        pytest.param(
            replace(GROWING_POOL, co_tenants=(replace(LARGE_CO_TENANT, held=50 * MIB),)),
            "fragmentation",
            id="a co-tenant with less than the run",
        ),
    ],
)
def test_co_tenant_or_fragmentation(known: FailureContext, name: str) -> None:
    """Memory in pieces is the cause only where the pool could not have grown without co-tenants."""
    assert diagnose(known).cause == name, diagnose(known)


HALF_WAY = case("30000,1000", 114, after=(27.7, 162), before=(27.7, 35), **TRAINED)
HALF_WAY = replace(HALF_WAY, fit_steps=0, windows=tuple(window(10 * each, 5 * each, 35) for each in range(1, 5)))


@pytest.mark.parametrize(
    "known",
    [
        pytest.param(HALF_WAY, id="memory that grew by less"),
        pytest.param(
            replace(
                HALF_WAY,
                after=DeviceMemory(round(27.7 * MIB), 162 * MIB),
                windows=uniform_steps(35, base=27.7),
                grown_co_tenants=(replace(CO_TENANT.grown_co_tenants[0], grown=30 * MIB),),
            ),
            id="a co-tenant that took less",
        ),
    ],
)
def test_step_that_failed_half_way(known: FailureContext) -> None:
    """A first step that filled the memory lacked more than its last request: small growth is not the cause."""
    assert diagnose(replace(known, batch_size=30_000)).cause == "batch_too_large"


def test_next_step_for_a_co_tenant_names_no_batch() -> None:
    """The co-tenant's memory is missing, so a smaller batch is not what to change first."""
    found = diagnose(FIRST_STEP)
    assert found.next_step == "Use a free GPU, or agree with the owner of python process 4711 of bob who uses this one."


def test_unknown_cause_before_any_step_has_the_figures_at_the_error() -> None:
    """Without steps there is no memory in use between them."""
    found = diagnose(changed(EXPERTS, allocation=Allocation(6 * MIB, "2048,768", "float", "Sub", "CPU:0")))
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
    found = diagnose(changed(PIECES, leak=REPORTED_LEAK))
    assert found.cause == "fragmentation"
    assert found.evidence == f"{diagnose(PIECES).evidence[:-1]}; memory in use also grows, at 120 MiB a minute."
    leak = diagnose(changed(LEAK, leak=REPORTED_LEAK))
    assert leak.cause == "leak"
    assert "grows too" not in leak.evidence


def test_size_that_fitted_is_advised() -> None:
    """The advised batch size is no smaller than one that has trained in the same fit."""
    tried = tuple(window(each, 12, 39.5, batch_size=2**each) for each in range(3, 9))
    found = diagnose(changed(GIANT, windows=tried, batch_size=384, largest_batch_before=256))
    assert (found.cause, found.next_step.split(";")[0]) == ("batch_too_large", "Try a batch size of 256 or less")


def test_age_of_the_figures() -> None:
    """Figures from before the error are given with their age."""
    found = diagnose(changed(WEIGHTS, after=memory(50, 50), memory_age=12.0))
    assert found.evidence.endswith("were already in use 12s before.")


def test_own_limit_with_room_on_the_device() -> None:
    """The next step is to raise the run's own limit if that was reached first."""
    limited = DeviceMemory(190 * MIB, 190 * MIB, 200 * MIB)
    found = diagnose(changed(WEIGHTS, after=limited, before=limited, room=200 * MIB, size=GIB, free=800 * MIB))
    assert (found.cause, found.next_step) == (
        "too_big",
        "Raise the run's own memory limit: 800 MiB of the device are free.",
    )
