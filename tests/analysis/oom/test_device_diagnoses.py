"""Diagnoses by what else is on the device, its size and the pieces of its memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from failure_contexts import (
    CO_TENANT,
    EAGER,
    FIRST_STEP,
    GIANT,
    GIB,
    LARGE_CO_TENANT,
    MIB,
    TRAINED,
    change_context,
    make_failure,
    uniform_steps,
    window,
)

from gpuwarden.analysis.oom.context import FailureContext
from gpuwarden.analysis.oom.diagnosis_rules import diagnose
from gpuwarden.protocol.messages import Allocation, DeviceMemory

ATTENTION = make_failure("2,1,10000,10000", 763, after=(0.6, 4.6), room=240, error={"like_weight": False})
EMPTY_POOL = DeviceMemory(0, 0)
NO_SIZE = replace(
    FIRST_STEP, allocation=None, room=4.05 * MIB, size=240.0 * MIB
)  # as from a library below the framework
EMPTY = make_failure("7864320", 30, after=(0, 0), before=(0, 0), room=240, text=EAGER)


@pytest.mark.parametrize(
    ("known", "name"),
    [
        pytest.param(FIRST_STEP, "co_tenant", id="allocated before the run"),
        pytest.param(replace(FIRST_STEP, co_tenants=()), "batch_too_large", id="no co-tenant"),
        pytest.param(NO_SIZE, "co_tenant", id="no size, co-tenants use most of the device"),
        pytest.param(
            replace(NO_SIZE, after=EMPTY_POOL, before=EMPTY_POOL), "co_tenant", id="no size, and nothing in use"
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
            "co_tenant",
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
            make_failure("2000000,64", 488, after=(0, 0), before=(0, 0), room=240, text=EAGER, size=256.0 * MIB),
            "too_big",
            id="one tensor is larger than the device",
        ),
        pytest.param(EMPTY, "unknown", id="all was free, and not allocated"),
        pytest.param(change_context(EMPTY, **TRAINED), "unknown", id="after steps"),
        pytest.param(replace(EMPTY, free=20.0 * MIB), "fragmentation", id="a pool that grew in pieces"),
    ],
)
def test_co_tenants_and_device_size(known: FailureContext, name: str) -> None:
    """On an empty pool, co-tenants, the size of an example and free memory decide."""
    assert diagnose(known).cause == name, diagnose(known)


JACOBIAN = change_context(
    GIANT, batch_size=2, size=256.0 * MIB, allocation=Allocation(512 * MIB, "1024,131072", "float", "pfor/MatMul")
)
LAYER_CALL = f"{EAGER} Arguments received by Dense.call():"


@pytest.mark.parametrize(
    ("known", "name"),
    [
        pytest.param(JACOBIAN, "too_big", id="a multiple of two is no sign of a batch"),
        pytest.param(change_context(JACOBIAN, batch_size=64), "phase_peak", id="a multiple of the batch"),
        pytest.param(change_context(JACOBIAN, batch_size=1024), "phase_peak", id="the batch"),
        pytest.param(change_context(JACOBIAN, like_weight=False), "phase_peak", id="in a model's step"),
        pytest.param(change_context(JACOBIAN, text=LAYER_CALL), "phase_peak", id="in a layer's call"),
        pytest.param(
            change_context(JACOBIAN, phase="test"), "phase_peak", id="of a validation, which has a batch of its own"
        ),
        pytest.param(change_context(JACOBIAN, size=float(GIB)), "phase_peak", id="smaller than the device"),
        pytest.param(
            change_context(JACOBIAN, batch_size=64, allocation=Allocation(16 << 40, "4194304,1048576")),
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
    make_failure("284,1024,24", 26.6, after=(3.8, 65.8), before=(0.4, 65.8), room=74, **TRAINED),
    after=DeviceMemory(round(3.8 * MIB), round(65.8 * MIB)),
    windows=uniform_steps(65.8, base=0.4),
    training_peak=round(65.8 * MIB),
    free=8 * MIB,
    co_tenants=(LARGE_CO_TENANT,),
)


@pytest.mark.parametrize(
    ("known", "name"),
    [
        pytest.param(GROWING_POOL, "co_tenant", id="the co-tenant has what the pool could have grown by"),
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


HALF_WAY = make_failure("30000,1000", 114, after=(27.7, 162), before=(27.7, 35), **TRAINED)
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
