"""Readings of one GPU: missing values are absent, a fault affects its readings only, each call is made once."""

from types import SimpleNamespace
from typing import Any, cast

import pynvml
import pytest
from fake_gpu import (
    ANSWERS,
    GIB,
    HANDLE,
    LOST,
    MEMORY,
    UNKNOWN,
    UNSUPPORTED,
    ErrorAnswer,
    FakeNvml,
    Gpu,
    label_readings,
    read,
    scalars,
)
from offenders import check_each

from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.gpu.reader import INTERNAL, Answers, GpuGoneError, GpuReader
from gpuwarden.metrics.model import Metric
from gpuwarden.nvml import fields
from gpuwarden.nvml.gpm import OPTION as GPM_OPTION
from gpuwarden.nvml.interface import FUNCTIONS, Nvml
from gpuwarden.nvml.return_codes import nvml_error


def test_units_are_base_units() -> None:
    """Milliwatts, megahertz, percent and millijoules become watts, hertz, ratios and joules."""
    readings = read().readings
    assert readings[GpuReadings.power_usage_watts] == 345.678
    assert readings[GpuReadings.utilization_ratio] == 0.9
    assert readings[GpuReadings.energy_joules_total] == 123_456.789
    assert readings[GpuReadings.clock_hertz] == dict.fromkeys([("graphics",), ("sm",), ("memory",), ("video",)], 1.98e9)
    active = cast("dict[tuple[str], float]", readings[GpuReadings.clock_event_active])
    assert {name for (name,), value in active.items() if value} == {"sw_power_cap"}


@pytest.mark.parametrize("nothing", [0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF])
def test_unavailable_value_is_absent(nothing: int) -> None:
    """NVML's -1 for 'not available' is no reading, no error and not added up; the next valid answer counts again."""
    changes: dict[str, Any] = dict.fromkeys(NUMBERS, nothing)
    changes["nvmlDeviceGetUtilizationRates"] = SimpleNamespace(gpu=nothing, memory=nothing)
    gpu = Gpu(**changes)
    gpu.read()
    answers = gpu.read(1.0)
    spoilt = [row.name for row in scalars(answers) for value in values(answers, row) if abs(value) > 1e15]
    assert spoilt == []
    assert answers.readings.get(GpuReadings.power_usage_watts) is None
    assert answers.readings.get(GpuReadings.busy_seconds_total) is None
    assert not answers.errors
    gpu.nvml.nvmlDeviceGetPowerUsage = lambda _handle: 1000  # type: ignore[attr-defined] # generated from a table
    assert gpu.read(1.0).readings[GpuReadings.power_usage_watts] == 1.0


NUMBERS = [name for name, answer in ANSWERS.items() if isinstance(answer, int)]


def values(answers: Answers, row: Metric[Any]) -> list[float]:
    """Return all values of a row."""
    found = answers.readings[row]
    return list(cast("dict[Any, float]", found).values()) if isinstance(found, dict) else [cast("float", found)]


def test_unavailable_memory_is_no_peak() -> None:
    """Used memory of -1 is not taken for a peak."""
    memory = SimpleNamespace(total=2**64 - 1, used=2**64 - 1, free=2**64 - 1, reserved=0)
    answers = read(nvmlDeviceGetMemoryInfo=memory)
    for row in (GpuReadings.memory_used_bytes, GpuReadings.memory_size_bytes, GpuReadings.memory_used_peak_bytes):
        assert row not in answers.readings
    assert GpuReadings.power_usage_watts in answers.readings


def test_malformed_answer_affects_its_row_only(caplog: pytest.LogCaptureFixture) -> None:
    """An answer that NVML does not document affects its row only, is counted, and logged once."""

    def garbled() -> str:
        return b"\xff\xfe".decode()

    gpu = Gpu(nvmlDeviceGetInforomImageVersion=garbled, nvmlDeviceGetPowerUsage=None)
    for reading in (1, 2, 3):
        answers = gpu.read(60.0)
        assert answers.errors[INTERNAL] == 2, reading
        assert set(scalars(answers)) == ROWS - {GpuReadings.inforom_info, GpuReadings.power_usage_watts}
    assert sorted(record.getMessage().partition("metric=")[2] for record in caplog.records) == [
        GpuReadings.inforom_info.name,
        GpuReadings.power_usage_watts.name,
    ]


def test_implausible_counts_are_bounded() -> None:
    """Implausible numbers of fans and links are limited, because looping over them would use all memory."""
    gpu = Gpu({fields.NVLINK_COUNT: 3_000_000_000}, nvmlDeviceGetNumFans=3_000_000_000)
    answers = gpu.read()
    assert len(cast("dict[Any, float]", answers.readings[GpuReadings.nvlink_up])) <= 64
    assert len(cast("dict[Any, float]", answers.readings[GpuReadings.fan_speed_ratio])) <= 32


def test_every_row_reads_a_full_device() -> None:
    """A device that supports everything has all rows, except those of the time between two readings (test_gpm.py)."""
    assert set(scalars(read())) == ROWS


ROWS = {row for row in GpuReadings.rows if row.opt_in != GPM_OPTION}
WITHOUT: dict[str, set[Metric[Any]]] = {
    "nvmlDeviceGetMemoryInfo": {GpuReadings.memory_reserved_bytes},  # the machine's memory replaces the rest
    "nvmlDeviceGetBAR1MemoryInfo": {GpuReadings.bar1_size_bytes, GpuReadings.bar1_used_bytes},
    "nvmlDeviceGetMemoryBusWidth": {GpuReadings.memory_bus_width_bytes},
    "nvmlDeviceGetNumaNodeId": {GpuReadings.memory_numa_node},
    "nvmlDeviceGetEncoderUtilization": set(),  # one engine less
    "nvmlDeviceGetEncoderStats": {
        GpuReadings.encoder_sessions,
        GpuReadings.encoder_frame_rate_hertz,
        GpuReadings.encoder_latency_seconds,
    },
    "nvmlDeviceGetNumFans": {GpuReadings.fan_speed_ratio},
    "nvmlDeviceGetFanSpeed_v2": {GpuReadings.fan_speed_ratio},
    "nvmlDeviceGetPowerManagementLimitConstraints": set(),  # two limits less
    "nvmlDeviceGetApplicationsClock": set(),  # the defaults stay
    "nvmlDeviceGetCurrPcieLinkGeneration": {GpuReadings.pcie_link_generation},
    "nvmlDeviceGetCurrPcieLinkWidth": {GpuReadings.pcie_link_width},
    "nvmlDeviceGetMaxPcieLinkGeneration": set(),  # the maximum of the GPU itself stays
    "nvmlDeviceGetMaxPcieLinkWidth": {GpuReadings.pcie_link_max_width},
    "nvmlDeviceGetPcieThroughput": {GpuReadings.pcie_throughput_bytes_per_second},
    "nvmlDeviceGetMemoryErrorCounter": set(),  # the totals replace it
    "nvmlDeviceGetSramEccErrorStatus": {
        GpuReadings.ecc_sram_errors_total,
        GpuReadings.ecc_sram_unit_errors_total,
        GpuReadings.ecc_sram_threshold_exceeded,
    },
    "nvmlDeviceGetRowRemapperHistogram": {GpuReadings.row_remap_banks},
    "nvmlDeviceGetGpuFabricInfoV": {
        GpuReadings.fabric_state,
        GpuReadings.fabric_joined,
        GpuReadings.fabric_info,
        GpuReadings.fabric_fault,
    },
    "nvmlDeviceGetPersistenceMode": {GpuReadings.persistence_mode},
    "nvmlDeviceGetComputeMode": {GpuReadings.compute_mode},
    "nvmlDeviceGetMigMode": {GpuReadings.mig_mode},
    "nvmlDeviceGetAccountingMode": {GpuReadings.accounting_mode},
    "nvmlDeviceGetDisplayActive": {GpuReadings.display_active},
    "nvmlDeviceGetAddressingMode": {GpuReadings.addressing_mode},
    "nvmlDeviceGetVirtualizationMode": {GpuReadings.virtualization_mode},
    "nvmlDeviceGetRepairStatus": {GpuReadings.repair_pending},
    "nvmlDeviceGetUnrepairableMemoryFlag_v1": {GpuReadings.memory_unrepairable},
    "nvmlDeviceGetNumGpuCores": {GpuReadings.cores},
    "nvmlDeviceGetInforomImageVersion": set(),  # its parts stay
    "nvmlDeviceGetFieldValues": {
        GpuReadings.temperature_margin_threshold_celsius,
        GpuReadings.power_instant_watts,
        GpuReadings.power_average_watts,
        GpuReadings.pcie_bytes_total,
        GpuReadings.pcie_replays_total,
        GpuReadings.pcie_errors_total,
        GpuReadings.nvlink_up,
        GpuReadings.nvlink_speed_bytes_per_second,
        GpuReadings.nvlink_bytes_total,
        GpuReadings.nvlink_errors_total,
        GpuReadings.nvlink_link_errors_total,
        GpuReadings.c2c_link_up,
        GpuReadings.c2c_speed_bytes_per_second,
        GpuReadings.c2c_errors_total,
        GpuReadings.ecc_mode,
        GpuReadings.remapped_rows,
        GpuReadings.row_remap_pending,
        GpuReadings.row_remap_failed,
        GpuReadings.retired_pages,
        GpuReadings.retired_pages_pending,
        GpuReadings.recovery_action,
        GpuReadings.reset_required,
    },
    "nvmlDeviceGetUtilizationRates": {
        GpuReadings.utilization_ratio,
        GpuReadings.busy_seconds_total,
        GpuReadings.memory_bandwidth_utilization_ratio,
    },
    "nvmlDeviceGetTemperature": {GpuReadings.temperature_celsius},
    "nvmlDeviceGetTemperatureThreshold": {GpuReadings.temperature_threshold_celsius},
    "nvmlDeviceGetMarginTemperature": set(),  # the distance to the threshold replaces it
    "nvmlDeviceGetPowerUsage": {GpuReadings.power_usage_watts},
    "nvmlDeviceGetEnforcedPowerLimit": set(),  # one limit less
    "nvmlDeviceGetTotalEnergyConsumption": {GpuReadings.energy_joules_total},
    "nvmlDeviceGetClockInfo": {GpuReadings.clock_hertz},
    "nvmlDeviceGetMaxClockInfo": {GpuReadings.clock_max_hertz},
    "nvmlDeviceGetCurrentClocksEventReasons": {GpuReadings.clock_event_active},
    "nvmlDeviceGetSupportedClocksEventReasons": set(),  # then every reason may be reported
    "nvmlDeviceGetPerformanceState": {GpuReadings.performance_state},
}


@check_each(WITHOUT.items())
def test_unsupported_call_leaves_its_readings_out(function: str, missing: set[Metric[Any]]) -> None:
    """An unsupported reading is absent without an error; the others stay."""
    answers = read(**{function: UNSUPPORTED})
    assert not answers.errors
    assert ROWS - set(scalars(answers)) == missing


def test_missing_readings_have_no_default() -> None:
    """On a device that only supports memory, only memory is read."""
    nothing = dict.fromkeys(FUNCTIONS, UNSUPPORTED)
    answers = read(**nothing | {"nvmlDeviceGetMemoryInfo": MEMORY})
    assert {row.name for row in scalars(answers)} == {
        "gpuwarden_gpu_memory_size_bytes",
        "gpuwarden_gpu_memory_used_bytes",
        "gpuwarden_gpu_memory_free_bytes",
        "gpuwarden_gpu_memory_reserved_bytes",
        "gpuwarden_gpu_memory_used_peak_bytes",
        "gpuwarden_gpu_memory_unified",
    }


def test_older_driver_without_memory_v2() -> None:
    """Version 1 of the memory call replaces a missing version 2; the reserved memory is then unknown."""
    answers = read(nvmlDeviceGetMemoryInfo=lambda version=None: UNSUPPORTED if version else MEMORY)
    assert answers.readings[GpuReadings.memory_used_bytes] == 30 * GIB
    assert answers.readings[GpuReadings.memory_reserved_bytes] is None


@pytest.mark.parametrize(("margin", "expected"), [(26, 26), (0, 28), (-3, 28), (UNSUPPORTED, 28)])
def test_margin_of_zero_or_less_is_ignored(margin: Any, expected: int) -> None:
    """A positive margin of the driver counts; otherwise the distance to the slowdown threshold does."""
    assert read(nvmlDeviceGetMarginTemperature=margin).readings[GpuReadings.temperature_margin_celsius] == expected


def test_threshold_of_zero_is_none() -> None:
    """0, which some boards return for a threshold that is not set, is no threshold and gives no margin."""
    readings = read(nvmlDeviceGetTemperatureThreshold=0, nvmlDeviceGetMarginTemperature=UNSUPPORTED).readings
    assert readings[GpuReadings.temperature_threshold_celsius] == {}
    assert readings[GpuReadings.temperature_margin_celsius] is None


def test_unknown_performance_state_is_absent() -> None:
    """NVML's number for an unknown state, 32, is absent."""
    assert read(nvmlDeviceGetPerformanceState=32).readings[GpuReadings.performance_state] is None


def test_failing_call_affects_its_readings_and_is_counted() -> None:
    """An error of one call affects its rows only, and is counted by NVML's name."""
    answers = read(nvmlDeviceGetPowerUsage=UNKNOWN)
    assert GpuReadings.power_usage_watts not in answers.readings
    assert answers.errors == {"unknown": 1}
    assert answers.readings[GpuReadings.memory_used_bytes] == 30 * GIB


def test_lost_gpu_is_gone() -> None:
    """A GPU lost at any call of the poll has no readings at all."""
    for function in (*ANSWERS, "nvmlDeviceGetFieldValues"):
        with pytest.raises(GpuGoneError, match="gpu_is_lost"):
            read(**{function: LOST})


def test_gpu_on_which_everything_fails_is_gone() -> None:
    """A GPU whose every call fails does not answer, with any error."""
    with pytest.raises(GpuGoneError, match="unknown"):
        read(**dict.fromkeys(FUNCTIONS, UNKNOWN))


def test_sick_gpu_does_not_flap() -> None:
    """If all calls of the poll tier fail, the GPU is down even though calls of the slow tier succeed."""
    failing: dict[str, Any] = dict.fromkeys(QUICK, UNKNOWN)
    gpu = Gpu(**failing)
    for _ in range(4):
        with pytest.raises(GpuGoneError, match="unknown"):
            gpu.read(1.0)
        gpu.reader.attach(HANDLE)  # as the poller does after a failure


QUICK = (
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
)


def test_bare_gpu_stays_up() -> None:
    """A GPU that only supports rows of the slow tier is up in every poll."""
    lacking: dict[str, Any] = dict.fromkeys(FUNCTIONS, UNSUPPORTED)
    gpu = Gpu(**lacking | {"nvmlDeviceGetPersistenceMode": 1})
    for poll in range(20):
        assert gpu.read(1.0).readings[GpuReadings.persistence_mode] == 1, poll


def test_gpu_without_any_supported_call_is_gone() -> None:
    """A GPU without any reading is not up, though no call failed with an error that counts."""
    with pytest.raises(GpuGoneError, match="no_reading"):
        read(**dict.fromkeys(FUNCTIONS, ErrorAnswer(pynvml.NVML_ERROR_INVALID_ARGUMENT)))


def test_each_call_is_made_once() -> None:
    """Rows that share a driver call need one call per poll."""
    nvml = FakeNvml()  # no options
    GpuReader(cast("Nvml", nvml), HANDLE).read()
    assert len(nvml.calls) == len(set(nvml.calls))


def test_field_values_are_read_in_one_call_per_tier() -> None:
    """Once the supported fields of a tier are known, they are read in one call; static ones are not read again."""
    gpu = Gpu()
    gpu.read()
    gpu.nvml.calls.clear()
    gpu.read(after=100)  # slow is due, and unsupported calls are retried
    calls = [asked for asked in gpu.nvml.calls if asked[0] == "nvmlDeviceGetFieldValues"]
    assert len(calls) == 2
    assert len({field for _name, batch in calls for field in batch}) == sum(len(batch) for _name, batch in calls)


def test_failing_field_values_affect_their_rows_only() -> None:
    """A failing call for a tier's fields is made once, not for every row; rows without fields stay."""
    gpu = Gpu(nvmlDeviceGetFieldValues=UNKNOWN)
    gpu.read()
    gpu.nvml.calls.clear()
    answers = gpu.read(after=100)
    assert [name for name, *_ in gpu.nvml.calls].count("nvmlDeviceGetFieldValues") <= 3
    assert answers.readings[GpuReadings.temperature_celsius] == {("core",): 61}
    assert answers.errors["unknown"] > 1


def test_process_listed_twice_is_one_process() -> None:
    """A pid that is in both lists, or twice in one, is one process with the larger figure."""
    twice = [SimpleNamespace(pid=7, usedGpuMemory=1 * GIB), SimpleNamespace(pid=7, usedGpuMemory=2 * GIB)]
    graphics = [SimpleNamespace(pid=7, usedGpuMemory=None), SimpleNamespace(pid=8, usedGpuMemory=None)]
    answers = read(nvmlDeviceGetComputeRunningProcesses=twice, nvmlDeviceGetGraphicsRunningProcesses=graphics)
    assert [(p.pid, p.type, p.memory) for p in answers.processes] == [(7, "compute", 2 * GIB), (8, "graphics", None)]


def test_process_listed_twice_without_memory_has_none() -> None:
    """Memory that the driver reports in neither list is unknown, not 0."""
    untold = [SimpleNamespace(pid=7, usedGpuMemory=None)]
    answers = read(nvmlDeviceGetComputeRunningProcesses=untold, nvmlDeviceGetGraphicsRunningProcesses=untold)
    assert [(p.pid, p.type, p.memory) for p in answers.processes] == [(7, "compute", None)]


def test_failing_process_list_affects_processes_only() -> None:
    """Readings stay if the processes cannot be listed."""
    answers = read(nvmlDeviceGetComputeRunningProcesses=UNKNOWN)
    assert answers.processes == ()
    assert answers.process_lists == ("graphics",)  # compute processes are unknown, which is not 0
    assert answers.errors == {"unknown": 1}
    assert set(scalars(answers)) == ROWS


def test_binding_has_every_function() -> None:
    """The installed nvidia-ml-py has every function that the reader uses."""
    assert [name for name in FUNCTIONS if not callable(getattr(pynvml, name, None))] == []


def test_time_without_polls_is_not_added_up() -> None:
    """A time without polls is left out of integrated counters: the utilization is unknown."""
    now = 0.0
    reader = GpuReader(cast("Nvml", FakeNvml()), HANDLE, clock=lambda: now)
    for now in (0.0, 10.0):  # noqa: B007 - the reader's clock returns it
        reader.read()
    before = reader.read().readings[GpuReadings.busy_seconds_total]
    assert before == pytest.approx(9.0)
    reader.mark_gap()
    now = 1000.0
    assert reader.read().readings[GpuReadings.busy_seconds_total] == before
    now = 1010.0
    assert reader.read().readings[GpuReadings.busy_seconds_total] == pytest.approx(18.0)


@pytest.mark.parametrize("gap", ["left alone", "new handle", "failure"])
def test_samples_before_a_gap_are_no_new_peak(gap: str) -> None:
    """A sample between two readings counts for the second one, unless its time is unknown."""
    gpu = Gpu()
    gpu.read()
    probe = gpu.reader.memory_probe
    assert probe is not None
    probe.samples.append((0.0, 60 * GIB))
    assert gpu.read(1.0).readings[GpuReadings.memory_used_peak_bytes] == label_readings(
        {"1m": 60 * GIB, "5m": 60 * GIB}
    )
    probe.samples.append((0.0, 70 * GIB))
    if gap == "left alone":
        gpu.reader.mark_gap()
    elif gap == "new handle":
        gpu.reader.attach(HANDLE)
    else:
        working, gpu.nvml.nvmlDeviceGetPowerUsage = gpu.nvml.nvmlDeviceGetPowerUsage, lost  # type: ignore[attr-defined] # made from a table
        with pytest.raises(GpuGoneError):
            gpu.read(1.0)
        gpu.nvml.nvmlDeviceGetPowerUsage = working  # type: ignore[attr-defined]
        probe.samples.append((0.0, 70 * GIB))  # before the end of the poll, which stops the sampling
    assert gpu.read(1800.0).readings[GpuReadings.memory_used_peak_bytes] == label_readings(
        {"1m": 30 * GIB, "5m": 30 * GIB}
    )


def lost(_handle: object) -> int:
    """Raise the error of a GPU that is off the bus."""
    raise nvml_error(pynvml.NVML_ERROR_GPU_IS_LOST)


def test_time_without_a_handle_is_not_added_up() -> None:
    """The driver may have been unloaded for long before there was a new handle."""
    gpu = Gpu()
    gpu.read()
    assert gpu.read(10.0).readings[GpuReadings.busy_seconds_total] == pytest.approx(9.0)
    gpu.reader.attach(HANDLE)
    assert gpu.read(1000.0).readings[GpuReadings.busy_seconds_total] == pytest.approx(9.0)
