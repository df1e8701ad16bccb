"""GPUs whose readings a test sets, through NVML: the recorded answers of an idle H100, and those of a board."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from faulty_simulation import SLOWDOWN, FaultySimulation

from gpuwarden.capture.capture_file import FIELD_VALUES, GPM_METRICS, Answer, Frame, format_question
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
)

MIB, GIB = 1 << 20, 1 << 30
SIZE, RESERVED = 81559 * MIB, 479 * MIB  # of an H100's memory
UNOWNED = 4 * MIB  # in use without any process
CAPACITY = SIZE - RESERVED - UNOWNED  # bytes that processes can have
CONTEXT = 610 * MIB  # memory of CUDA, cuBLAS and cuDNN, outside of the framework's pool
_MEMORY_CLOCK = 2619  # megahertz
_BAR1_SIZE = 128 << 30
_PCIE_BYTES_PER_SECOND = {"transmit": 0.3e9, "receive": 2.2e9}  # by a board that is always busy
_NVLINK_LINKS, _NVLINK_LINK_BYTES_PER_SECOND = 18, 26_562e6  # in each direction

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


# Readings of a GPU: temperature and memory_temperature in celsius, power in watts, clock in megahertz, utilization as
# percent of a kernel and of device memory, the reasons that limit the clock, held with their seconds, energy in joules,
# busy and exchanged in seconds, and processes(), each with its pid and bytes.
Board: TypeAlias = Any


class ScriptedSimulation(FaultySimulation):
    """Simulation with the readings of boards. They are read once at each time of the clock."""

    def __init__(self, boards: Sequence[Board], clock: Callable[[], float]) -> None:
        self._boards = boards
        self._read: tuple[float, Frame] | None = None
        super().__init__(len(boards), clock)
        for index in range(len(boards)):
            self.set_idle(index)
        self._same = super()._frame().gpus

    def _frame(self) -> Frame:
        now = self._clock()
        if self._read is None or self._read[0] != now:
            gpus = ({**same, **read_board(board)} for same, board in zip(self._same, self._boards, strict=True))
            self._read = now, Frame(self._driver, tuple(gpus))
        return self._read[1]


def read_board(board: Board) -> dict[str, Answer]:
    """Return the answers that follow from a board's readings, by question."""
    processes = board.processes()
    used = min(UNOWNED + sum(used for _pid, used in processes), SIZE - RESERVED)
    free = SIZE - RESERVED - used
    busy, bandwidth = board.utilization
    reasons = sum(CLOCK_EVENT_REASONS[name] for name in board.reasons)
    clocks = {"graphics": 1.0, "sm": 1.0, "video": 0.9}
    held = {number: board.held.get(reason, 0.0) * 1e9 for reason, number in fields.CLOCK_EVENT_NANOSECONDS.items()}
    pcie = {number: board.busy * _PCIE_BYTES_PER_SECOND[name] for name, number in fields.PCIE_BYTES.items()}
    link = round(board.exchanged * _NVLINK_LINK_BYTES_PER_SECOND / 1024)
    moving = {
        **held,
        **pcie,
        fields.POWER_AVERAGE: board.power * 1000,
        fields.POWER_INSTANT: board.power * 1000,
        fields.MEMORY_TEMPERATURE: board.memory_temperature,
    }
    return {
        "nvmlDeviceGetMemoryInfo": {"total": SIZE, "free": free, "used": used + RESERVED},
        f"nvmlDeviceGetMemoryInfo({MEMORY_V2})": {"total": SIZE, "reserved": RESERVED, "free": free, "used": used},
        "nvmlDeviceGetBAR1MemoryInfo": {
            "bar1Total": _BAR1_SIZE,
            "bar1Free": _BAR1_SIZE - (2 + 2 * len(processes)) * MIB,
            "bar1Used": (2 + 2 * len(processes)) * MIB,
        },
        "nvmlDeviceGetComputeRunningProcesses": [
            {"pid": pid, "usedGpuMemory": used, "gpuInstanceId": NO_INSTANCE, "computeInstanceId": NO_INSTANCE}
            for pid, used in processes
        ],
        "nvmlDeviceGetUtilizationRates": {"gpu": busy, "memory": bandwidth},
        "nvmlDeviceGetTemperature(0)": round(board.temperature),
        "nvmlDeviceGetMarginTemperature": SLOWDOWN - round(board.temperature),
        "nvmlDeviceGetPowerUsage": round(board.power * 1000),
        "nvmlDeviceGetTotalEnergyConsumption": round(board.energy * 1000),
        "nvmlDeviceGetCurrentClocksEventReasons": reasons,
        "nvmlDeviceGetCurrentClocksThrottleReasons": reasons,
        format_question("nvmlDeviceGetClockInfo", CLOCKS["memory"]): _MEMORY_CLOCK,
        **{
            format_question("nvmlDeviceGetClockInfo", CLOCKS[name]): round(ratio * board.clock)
            for name, ratio in clocks.items()
        },
        **{format_question(FIELD_VALUES, number, 0): round(value) for number, value in moving.items()},
        **{
            format_question(FIELD_VALUES, number, scope): link * (_NVLINK_LINKS if scope == fields.ALL_LINKS else 1)
            for number in fields.NVLINK_KIBIBYTES.values()
            for scope in (fields.ALL_LINKS, *range(_NVLINK_LINKS))
        },
        **{format_question(GPM_METRICS, number): ratio * busy for number, ratio in _GPM_RATIOS.items()},
        format_question(GPM_METRICS, GPM_DRAM_ACTIVE): 0.8 * bandwidth,
    }
