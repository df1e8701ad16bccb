"""One GPU with answers from tables, so that a test can change a single answer."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pynvml

from gpuwarden.gpu.reader import Answers, GpuReader, Plan
from gpuwarden.metrics.model import Labels, Metric
from gpuwarden.nvml import fields
from gpuwarden.nvml.interface import FUNCTIONS, Handle, Nvml
from gpuwarden.nvml.return_codes import nvml_error

GIB = 2**30
HANDLE = cast("Handle", "the only GPU")
LINKS = 2
OPTIONS = ("gpus.pcie_throughput",)


class ErrorAnswer:
    """An answer that is one of NVML's errors."""

    def __init__(self, code: int) -> None:
        self.code = code


UNSUPPORTED = ErrorAnswer(pynvml.NVML_ERROR_NOT_SUPPORTED)
UNKNOWN = ErrorAnswer(pynvml.NVML_ERROR_UNKNOWN)
LOST = ErrorAnswer(pynvml.NVML_ERROR_GPU_IS_LOST)

MEMORY = SimpleNamespace(total=80 * GIB, used=30 * GIB, free=49 * GIB, reserved=1 * GIB)
SRAM = SimpleNamespace(
    volatileCor=1,
    volatileUncParity=2,
    volatileUncSecDed=3,
    aggregateCor=4,
    aggregateUncParity=5,
    aggregateUncSecDed=6,
    aggregateUncBucketL2=7,
    aggregateUncBucketSm=8,
    aggregateUncBucketPcie=9,
    aggregateUncBucketMcu=10,
    aggregateUncBucketOther=11,
    bThresholdExceeded=1,
)
# A device that supports everything, which no real one does.
ANSWERS: dict[str, Any] = {
    "nvmlDeviceGetMemoryInfo": MEMORY,
    "nvmlDeviceGetBAR1MemoryInfo": SimpleNamespace(bar1Total=128 * GIB, bar1Free=127 * GIB, bar1Used=1 * GIB),
    "nvmlDeviceGetMemoryBusWidth": 5120,
    "nvmlDeviceGetNumaNodeId": 1,
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=90, memory=40),
    "nvmlDeviceGetEncoderUtilization": [10, 167_000],
    "nvmlDeviceGetDecoderUtilization": [20, 167_000],
    "nvmlDeviceGetJpgUtilization": [30, 167_000],
    "nvmlDeviceGetOfaUtilization": [40, 167_000],
    "nvmlDeviceGetEncoderStats": (2, 184, 62_844),
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetTemperatureThreshold": 89,
    "nvmlDeviceGetMarginTemperature": 26,
    "nvmlDeviceGetNumFans": 2,
    "nvmlDeviceGetFanSpeed_v2": lambda fan: 30 + fan,
    "nvmlDeviceGetPowerUsage": 345_678,
    "nvmlDeviceGetEnforcedPowerLimit": 600_000,
    "nvmlDeviceGetPowerManagementLimit": 650_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
    "nvmlDeviceGetPowerManagementLimitConstraints": [200_000, 710_000],
    "nvmlDeviceGetTotalEnergyConsumption": 123_456_789,
    "nvmlDeviceGetClockInfo": 1980,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetApplicationsClock": 1755,
    "nvmlDeviceGetDefaultApplicationsClock": 1410,
    "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
    "nvmlDeviceGetSupportedClocksEventReasons": 0x1FF,
    "nvmlDeviceGetPerformanceState": 0,
    "nvmlDeviceGetCurrPcieLinkGeneration": 4,
    "nvmlDeviceGetCurrPcieLinkWidth": 8,
    "nvmlDeviceGetMaxPcieLinkGeneration": 4,
    "nvmlDeviceGetGpuMaxPcieLinkGeneration": 5,
    "nvmlDeviceGetMaxPcieLinkWidth": 16,
    "nvmlDeviceGetPcieThroughput": lambda direction: 450_000 + direction,
    "nvmlDeviceGetMemoryErrorCounter": lambda kind, lifetime, location: 100 * kind + 10 * lifetime + location,
    "nvmlDeviceGetSramEccErrorStatus": SRAM,
    "nvmlDeviceGetRowRemapperHistogram": SimpleNamespace(max=2556, high=3, partial=0, low=0, none=1),
    "nvmlDeviceGetGpuFabricInfoV": SimpleNamespace(status=0, state=3, cliqueId=7, healthMask=0b01101010),
    "nvmlDeviceGetPersistenceMode": 1,
    "nvmlDeviceGetComputeMode": 3,
    "nvmlDeviceGetMigMode": [0, 1],
    "nvmlDeviceGetAccountingMode": 0,
    "nvmlDeviceGetDisplayActive": 1,
    "nvmlDeviceGetAddressingMode": 1,
    "nvmlDeviceGetVirtualizationMode": 1,
    "nvmlDeviceGetRepairStatus": [0, 1],
    "nvmlDeviceGetUnrepairableMemoryFlag_v1": 1,
    "nvmlDeviceGetNumGpuCores": 16896,
    "nvmlDeviceGetInforomImageVersion": "G520.0200.00.05",
    "nvmlDeviceGetInforomVersion": lambda part: ("2.1", "7.16", "1.0")[part],
    "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=7, usedGpuMemory=20 * GIB)],
    "nvmlDeviceGetGraphicsRunningProcesses": [],
}
FieldChange = float | None | ErrorAnswer | Callable[[int], Any]  # a function: of the scope; None: not supported
# By the field's number.
FIELDS: dict[int, FieldChange] = {
    fields.ECC_CURRENT: 1,
    fields.ECC_PENDING: 0,
    **dict.fromkeys(fields.ECC_TOTALS.values(), 60),
    **{number: number for number in fields.RETIRED_PAGES.values()},
    fields.RETIRED_PAGES_PENDING: 1,
    **{number: number * 10**9 for number in fields.CLOCK_EVENT_NANOSECONDS.values()},
    fields.MEMORY_TEMPERATURE: 54,
    **dict.fromkeys(fields.MARGIN_THRESHOLDS.values(), -8),
    fields.POWER_INSTANT: lambda scope: 625_680 if scope == 0 else None,
    fields.POWER_AVERAGE: lambda scope: 631_950 if scope == 0 else None,
    fields.PCIE_REPLAYS: 12,
    **{number: number for number in fields.PCIE_ERRORS.values()},
    **{number: number << 32 for number in fields.PCIE_BYTES.values()},
    fields.NVLINK_COUNT: LINKS,
    fields.NVLINK_SPEED: 26_562,
    fields.NVLINK_STATE: lambda link: 1 - link,
    **dict.fromkeys(fields.NVLINK_KIBIBYTES.values(), lambda scope: 1000 if scope == fields.ALL_LINKS else 10),
    **{fields.NVLINK_ERRORS[name]: lambda link: 5 * link for name in ("replay", "recovery", "crc")},
    **{number: number for number in fields.NVLINK_ERROR_TOTALS.values()},
    **{number: number for number in fields.REMAPPED_ROWS.values()},
    fields.ROW_REMAP_PENDING: 1,
    fields.ROW_REMAP_FAILED: 0,
    fields.C2C_COUNT: 1,
    fields.C2C_STATUS: 1,
    fields.C2C_SPEED: 50_000,
    **{number: number for number in fields.C2C_ERRORS.values()},
    fields.RECOVERY_ACTION: 1,
}


class FakeNvml:
    """Answers from a dict of NVML functions; counts the questions. `fields` changes field values by number."""

    def __init__(self, fields: Mapping[int, FieldChange] | None = None, /, **changes: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fields: dict[int, FieldChange] = {**FIELDS, **(fields or {})}
        answers = dict.fromkeys(FUNCTIONS, UNSUPPORTED) | ANSWERS | {"nvmlDeviceGetFieldValues": self._field_values}
        for name, answer in (answers | changes).items():
            setattr(self, name, self._function(name, answer))

    def _function(self, name: str, answer: Any) -> Callable[..., Any]:
        def function(handle: object, *arguments: object) -> Any:
            assert handle == HANDLE
            self.calls.append((name, *arguments))
            value = answer(*arguments) if callable(answer) else answer
            if isinstance(value, ErrorAnswer):
                raise nvml_error(value.code)
            return value

        return function

    def _field_values(self, asked: Sequence[tuple[int, int]]) -> list[tuple[int, float | None]]:
        return [self._field(*field) for field in asked]

    def _field(self, number: int, scope: int) -> tuple[int, float | None]:
        answer = self.fields.get(number)
        value = answer(scope) if callable(answer) else answer
        if isinstance(value, ErrorAnswer):
            return value.code, None
        return (pynvml.NVML_ERROR_NOT_SUPPORTED, None) if value is None else (0, value)


class Gpu:
    """A fake GPU and its reader, on a clock that the test moves."""

    def __init__(
        self,
        fields: Mapping[int, FieldChange] | None = None,
        /,
        *,
        opted_in: Iterable[str] = OPTIONS,
        **changes: Any,
    ) -> None:
        self.now = 0.0
        self.nvml = FakeNvml(fields, **changes)
        plan = Plan(opted_in=frozenset(opted_in))
        self.reader = GpuReader(cast("Nvml", self.nvml), HANDLE, plan, clock=lambda: self.now)

    def read(self, after: float = 0.0) -> Answers:
        """Read once, this many seconds after the last time."""
        self.now += after
        return self.reader.read()


def read(fields: Mapping[int, FieldChange] | None = None, /, **changes: Any) -> Answers:
    """Read the fake GPU with some answers changed."""
    return Gpu(fields, **changes).read()


def reading(row: Metric[Any], fields: Mapping[int, FieldChange] | None = None, /, **changes: Any) -> Any:
    """Read one row of the fake GPU with some answers changed."""
    return read(fields, **changes).readings.get(row)


def label_readings(names: Mapping[str, float]) -> dict[Labels, float]:
    """Write the reading of a row with one label."""
    return {(name,): value for name, value in names.items()}


def scalars(answers: Answers) -> Iterator[Metric[Any]]:
    """Return the rows that have a reading."""
    return (row for row, found in answers.readings.items() if found is not None and found != {})
