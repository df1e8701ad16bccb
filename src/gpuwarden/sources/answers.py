"""What a simulated GPU answers to each NVML function: one line a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

from pynvml import (  # noqa: TID251 - numbers; nothing is called
    NVML_ERROR_DEPRECATED,
    NVML_ERROR_INVALID_ARGUMENT,
    NVML_ERROR_NOT_FOUND,
    NVML_ERROR_NOT_SUPPORTED,
    NVML_SUCCESS,
)

from gpuwarden.gpu import fields
from gpuwarden.gpu.nvml import (
    CLOCK_EVENT_REASONS,
    CLOCKS,
    ECC_LIFETIMES,
    ECC_TYPES,
    GPM_DRAM_ACTIVE,
    GPM_GRAPHICS_ENGINE,
    GPM_PCIE,
    GPM_PIPES,
    GPM_SM_ACTIVE,
    GPM_SM_OCCUPANCY,
    GPM_TENSOR_OPERATIONS,
    MEMORY_LOCATIONS,
    MEMORY_V2,
    PCIE_DIRECTIONS,
    RECOVERY_ACTIONS,
    TEMPERATURE_CORE,
    TEMPERATURE_THRESHOLDS,
    FieldValue,
    nvml_error,
)
from gpuwarden.gpu.processes import ProcessIdentity
from gpuwarden.protocol import Message
from gpuwarden.runs.peer import Peer
from gpuwarden.sources import board as limits
from gpuwarden.sources import gpm, structs
from gpuwarden.sources.board import NO_LOAD, Board
from gpuwarden.sources.faults import SimulatedGpu
from gpuwarden.sources.workloads import MIB, RESERVED, SIZE, UNOWNED

T = TypeVar("T")

BAR1_SIZE = 128 << 30
NAME = "NVIDIA H100 80GB HBM3 (simulated)"
_VIDEO_RATIO = 0.9  # of the graphics clock
_LOCATIONS = frozenset(MEMORY_LOCATIONS.values())
_LOCATED = frozenset({MEMORY_LOCATIONS["dram"], MEMORY_LOCATIONS["sram"]})


class Occupant(Protocol):
    """What runs on a GPU, or on some together. Its user sees to it that one thread at a time asks."""

    def advance(self, now: float) -> None:
        """Move on to that time, with the boards it is on."""

    def processes(self) -> Sequence[tuple[int, int]]:
        """Return those with a context now: their pids, and their bytes on each of the boards."""

    def identity(self, pid: int) -> ProcessIdentity | None:
        """Say who a process is; None for one that is none of it."""

    def reports(self) -> Iterable[tuple[Peer, Message | None]]:
        """Return what runs said since the last call; None is the end of a process."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A GPU in the box: its hardware, what runs on it (None: nothing ever) and a test's grip on it."""

    index: int
    uuid: str
    board: Board
    occupancy: Occupant | None
    gpu: SimulatedGpu

    def advance(self, now: float) -> None:
        """Move on to that time, with all GPUs that share a run with this one."""
        if self.occupancy:
            self.occupancy.advance(now)
        else:
            self.board.advance(now, NO_LOAD)


def _processes(slot: Slot) -> list[structs.Process]:
    return [structs.Process(*process) for process in slot.occupancy.processes()] if slot.occupancy else []


def _memory(slot: Slot, version: int | None = None) -> structs.Memory:
    used = UNOWNED + sum(process.usedGpuMemory for process in _processes(slot))
    used = min(max(used, slot.board.pins.memory_used or 0), SIZE - RESERVED)
    free = SIZE - RESERVED - used
    if version == MEMORY_V2:
        return structs.Memory(SIZE, RESERVED, free, used)
    return structs.Memory(SIZE, 0, free, used + RESERVED)  # version 1 counts what is reserved as used


def _bar1_used(slot: Slot) -> int:
    return (2 + 2 * len(_processes(slot))) * MIB


def _pcie_throughput(slot: Slot, direction: int) -> int:
    """Kilobytes a second."""
    rates = {number: limits.PCIE_BYTES_A_SECOND[name] for name, number in PCIE_DIRECTIONS.items()}
    return round(_known(rates, direction) * slot.board.load.utilization / 1000)


def _temperature(slot: Slot, sensor: int) -> int:
    return _known({TEMPERATURE_CORE: round(slot.board.temperature)}, sensor)


def _clock(graphics: int, clock: int) -> int:
    video = round(_VIDEO_RATIO * graphics)
    clocks = {"graphics": graphics, "sm": graphics, "memory": limits.MEMORY_CLOCK, "video": video}
    return _known({CLOCKS[name]: megahertz for name, megahertz in clocks.items()}, clock)


def _known(answers: Mapping[int, T], argument: int) -> T:
    if argument not in answers:
        raise nvml_error(NVML_ERROR_INVALID_ARGUMENT)
    return answers[argument]


def _reasons(slot: Slot) -> int:
    return sum(CLOCK_EVENT_REASONS[name] for name in slot.board.point.reasons)


def _utilization(percent: Callable[[Slot], int]) -> Callable[[Slot], list[int]]:
    return lambda slot: [percent(slot), _SAMPLE_MICROSECONDS]


def _refuse(code: int) -> Callable[..., NoReturn]:
    def refuse(*_: object) -> NoReturn:
        raise nvml_error(code)

    return refuse


def _memory_errors(_slot: Slot, kind: int, lifetime: int, location: int) -> int:
    """Tell of a healthy board: of its life a few errors that ECC corrected; located as on Ampere and newer."""
    if location not in _LOCATED:
        raise nvml_error(NVML_ERROR_NOT_SUPPORTED if location in _LOCATIONS else NVML_ERROR_INVALID_ARGUMENT)
    old = kind == ECC_TYPES["corrected"] and lifetime == ECC_LIFETIMES["aggregate"]
    return 3 if old and location == MEMORY_LOCATIONS["dram"] else 0


def _field(slot: Slot, number: int, scope: int) -> FieldValue:
    answer = FIELDS.get(number)
    value = slot.gpu.fields.get((number, scope), answer(slot, scope) if answer else None)
    return (NVML_ERROR_NOT_SUPPORTED, None) if value is None else (NVML_SUCCESS, value)


def _fixed(value: float) -> Callable[[Slot, int], float | None]:
    return lambda _slot, scope: None if scope else value


def _of_link(value: float) -> Callable[[Slot, int], float | None]:
    return lambda _slot, link: value if link < limits.NVLINK_LINKS else None


def _held(reason: str) -> Callable[[Slot, int], float | None]:
    return lambda slot, _scope: round(slot.board.held.get(reason, 0.0) * 1e9)


def _pcie_bytes(direction: str) -> Callable[[Slot, int], float | None]:
    return lambda slot, _scope: round(slot.board.busy * limits.PCIE_BYTES_A_SECOND[direction])


def _nvlink_kibibytes(slot: Slot, scope: int) -> float | None:
    links = limits.NVLINK_LINKS if scope == fields.ALL_LINKS else 1
    if scope not in {fields.ALL_LINKS, *range(limits.NVLINK_LINKS)}:
        return None
    return round(slot.board.exchanged * limits.NVLINK_LINK_SPEED * 1e6 / 1024) * links


def _power(slot: Slot, scope: int) -> float | None:
    return None if scope else round(slot.board.power * 1000)


def _sample(slot: Slot, sample: dict[int, float]) -> None:
    """Fill a GPM sample with what the units do, in percent: kernels that draw more power keep more of them busy.

    Traffic is in MiB a second.
    """
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
        **{
            number: limits.PCIE_BYTES_A_SECOND[direction] * slot.board.load.utilization / MIB
            for direction, number in GPM_PCIE.items()
        },
    }


def gpm_metrics(request: gpm.Request) -> None:
    """Answer with the middle of two samples."""
    for metric in request.wanted():
        if metric.metricId in request.sample2:
            metric.value = (request.sample1[metric.metricId] + request.sample2[metric.metricId]) / 2
        else:
            metric.nvmlReturn = NVML_ERROR_NOT_SUPPORTED


_THRESHOLDS = {TEMPERATURE_THRESHOLDS[name]: celsius for name, celsius in limits.THRESHOLDS.items()}
_POWER_LIMIT = round(limits.POWER_LIMIT * 1000)
_ALL_REASONS = 0x1FF  # all that driver 590 knows
_SAMPLE_MICROSECONDS = 167_000

# By the field's number; of the GPU and the scope asked for. None: not supported in that scope.
FIELDS: dict[int, Callable[[Slot, int], float | None]] = {
    fields.ECC_CURRENT: _fixed(1),
    fields.ECC_PENDING: _fixed(1),
    **{
        number: _fixed(3 if labels == ("corrected", "aggregate") else 0) for labels, number in fields.ECC_TOTALS.items()
    },
    **{number: _held(reason) for reason, number in fields.CLOCK_EVENT_NANOSECONDS.items()},
    fields.MEMORY_TEMPERATURE: lambda slot, _scope: round(slot.board.memory_temperature),
    fields.NVLINK_COUNT: _fixed(limits.NVLINK_LINKS),
    fields.PCIE_REPLAYS: _fixed(0),
    **dict.fromkeys(fields.NVLINK_KIBIBYTES.values(), _nvlink_kibibytes),
    **dict.fromkeys((*fields.REMAPPED_ROWS.values(), fields.ROW_REMAP_PENDING, fields.ROW_REMAP_FAILED), _fixed(0)),
    **{fields.NVLINK_ERRORS[name]: _of_link(0) for name in ("replay", "recovery", "crc")},
    **dict.fromkeys(fields.NVLINK_ERROR_TOTALS.values(), _fixed(0)),
    fields.NVLINK_SPEED: _of_link(limits.NVLINK_LINK_SPEED),
    fields.NVLINK_STATE: _of_link(1),
    **dict.fromkeys(fields.PCIE_ERRORS.values(), _fixed(0)),
    fields.POWER_AVERAGE: _power,
    fields.POWER_INSTANT: _power,
    **{number: _fixed(limits.MARGINS[name]) for name, number in fields.MARGIN_THRESHOLDS.items()},
    **{number: _pcie_bytes(direction) for direction, number in fields.PCIE_BYTES.items()},
    fields.RECOVERY_ACTION: _fixed(RECOVERY_ACTIONS["none"]),
}

ANSWERS: dict[str, Callable[..., Any]] = {
    "nvmlDeviceGetUUID": lambda slot: slot.uuid,
    "nvmlDeviceGetName": lambda _: NAME,
    "nvmlDeviceGetPciInfo": lambda slot: structs.Pci(f"00000000:{0x10 + slot.index:02X}:00.0"),
    "nvmlDeviceGetVbiosVersion": lambda _: "96.00.A5.00.01",
    "nvmlDeviceGetBrand": lambda _: 14,
    "nvmlDeviceGetArchitecture": lambda _: 9,
    "nvmlDeviceGetCudaComputeCapability": lambda _: (9, 0),
    "nvmlDeviceGetMinorNumber": lambda slot: slot.index,
    "nvmlDeviceGetSerial": lambda slot: f"165312{slot.index:07d}",
    "nvmlDeviceGetBoardPartNumber": lambda _: "692-2G520-0200-000",
    "nvmlDeviceGetInforomImageVersion": lambda _: "G520.0200.00.05",
    "nvmlDeviceGetInforomVersion": lambda _, part: {0: "2.1", 1: "7.16"}[_known({0: 0, 1: 1}, part)],
    "nvmlDeviceGetGspFirmwareVersion": lambda _: "590.48.01",
    "nvmlDeviceGetNumGpuCores": lambda _: 16896,
    "nvmlDeviceGetMemoryBusWidth": lambda _: 5120,
    "nvmlDeviceGetNumaNodeId": _refuse(NVML_ERROR_NOT_SUPPORTED),  # of superchips
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlDeviceGetBAR1MemoryInfo": lambda slot: structs.Bar1(BAR1_SIZE, BAR1_SIZE - _bar1_used(slot), _bar1_used(slot)),
    "nvmlDeviceGetUtilizationRates": lambda slot: structs.Utilization(*slot.board.utilization),
    "nvmlDeviceGetEncoderUtilization": _utilization(lambda _: 0),
    "nvmlDeviceGetDecoderUtilization": _utilization(lambda _: 0),
    "nvmlDeviceGetJpgUtilization": _utilization(lambda slot: round(3 * slot.board.load.utilization)),
    "nvmlDeviceGetOfaUtilization": _utilization(lambda _: 0),
    "nvmlDeviceGetEncoderStats": lambda _: (0, 0, 0),
    "nvmlDeviceGetTemperature": _temperature,
    "nvmlDeviceGetTemperatureThreshold": lambda _, threshold: _known(_THRESHOLDS, threshold),
    "nvmlDeviceGetMarginTemperature": lambda slot: limits.THRESHOLDS["slowdown"] - round(slot.board.temperature),
    "nvmlDeviceGetNumFans": lambda _: 0,
    "nvmlDeviceGetFanSpeed_v2": _refuse(NVML_ERROR_NOT_SUPPORTED),
    "nvmlDeviceGetPowerUsage": lambda slot: round(slot.board.power * 1000),
    "nvmlDeviceGetEnforcedPowerLimit": lambda _: _POWER_LIMIT,
    "nvmlDeviceGetPowerManagementLimit": lambda _: _POWER_LIMIT,
    "nvmlDeviceGetPowerManagementDefaultLimit": lambda _: _POWER_LIMIT,
    "nvmlDeviceGetPowerManagementLimitConstraints": lambda _: [200_000, _POWER_LIMIT],
    "nvmlDeviceGetTotalEnergyConsumption": lambda slot: round(slot.board.energy * 1000),
    "nvmlDeviceGetClockInfo": lambda slot, clock: _clock(slot.board.clock, clock),
    "nvmlDeviceGetMaxClockInfo": lambda _, clock: _clock(limits.MAX_CLOCK, clock),
    "nvmlDeviceGetApplicationsClock": _refuse(NVML_ERROR_DEPRECATED),
    "nvmlDeviceGetDefaultApplicationsClock": _refuse(NVML_ERROR_DEPRECATED),
    "nvmlDeviceGetCurrentClocksEventReasons": _reasons,
    "nvmlDeviceGetSupportedClocksEventReasons": lambda _: _ALL_REASONS,
    "nvmlDeviceGetCurrentClocksThrottleReasons": _reasons,
    "nvmlDeviceGetSupportedClocksThrottleReasons": lambda _: _ALL_REASONS,
    "nvmlDeviceGetPerformanceState": lambda _: 0,  # an H100 is in P0 even when idle
    "nvmlDeviceGetCurrPcieLinkGeneration": lambda _: 5,
    "nvmlDeviceGetCurrPcieLinkWidth": lambda _: 16,
    "nvmlDeviceGetMaxPcieLinkGeneration": lambda _: 5,
    "nvmlDeviceGetGpuMaxPcieLinkGeneration": lambda _: 5,
    "nvmlDeviceGetMaxPcieLinkWidth": lambda _: 16,
    "nvmlDeviceGetPcieThroughput": _pcie_throughput,
    "nvmlDeviceGetMemoryErrorCounter": _memory_errors,
    "nvmlDeviceGetSramEccErrorStatus": lambda _: structs.SramErrors(),
    "nvmlDeviceGetRowRemapperHistogram": lambda _: structs.SpareRows(),
    "nvmlDeviceGetGpuFabricInfoV": lambda _: structs.FabricInfo(),
    "nvmlDeviceGetPersistenceMode": lambda _: 1,
    "nvmlDeviceGetComputeMode": lambda _: 0,
    "nvmlDeviceGetAccountingMode": lambda _: 0,
    "nvmlDeviceGetDisplayActive": lambda _: 0,
    "nvmlDeviceGetAddressingMode": lambda _: 1,
    "nvmlDeviceGetVirtualizationMode": lambda _: 0,
    "nvmlDeviceGetRepairStatus": lambda _: [0, 0],
    "nvmlDeviceGetUnrepairableMemoryFlag_v1": lambda _: 0,
    "nvmlDeviceGetFieldValues": lambda slot, fields: [_field(slot, *field) for field in fields],
    "nvmlDeviceGetComputeRunningProcesses": _processes,
    "nvmlDeviceGetGraphicsRunningProcesses": lambda _: [],
    "nvmlGpmQueryDeviceSupport": lambda _: structs.GpmSupport(1),
    "nvmlGpmSampleGet": _sample,
    "nvmlGpmMigSampleGet": _refuse(NVML_ERROR_INVALID_ARGUMENT),
    "nvmlDeviceGetMigMode": lambda _: [0, 0],
    "nvmlDeviceGetMaxMigDeviceCount": lambda _: 7,
    "nvmlDeviceGetMigDeviceHandleByIndex": _refuse(NVML_ERROR_NOT_FOUND),
    "nvmlDeviceGetGpuInstanceId": _refuse(NVML_ERROR_INVALID_ARGUMENT),
    "nvmlDeviceGetComputeInstanceId": _refuse(NVML_ERROR_INVALID_ARGUMENT),
    "nvmlDeviceGetAttributes_v2": _refuse(NVML_ERROR_INVALID_ARGUMENT),
}
