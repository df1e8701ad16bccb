"""Readings of modes: how the GPU is set up, what the driver wants done with it, and what it is."""

from __future__ import annotations

from gpuwarden.gpu.readings.shapes import answer, one_of, settings, state
from gpuwarden.metrics.model import Labels
from gpuwarden.nvml import fields
from gpuwarden.nvml.constants import (
    ADDRESSING_MODES,
    COMPUTE_MODES,
    FABRIC_STATES,
    INFOROM_PARTS,
    RECOVERY_ACTIONS,
    VIRTUALIZATION_MODES,
)
from gpuwarden.nvml.device import Device
from gpuwarden.nvml.interface import Nvml

_RESETS = frozenset({1, 4, 6})  # the recovery actions that reset the GPU
# Faults of the GPU's place in its NVLink fabric: two bits each of the health mask, 0 not told, 1 yes, 2 no.
_FABRIC_FAULTS = {"bandwidth": 0, "route_recovery": 2, "route_unhealthy": 4, "access_timeout_recovery": 6}
_REGISTERED = FABRIC_STATES["completed"]


persistence = answer(Nvml.nvmlDeviceGetPersistenceMode)
compute = state(COMPUTE_MODES, Nvml.nvmlDeviceGetComputeMode)
mig = settings(Nvml.nvmlDeviceGetMigMode, ("current", "pending"))
accounting = answer(Nvml.nvmlDeviceGetAccountingMode)
display = answer(Nvml.nvmlDeviceGetDisplayActive)
addressing = state(ADDRESSING_MODES, Nvml.nvmlDeviceGetAddressingMode)
virtualization = state(VIRTUALIZATION_MODES, Nvml.nvmlDeviceGetVirtualizationMode)


def recovery(gpu: Device) -> dict[Labels, float]:
    """Say what the driver wants done before the GPU is used again."""
    return one_of(RECOVERY_ACTIONS, gpu.field(fields.RECOVERY_ACTION))


def reset_required(gpu: Device) -> float | None:
    """Return whether the driver wants a reset: by the action it names, or by the flags that drivers before R570 had."""
    action = gpu.field(fields.RECOVERY_ACTION)
    if action is not None:
        return float(action in _RESETS)
    flags = gpu.fields([(fields.RESET_REQUIRED, 0), (fields.DRAIN_AND_RESET_REQUIRED, 0)])
    return None if flags == [None, None] else float(any(flags))


def fabric_state(gpu: Device) -> dict[Labels, float]:
    """Progress of the GPU in joining its NVLink fabric; nothing where it belongs to none."""
    told = gpu.try_query(gpu.nvml.nvmlDeviceGetGpuFabricInfoV)
    return one_of(FABRIC_STATES, told.state) if told is not None and told.state else {}


def fabric_joined(gpu: Device) -> float | None:
    """Return whether the GPU has joined its NVLink fabric without an error."""
    told = gpu.try_query(gpu.nvml.nvmlDeviceGetGpuFabricInfoV)
    if told is None or not told.state:
        return None
    return float(told.state == _REGISTERED and told.status == 0)


def fabric_place(gpu: Device) -> dict[Labels, float]:
    """Which clique of its NVLink fabric the GPU is in: those in one can reach each other."""
    told = gpu.try_query(gpu.nvml.nvmlDeviceGetGpuFabricInfoV)
    return {} if told is None or told.state != _REGISTERED else {(str(told.cliqueId),): 1.0}


def fabric_faults(gpu: Device) -> dict[Labels, float]:
    """Faults of the GPU's place in its NVLink fabric, as far as the fabric manager tells."""
    told = gpu.try_query(gpu.nvml.nvmlDeviceGetGpuFabricInfoV)
    if told is None or told.state != _REGISTERED:
        return {}
    found = {name: told.healthMask >> shift & 3 for name, shift in _FABRIC_FAULTS.items()}
    return {(name,): float(answer == 1) for name, answer in found.items() if answer}


def cores(gpu: Device) -> float | None:
    """Count the cores that NVIDIA names CUDA cores."""
    return gpu.try_query(gpu.nvml.nvmlDeviceGetNumGpuCores) or None


def inforom(gpu: Device) -> dict[Labels, float]:
    """Versions of what is written into the board's own store, the whole image and its parts."""
    image = gpu.try_query(gpu.nvml.nvmlDeviceGetInforomImageVersion)
    parts = [gpu.try_query(gpu.nvml.nvmlDeviceGetInforomVersion, number) for number in INFOROM_PARTS.values()]
    versions = tuple(version or "" for version in (image, *parts))
    return {versions: 1.0} if any(versions) else {}
