"""Modes and state of a GPU: its settings, the recovery action it needs, its fabric, and its firmware."""

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

_RESETS = frozenset({1, 4, 6})  # recovery actions that reset the GPU
# Faults of the GPU in its NVLink fabric: two bits each of the health mask, 0 unknown, 1 yes, 2 no.
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
    """Return the recovery action that the GPU needs."""
    return one_of(RECOVERY_ACTIONS, gpu.field(fields.RECOVERY_ACTION))


def reset_required(gpu: Device) -> float | None:
    """Return whether the GPU needs a reset: by its recovery action, or by the flags of drivers before R570."""
    action = gpu.field(fields.RECOVERY_ACTION)
    if action is not None:
        return float(action in _RESETS)
    flags = gpu.fields([(fields.RESET_REQUIRED, 0), (fields.DRAIN_AND_RESET_REQUIRED, 0)])
    return None if flags == [None, None] else float(any(flags))


def fabric_state(gpu: Device) -> dict[Labels, float]:
    """NVLink fabric registration state; empty if the GPU has no fabric."""
    fabric = gpu.try_query(gpu.nvml.nvmlDeviceGetGpuFabricInfoV)
    return one_of(FABRIC_STATES, fabric.state) if fabric is not None and fabric.state else {}


def fabric_joined(gpu: Device) -> float | None:
    """Return whether the GPU has joined its NVLink fabric without an error."""
    fabric = gpu.try_query(gpu.nvml.nvmlDeviceGetGpuFabricInfoV)
    if fabric is None or not fabric.state:
        return None
    return float(fabric.state == _REGISTERED and fabric.status == 0)


def fabric_place(gpu: Device) -> dict[Labels, float]:
    """Clique of the GPU in its NVLink fabric: GPUs in one can reach each other."""
    fabric = gpu.try_query(gpu.nvml.nvmlDeviceGetGpuFabricInfoV)
    return {} if fabric is None or fabric.state != _REGISTERED else {(str(fabric.cliqueId),): 1.0}


def fabric_faults(gpu: Device) -> dict[Labels, float]:
    """Faults of the GPU in its NVLink fabric, as far as the fabric manager reports them."""
    fabric = gpu.try_query(gpu.nvml.nvmlDeviceGetGpuFabricInfoV)
    if fabric is None or fabric.state != _REGISTERED:
        return {}
    found = {name: fabric.healthMask >> shift & 3 for name, shift in _FABRIC_FAULTS.items()}
    return {(name,): float(answer == 1) for name, answer in found.items() if answer}


def cores(gpu: Device) -> float | None:
    """Return the number of CUDA cores."""
    return gpu.try_query(gpu.nvml.nvmlDeviceGetNumGpuCores) or None


def inforom(gpu: Device) -> dict[Labels, float]:
    """Versions of the InfoROM: its image and its parts."""
    image = gpu.try_query(gpu.nvml.nvmlDeviceGetInforomImageVersion)
    parts = [gpu.try_query(gpu.nvml.nvmlDeviceGetInforomVersion, number) for number in INFOROM_PARTS.values()]
    versions = tuple(version or "" for version in (image, *parts))
    return {versions: 1.0} if any(versions) else {}
