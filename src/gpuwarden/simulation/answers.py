"""Answers of a simulated GPU: those of a recorded H100, with simulated readings in place of those that change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pynvml import NVML_ERROR_NOT_SUPPORTED, NVML_SUCCESS  # noqa: TID251 - return codes; nothing is called

from gpuwarden.capture import nvml_stand_ins
from gpuwarden.capture.capture_file import FIELD_VALUES, Frame, format_question, load_capture
from gpuwarden.capture.replay import replay_answer
from gpuwarden.nvml import fields
from gpuwarden.nvml.constants import (
    CLOCK_EVENT_REASONS,
    CLOCKS,
    GPM_DRAM_ACTIVE,
    GPM_GRAPHICS_ENGINE,
    GPM_PCIE,
    GPM_PIPES,
    GPM_SM_ACTIVE,
    GPM_SM_OCCUPANCY,
    GPM_TENSOR_OPERATIONS,
    MEMORY_V2,
    NO_INSTANCE,
    TEMPERATURE_CORE,
)
from gpuwarden.nvml.interface import Field, FieldValue
from gpuwarden.simulation.board import MEMORY_CLOCK, THRESHOLDS, Board
from gpuwarden.simulation.trainer import WorkloadHost
from gpuwarden.simulation.workloads import MIB, RESERVED, SIZE, UNOWNED

_BAR1_SIZE = 128 << 30
_PCIE_BYTES_PER_SECOND = {"transmit": 0.3e9, "receive": 2.2e9}  # by a board that is always busy
_NVLINK_LINKS, _NVLINK_LINK_BYTES_PER_SECOND = 18, 26_562e6  # in each direction


class SimulatedGpu:
    """One simulated GPU: its hardware and software."""

    def __init__(self, index: int, board: Board, workload_host: WorkloadHost) -> None:
        self.index = index
        self.size = SIZE
        self.claims: dict[int, int] = {}  # bytes of real processes that report to it, by pid
        self.uuid = simulated_uuid(index)
        self.board = board
        self.workload_host = workload_host

    @property
    def reserved(self) -> int:
        """Bytes that the driver keeps for itself."""
        return RESERVED * self.size // SIZE

    def processes(self) -> list[tuple[int, int]]:
        """Return the processes on the GPU with their memory in bytes."""
        return [*self.workload_host.processes(), *self.claims.items()]


def simulated_uuid(index: int) -> str:
    """Return the UUID of the GPU of an index, which shows that it is simulated."""
    return f"GPU-51300000-0000-4000-8000-{index:012x}"


@cache
def recorded_frame() -> Frame:
    """Return the answers of an idle H100 with driver 590, without the readings that change."""
    return load_capture(Path(__file__).with_name("h100.json")).frames[0]


def compute_answer(gpu: SimulatedGpu, function: str, *arguments: Any) -> Any:
    """Return a GPU's answer at its board's current time. Raises NVMLError."""
    moving = MOVING.get(function)
    if moving is not None and (found := moving(gpu, *arguments)) is not None:
        return found
    return replay_answer(recorded_frame().gpus[0], function, *arguments)


def fill_gpm_metrics(request: nvml_stand_ins.PlainGpmRequest) -> None:
    """Fill in the mean of two samples."""
    for metric in request.wanted():
        if metric.metricId in request.sample2:
            metric.value = (request.sample1[metric.metricId] + request.sample2[metric.metricId]) / 2
        else:
            metric.nvmlReturn = NVML_ERROR_NOT_SUPPORTED


def _processes(gpu: SimulatedGpu) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(pid=pid, usedGpuMemory=used, gpuInstanceId=NO_INSTANCE, computeInstanceId=NO_INSTANCE)
        for pid, used in gpu.processes()
    ]


def _memory(gpu: SimulatedGpu, version: int | None = None) -> SimpleNamespace:
    capacity = gpu.size - gpu.reserved
    used = min(UNOWNED + sum(used for _pid, used in gpu.processes()), capacity)
    free = capacity - used
    if version == MEMORY_V2:
        return SimpleNamespace(total=gpu.size, reserved=gpu.reserved, free=free, used=used)
    # Version 1 includes reserved memory in used.
    return SimpleNamespace(total=gpu.size, free=free, used=used + gpu.reserved)


def _bar1(gpu: SimulatedGpu) -> SimpleNamespace:
    used = (2 + 2 * len(gpu.processes())) * MIB
    return SimpleNamespace(bar1Total=_BAR1_SIZE, bar1Free=_BAR1_SIZE - used, bar1Used=used)


def _clock(gpu: SimulatedGpu, clock: int) -> int | None:
    graphics = gpu.board.clock
    clocks = {"graphics": graphics, "sm": graphics, "memory": MEMORY_CLOCK, "video": round(0.9 * graphics)}
    return {CLOCKS[name]: megahertz for name, megahertz in clocks.items()}.get(clock)


def _reasons(gpu: SimulatedGpu) -> int:
    return sum(CLOCK_EVENT_REASONS[name] for name in gpu.board.point.reasons)


def _field_values(gpu: SimulatedGpu, asked: Sequence[Field]) -> list[FieldValue]:
    return [_field(gpu, *field) for field in asked]


def _field(gpu: SimulatedGpu, number: int, scope: int) -> FieldValue:
    value: Any
    if number in _MOVING_FIELDS:
        value = _MOVING_FIELDS[number](gpu.board, scope)
    else:
        value = recorded_frame().gpus[0].get(format_question(FIELD_VALUES, number, scope))
    return (NVML_ERROR_NOT_SUPPORTED, None) if value is None else (NVML_SUCCESS, value)


def _unscoped(value: Callable[[Board], float]) -> Callable[[Board, int], int | None]:
    return lambda board, scope: None if scope else round(value(board))


def _held(reason: str) -> Callable[[Board], float]:
    return lambda board: board.held.get(reason, 0.0) * 1e9


def _pcie_bytes(direction: str) -> Callable[[Board], float]:
    return lambda board: board.busy * _PCIE_BYTES_PER_SECOND[direction]


def _nvlink_kibibytes(board: Board, scope: int) -> int | None:
    if scope not in {fields.ALL_LINKS, *range(_NVLINK_LINKS)}:
        return None
    links = _NVLINK_LINKS if scope == fields.ALL_LINKS else 1
    return round(board.exchanged * _NVLINK_LINK_BYTES_PER_SECOND / 1024) * links


def _gpm_sample(gpu: SimulatedGpu, sample: dict[int, float]) -> bool:
    """Fill a sample: percent, and traffic in MiB per second."""
    busy, bandwidth = gpu.board.utilization
    sample |= {number: ratio * busy for number, ratio in _GPM_RATIOS.items()}
    sample[GPM_DRAM_ACTIVE] = 0.8 * bandwidth
    return True


# GPM metrics as ratios of utilization in percent.
_GPM_RATIOS = {
    GPM_GRAPHICS_ENGINE: 1.0,
    GPM_SM_ACTIVE: 0.85,
    GPM_SM_OCCUPANCY: 0.36,
    **dict.fromkeys(GPM_TENSOR_OPERATIONS.values(), 0.0),
    GPM_TENSOR_OPERATIONS["hmma"]: 0.41,
    GPM_PIPES["tensor"]: 0.41,
    GPM_PIPES["fp64"]: 0.0,
    GPM_PIPES["fp32"]: 0.11,
    GPM_PIPES["fp16"]: 0.03,
    GPM_PIPES["integer"]: 0.08,
    **{GPM_PCIE[direction]: rate / MIB / 100 for direction, rate in _PCIE_BYTES_PER_SECOND.items()},
}
_MOVING_FIELDS: dict[int, Callable[[Board, int], int | None]] = {
    **{number: _unscoped(_held(reason)) for reason, number in fields.CLOCK_EVENT_NANOSECONDS.items()},
    **{number: _unscoped(_pcie_bytes(direction)) for direction, number in fields.PCIE_BYTES.items()},
    **dict.fromkeys(fields.NVLINK_KIBIBYTES.values(), _nvlink_kibibytes),
    **dict.fromkeys((fields.POWER_AVERAGE, fields.POWER_INSTANT), _unscoped(lambda board: board.power * 1000)),
    fields.MEMORY_TEMPERATURE: _unscoped(lambda board: board.memory_temperature),
}
# None falls back to the recorded answer.
MOVING: dict[str, Callable[..., Any]] = {
    "nvmlDeviceGetUUID": lambda gpu: gpu.uuid,
    "nvmlDeviceGetPciInfo": lambda gpu: SimpleNamespace(busId=f"00000000:{0x10 + gpu.index:02X}:00.0"),
    "nvmlDeviceGetMinorNumber": lambda gpu: gpu.index,
    "nvmlDeviceGetSerial": lambda gpu: f"165312{gpu.index:07d}",
    "nvmlDeviceGetMemoryInfo": _memory,
    "nvmlDeviceGetBAR1MemoryInfo": _bar1,
    "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(
        gpu=gpu.board.utilization[0], memory=gpu.board.utilization[1]
    ),
    "nvmlDeviceGetTemperature": lambda gpu, sensor: (
        round(gpu.board.temperature) if sensor == TEMPERATURE_CORE else None
    ),
    "nvmlDeviceGetMarginTemperature": lambda gpu: THRESHOLDS["slowdown"] - round(gpu.board.temperature),
    "nvmlDeviceGetPowerUsage": lambda gpu: round(gpu.board.power * 1000),
    "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: round(gpu.board.energy * 1000),
    "nvmlDeviceGetClockInfo": _clock,
    "nvmlDeviceGetCurrentClocksEventReasons": _reasons,
    "nvmlDeviceGetCurrentClocksThrottleReasons": _reasons,
    FIELD_VALUES: _field_values,
    "nvmlDeviceGetComputeRunningProcesses": _processes,
    "nvmlGpmSampleGet": _gpm_sample,
}
