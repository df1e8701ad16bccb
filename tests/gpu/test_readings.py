"""Each reading of a GPU: its value in base units, and its absence on a device without it."""

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import pynvml
import pytest
from fake_gpu import GIB, HANDLE, LINKS, SRAM, UNKNOWN, UNSUPPORTED, ErrorAnswer, Gpu, label_readings, read, reading
from offenders import check_each

from gpuwarden.gpu.metrics import GpuReadings as Row
from gpuwarden.metrics.model import Labels, Metric
from gpuwarden.nvml import fields
from gpuwarden.nvml.constants import CLOCK_EVENT_REASONS
from gpuwarden.nvml.gpm import OPTION as GPM_OPTION

NOT_AVAILABLE = 0xFFFFFFFF

# Expected readings; tests/support/fake_gpu.py has the answers.
VALUES: list[tuple[Metric[Any], Any]] = [
    (Row.memory_bus_width_bytes, 640),
    (Row.memory_numa_node, 1),
    (Row.bar1_size_bytes, 128 * GIB),
    (Row.bar1_used_bytes, 1 * GIB),
    (Row.engine_utilization_ratio, label_readings({"encoder": 0.1, "decoder": 0.2, "jpeg": 0.3, "ofa": 0.4})),
    (Row.encoder_sessions, 2),
    (Row.encoder_frame_rate_hertz, 184),
    (Row.encoder_latency_seconds, 0.062844),
    (Row.temperature_celsius, label_readings({"core": 61, "memory": 54})),
    (
        Row.temperature_threshold_celsius,
        label_readings(dict.fromkeys(("shutdown", "slowdown", "max_operating", "memory_max_operating"), 89)),
    ),
    (
        Row.temperature_margin_threshold_celsius,
        label_readings(dict.fromkeys(("shutdown", "slowdown", "max_operating", "memory_max_operating"), -8)),
    ),
    (Row.fan_speed_ratio, label_readings({"0": 0.3, "1": 0.31})),
    (Row.power_instant_watts, label_readings({"gpu": 625.68})),
    (Row.power_average_watts, label_readings({"gpu": 631.95})),
    (
        Row.power_limit_watts,
        label_readings({"enforced": 600, "requested": 650, "default": 700, "min": 200, "max": 710}),
    ),
    (
        Row.clock_application_hertz,
        {
            ("graphics", "current"): 1.755e9,
            ("graphics", "default"): 1.41e9,
            ("memory", "current"): 1.755e9,
            ("memory", "default"): 1.41e9,
        },
    ),
    (Row.pcie_link_generation, 4),
    (Row.pcie_link_width, 8),
    (Row.pcie_link_max_generation, label_readings({"gpu": 5, "link": 4})),
    (Row.pcie_link_max_width, 16),
    (Row.pcie_bytes_total, label_readings({"transmit": 197 << 32, "receive": 198 << 32})),
    (Row.pcie_throughput_bytes_per_second, label_readings({"transmit": 450_000_000, "receive": 450_001_000})),
    (Row.pcie_replays_total, 12),
    (Row.pcie_errors_total, label_readings(fields.PCIE_ERRORS)),
    (Row.nvlink_up, label_readings({"0": 1, "1": 0})),
    (Row.nvlink_speed_bytes_per_second, LINKS * 26.562e9),
    (Row.nvlink_bytes_total, label_readings({"transmit": 1_024_000, "receive": 1_024_000})),
    (
        Row.nvlink_errors_total,
        label_readings({"replay": 5, "recovery": 5, "crc": 5, "crc_flit": 38, "crc_data": 45, "ecc_data": 160}),
    ),
    (Row.nvlink_link_errors_total, {("1", "replay"): 5, ("1", "recovery"): 5, ("1", "crc"): 5}),
    (Row.c2c_link_up, label_readings({"0": 1})),
    (Row.c2c_speed_bytes_per_second, 50e9),
    (Row.c2c_errors_total, label_readings({"interrupt": 231, "replay": 232, "replay_back_to_back": 233})),
    (Row.memory_unrepairable, 1),
    (Row.repair_pending, label_readings({"channel": 0, "tpc": 1})),
    (Row.virtualization_mode, label_readings({"none": 0, "passthrough": 1, "vgpu": 0, "host_vgpu": 0, "host_vsga": 0})),
    (Row.fabric_info, {("7",): 1}),
    (Row.ecc_mode, label_readings({"current": 1, "pending": 0})),
    (
        Row.ecc_sram_errors_total,
        {
            ("corrected", "volatile"): 1,
            ("parity", "volatile"): 2,
            ("secded", "volatile"): 3,
            ("corrected", "aggregate"): 4,
            ("parity", "aggregate"): 5,
            ("secded", "aggregate"): 6,
        },
    ),
    (Row.ecc_sram_unit_errors_total, label_readings({"l2": 7, "sm": 8, "pcie": 9, "microcontroller": 10, "other": 11})),
    (Row.ecc_sram_threshold_exceeded, 1),
    (Row.remapped_rows, label_readings({"correctable": 142, "uncorrectable": 143})),
    (Row.row_remap_pending, 1),
    (Row.row_remap_failed, 0),
    (Row.row_remap_banks, label_readings({"max": 2556, "high": 3, "partial": 0, "low": 0, "none": 1})),
    (Row.retired_pages, label_readings({"single_bit": 29, "double_bit": 30})),
    (Row.retired_pages_pending, 1),
    (Row.persistence_mode, 1),
    (Row.compute_mode, label_readings({"default": 0, "exclusive_thread": 0, "prohibited": 0, "exclusive_process": 1})),
    (Row.mig_mode, label_readings({"current": 0, "pending": 1})),
    (Row.addressing_mode, label_readings({"none": 0, "hmm": 1, "ats": 0})),
    (Row.accounting_mode, 0),
    (Row.display_active, 1),
    (
        Row.recovery_action,
        label_readings(
            {
                "none": 0,
                "gpu_reset": 1,
                "node_reboot": 0,
                "drain_p2p": 0,
                "drain_and_reset": 0,
                "recover_imex_domain": 0,
                "bus_reset": 0,
                "system_reboot": 0,
            }
        ),
    ),
    (Row.reset_required, 1),
    (Row.fabric_state, label_readings({"not_started": 0, "in_progress": 0, "completed": 1})),
    (Row.fabric_joined, 1),
    (
        Row.fabric_fault,
        label_readings({"bandwidth": 0, "route_recovery": 0, "route_unhealthy": 0, "access_timeout_recovery": 1}),
    ),
    (Row.cores, 16896),
    (Row.inforom_info, {("G520.0200.00.05", "2.1", "7.16", "1.0"): 1}),
]


@check_each(VALUES)
def test_value(row: Metric[Any], expected: Any) -> None:
    """A device that has the reading returns it in base units."""
    assert reading(row) == pytest.approx(expected)


# Answers that mean that the device does not have the reading.
SENTINELS: list[tuple[Metric[Any], Any, dict[int, Any], dict[str, Any]]] = [
    (Row.memory_bus_width_bytes, None, {}, {"nvmlDeviceGetMemoryBusWidth": 0}),
    (Row.memory_numa_node, None, {}, {"nvmlDeviceGetNumaNodeId": -1}),
    (
        Row.bar1_size_bytes,
        None,
        {},
        {"nvmlDeviceGetBAR1MemoryInfo": type("Bar1", (), {"bar1Total": 0, "bar1Free": 0, "bar1Used": 0})()},
    ),
    (Row.encoder_frame_rate_hertz, None, {}, {"nvmlDeviceGetEncoderStats": (0, 0, 0)}),
    (Row.encoder_latency_seconds, None, {}, {"nvmlDeviceGetEncoderStats": (0, 0, 0)}),
    (Row.temperature_celsius, label_readings({"core": 61}), {fields.MEMORY_TEMPERATURE: 0}, {}),
    (
        Row.fan_speed_ratio,
        label_readings({"0": 0.3}),
        {},
        {"nvmlDeviceGetFanSpeed_v2": lambda fan: (30, NOT_AVAILABLE)[fan]},
    ),
    (Row.power_instant_watts, {}, {fields.POWER_INSTANT: 0}, {}),
    (Row.power_average_watts, {}, {fields.POWER_AVERAGE: 0}, {}),
    (
        Row.power_limit_watts,
        label_readings({"requested": 650, "default": 700, "min": 200, "max": 710}),
        {},
        {"nvmlDeviceGetEnforcedPowerLimit": 0},
    ),
    (
        Row.clock_application_hertz,
        {("graphics", "default"): 1.41e9, ("memory", "default"): 1.41e9},
        {},
        {"nvmlDeviceGetApplicationsClock": 0},
    ),
    (Row.pcie_link_generation, None, {}, {"nvmlDeviceGetCurrPcieLinkGeneration": 0}),
    (Row.pcie_link_width, None, {}, {"nvmlDeviceGetCurrPcieLinkWidth": NOT_AVAILABLE}),
    (Row.pcie_link_max_width, None, {}, {"nvmlDeviceGetMaxPcieLinkWidth": NOT_AVAILABLE}),
    (Row.fabric_state, {}, {}, {"nvmlDeviceGetGpuFabricInfoV": type("Fabric", (), {"state": 0, "status": 3})()}),
    (Row.fabric_joined, None, {}, {"nvmlDeviceGetGpuFabricInfoV": type("Fabric", (), {"state": 0, "status": 3})()}),
    (Row.cores, None, {}, {"nvmlDeviceGetNumGpuCores": 0}),
    (Row.nvlink_up, {}, {fields.NVLINK_COUNT: 0}, {}),
    (Row.nvlink_speed_bytes_per_second, None, {fields.NVLINK_COUNT: None}, {}),
    (Row.nvlink_bytes_total, {}, {fields.NVLINK_COUNT: None}, {}),
    (Row.nvlink_errors_total, {}, {fields.NVLINK_COUNT: None}, {}),
]


@pytest.mark.parametrize(("row", "expected", "values", "changes"), SENTINELS)
def test_unavailable_value_is_absent(
    row: Metric[Any], expected: Any, values: dict[int, Any], changes: dict[str, Any]
) -> None:
    """0, -1 or 0xFFFFFFFF from a driver for 'not available' is not reported as a value."""
    answers = read(values, **changes)
    assert answers.readings.get(row) == expected
    assert not answers.errors


def test_failing_memory_temperature_affects_itself_only() -> None:
    """The core's temperature stays, and the failure counts."""
    answers = read({fields.MEMORY_TEMPERATURE: UNKNOWN})
    assert answers.readings[Row.temperature_celsius] == label_readings({"core": 61})
    assert answers.errors == {"unknown": 1}


class TestClockEventSeconds:
    """Time for which clocks were limited, by reason."""

    def test_driver_and_polls(self) -> None:
        """The driver's counters are used if it has them, otherwise the time is summed up over the polls."""
        gpu = Gpu(nvmlDeviceGetCurrentClocksEventReasons=CLOCK_EVENT_REASONS["hw_thermal_slowdown"])
        for _ in range(16):
            answers = gpu.read(after=1)
        seconds = answers.readings[Row.clock_event_seconds_total]
        assert isinstance(seconds, dict)
        assert seconds[("sw_power_cap",)] == fields.CLOCK_EVENT_NANOSECONDS["sw_power_cap"]
        assert seconds[("sw_thermal_slowdown",)] == fields.CLOCK_EVENT_NANOSECONDS["sw_thermal_slowdown"]
        assert seconds[("hw_thermal_slowdown",)] == 15
        assert seconds[("hw_slowdown",)] == 0

    def test_source_does_not_change(self) -> None:
        """A driver's counter that goes away is not replaced by ours, which would look like a reset."""
        gpu = Gpu()
        gpu.read()
        gpu.nvml.fields[fields.CLOCK_EVENT_NANOSECONDS["sw_power_cap"]] = None
        seconds = gpu.read(after=100).readings[Row.clock_event_seconds_total]
        assert isinstance(seconds, dict)
        assert ("sw_power_cap",) not in seconds
        assert ("sw_thermal_slowdown",) in seconds

    def test_unsupported_reasons_are_absent(self) -> None:
        """A device without clock event reasons has the times that the driver counts only."""
        nothing = dict.fromkeys(
            ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetSupportedClocksEventReasons"), UNSUPPORTED
        )
        assert set(reading(Row.clock_event_seconds_total, {}, **nothing)) == {
            (name,) for name in fields.CLOCK_EVENT_NANOSECONDS
        }
        uncounted = dict.fromkeys(fields.CLOCK_EVENT_NANOSECONDS.values())
        assert reading(Row.clock_event_seconds_total, uncounted, **nothing) == {}

    def test_unknown_reasons_are_left_out(self) -> None:
        """Only reasons of the supported mask, and those that the driver counts, have series."""
        uncounted = dict.fromkeys((77, 78, 79))
        names = {name for (name,) in reading(Row.clock_event_seconds_total, uncounted)}
        assert names == {name for name, bit in CLOCK_EVENT_REASONS.items() if bit & 0x1FF}


class TestPcieBytes:
    """PCIe counters, which may wrap according to nvml.h."""

    def test_narrow_counter_is_none(self) -> None:
        """A counter that never exceeded 32 bits may wrap ten times a second, so it is absent."""
        gpu = Gpu({197: 4_000_000_000, 198: 1})
        for _ in range(3):
            assert gpu.read(after=100).readings[Row.pcie_bytes_total] == {}

    def test_wide_counter_stays(self) -> None:
        """After a value above 32 bits it is a counter, also after a GPU reset."""
        gpu = Gpu()
        gpu.read()
        gpu.nvml.fields[197] = 4
        gpu.read(after=100)  # in which a counter that went back is refused
        gpu.nvml.fields[197] = 5
        assert gpu.read(after=100).readings[Row.pcie_bytes_total] == label_readings(
            {"transmit": 5, "receive": 198 << 32}
        )

    def test_throughput_is_opt_in(self) -> None:
        """The call, which blocks, is only made if configured."""
        gpu = Gpu()
        assert "nvmlDeviceGetPcieThroughput" in {name for name, *_ in read_and_list_calls(gpu)}
        plain = Gpu(opted_in=())
        assert "nvmlDeviceGetPcieThroughput" not in {name for name, *_ in read_and_list_calls(plain)}
        assert Row.pcie_throughput_bytes_per_second not in plain.read().readings


def test_default_application_clocks_are_read_once() -> None:
    """Default clocks, which do not change and cost a millisecond each, are read once; current ones each time."""
    gpu = Gpu()
    gpu.read()
    gpu.nvml.calls.clear()
    assert gpu.read(after=100).readings[Row.clock_application_hertz] == reading(Row.clock_application_hertz)
    asked = {name for name, *_ in gpu.nvml.calls}
    assert "nvmlDeviceGetApplicationsClock" in asked
    assert "nvmlDeviceGetDefaultApplicationsClock" not in asked


def read_and_list_calls(gpu: Gpu) -> list[tuple[Any, ...]]:
    """Read once, and return the calls."""
    gpu.read()
    return gpu.nvml.calls


class CountedByLink(NamedTuple):
    """A counter that is summed over two links here."""

    row: Metric[Any]
    label: str
    number: int
    other_fields: Mapping[int, float | None]

    def gpu(self, *counts: float | None) -> Gpu:
        """Return a GPU with these link counters; None for a link that does not report."""
        gpu = Gpu(self.other_fields)
        self.report(gpu, *counts)
        return gpu

    def report(self, gpu: Gpu, *counts: float | None) -> None:
        """Set the counters of the links."""
        gpu.nvml.fields[self.number] = lambda link: counts[link]

    def total(self, gpu: Gpu, after: float = 0.0) -> float | None:
        """Return the sum."""
        return cast("dict[Any, float]", gpu.read(after).readings[self.row]).get((self.label,))


COUNTED_BY_LINK = [
    CountedByLink(Row.nvlink_errors_total, "replay", fields.NVLINK_ERRORS["replay"], {}),
    CountedByLink(
        Row.nvlink_bytes_total,
        "receive",
        fields.NVLINK_BYTES["receive"],
        dict.fromkeys(fields.NVLINK_KIBIBYTES.values()),
    ),
    CountedByLink(Row.c2c_errors_total, "replay", fields.C2C_ERRORS["replay"], {fields.C2C_COUNT: 2}),
]


class TestNvlink:
    """Traffic and errors of NVLinks."""

    def test_bytes_link_by_link(self) -> None:
        """If the driver does not sum over links (Blackwell), gpuwarden does."""
        gone = dict.fromkeys(fields.NVLINK_KIBIBYTES.values())
        counted = {number: lambda link: 7 + link for number in fields.NVLINK_BYTES.values()}
        assert reading(Row.nvlink_bytes_total, {**gone, **counted}) == label_readings({"transmit": 15, "receive": 15})

    @pytest.mark.parametrize("fields_by_link", [fields.NVLINK_KIBIBYTES, fields.NVLINK_BYTES])
    def test_sum_that_stays_zero(self, fields_by_link: Mapping[str, int]) -> None:
        """The counts of the links are summed if the driver answers 0 for their sum."""
        zero = dict.fromkeys((*fields.NVLINK_KIBIBYTES.values(), *fields.NVLINK_BYTES.values()), 0)
        counted = {number: lambda link: 0 if link == fields.ALL_LINKS else 5 for number in fields_by_link.values()}
        unit = 1024 if fields_by_link is fields.NVLINK_KIBIBYTES else 1
        total = 5 * LINKS * unit
        assert reading(Row.nvlink_bytes_total, {**zero, **counted}) == label_readings(
            {"transmit": total, "receive": total}
        )

    @pytest.mark.parametrize(("raw", "expected"), [(0, label_readings({"transmit": 0, "receive": 0})), (900, {})])
    def test_zero_beside_traffic(self, raw: int, expected: Mapping[Labels, float]) -> None:
        """0 of every counter is a value only while the raw counters, with the protocol's overhead, are 0 too."""
        zero = dict.fromkeys((*fields.NVLINK_KIBIBYTES.values(), *fields.NVLINK_BYTES.values()), 0)
        gpu = Gpu(zero | dict.fromkeys(fields.NVLINK_RAW_KIBIBYTES, raw))
        assert gpu.read().readings[Row.nvlink_bytes_total] == expected
        gpu.nvml.fields.update(dict.fromkeys(fields.NVLINK_KIBIBYTES.values(), 3))
        assert gpu.read(after=100).readings[Row.nvlink_bytes_total] == label_readings(
            {"transmit": 3072, "receive": 3072}
        )

    def test_source_of_bytes_does_not_change(self) -> None:
        """A sum over links that goes away is not replaced by the links' counters, which may start elsewhere."""
        gpu = Gpu(dict.fromkeys(fields.NVLINK_BYTES.values(), 3))
        gpu.read()
        gpu.nvml.fields.update(dict.fromkeys(fields.NVLINK_KIBIBYTES.values()))
        assert gpu.read(after=100).readings[Row.nvlink_bytes_total] == {}

    @pytest.mark.parametrize("each", COUNTED_BY_LINK)
    def test_link_that_is_missing_for_a_while(self, each: CountedByLink) -> None:
        """A sum without a link would fall, and rate() would count all of it again: it is absent meanwhile."""
        gpu = each.gpu(1000, 3000)
        assert each.total(gpu) == 4000
        each.report(gpu, 1000, None)
        assert [each.total(gpu, 15.0) for _ in range(3)] == [None] * 3
        each.report(gpu, 1000, 3005)
        later = [total for _ in range(5) if (total := each.total(gpu, 15.0)) is not None]
        assert later == [4005] * len(later)
        assert later

    @pytest.mark.parametrize("each", COUNTED_BY_LINK)
    def test_link_that_is_switched_off(self, each: CountedByLink) -> None:
        """A link that is switched off ends the absence after a while; its past counts, so the sum never falls."""
        gpu = each.gpu(1000, 3000)
        each.total(gpu)
        each.report(gpu, 1001, None)
        totals = [each.total(gpu, 15.0) for _ in range(12)]
        absent = totals.count(None)
        assert 4 <= absent <= 8  # one to two minutes
        assert totals == [None] * absent + [4001] * (12 - absent)
        each.report(gpu, 1002, None)
        assert each.total(gpu, 15.0) == 4002
        each.report(gpu, 1002, 3005)
        assert each.total(gpu, 60.0) == 4007  # switched on again

    @pytest.mark.parametrize("each", COUNTED_BY_LINK)
    def test_link_that_is_off_from_the_start(self, each: CountedByLink) -> None:
        """A link that was off from the start is not in the sum; nor are counts before a new handle."""
        gpu = each.gpu(1000, None)
        assert [each.total(gpu, 15.0) for _ in range(10)] == [1000] * 10
        each.report(gpu, 1000, 3000)
        assert each.total(gpu, 60.0) == 4000
        each.report(gpu, 7, None)
        gpu.reader.attach(HANDLE)
        assert each.total(gpu, 1.0) == 7

    def test_links_without_errors_have_no_series(self) -> None:
        """Hundreds of series with value 0 are not exported; the sum over links is."""
        clean = dict.fromkeys((161, 162, 163), 0) | dict.fromkeys(fields.NVLINK_ERROR_TOTALS.values())
        assert reading(Row.nvlink_link_errors_total, clean) == {}
        assert reading(Row.nvlink_errors_total, clean) == label_readings({"replay": 0, "recovery": 0, "crc": 0})

    def test_newer_errors(self) -> None:
        """Blackwell counts other errors than older links."""
        newer = dict.fromkeys((161, 162, 163, *fields.NVLINK_ERROR_TOTALS.values())) | {215: 1, 208: 0}
        assert reading(Row.nvlink_errors_total, newer) == label_readings({"link_recovery": LINKS, "receive": 0})

    def test_sleeping_link_is_up(self) -> None:
        """A link that sleeps to save power is up; one whose traffic is switched off is not."""
        assert reading(Row.nvlink_up, {fields.NVLINK_STATE: lambda link: 2 + link}) == label_readings({"0": 1, "1": 0})


class TestEcc:
    """ECC memory errors."""

    def test_locations(self) -> None:
        """Each type, lifetime and location of the device is read."""
        found = reading(Row.ecc_errors_total)
        assert len(found) == 2 * 2 * 8
        assert found[("corrected", "volatile", "dram")] == 2
        assert found[("uncorrected", "aggregate", "sram")] == 117

    def test_known_locations_only(self) -> None:
        """Locations that a model lacks have no samples, with any error; Hopper has two."""

        def counter(_kind: int, _lifetime: int, location: int) -> int | ErrorAnswer:
            return 0 if location in {2, 7} else ErrorAnswer(pynvml.NVML_ERROR_NOT_SUPPORTED)

        found = reading(Row.ecc_errors_total, nvmlDeviceGetMemoryErrorCounter=counter)
        assert {location for *_, location in found} == {"dram", "sram"}

    def test_total_replaces_locations(self) -> None:
        """A device without locations has totals."""
        found = reading(Row.ecc_errors_total, nvmlDeviceGetMemoryErrorCounter=UNSUPPORTED)
        assert found == {
            (kind, lifetime, "total"): 60
            for kind in ("corrected", "uncorrected")
            for lifetime in ("volatile", "aggregate")
        }

    def test_without_ecc(self) -> None:
        """A consumer card has no ECC readings."""
        without = dict.fromkeys((*fields.ECC_TOTALS.values(), fields.ECC_CURRENT, fields.ECC_PENDING))
        answers = read(
            without, nvmlDeviceGetMemoryErrorCounter=UNSUPPORTED, nvmlDeviceGetSramEccErrorStatus=UNSUPPORTED
        )
        assert answers.readings[Row.ecc_errors_total] == answers.readings[Row.ecc_mode] == {}
        assert answers.readings[Row.ecc_sram_threshold_exceeded] is None

    def test_threshold_not_exceeded(self) -> None:
        """Errors below the threshold do not exceed it."""
        fine = type("Sram", (), {**vars(SRAM), "bThresholdExceeded": 0})()
        assert reading(Row.ecc_sram_threshold_exceeded, nvmlDeviceGetSramEccErrorStatus=fine) == 0


class TestRecovery:
    """Recovery actions that the driver recommends."""

    @pytest.mark.parametrize(("action", "reset"), [(0, 0), (1, 1), (2, 0), (3, 0), (4, 1), (6, 1), (7, 0)])
    def test_reset_follows_the_action(self, action: int, reset: int) -> None:
        """Only actions that reset the GPU need a reset."""
        assert reading(Row.reset_required, {fields.RECOVERY_ACTION: action}) == reset

    @pytest.mark.parametrize(("flags", "reset"), [((0, 0), 0), ((1, 0), 1), ((0, 1), 1), ((None, 1), 1)])
    def test_older_flags(self, flags: tuple[int | None, int], reset: int) -> None:
        """Drivers without a recovery action have two flags."""
        values = {fields.RECOVERY_ACTION: None, 226: flags[0], 227: flags[1]}
        answers = read(values)
        assert answers.readings[Row.reset_required] == reset
        assert answers.readings[Row.recovery_action] == {}

    def test_new_action_is_reported(self) -> None:
        """An action that is new in NVML is reported by its number, not hidden."""
        found = reading(Row.recovery_action, {fields.RECOVERY_ACTION: 12})
        assert {name for (name,), value in found.items() if value} == {"state_12"}


class TestFabric:
    """State of the GPU in its NVLink fabric."""

    @pytest.mark.parametrize(("state", "status", "joined"), [(1, 0, 0), (2, 0, 0), (3, 0, 1), (3, 999, 0)])
    def test_joined(self, state: int, status: int, joined: int) -> None:
        """A GPU has joined when the state is completed and the status has no error."""
        answer = type("Fabric", (), {"state": state, "status": status, "cliqueId": 0, "healthMask": 0})()
        assert reading(Row.fabric_joined, nvmlDeviceGetGpuFabricInfoV=answer) == joined
        assert reading(Row.fabric_fault, nvmlDeviceGetGpuFabricInfoV=answer) == {}


def test_more_power_scopes() -> None:
    """A superchip reports the power of its module and memory too."""
    answer = {fields.POWER_INSTANT: lambda scope: (500_000, 900_000, 60_000)[scope]}
    assert reading(Row.power_instant_watts, answer) == label_readings({"gpu": 500, "module": 900, "memory": 60})


def test_static_facts_are_read_once() -> None:
    """Readings that cannot change while the driver is loaded are read once, and stay."""
    gpu = Gpu()
    first = gpu.read()
    gpu.nvml.calls.clear()
    second = gpu.read(after=100)
    asked = {name for name, *_ in gpu.nvml.calls}
    assert not asked & {
        "nvmlDeviceGetTemperatureThreshold",
        "nvmlDeviceGetMaxClockInfo",
        "nvmlDeviceGetNumFans",
        "nvmlDeviceGetSupportedClocksEventReasons",
        "nvmlDeviceGetInforomImageVersion",
    }
    static = [row for row in Row.rows if row.tier == "static"]
    assert [second.readings[row] for row in static] == [first.readings[row] for row in static]


def test_every_row_is_tested() -> None:
    """Each row has its value checked, here or in test_reader.py."""
    elsewhere = {
        Row.memory_size_bytes,
        Row.memory_used_bytes,
        Row.memory_free_bytes,
        Row.memory_reserved_bytes,
        Row.memory_unified,
        Row.memory_used_peak_bytes,
        Row.utilization_ratio,
        Row.busy_seconds_total,
        Row.memory_bandwidth_utilization_ratio,
        Row.temperature_margin_celsius,
        Row.power_usage_watts,
        Row.energy_joules_total,
        Row.clock_hertz,
        Row.clock_max_hertz,
        Row.clock_event_active,
        Row.clock_event_seconds_total,
        Row.ecc_errors_total,
        Row.performance_state,
    }
    elsewhere |= {row for row in Row.rows if row.opt_in == GPM_OPTION}  # test_gpm.py
    assert {row for row, _ in VALUES} | elsewhere == set(Row.rows)
