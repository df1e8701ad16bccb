"""Contexts of failures for the rules of diagnosis, with figures of real runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpuwarden.analysis.memory.leak_detector import Leak
from gpuwarden.analysis.memory.memory_history import MemoryWindow
from gpuwarden.analysis.oom.context import CoTenantMemory, FailureContext
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


def make_failure(
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
LARGE_BATCH = make_failure("16000,1000", 61, after=(11.9, 203.9), before=(11.7, 193.6), batch_size=16000)
LEAK = make_failure(
    "2000,1000",
    7.6,
    after=(214.1, 252.1),
    before=(213, 250),
    steps=80,
    fit_steps=80,
    windows=tuple(window(20 * each, 12 + 50 * each, 50 + 50 * each) for each in range(1, 5)),
    training_peak=250 * MIB,
)
JOINED = make_failure(
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
PIECES = make_failure("51,262144", 51, after=(104, 216), text=EAGER)
VALIDATION = make_failure("40000,1000", 152.6, after=(12.2, 206.2), before=(12.2, 39.5), phase="test", **TRAINED)
GIANT = make_failure("20000,1000", 76.3, after=(7.7, 233.8), before=(8, 39.5), **TRAINED)
WEIGHTS = make_failure("4200,4200", 67.3, after=(254, 254), before=(0, 0), text=EAGER, error={"stage": "weights"})
CO_TENANT = make_failure(
    "2000,1000",
    20,
    after=(12, 39.5),
    room=25,
    grown_co_tenants=(CoTenantMemory(4711, "python process 4711 of bob", 100 * MIB, 200 * MIB, 12.0),),
    **TRAINED,
)
PIPELINE = make_failure(
    None, 381.7, after=(1, 2), text="passed to ParallelMapDatasetV2:21 transformation with iterator: OOM"
)
PIPELINE = replace(PIPELINE, error=replace(PIPELINE.error, kind="host_oom"))
EXPERTS = make_failure("2048,768", 6, after=(238, 238), before=(0, 0), room=240.0, text=EAGER)
EXPERTS = replace(EXPERTS, allocation=Allocation(6 * MIB, "2048,768", "float", "Fill", "CPU:0"))
REPORTED_LEAK = Leak(2.0 * MIB, 200 * MIB)


def change_context(known: FailureContext, **changes: Any) -> FailureContext:
    """Change facts of a context; those of its error go there."""
    error_changes = {
        name: changes.pop(name) for name in list(changes) if hasattr(known.error, name) and name != "batch_size"
    }
    return replace(known, error=replace(known.error, **error_changes), **changes)


LARGE_CO_TENANT = CoTenantMemory(4711, "python process 4711 of bob", 190 * MIB, 190 * MIB, 4000.0)
FIRST_STEP = replace(
    make_failure("2048,4096", 32, after=(4, 5), room=34, error={"like_weight": False}), co_tenants=(LARGE_CO_TENANT,)
)
FIRST_STEP = replace(FIRST_STEP, after=DeviceMemory(4 * MIB, 5 * MIB))  # no limit of its own
