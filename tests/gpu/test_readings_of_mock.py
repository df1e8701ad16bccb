"""All rows read through nvidia-ml-py on the mock library: a data center GPU, a consumer card, and faults."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest
from commands import COMMAND, run_command

from gpuwarden.gpu.metrics import GpuReadings
from gpuwarden.nvml.gpm import OPTION as GPM_OPTION
from mock_nvml import MockNvml

UUID = re.compile(r',?uuid="[^"]*",?')
# Rows that an H100 under driver 590 does not have.
LACKING = {
    GpuReadings.encoder_frame_rate_hertz,  # without a session
    GpuReadings.encoder_latency_seconds,
    GpuReadings.fan_speed_ratio,
    GpuReadings.clock_application_hertz,
    GpuReadings.pcie_throughput_bytes_per_second,  # not configured
    GpuReadings.nvlink_link_errors_total,  # none
    GpuReadings.c2c_link_up,
    GpuReadings.c2c_speed_bytes_per_second,
    GpuReadings.c2c_errors_total,
    GpuReadings.memory_unrepairable,
    GpuReadings.repair_pending,
    GpuReadings.retired_pages,
    GpuReadings.retired_pages_pending,
    GpuReadings.addressing_mode,
    GpuReadings.memory_numa_node,
    *(row for row in GpuReadings.rows if row.opt_in == GPM_OPTION),  # of the time between two polls (test_gpm.py)
}


def samples(mock_nvml: MockNvml, model: str = "h100") -> dict[str, float]:
    """Return one poll's samples of a GPU, without its UUID, by name and other labels."""
    return samples_from_page(run_command("once", env=mock_nvml.env(gpus=1, frozen=1, model=model)).stdout)


def samples_from_page(page: str) -> dict[str, float]:
    """Return a page's samples of a GPU, without its UUID, by name and other labels."""
    lines = [line for line in page.splitlines() if line.startswith("gpuwarden_gpu_") and "uuid=" in line]
    return {name: float(value) for name, value in (UUID.sub("", line).rsplit(" ", 1) for line in lines)}


# The oldest supported nvidia-ml-py: the installed one, without the functions that were added later.
OLD_RELEASE = """
import importlib.util
import sys

spec = importlib.util.spec_from_file_location("installed", {installed!r})
installed = sys.modules["installed"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(installed)
later = {{
    "NVML_ERROR_GPU_NOT_FOUND", "nvmlDeviceGetAddressingMode", "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetMarginTemperature", "nvmlDeviceGetMemoryLimits_v1", "nvmlDeviceGetNumaNodeId",
    "nvmlDeviceGetRepairStatus",
    "nvmlDeviceGetSramEccErrorStatus", "nvmlDeviceGetUnrepairableMemoryFlag_v1", "c_nvmlGpuFabricInfo_v2_t",
    "c_nvmlEccSramErrorStatus_v1_t",
}}
globals().update({{name: value for name, value in vars(installed).items() if name not in later}})


def nvmlDeviceGetGspFirmwareVersion(handle, version):
    raise AssertionError("this release wants a buffer")
"""


def test_least_nvidia_ml_py(mock_nvml: MockNvml, tmp_path: Path) -> None:
    """The oldest supported nvidia-ml-py lacks rows, and nothing fails."""
    (tmp_path / "pynvml.py").write_text(OLD_RELEASE.format(installed=pynvml.__file__))
    env = {**os.environ, **mock_nvml.env(gpus=1, frozen=1), "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([*COMMAND, "once"], env=env, capture_output=True, text=True, check=True)
    found = samples_from_page(done.stdout)
    lost = rows(samples(mock_nvml)) - rows(found)
    assert lost == {
        "gpuwarden_gpu_fabric_state",
        "gpuwarden_gpu_fabric_joined",
        "gpuwarden_gpu_fabric_info",
        "gpuwarden_gpu_fabric_fault",
        "gpuwarden_gpu_ecc_sram_errors_total",
        "gpuwarden_gpu_ecc_sram_unit_errors_total",
        "gpuwarden_gpu_ecc_sram_threshold_exceeded",
    }
    # The distance to the slowdown threshold replaces the driver's margin.
    assert found["gpuwarden_gpu_temperature_margin_celsius{}"] == 89 - 54
    assert 'gsp_firmware_version="590.48.01"' in next(name for name in found if "hardware_info" in name)


def rows(found: dict[str, float]) -> set[str]:
    """Return the names of the metrics."""
    return {name.partition("{")[0] for name in found}


def test_data_centre_gpu(mock_nvml: MockNvml) -> None:
    """Each row that an H100 has is read through the real binding, in base units."""
    found = samples(mock_nvml)
    expected = {row.name for row in GpuReadings.rows} - {row.name for row in LACKING}
    assert expected <= rows(found)
    assert rows(found).isdisjoint(row.name for row in LACKING)
    assert {
        name: found[f"gpuwarden_gpu_{name}"]
        for name in (
            "bar1_size_bytes{}",
            'engine_utilization_ratio{engine="decoder"}',
            'temperature_celsius{sensor="memory"}',
            'temperature_threshold_celsius{threshold="max_operating"}',
            'temperature_margin_threshold_celsius{threshold="shutdown"}',
            'power_instant_watts{scope="gpu"}',
            'power_average_watts{scope="gpu"}',
            'power_limit_watts{limit="min"}',
            'power_limit_watts{limit="max"}',
            'clock_event_seconds_total{reason="sw_power_cap"}',
            'clock_event_seconds_total{reason="hw_slowdown"}',
            "pcie_link_generation{}",
            'pcie_link_max_generation{of="gpu"}',
            'pcie_bytes_total{direction="transmit"}',
            'pcie_bytes_total{direction="receive"}',
            'nvlink_up{link="17"}',
            "nvlink_speed_bytes_per_second{}",
            'nvlink_bytes_total{direction="transmit"}',
            'ecc_mode{setting="current"}',
            'row_remap_banks{spare_rows="max"}',
            "persistence_mode{}",
            'compute_mode{mode="default"}',
            'fabric_state{state="completed"}',
            "fabric_joined{}",
            "memory_bus_width_bytes{}",
            "cores{}",
            'inforom_info{ecc="7.16",image="G520.0200.00.05",oem="2.1",power="2.1"}',
        )
    } == {
        "bar1_size_bytes{}": 128 << 30,
        'engine_utilization_ratio{engine="decoder"}': 0,
        'temperature_celsius{sensor="memory"}': 50,
        'temperature_threshold_celsius{threshold="max_operating"}': 87,
        'temperature_margin_threshold_celsius{threshold="shutdown"}': -8,
        'power_instant_watts{scope="gpu"}': 390,
        'power_average_watts{scope="gpu"}': 390,
        'power_limit_watts{limit="min"}': 200,
        'power_limit_watts{limit="max"}': 700,
        'clock_event_seconds_total{reason="sw_power_cap"}': 7.2,
        'clock_event_seconds_total{reason="hw_slowdown"}': 0,
        "pcie_link_generation{}": 5,
        'pcie_link_max_generation{of="gpu"}': 5,
        'pcie_bytes_total{direction="transmit"}': 4.5e8 * 3600,
        'pcie_bytes_total{direction="receive"}': 9e8 * 3600,
        'nvlink_up{link="17"}': 1,
        "nvlink_speed_bytes_per_second{}": 18 * 26.562e9,
        'nvlink_bytes_total{direction="transmit"}': 0.9e6 * 18 * 3600 * 1024,
        'ecc_mode{setting="current"}': 1,
        'row_remap_banks{spare_rows="max"}': 2560,
        "persistence_mode{}": 1,
        'compute_mode{mode="default"}': 1,
        'fabric_state{state="completed"}': 1,
        "fabric_joined{}": 1,
        "memory_bus_width_bytes{}": 640,
        "cores{}": 16896,
        'inforom_info{ecc="7.16",image="G520.0200.00.05",oem="2.1",power="2.1"}': 1,
    }


def test_nvlink_sum_that_a_driver_leaves_at_zero(mock_nvml: MockNvml) -> None:
    """The links are summed where the driver's sum is 0; if only raw counters move, there is no value."""
    name = 'gpuwarden_gpu_nvlink_bytes_total{direction="transmit"}'
    mock_nvml.set(0, "nvlink_sum", 0)
    by_link = sum(1 + 0.02 * link for link in range(18))
    assert samples(mock_nvml)[name] == pytest.approx(0.9e6 * by_link * 3600 * 1024)
    mock_nvml.set(0, "nvlink_data", 0)
    found = samples(mock_nvml)
    assert name not in found
    assert found['gpuwarden_gpu_nvlink_up{link="17"}'] == 1


def test_consumer_card(mock_nvml: MockNvml) -> None:
    """A card without ECC, NVLink, row remapping and a fabric has fans, and no defaults for missing readings."""
    found = samples(mock_nvml, "rtx4090")
    assert {name: value for name, value in found.items() if "fan" in name} == {
        'gpuwarden_gpu_fan_speed_ratio{fan="0"}': 0.55,
        'gpuwarden_gpu_fan_speed_ratio{fan="1"}': 0.55,
    }
    assert not [name for name in found if re.search("nvlink|ecc|remap|fabric|mig|inforom|jpeg", name)]
    assert 'gpuwarden_gpu_temperature_celsius{sensor="memory"}' not in found
    assert "gpuwarden_gpu_pcie_bytes_total" not in rows(found)
    assert found['gpuwarden_gpu_engine_utilization_ratio{engine="encoder"}'] == 0.1
    assert 'serial=""' in next(name for name in found if "hardware_info" in name)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("nvlink_down", 3, {'nvlink_up{link="3"}': 0, 'nvlink_up{link="4"}': 1}),
        (
            "nvlink_errors",
            2,
            {'nvlink_errors_total{type="crc"}': 36, 'nvlink_link_errors_total{link="5",type="replay"}': 2},
        ),
        (
            "ecc_sbe",
            7,
            {
                'ecc_errors_total{lifetime="volatile",location="dram",type="corrected"}': 7,
                'ecc_errors_total{lifetime="aggregate",location="dram",type="corrected"}': 14,
                'ecc_errors_total{lifetime="volatile",location="dram",type="uncorrected"}': 0,
            },
        ),
        ("remap_unc", 5, {'remapped_rows{cause="uncorrectable"}': 5, 'remapped_rows{cause="correctable"}': 0}),
        ("remap_pending", 1, {"row_remap_pending{}": 1, "row_remap_failed{}": 0}),
        ("remap_failed", 1, {"row_remap_failed{}": 1}),
        ("recovery", 4, {'recovery_action{action="drain_and_reset"}': 1, "reset_required{}": 1}),
        ("pcie_gen", 1, {"pcie_link_generation{}": 1, 'pcie_link_max_generation{of="link"}': 5}),
        ("pcie_width", 4, {"pcie_link_width{}": 4, "pcie_link_max_width{}": 16}),
        ("pcie_replay", 11, {"pcie_replays_total{}": 11}),
        ("limit", 500_000, {'power_limit_watts{limit="enforced"}': 500, 'power_limit_watts{limit="default"}': 700}),
    ],
)
def test_fault(mock_nvml: MockNvml, key: str, value: int, expected: dict[str, float]) -> None:
    """A fault of the device appears in its own row."""
    mock_nvml.control(f"set 0 {key} {value}")
    found = samples(mock_nvml)
    assert {name: found[f"gpuwarden_gpu_{name}"] for name in expected} == expected


def test_failing_field_values(mock_nvml: MockNvml) -> None:
    """If field values fail as a whole, rows without fields stay, and the failure is counted."""
    mock_nvml.error(0, "nvmlDeviceGetFieldValues", "UNKNOWN")
    found = samples(mock_nvml)
    assert found['gpuwarden_gpu_temperature_celsius{sensor="core"}'] == 54
    assert "gpuwarden_gpu_power_instant_watts" not in rows(found)
    assert found['gpuwarden_gpu_errors_total{error="unknown"}'] > 0
    assert found["gpuwarden_gpu_up{}"] == 1
