"""Reading one GPU: absent is absent, a fault costs what it spoils, and the driver is asked once a question."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pynvml
import pytest
from simulated_box import Clock

from gpuwarden.gpu.gpm import OPTION as GPM_OPTION
from gpuwarden.gpu.nvml import FUNCTIONS, Handle, Nvml, nvml_error
from gpuwarden.gpu.reader import DEFAULT_PLAN, Answers, GpuGoneError, GpuReader
from gpuwarden.gpu.table import GpuReadings
from gpuwarden.metric import Metric
from gpuwarden.sources import gpm

GIB = 2**30
HANDLE = cast("Handle", "the only GPU")
MEMORY = SimpleNamespace(total=80 * GIB, used=30 * GIB, free=49 * GIB, reserved=1 * GIB)
ANSWERS: dict[str, Any] = {
    "nvmlDeviceGetMemoryInfo": MEMORY,
    "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=90, memory=40),
    "nvmlDeviceGetTemperature": 61,
    "nvmlDeviceGetTemperatureThreshold": 89,
    "nvmlDeviceGetMarginTemperature": 26,
    "nvmlDeviceGetPowerUsage": 345_678,
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetPowerManagementLimit": 700_000,
    "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
    "nvmlDeviceGetTotalEnergyConsumption": 123_456_789,
    "nvmlDeviceGetClockInfo": 1980,
    "nvmlDeviceGetMaxClockInfo": 1980,
    "nvmlDeviceGetCurrentClocksEventReasons": 0x4,
    "nvmlDeviceGetSupportedClocksEventReasons": 0x1FF,
    "nvmlDeviceGetPerformanceState": 0,
    "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=7, usedGpuMemory=20 * GIB)],
    "nvmlDeviceGetGraphicsRunningProcesses": [],
    "nvmlGpmQueryDeviceSupport": SimpleNamespace(isSupportedDevice=1),
    "nvmlGpmSampleGet": None,
}


class Fails:
    """An answer that is one of NVML's errors."""

    def __init__(self, code: int) -> None:
        self.code = code


UNSUPPORTED = Fails(pynvml.NVML_ERROR_NOT_SUPPORTED)
UNKNOWN = Fails(pynvml.NVML_ERROR_UNKNOWN)
LOST = Fails(pynvml.NVML_ERROR_GPU_IS_LOST)


class FakeNvml:
    """Answers from a dict of NVML functions; a number of NVML_ERROR_* raises that error. Counts the questions."""

    def __init__(self, **changes: Any) -> None:
        self.asked: list[tuple[Any, ...]] = []
        for name, answer in (dict.fromkeys(FUNCTIONS, UNSUPPORTED) | ANSWERS | changes).items():
            setattr(self, name, self._function(name, answer))
        self.nvmlGpmSampleAlloc = object
        self.nvmlGpmSampleFree = lambda _sample: None
        self.nvmlGpmMetricsGet = halfway
        self.c_nvmlGpmMetricsGet_t = gpm.Request

    def _function(self, name: str, answer: Any) -> Callable[..., Any]:
        def function(handle: object, *arguments: object) -> Any:
            assert handle == HANDLE
            self.asked.append((name, *arguments))
            value = answer(*arguments) if callable(answer) else answer
            if isinstance(value, Fails):
                raise nvml_error(value.code)
            return value

        return function


def halfway(request: gpm.Request) -> None:
    """Answer every metric with 50 percent."""
    for metric in request.wanted():
        metric.value = 50.0


def read(**changes: Any) -> Answers:
    """Read the fake GPU with some answers changed, all of it a second time, as rates need two readings."""
    clock = Clock()
    reader = GpuReader(cast("Nvml", FakeNvml(**changes)), HANDLE, clock=clock)
    reader.read()
    clock.sleep(DEFAULT_PLAN.slow_interval)
    return reader.read()


def scalars(answers: Answers) -> Iterator[Metric[Any]]:
    """Return the rows that have a reading."""
    return (row for row, reading in answers.readings.items() if reading is not None and reading != {})


def test_units_are_base_units() -> None:
    """Milliwatts, megahertz, percent and millijoules come out as watts, hertz, ratios and joules."""
    readings = read().readings
    assert readings[GpuReadings.power_usage_watts] == 345.678
    assert readings[GpuReadings.utilization_ratio] == 0.9
    assert readings[GpuReadings.energy_joules_total] == 123_456.789
    assert readings[GpuReadings.clock_hertz] == dict.fromkeys([("graphics",), ("sm",), ("memory",), ("video",)], 1.98e9)
    active = cast("dict[tuple[str], float]", readings[GpuReadings.clock_event_active])
    assert {name for (name,), value in active.items() if value} == {"sw_power_cap"}


def test_every_row_reads_a_full_device() -> None:
    """A device that supports everything has a reading in every row."""
    assert set(scalars(read())) == set(GpuReadings.rows)


WITHOUT: dict[str, set[Metric[Any]]] = {
    "nvmlDeviceGetMemoryInfo": {GpuReadings.memory_reserved_bytes},  # the machine's memory stands in for the rest
    "nvmlDeviceGetUtilizationRates": {
        GpuReadings.utilization_ratio,
        GpuReadings.busy_seconds_total,
        GpuReadings.memory_bandwidth_utilization_ratio,
    },
    "nvmlDeviceGetTemperature": {GpuReadings.temperature_celsius},
    "nvmlDeviceGetTemperatureThreshold": {GpuReadings.temperature_threshold_celsius},
    "nvmlDeviceGetMarginTemperature": set(),  # the distance to the threshold stands in
    "nvmlDeviceGetPowerUsage": {GpuReadings.power_usage_watts},
    "nvmlDeviceGetEnforcedPowerLimit": set(),  # one limit less
    "nvmlDeviceGetTotalEnergyConsumption": {GpuReadings.energy_joules_total},
    "nvmlDeviceGetClockInfo": {GpuReadings.clock_hertz},
    "nvmlDeviceGetMaxClockInfo": {GpuReadings.clock_max_hertz},
    "nvmlDeviceGetCurrentClocksEventReasons": {GpuReadings.clock_event_active},
    "nvmlDeviceGetSupportedClocksEventReasons": set(),  # then every reason may be told
    "nvmlDeviceGetPerformanceState": {GpuReadings.performance_state},
    "nvmlGpmQueryDeviceSupport": {row for row in GpuReadings.rows if row.opt_in == GPM_OPTION},
    "nvmlGpmSampleGet": {row for row in GpuReadings.rows if row.opt_in == GPM_OPTION},
}


@pytest.mark.parametrize(("function", "missing"), WITHOUT.items())
def test_unsupported_call_leaves_its_readings_out(function: str, missing: set[Metric[Any]]) -> None:
    """What a device does not support yields no reading and no error; the others stay."""
    answers = read(**{function: UNSUPPORTED})
    assert not answers.errors
    assert set(GpuReadings.rows) - set(scalars(answers)) == missing


def test_nothing_is_a_made_up_number() -> None:
    """On a device that supports memory alone, memory alone is read."""
    answers = read(**{name: UNSUPPORTED for name in ANSWERS if name != "nvmlDeviceGetMemoryInfo"})
    assert {row.name for row in scalars(answers)} == {
        "gpuwarden_gpu_memory_size_bytes",
        "gpuwarden_gpu_memory_used_bytes",
        "gpuwarden_gpu_memory_free_bytes",
        "gpuwarden_gpu_memory_reserved_bytes",
        "gpuwarden_gpu_memory_used_peak_bytes",
        "gpuwarden_gpu_memory_unified",
    }


def test_older_driver_without_memory_v2() -> None:
    """Version 1 of the memory call serves where version 2 is missing; the reserved share is then unknown."""
    answers = read(nvmlDeviceGetMemoryInfo=lambda version=None: UNSUPPORTED if version else MEMORY)
    assert answers.readings[GpuReadings.memory_used_bytes] == 30 * GIB
    assert answers.readings[GpuReadings.memory_reserved_bytes] is None


@pytest.mark.parametrize(("margin", "expected"), [(26, 26), (0, 28), (-3, 28), (UNSUPPORTED, 28)])
def test_margin_of_zero_or_less_is_not_believed(margin: Any, expected: int) -> None:
    """The driver's margin counts when positive; else the distance to the slowdown threshold does."""
    assert read(nvmlDeviceGetMarginTemperature=margin).readings[GpuReadings.temperature_margin_celsius] == expected


def test_threshold_of_zero_is_none() -> None:
    """Some boards answer 0 for a threshold that is not set: it is no threshold, and no margin follows from it."""
    readings = read(nvmlDeviceGetTemperatureThreshold=0, nvmlDeviceGetMarginTemperature=UNSUPPORTED).readings
    assert readings[GpuReadings.temperature_threshold_celsius] == {}
    assert readings[GpuReadings.temperature_margin_celsius] is None


def test_unknown_performance_state_is_absent() -> None:
    """NVML's number for an unknown state, 32, is no state."""
    assert read(nvmlDeviceGetPerformanceState=32).readings[GpuReadings.performance_state] is None


def test_failing_call_costs_its_readings_and_is_counted() -> None:
    """An error of one call spoils its rows alone and is counted by NVML's name."""
    answers = read(nvmlDeviceGetPowerUsage=UNKNOWN)
    assert GpuReadings.power_usage_watts not in answers.readings
    assert answers.errors == {"unknown": 1}
    assert answers.readings[GpuReadings.memory_used_bytes] == 30 * GIB


def test_lost_gpu_is_gone() -> None:
    """A lost GPU has no readings at all, wherever in the poll it is lost."""
    for function in ANSWERS:
        with pytest.raises(GpuGoneError, match="gpu_is_lost"):
            read(**{function: LOST})


def test_gpu_on_which_everything_fails_is_gone() -> None:
    """A GPU whose every call fails does not answer, whatever the errors are called."""
    with pytest.raises(GpuGoneError, match="unknown"):
        read(**dict.fromkeys(ANSWERS, UNKNOWN))


def test_gpu_that_knows_no_question_is_gone() -> None:
    """A GPU without a single reading is not shown as answering, though no call failed by an error that counts."""
    with pytest.raises(GpuGoneError, match="no_reading"):
        read(**dict.fromkeys(ANSWERS, Fails(pynvml.NVML_ERROR_INVALID_ARGUMENT)))


def test_each_question_is_asked_once() -> None:
    """Rows that share a driver call cost one call a poll."""
    nvml = FakeNvml()
    GpuReader(cast("Nvml", nvml), HANDLE).read()
    assert len(nvml.asked) == len(set(nvml.asked))


def test_process_listed_twice_is_one_process() -> None:
    """A pid that is in both lists, or twice in one, is one process with the larger figure."""
    twice = [SimpleNamespace(pid=7, usedGpuMemory=1 * GIB), SimpleNamespace(pid=7, usedGpuMemory=2 * GIB)]
    graphics = [SimpleNamespace(pid=7, usedGpuMemory=None), SimpleNamespace(pid=8, usedGpuMemory=None)]
    answers = read(nvmlDeviceGetComputeRunningProcesses=twice, nvmlDeviceGetGraphicsRunningProcesses=graphics)
    assert [(p.pid, p.type, p.memory) for p in answers.processes] == [(7, "compute", 2 * GIB), (8, "graphics", None)]


def test_process_listed_twice_without_memory_has_none() -> None:
    """What the driver tells in neither list stays unknown: a 0 would stand for memory it has not measured."""
    untold = [SimpleNamespace(pid=7, usedGpuMemory=None)]
    answers = read(nvmlDeviceGetComputeRunningProcesses=untold, nvmlDeviceGetGraphicsRunningProcesses=untold)
    assert [(p.pid, p.type, p.memory) for p in answers.processes] == [(7, "compute", None)]


def test_failing_process_list_costs_the_processes_alone() -> None:
    """Readings stay when the processes cannot be listed."""
    answers = read(nvmlDeviceGetComputeRunningProcesses=UNKNOWN)
    assert answers.processes == ()
    assert answers.process_lists == ("graphics",)  # of compute processes nothing is known, not even that there are 0
    assert answers.errors == {"unknown": 1}
    assert set(scalars(answers)) == set(GpuReadings.rows)


def test_binding_has_every_function() -> None:
    """Every function of the seam exists in the installed nvidia-ml-py."""
    assert [name for name in FUNCTIONS if not callable(getattr(pynvml, name, None))] == []
