"""Diagnosis rules: each cause just met and just missed, and their order, with figures of real runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from failure_contexts import (
    CO_TENANT,
    EAGER,
    EXPERTS,
    GIANT,
    GIB,
    GRAPH,
    JOINED,
    LARGE_BATCH,
    LEAK,
    MIB,
    PIECES,
    PIPELINE,
    REPORTED_LEAK,
    TRAINED,
    VALIDATION,
    WEIGHTS,
    change_context,
    make_failure,
    memory,
    uniform_steps,
    window,
)
from offenders import check_each

from gpuwarden.analysis.oom.context import FailureContext
from gpuwarden.analysis.oom.diagnosis_rules import diagnose
from gpuwarden.protocol.messages import Allocation, DeviceMemory

NUMPY = "Unable to allocate 29.1 TiB for an array with shape (2000000, 2000000) and data type float64"
FETCH = "OOM when allocating tensor with shape[512,600000,1] and type float [[{{node IteratorGetNext}}]]"
KEPT = make_failure("1024,256", 1, after=(233, 234), before=(4, 13), room=234.0, steps=300, phase="idle", text=EAGER)
SLOTS = make_failure("1920,1920", 14, after=(233, 233), before=(115, 171), room=234.0, text=EAGER, **TRAINED)
SLOTS = replace(SLOTS, windows=uniform_steps(171, base=115), training_peak=171 * MIB)


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
            "co_tenant",
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


SUDDEN = tuple(window(20 * each, 12 if each < 4 else 200, 250) for each in range(1, 5))
LATE_LEAK = tuple(window(20 * each, 12 + 50 * max(each - 8, 0), 250) for each in range(1, 12))
UP_AND_DOWN = tuple(window(20 * each, 12 if each % 2 else 200, 250) for each in range(1, 9))
# Adam's slots in the first step, which is sampled before and after it; then accumulators, in a second fit.
SLOTS_AND_JUMP = (
    window(1, 38, 141, highest=round(115 * MIB)),
    window(24, 115, 155),
    *(window(steps, 192, 205) for steps in (25, 28, 31)),
)
SUDDEN_LATE = tuple(window(20 * each, 12 if each < 9 else 100, 250) for each in range(1, 10))


@check_each(
    [
        pytest.param(change_context(LARGE_BATCH, batch_size=1), "too_big", id="a batch of one example"),
        pytest.param(
            change_context(LARGE_BATCH, after=memory(240, 250)),
            "too_big",
            id="weights alone leave no room for any batch",
        ),
        pytest.param(
            change_context(LARGE_BATCH, batch_size=2, allocation=Allocation(600 * MIB, "2,75000000")),
            "too_big",
            id="half of a batch of two does not fit either",
        ),
        pytest.param(
            change_context(LARGE_BATCH, batch_size=4, allocation=Allocation(600 * MIB, "4,37500000")),
            "batch_too_large",
            id="a quarter of a batch of four does",
        ),
        pytest.param(
            change_context(LARGE_BATCH, batch_size=None, like_weight=False), "batch_too_large", id="no weight's shape"
        ),
        pytest.param(
            change_context(
                LARGE_BATCH, after=memory(12, 240), batch_size=1000, allocation=Allocation(8 * MIB, "2000,1000")
            ),
            "unknown",
            id="a multiple of the batch, or a weight",
        ),
        pytest.param(
            change_context(
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
            change_context(LARGE_BATCH, like_weight=True, weights=60 * MIB, trainable=30 * MIB),
            "batch_too_large",
            id="a gradient that came on top of activations",
        ),
        pytest.param(
            change_context(LARGE_BATCH, like_weight=True, weights=180 * MIB, trainable=60 * MIB),
            "too_big",
            id="a gradient of a model that fills the device",
        ),
        pytest.param(
            change_context(LARGE_BATCH, like_weight=False, weights=280 * MIB, trainable=90 * MIB),
            "too_big",
            id="activations of a model that does not fit",
        ),
        pytest.param(
            change_context(LARGE_BATCH, phase="idle", batch_size=None, stage=None), "unknown", id="no phase, no room"
        ),
        pytest.param(change_context(LEAK, windows=SUDDEN), "too_big", id="a sudden rise is no leak"),
        pytest.param(
            change_context(LEAK, windows=SLOTS_AND_JUMP), "too_big", id="two rises, the first in the first step"
        ),
        pytest.param(change_context(LEAK, windows=LATE_LEAK), "leak", id="a leak that started late"),
        pytest.param(change_context(LEAK, windows=SUDDEN_LATE), "too_big", id="a sudden rise, early after it"),
        pytest.param(change_context(LEAK, windows=UP_AND_DOWN), "unknown", id="memory that had been as high before"),
        pytest.param(
            change_context(LEAK, windows=SUDDEN, after=memory(240, 250)), "too_big", id="memory that was free at first"
        ),
        pytest.param(change_context(LEAK, after=memory(190, 252)), "leak", id="leaked, with room between steps"),
        pytest.param(change_context(LEAK, windows=(), leak=REPORTED_LEAK), "leak", id="a reported leak"),
        pytest.param(
            change_context(LEAK, windows=SUDDEN, leak=replace(REPORTED_LEAK, grown=4 * MIB)),
            "too_big",
            id="a very small leak",
        ),
        pytest.param(
            change_context(LEAK, batch_size=64, largest_batch_before=32), "leak", id="the usual batch is no sign"
        ),
        pytest.param(JOINED, "leak", id="a tensor that each step joins to a larger one"),
        pytest.param(change_context(JOINED, leak=None), "leak", id="a tensor with the examples of all steps"),
        pytest.param(
            change_context(JOINED, leak=None, fit_steps=80), "phase_peak", id="a larger step, without a reported leak"
        ),
        pytest.param(
            change_context(JOINED, leak=replace(REPORTED_LEAK, grown=40 * MIB), windows=JOINED.windows[-1:]),
            "phase_peak",
            id="a larger step next to a leak smaller than the request",
        ),
        pytest.param(
            change_context(
                JOINED, leak=replace(REPORTED_LEAK, grown=60 * MIB), windows=JOINED.windows[-1:], fit_steps=80
            ),
            "phase_peak",
            id="a step that is larger by more than a leak",
        ),
        pytest.param(
            replace(JOINED, error=replace(JOINED.error, batch_size=8192), largest_batch_before=4096),
            "phase_peak",
            id="a larger batch next to a leak",
        ),
        pytest.param(
            change_context(PIECES, allocation=Allocation(160 * MIB, "160,262144")),
            "unknown",
            id="more than the total free memory",
        ),
        pytest.param(
            change_context(PIECES, before=memory(246, 250), after=memory(246, 250)),
            "too_big",
            id="some MiB are always fragmented",
        ),
        pytest.param(
            change_context(PIECES, text=GRAPH, before=memory(104, 216)),
            "fragmentation",
            id="an old peak of memory in use",
        ),
        pytest.param(
            change_context(PIECES, text=GRAPH, before=memory(104, 150), like_weight=False),
            "batch_too_large",
            id="a peak that the step itself reached",
        ),
        pytest.param(
            change_context(
                LARGE_BATCH,
                before=memory(11.9, 20),
                after=memory(11.9, 150),
                allocation=Allocation(50 * MIB, "16000,1000"),
            ),
            "fragmentation",
            id="twice as much as failed was free",
        ),
        pytest.param(
            change_context(
                LARGE_BATCH,
                before=memory(11.9, 20),
                after=memory(11.9, 170),
                allocation=Allocation(50 * MIB, "16000,1000"),
            ),
            "batch_too_large",
            id="a first step would have asked for more",
        ),
        pytest.param(
            change_context(VALIDATION, steps=0, fit_steps=0, like_weight=False),
            "batch_too_large",
            id="prediction without training",
        ),
        pytest.param(
            change_context(VALIDATION, text=EAGER, phase="idle"), "phase_peak", id="a large tensor outside of steps"
        ),
        pytest.param(
            change_context(VALIDATION, text=EAGER, phase="idle", training_peak=None),
            "unknown",
            id="outside of steps, where the peak of training is unknown",
        ),
        pytest.param(
            change_context(VALIDATION, training_peak=380 * MIB),
            "unknown",
            id="a validation that needed less than training",
        ),
        pytest.param(
            change_context(SLOTS, stage="optimizer"), "too_big", id="slots that are made after steps are no larger step"
        ),
        pytest.param(SLOTS, "phase_peak", id="a larger step"),
        pytest.param(change_context(EXPERTS, phase="train"), "too_big", id="weights that are filled before any step"),
        pytest.param(change_context(EXPERTS, steps=20), "unknown", id="a tensor that is filled after steps"),
        pytest.param(
            change_context(GIANT, allocation=Allocation(20 * MIB, "500,10000"), like_weight=False),
            "phase_peak",
            id="a step that had taken far more than the others",
        ),
        pytest.param(
            change_context(
                GIANT, after=memory(8, 39.5), allocation=Allocation(20 * MIB, "500,10000"), like_weight=False
            ),
            "fragmentation",
            id="a step like the others",
        ),
        pytest.param(
            change_context(GIANT, after=memory(12, 39.5), room=41.0 * MIB, allocation=Allocation(8 * MIB, "500,10000")),
            "batch_too_large",
            id="steps that had only just fitted",
        ),
        pytest.param(
            change_context(GIANT, fit_steps=0, like_weight=False), "batch_too_large", id="the first step of another fit"
        ),
        pytest.param(
            change_context(
                GIANT,
                windows=tuple(window(each, 12, 39.5, batch_size=2**each) for each in range(3, 9)),
                batch_size=20000,
            ),
            "batch_too_large",
            id="sizes that are being tried out",
        ),
        pytest.param(change_context(WEIGHTS, stage=None, phase="idle"), "too_big", id="before any training"),
        pytest.param(
            change_context(WEIGHTS, after=memory(50, 50)), "fragmentation", id="weights for which there was room"
        ),
        pytest.param(
            change_context(WEIGHTS, after=memory(180, 180)), "too_big", id="weights that would have filled the rest"
        ),
        pytest.param(change_context(CO_TENANT, grown_co_tenants=()), "unknown", id="no co-tenant grew"),
        pytest.param(
            change_context(CO_TENANT, grown_co_tenants=(replace(CO_TENANT.grown_co_tenants[0], grown=10 * MIB),)),
            "unknown",
            id="the co-tenant grew too little",
        ),
        pytest.param(
            change_context(CO_TENANT, after=DeviceMemory(12 * MIB, 39 * MIB, 25 * MIB)),
            "unknown",
            id="its own limit was reached first",
        ),
        pytest.param(
            change_context(PIECES, after=memory(3, 40), before=memory(3, 40), free=10 * MIB),
            "fragmentation",
            id="a pool of small pieces",
        ),
        pytest.param(
            change_context(PIECES, after=memory(3, 216), before=memory(3, 216), free=10 * MIB, phase="idle"),
            "unknown",
            id="one piece that nearly nothing uses",
        ),
        pytest.param(change_context(PIECES, memory_age=12.0), "batch_too_large", id="memory in use is from before"),
        pytest.param(
            change_context(WEIGHTS, after=memory(50, 50), memory_age=12.0),
            "too_big",
            id="weights, after figures that are old",
        ),
        pytest.param(KEPT, "leak", id="outputs of a phase that are kept"),
        pytest.param(
            change_context(KEPT, allocation=Allocation(20 * MIB, "20480,256")), "unknown", id="a few large outputs"
        ),
        pytest.param(change_context(KEPT, phase="train"), "batch_too_large", id="what a training step keeps"),
        pytest.param(change_context(PIPELINE, text=NUMPY), "unknown", id="an array of the program's own"),
        pytest.param(
            change_context(
                PIPELINE, text=NUMPY, allocation=Allocation(32 << 40, "2000000,2000000"), host_size=64 * GIB
            ),
            "too_big",
            id="an array larger than the host",
        ),
        pytest.param(
            change_context(PIPELINE, text=NUMPY, allocation=Allocation(32 << 40), host_size=64 * GIB, stage="input"),
            "host_input",
            id="an array larger than the host, in a loader",
        ),
        pytest.param(change_context(PIPELINE, text=FETCH), "host_input", id="tf.data within a compiled step"),
        pytest.param(change_context(PIPELINE, text="std::bad_alloc"), "unknown", id="the host, not the input"),
        pytest.param(
            change_context(PIPELINE, text="std::bad_alloc", host_leak=REPORTED_LEAK), "leak", id="a leak on the host"
        ),
        pytest.param(
            change_context(PIPELINE, text="std::bad_alloc", stage="input"), "host_input", id="raised in a loader"
        ),
        pytest.param(
            change_context(make_failure(None, None, after=(1, 2), room=None), allocation=None),
            "unknown",
            id="nothing is known",
        ),
    ],
)
def test_rule_boundaries(known: FailureContext, name: str) -> None:
    """A changed fact changes the diagnosis where it should."""
    assert diagnose(known).cause == name, diagnose(known)
