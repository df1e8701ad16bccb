"""Gate for readings: what NVML returns with success, and no GPU can have, is refused, counted and left out."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_gpu import ANSWERS, GIB, MEMORY, UNKNOWN, Gpu, label_readings, read

from gpuwarden.gpu.metrics import GpuReadings as Row
from gpuwarden.gpu.metrics import MigReadings
from gpuwarden.gpu.reader import RELEARN_SECONDS, GpuGoneError
from gpuwarden.gpu.snapshot import GpuProcess
from gpuwarden.metrics.model import Labels, Metric
from gpuwarden.metrics.reading_gate import DEFAULT_BOUNDS, IMPLAUSIBLE, MIN_RESET_SECONDS, ReadingGate

NO_MEMORY = SimpleNamespace(total=0, used=0, free=0, reserved=0)
SLOW = 20.0  # seconds, after which the slow tier is due
SIZED = {Row.memory_used_bytes, Row.memory_free_bytes, Row.memory_reserved_bytes}  # by the memory's size
# Changed answers, the row that is refused, and the rows that are absent with it.
NONSENSE: list[tuple[dict[str, Any], Metric[Any], set[Metric[Any]]]] = [
    (
        {"nvmlDeviceGetMemoryInfo": NO_MEMORY},
        Row.memory_size_bytes,
        {*SIZED, Row.memory_used_peak_bytes, Row.memory_unified},
    ),
    (
        {"nvmlDeviceGetMemoryInfo": SimpleNamespace(**{**vars(MEMORY), "used": 81 * GIB})},
        Row.memory_used_bytes,
        {Row.memory_used_peak_bytes},
    ),
    ({"nvmlDeviceGetMemoryInfo": SimpleNamespace(**{**vars(MEMORY), "free": -1})}, Row.memory_free_bytes, set()),
    (
        {"nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=808334905, memory=40)},
        Row.utilization_ratio,
        {Row.busy_seconds_total},
    ),
    (
        {"nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=90, memory=1980)},
        Row.memory_bandwidth_utilization_ratio,
        set(),
    ),
    ({"nvmlDeviceGetPowerUsage": 4_294_967_000}, Row.power_usage_watts, set()),
    ({"nvmlDeviceGetPerformanceState": 77}, Row.performance_state, set()),
    ({"nvmlDeviceGetCurrPcieLinkWidth": 0xFFFF}, Row.pcie_link_width, set()),
    ({"nvmlDeviceGetMarginTemperature": 2**31}, Row.temperature_margin_celsius, set()),
    ({"nvmlDeviceGetTotalEnergyConsumption": 2**63}, Row.energy_joules_total, set()),
]


@pytest.mark.parametrize(("changes", "row", "others"), NONSENSE, ids=lambda value: getattr(value, "name", None))
def test_nonsense_is_absent_and_counted(changes: dict[str, Any], row: Metric[Any], others: set[Metric[Any]]) -> None:
    """A value that no GPU can have is absent, and so are the rows that it bounds or that are made from it."""
    plain, answers = read().readings, read(**changes)
    absent = {each for each in plain if plain[each] is not None and answers.readings.get(each) is None}
    assert absent == {row, *others}
    assert answers.errors.keys() == {IMPLAUSIBLE}


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
    """Only the implausible values of a reading with labels are refused."""
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

    def read(self, value: float, labels: Labels = ("core",)) -> float | None:
        """Return what is shown of a value that is read SLOW seconds after the last one; None if it is refused."""
        self.now += SLOW
        errors = Counter[str]()
        shown = self.gate.filter(self.row, {labels: value}, {}, errors)
        assert isinstance(shown, dict)
        assert errors.total() == (not shown)
        return cast("float | None", shown.get(labels))


@pytest.mark.parametrize("nonsense", [0, 5, 10**8, 2**31, 2**63, -1, math.nan])
def test_counter_takes_no_jump(nonsense: float) -> None:
    """A value of a counter that went back, or rose faster than it can, is refused, and the right one passes at once."""
    counter = Counted(Row.ecc_errors_total)
    assert [counter.read(value) for value in (100, 100, nonsense, 101, nonsense, 101)] == [
        100,
        100,
        None,
        101,
        None,
        101,
    ]


def test_counter_that_was_reset() -> None:
    """A counter that goes on from where it went back was reset, and passes from the second reading on."""
    counter = Counted(Row.energy_joules_total)
    assert [counter.read(value) for value in (10**9, 5000, 9000, 12_000)] == [10**9, None, 9000, 12_000]


def test_counter_that_stays_back() -> None:
    """A counter that went back and stands still was reset after a minute; before, its old value passes again."""
    counter = Counted(Row.ecc_errors_total)
    assert [counter.read(value) for value in (100, 0, 0, 100, 0, 0)] == [100, None, None, 100, None, None]
    counter.now += MIN_RESET_SECONDS
    assert [counter.read(value) for value in (0, 1)] == [0, 1]


def test_counter_that_jumps_and_stays() -> None:
    """A counter that jumped continues without the jump, whether it stands still or rises."""
    counter = Counted(Row.ecc_errors_total)
    jumps = (3, 4 * 10**8, 4 * 10**8, 4 * 10**8 + 2, 8 * 10**8, 8 * 10**8 + 1)
    assert [counter.read(value) for value in jumps] == [3, None, 3, 5, None, 5]
    assert [counter.read(value) for value in (6, 7)] == [None, 7]  # the driver is right again


def test_right_value_after_nonsense_that_rose() -> None:
    """A counter whose nonsense passed for a reset goes on from there, without a jump back to its right value."""
    counter = Counted(Row.energy_joules_total)
    readings = (10**9, 5000, 5400, 5800, 10**9 + 1000, 10**9 + 1500)
    assert [counter.read(value) for value in readings] == [10**9, None, 5400, 5800, None, 5800]


def test_counters_are_apart() -> None:
    """Each label has its own counter, and a reset of the GPU restarts them."""
    counter = Counted(Row.ecc_errors_total)
    assert counter.read(100) == 100
    assert counter.read(3, labels=("memory",)) == 3
    counter.gate.clear()
    assert counter.read(0) == 0


def test_each_row_has_bounds() -> None:
    """Each row of a GPU has bounds, its own or those of its unit; the gate knows no counters of MIG instances."""
    assert not [row for row in MigReadings.rows if row.kind == "counter"]
    for row in (*Row.rows, *MigReadings.rows):
        if row.kind != "info":
            low, high = row.bounds or DEFAULT_BOUNDS[row.kind, row.unit]
            assert isinstance(high, Metric) or low < high, row.name


def test_gpu_that_supports_everything_passes() -> None:
    """Valid readings pass, and a reading that passes is the same object, as the page needs it."""
    gpu = Gpu()
    first, second = gpu.read(), gpu.read(after=SLOW)
    assert not first.errors
    assert not second.errors
    mapping = label_readings({"core": 61.0})
    assert ReadingGate(lambda: 0.0).filter(Row.temperature_celsius, mapping, {}, Counter()) is mapping


def test_refused_sample_is_no_reason_of_a_lost_gpu() -> None:
    """A GPU that stops answering is down by the error of the driver, not by a value refused before."""
    gpu = Gpu()
    gpu.read()
    gpu.reader._memory_probe.samples.append((1.0, 81 * GIB))
    for name in (*ANSWERS, "nvmlDeviceGetFieldValues"):
        setattr(gpu.nvml, name, gpu.nvml._function(name, UNKNOWN))
    with pytest.raises(GpuGoneError, match="unknown"):
        gpu.read(after=1.0)


@pytest.mark.parametrize(
    ("question", "row", "right"),
    [
        ("nvmlDeviceGetMaxClockInfo", Row.clock_max_hertz, 1980),
        ("nvmlDeviceGetTemperatureThreshold", Row.temperature_threshold_celsius, 89),
    ],
)
def test_implausible_constant_is_read_again(question: str, row: Metric[Any], right: int) -> None:
    """A static value that was refused is read again, each minute: some of these calls take a millisecond."""
    changes: dict[str, Any] = {question: 2**31}
    gpu = Gpu(**changes)
    asked = gpu.nvml.calls
    for _ in range(2):
        assert gpu.read(after=SLOW).readings[row] == {}
    assert [name for name, *_ in asked].count("nvmlDeviceGetNumGpuCores") == 1
    setattr(gpu.nvml, question, gpu.nvml._function(question, right))
    gpu.read(after=RELEARN_SECONDS)
    assert gpu.read(after=SLOW).readings[row]
