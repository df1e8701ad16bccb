"""Gate for readings: what NVML returns with success, and no GPU can have, is refused, counted and left out."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from fake_gpu import GIB, MEMORY, Gpu, by, read

from gpuwarden.gpu.metrics import GpuReadings as Row
from gpuwarden.gpu.metrics import MigReadings
from gpuwarden.gpu.snapshot import GpuProcess
from gpuwarden.metrics.model import Labels, Metric
from gpuwarden.metrics.reading_gate import DEFAULT_BOUNDS, IMPLAUSIBLE, RESET_SECONDS, ReadingGate

NO_MEMORY = SimpleNamespace(total=0, used=0, free=0, reserved=0)
SLOW = 20.0  # seconds, after which the slow tier is due
NONSENSE: list[tuple[dict[str, Any], Metric[Any], int]] = [  # changed answers, the row, how many readings are refused
    ({"nvmlDeviceGetMemoryInfo": NO_MEMORY}, Row.memory_size_bytes, 5),
    ({"nvmlDeviceGetMemoryInfo": SimpleNamespace(**{**vars(MEMORY), "used": 81 * GIB})}, Row.memory_used_bytes, 1),
    ({"nvmlDeviceGetMemoryInfo": SimpleNamespace(**{**vars(MEMORY), "free": -1})}, Row.memory_free_bytes, 1),
    ({"nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=808334905, memory=40)}, Row.utilization_ratio, 1),
    (
        {"nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=90, memory=1980)},
        Row.memory_bandwidth_utilization_ratio,
        1,
    ),
    ({"nvmlDeviceGetPowerUsage": 4_294_967_000}, Row.power_usage_watts, 1),
    ({"nvmlDeviceGetPerformanceState": 77}, Row.performance_state, 1),
    ({"nvmlDeviceGetCurrPcieLinkWidth": 0xFFFF}, Row.pcie_link_width, 1),
    ({"nvmlDeviceGetMarginTemperature": 2**31}, Row.temperature_margin_celsius, 1),
    ({"nvmlDeviceGetTotalEnergyConsumption": 2**63}, Row.energy_joules_total, 1),
]


@pytest.mark.parametrize(("changes", "row", "refused"), NONSENSE, ids=lambda value: getattr(value, "name", None))
def test_nonsense_is_absent_and_counted(changes: dict[str, Any], row: Metric[Any], refused: int) -> None:
    """A value that no GPU can have is absent, and so is what it bounds; each is counted, the others stay."""
    plain, answers = read(), read(**changes)
    assert plain.readings[row] is not None
    assert answers.readings[row] is None
    assert answers.errors == {IMPLAUSIBLE: refused}
    absent = {
        each for each in plain.readings if plain.readings[each] is not None and answers.readings.get(each) is None
    }
    assert len(absent - {Row.memory_unified, Row.memory_used_peak_bytes, Row.busy_seconds_total}) == min(refused, 4)


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({"nvmlDeviceGetTemperature": 2**31}, Row.temperature_celsius),
        ({"nvmlDeviceGetClockInfo": 0xFFFF}, Row.clock_hertz),
        ({"nvmlDeviceGetMaxClockInfo": 0xFFFF}, Row.clock_max_hertz),
        ({"nvmlDeviceGetEnforcedPowerLimit": 2**31}, Row.power_limit_watts),
    ],
)
def test_nonsense_of_one_label_costs_no_other(changes: dict[str, Any], row: Metric[Any]) -> None:
    """Of a reading with labels only the implausible values are refused."""
    plain, answers = read().readings[row], read(**changes)
    kept = answers.readings[row]
    assert isinstance(plain, dict)
    assert isinstance(kept, dict)
    assert kept.items() < plain.items()
    assert answers.errors[IMPLAUSIBLE] >= len(plain) - len(kept)


def test_log_names_the_first_value(caplog: pytest.LogCaptureFixture) -> None:
    """The first refused value of a metric is logged."""
    gpu = Gpu(nvmlDeviceGetPowerUsage=4_294_967_000)
    for _ in range(2):
        gpu.read(after=1.0)
    (line,) = caplog.messages
    event = "implausible reading refused, further ones are only counted"
    assert line == f"{event} metric={Row.power_usage_watts.name} value=4294967"


def test_integral_takes_no_jump() -> None:
    """Busy seconds do not count the time of a utilization that was refused."""
    gpu = Gpu()
    rates = gpu.nvml.nvmlDeviceGetUtilizationRates  # type: ignore[attr-defined] # made by name
    gpu.read()
    assert gpu.read(after=10.0).readings[Row.busy_seconds_total] == pytest.approx(9.0)
    gpu.nvml.nvmlDeviceGetUtilizationRates = lambda _handle: SimpleNamespace(gpu=808334905, memory=0)  # type: ignore[attr-defined]
    assert gpu.read(after=10.0).readings.get(Row.busy_seconds_total) is None
    gpu.nvml.nvmlDeviceGetUtilizationRates = rates  # type: ignore[attr-defined]
    assert gpu.read(after=10.0).readings[Row.busy_seconds_total] == pytest.approx(18.0)


def test_peaks_take_no_nonsense() -> None:
    """A memory of which more is in use than there is leaves no peak, in a reading or between two."""
    gpu = Gpu()
    gpu.read()
    gpu.reader._memory_probe.samples.extend([(1.0, 2**64 - 1), (1.1, 81 * GIB), (1.2, 31 * GIB)])
    answers = gpu.read(after=1.0)
    assert answers.memory_samples == ((1.2, 31 * GIB),)
    assert answers.readings[Row.memory_used_peak_bytes] == {("1m",): 31 * GIB, ("5m",): 31 * GIB}
    assert answers.errors == {IMPLAUSIBLE: 1}  # 2^64 - 1 means that there is no value


def test_process_with_more_memory_than_the_gpu() -> None:
    """The memory of such a process is unknown."""
    listed = [SimpleNamespace(pid=7, usedGpuMemory=20 * GIB), SimpleNamespace(pid=8, usedGpuMemory=81 * GIB)]
    answers = read(nvmlDeviceGetComputeRunningProcesses=listed)
    assert answers.processes == (GpuProcess(7, "compute", 20 * GIB), GpuProcess(8, "compute", None))
    assert answers.errors == {IMPLAUSIBLE: 1}


class Counted:
    """Gate for one counter, on a clock that the test moves."""

    def __init__(self, row: Metric[Any]) -> None:
        self.now = 0.0
        self.gate = ReadingGate(lambda: self.now)
        self.row = row

    def passes(self, value: float, labels: Labels = ("core",)) -> bool:
        """Return whether a value passes that is read SLOW seconds after the last one."""
        self.now += SLOW
        errors = Counter[str]()
        passed = self.gate.filter(self.row, {labels: value}, {}, errors) == {labels: value}
        assert errors.total() == (not passed)
        return passed


@pytest.mark.parametrize("nonsense", [0, 5, 10**9, 2**31, 2**63, -1, math.nan])
def test_counter_takes_no_jump(nonsense: float) -> None:
    """A single value of a counter that went back, or rose faster than it can, is refused, and the next one passes."""
    counter = Counted(Row.ecc_errors_total)
    passed = [counter.passes(value) for value in (100, 100, nonsense, 101, nonsense, nonsense, 101)]
    assert passed == [True, True, False, True, False, False, True]


def test_counter_that_was_reset() -> None:
    """A counter that goes on from where it went back was reset, and passes from the second reading on."""
    counter = Counted(Row.energy_joules_total)
    assert [counter.passes(value) for value in (10**9, 5000, 9000, 12_000)] == [True, False, True, True]


def test_counter_that_stays_back() -> None:
    """A counter that went back and stands still was reset after ten minutes; before, its old value passes again."""
    counter = Counted(Row.ecc_errors_total)
    assert [counter.passes(value) for value in (100, 0, 0, 0, 100, 0)] == [True, False, False, False, True, False]
    counter.now += RESET_SECONDS
    assert counter.passes(0)


def test_counter_that_jumps_and_stays() -> None:
    """A counter passes again once it could have risen so far, which its first value may have been too low for."""
    counter = Counted(Row.energy_joules_total)
    assert counter.passes(0)
    assert not counter.passes(10**8)
    counter.now += 2 * 3600
    assert counter.passes(10**8)


def test_counters_are_apart() -> None:
    """Each label has its own counter, and a reset of the GPU begins them anew."""
    counter = Counted(Row.ecc_errors_total)
    assert counter.passes(100)
    assert counter.passes(3, labels=("memory",))
    counter.gate.clear()
    assert counter.passes(0)


def test_each_row_has_bounds() -> None:
    """Each row of a GPU has bounds, its own or those of its unit; the gate knows no counters of MIG instances."""
    assert not [row for row in MigReadings.rows if row.kind == "counter"]
    for row in (*Row.rows, *MigReadings.rows):
        if row.kind != "info":
            low, high = row.bounds or DEFAULT_BOUNDS[row.kind, row.unit]
            assert isinstance(high, Metric) or low < high, row.name


def test_gpu_that_supports_everything_passes() -> None:
    """Right answers are refused nowhere, and a reading that passes is the same object, as the page needs it."""
    gpu = Gpu()
    first, second = gpu.read(), gpu.read(after=SLOW)
    assert not first.errors
    assert not second.errors
    mapping = by({"core": 61.0})
    assert ReadingGate(lambda: 0.0).filter(Row.temperature_celsius, mapping, {}, Counter()) is mapping
