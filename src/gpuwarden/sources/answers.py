"""What a simulated GPU answers to each NVML function: one line a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from pynvml import (  # noqa: TID251 - numbers; nothing is called
    NVML_ERROR_INVALID_ARGUMENT,
    NVML_ERROR_NOT_FOUND,
    NVML_ERROR_NOT_SUPPORTED,
    NVML_VALUE_TYPE_DOUBLE,
)

from gpuwarden.gpu.nvml import (
    CLOCK_EVENT_REASONS,
    CLOCKS,
    GPM_DRAM_ACTIVE,
    GPM_GRAPHICS_ENGINE,
    GPM_PIPES,
    GPM_SM_ACTIVE,
    GPM_SM_OCCUPANCY,
    GPM_TENSOR_OPERATIONS,
    MEMORY_V2,
    NO_INSTANCE,
    TEMPERATURE_CORE,
    TEMPERATURE_THRESHOLDS,
    nvml_error,
)
from gpuwarden.sources import board as limits
from gpuwarden.sources import gpm
from gpuwarden.sources.board import NO_LOAD, Board
from gpuwarden.sources.faults import SimulatedGpu
from gpuwarden.sources.occupancy import Occupancy
from gpuwarden.sources.workloads import RESERVED, SIZE, UNOWNED

NAME = "NVIDIA H100 80GB HBM3 (simulated)"
_VIDEO_RATIO = 0.9  # of the graphics clock


@dataclass(frozen=True, slots=True)
class Memory:
    """See nvml.Memory."""

    total: int
    reserved: int
    free: int
    used: int


@dataclass(frozen=True, slots=True)
class Utilization:
    """See nvml.Utilization."""

    gpu: int
    memory: int


@dataclass(frozen=True, slots=True)
class Process:
    """See nvml.ProcessInfo."""

    pid: int
    usedGpuMemory: int  # noqa: N815 - the fields' names in nvidia-ml-py
    gpuInstanceId: int = NO_INSTANCE  # noqa: N815
    computeInstanceId: int = NO_INSTANCE  # noqa: N815


@dataclass(frozen=True, slots=True)
class Pci:
    """See nvml.PciInfo."""

    busId: str  # noqa: N815 - the field's name in nvidia-ml-py


@dataclass(frozen=True, slots=True)
class GpmSupport:
    """See nvml.GpmSupport."""

    isSupportedDevice: int  # noqa: N815 - the field's name in nvidia-ml-py


@dataclass(frozen=True, slots=True)
class Slot:
    """A GPU in the box: its hardware, what runs on it (None: nothing ever) and a test's grip on it."""

    index: int
    uuid: str
    board: Board
    occupancy: Occupancy | None
    gpu: SimulatedGpu

    def advance(self, now: float) -> None:
        """Move on to that time, with all GPUs that share a run with this one."""
        if self.occupancy:
            self.occupancy.advance(now)
        else:
            self.board.advance(now, NO_LOAD)


def _processes(slot: Slot) -> list[Process]:
    process = slot.occupancy.process() if slot.occupancy else None
    return [Process(*process)] if process else []


def _memory(slot: Slot, version: int | None = None) -> Memory:
    used = UNOWNED + sum(process.usedGpuMemory for process in _processes(slot))
    used = min(max(used, slot.board.pins.memory_used or 0), SIZE - RESERVED)
    free = SIZE - RESERVED - used
    if version == MEMORY_V2:
        return Memory(SIZE, RESERVED, free, used)
    return Memory(SIZE, 0, free, used + RESERVED)  # version 1 counts what is reserved as used


def _temperature(slot: Slot, sensor: int) -> int:
    return _known({TEMPERATURE_CORE: round(slot.board.temperature)}, sensor)


def _clock(graphics: int, clock: int) -> int:
    video = round(_VIDEO_RATIO * graphics)
    clocks = {"graphics": graphics, "sm": graphics, "memory": limits.MEMORY_CLOCK, "video": video}
    return _known({CLOCKS[name]: megahertz for name, megahertz in clocks.items()}, clock)


def _known(answers: Mapping[int, int], argument: int) -> int:
    if argument not in answers:
        raise nvml_error(NVML_ERROR_INVALID_ARGUMENT)
    return answers[argument]


def _reasons(slot: Slot) -> int:
    return sum(CLOCK_EVENT_REASONS[name] for name in slot.board.point.reasons)


@dataclass(frozen=True, slots=True)
class FieldValue:
    """See nvml.FieldValue."""

    nvmlReturn: int  # noqa: N815 - the fields' names in nvidia-ml-py
    valueType: int = NVML_VALUE_TYPE_DOUBLE  # noqa: N815
    value: object = None


@dataclass(frozen=True, slots=True)
class _Double:
    dVal: float  # noqa: N815 - a member of nvmlValue_t


def _field(slot: Slot, number: int, scope: int) -> FieldValue:
    answer = FIELDS.get(number)
    value = answer(slot, scope) if answer else None
    return FieldValue(NVML_ERROR_NOT_SUPPORTED) if value is None else FieldValue(0, value=_Double(value))


def _sample(slot: Slot, sample: dict[int, float]) -> None:
    """Fill a GPM sample with what the units do, in percent: kernels that draw more power keep more of them busy."""
    busy, bandwidth = slot.board.utilization
    intensity = slot.board.load.intensity
    active = busy * (0.55 + 0.4 * intensity)
    tensor = 0.6 * intensity * active
    sample |= {
        GPM_GRAPHICS_ENGINE: busy,
        GPM_SM_ACTIVE: active,
        GPM_SM_OCCUPANCY: 0.42 * active,
        GPM_DRAM_ACTIVE: 0.8 * bandwidth,
        **dict.fromkeys(GPM_TENSOR_OPERATIONS.values(), 0.0),
        GPM_TENSOR_OPERATIONS["hmma"]: tensor,
        GPM_PIPES["tensor"]: tensor,
        GPM_PIPES["fp64"]: 0.0,
        GPM_PIPES["fp32"]: 0.13 * active,
        GPM_PIPES["fp16"]: 0.04 * active,
        GPM_PIPES["integer"]: 0.09 * active,
    }


def gpm_metrics(request: gpm.Request) -> None:
    """Answer with the middle of two samples."""
    for metric in request.wanted():
        if metric.metricId in request.sample2:
            metric.value = (request.sample1[metric.metricId] + request.sample2[metric.metricId]) / 2
        else:
            metric.nvmlReturn = NVML_ERROR_NOT_SUPPORTED


def _refuse(code: int) -> Callable[..., NoReturn]:
    def refuse(*_: object) -> NoReturn:
        raise nvml_error(code)

    return refuse


_THRESHOLDS = {TEMPERATURE_THRESHOLDS[name]: celsius for name, celsius in limits.THRESHOLDS.items()}
_POWER_LIMIT = round(limits.POWER_LIMIT * 1000)
_ALL_REASONS = sum(CLOCK_EVENT_REASONS.values())

# By the field's number; of the GPU and the scope asked for. None: not supported in that scope.
FIELDS: dict[int, Callable[[Slot, int], float | None]] = {}

ANSWERS: dict[str, Callable[..., Any]] = {
    "nvmlDeviceGetUUID": lambda slot: slot.uuid,
    "nvmlDeviceGetName": lambda _: NAME,
    "nvmlDeviceGetPciInfo": lambda slot: Pci(f"00000000:{0x10 + slot.index:02X}:00.0"),
    "nvmlDeviceGetVbiosVersion": lambda _: "96.00.A5.00.01",
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlDeviceGetUtilizationRates": lambda slot: Utilization(*slot.board.utilization),
    "nvmlDeviceGetTemperature": _temperature,
    "nvmlDeviceGetTemperatureThreshold": lambda _, threshold: _known(_THRESHOLDS, threshold),
    "nvmlDeviceGetMarginTemperature": lambda slot: limits.THRESHOLDS["slowdown"] - round(slot.board.temperature),
    "nvmlDeviceGetPowerUsage": lambda slot: round(slot.board.power * 1000),
    "nvmlDeviceGetEnforcedPowerLimit": lambda _: _POWER_LIMIT,
    "nvmlDeviceGetPowerManagementLimit": lambda _: _POWER_LIMIT,
    "nvmlDeviceGetPowerManagementDefaultLimit": lambda _: _POWER_LIMIT,
    "nvmlDeviceGetTotalEnergyConsumption": lambda slot: round(slot.board.energy * 1000),
    "nvmlDeviceGetClockInfo": lambda slot, clock: _clock(slot.board.clock, clock),
    "nvmlDeviceGetMaxClockInfo": lambda _, clock: _clock(limits.MAX_CLOCK, clock),
    "nvmlDeviceGetCurrentClocksEventReasons": _reasons,
    "nvmlDeviceGetSupportedClocksEventReasons": lambda _: _ALL_REASONS,
    "nvmlDeviceGetCurrentClocksThrottleReasons": _reasons,
    "nvmlDeviceGetSupportedClocksThrottleReasons": lambda _: _ALL_REASONS,
    "nvmlDeviceGetPerformanceState": lambda _: 0,  # an H100 is in P0 even when idle
    "nvmlDeviceGetFieldValues": lambda slot, fields: [_field(slot, *field) for field in fields],
    "nvmlDeviceGetComputeRunningProcesses": _processes,
    "nvmlDeviceGetGraphicsRunningProcesses": lambda _: [],
    "nvmlGpmQueryDeviceSupport": lambda _: GpmSupport(1),
    "nvmlGpmSampleGet": _sample,
    "nvmlGpmMigSampleGet": _refuse(NVML_ERROR_INVALID_ARGUMENT),
    "nvmlDeviceGetMigMode": lambda _: [0, 0],
    "nvmlDeviceGetMaxMigDeviceCount": lambda _: 7,
    "nvmlDeviceGetMigDeviceHandleByIndex": _refuse(NVML_ERROR_NOT_FOUND),
    "nvmlDeviceGetGpuInstanceId": _refuse(NVML_ERROR_INVALID_ARGUMENT),
    "nvmlDeviceGetComputeInstanceId": _refuse(NVML_ERROR_INVALID_ARGUMENT),
    "nvmlDeviceGetAttributes_v2": _refuse(NVML_ERROR_INVALID_ARGUMENT),
}
