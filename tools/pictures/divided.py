"""Simulated GPU with MIG, which the simulation lacks: its processes are on an instance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from gpuwarden.gpu.metrics import GpuReadings, MigReadings
from gpuwarden.gpu.snapshot import Gpu, MigInstance
from gpuwarden.nvml.identity import MigIdentity
from gpuwarden.runs.run_snapshot import RunSnapshot
from gpuwarden.state import State

_Key = TypeVar("_Key")
_PROFILE, _GPU_INSTANCE, _COMPUTE_INSTANCE = "7g.80gb", 0, 0


def divided(state: State) -> State:
    """Give the first GPU one instance, with all of its runs."""
    gpu, *others = state.snapshot.gpus
    whole, part = gpu.identity.uuid, gpu.identity.uuid.replace("GPU-", "MIG-")
    gpu = replace(gpu, mig=(_instance(gpu, part),)) if gpu.up else gpu
    levels = _renamed(state.pressure.levels, (whole, "memory"), (part, "memory"))
    return replace(
        state,
        snapshot=replace(state.snapshot, gpus=(gpu, *others)),
        pressure=replace(state.pressure, levels=levels),
        runs=tuple(_moved(run, whole, part) for run in state.runs),
        usage={run_id: _renamed(devices, whole, part) for run_id, devices in state.usage.items()},
    )


def _instance(gpu: Gpu, uuid: str) -> MigInstance:
    size, used, free = (
        gpu.readings[row]
        for row in (GpuReadings.memory_size_bytes, GpuReadings.memory_used_bytes, GpuReadings.memory_free_bytes)
    )
    labels = (gpu.identity.uuid, str(_GPU_INSTANCE), str(_COMPUTE_INSTANCE), _PROFILE)
    return MigInstance(
        MigIdentity(uuid, _GPU_INSTANCE, _COMPUTE_INSTANCE, _PROFILE),
        {
            MigReadings.info: {labels: 1.0},
            MigReadings.memory_size_bytes: size,
            MigReadings.memory_used_bytes: used,
            MigReadings.memory_free_bytes: free,
        },
    )


def _moved(run: RunSnapshot, whole: str, part: str) -> RunSnapshot:
    """Move a run from a GPU to an instance of it."""
    by_device = {each.name: getattr(run, each.name) for each in fields(run)}
    moved: dict[str, Any] = {
        name: _renamed(held, whole, part) for name, held in by_device.items() if isinstance(held, Mapping)
    }
    return replace(run, **moved)


def _renamed(held: Mapping[_Key, Any], whole: _Key, part: _Key) -> dict[_Key, Any]:
    return {part if key == whole else key: value for key, value in held.items()}
