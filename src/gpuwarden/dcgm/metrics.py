"""Metrics under DCGM's names, each with the reading that it shows, in DCGM's unit.

Names, kinds and units are those of dcgm-exporter's lists of counters (etc/*.csv) and of DCGM's dcgm_fields.h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpuwarden.dcgm.entity import LABELS, Entity
from gpuwarden.gpu.metrics import GpuReadings, MigReadings
from gpuwarden.metrics.model import Kind, Metric, Reading, Table
from gpuwarden.nvml.constants import CLOCK_EVENT_REASONS, COMPUTE_MODES
from gpuwarden.xid.codes import explain

MIB, MHZ = 1 / 2**20, 1e-6
PERCENT, MILLI, NANO = 100, 1e3, 1e9


class DcgmMetric(Metric[Entity]):
    """Row under a DCGM name: without the project's prefix, and without a unit in the name."""

    def __post_init__(self) -> None:
        """Raise ValueError for a name that is not DCGM's."""
        if not self.name.startswith("DCGM_FI_") or self.unit:
            raise ValueError(f"{self.name}: DCGM fields are named DCGM_FI_…, and their unit is in the help")


def _scaled(value: float | None, scale: float) -> float | None:
    """Convert to another unit, rounded to drop binary rounding errors."""
    return None if value is None else round(value * scale, 6)


def _whole(read: Callable[[Entity], Reading]) -> Callable[[Entity], Reading]:
    """Restrict a reader to whole GPUs, for values that a MIG instance does not have."""
    return lambda entity: None if entity.instance else read(entity)


def _direct(name: str, kind: Kind, text: str, row: Metric[Any], *labels: str, scale: float = 1) -> DcgmMetric:
    """Declare a field that is one of gpuwarden's metrics in another unit."""
    where = ",".join(f'{label}="{value}"' for label, value in zip(row.labels, labels, strict=True))
    return DcgmMetric(
        f"DCGM_FI_{name}", kind, "", text,
        _whole(lambda entity: _scaled(entity.gpu.value(row, *labels), scale)),
        source=f"{row.name}{{{where}}}" if where else row.name,
    )  # fmt: skip


def _computed(name: str, kind: Kind, text: str, read: Callable[[Entity], Reading], *rows: Metric[Any]) -> DcgmMetric:
    """Declare a field computed from several metrics."""
    return DcgmMetric(f"DCGM_FI_{name}", kind, "", text, _whole(read), source=", ".join(row.name for row in rows))


def _rate(name: str, text: str, counter: Metric[Any], label: str) -> DcgmMetric:
    """Declare a field that is the rate of one of gpuwarden's counters."""
    return DcgmMetric(
        f"DCGM_FI_{name}", "gauge", "", text,
        _whole(lambda entity: entity.rates.rate(entity.gpu.identity.uuid, counter, label)),
        source=f'{counter.name}{{{counter.labels[0]}="{label}"}}',
    )  # fmt: skip


def _pcie(name: str, text: str, direction: str, scale: float = 1) -> DcgmMetric:
    """Declare a field that is the rate of the PCIe counter, or GPM's mean where that counter is too narrow to use."""
    counter, mean = GpuReadings.pcie_bytes_total, GpuReadings.pcie_mean_throughput_bytes_per_second

    def read(entity: Entity) -> float | None:
        counted = entity.rates.rate(entity.gpu.identity.uuid, counter, direction)
        return _scaled(entity.gpu.value(mean, direction) if counted is None else counted, scale)

    where = f'{{direction="{direction}"}}'
    source = f"{counter.name}{where}, else {mean.name}{where}"
    return DcgmMetric(f"DCGM_FI_{name}", "gauge", "", text, _whole(read), source=source)


def _value(entity: Entity, whole: Metric[Any], part: Metric[Any], *labels: str) -> float | None:
    """Return the reading of an instance, or of a GPU without instances: both would count twice in a sum."""
    if entity.instance:
        return entity.instance.value(part, *labels)
    return None if entity.gpu.mig else entity.gpu.value(whole, *labels)


def _divided(name: str, text: str, whole: Metric[Any], part: Metric[Any], *labels: str, scale: float = 1) -> DcgmMetric:
    """Declare a field that a GPU with MIG has for each instance."""
    where = ",".join(f'{label}="{value}"' for label, value in zip(whole.labels, labels, strict=True))
    names = (f"{row.name}{{{where}}}" if where else row.name for row in (whole, part))
    return DcgmMetric(
        f"DCGM_FI_{name}", "gauge", "", text,
        lambda entity: _scaled(_value(entity, whole, part, *labels), scale),
        source=", ".join(names),
    )  # fmt: skip


def _used_share(entity: Entity) -> float | None:
    used = _value(entity, GpuReadings.memory_used_bytes, MigReadings.memory_used_bytes)
    size = _value(entity, GpuReadings.memory_size_bytes, MigReadings.memory_size_bytes)
    if used is None or size is None:
        return None
    usable = size - (_value(entity, GpuReadings.memory_reserved_bytes, MigReadings.memory_reserved_bytes) or 0)
    return _scaled(used / usable, 1) if usable > 0 else None


def _engine_share(entity: Entity) -> float | None:
    share = _value(entity, GpuReadings.graphics_engine_active_ratio, MigReadings.graphics_engine_active_ratio)
    if share is None and not entity.instance:  # before Hopper: the driver's utilization is close to it
        share = entity.gpu.value(GpuReadings.utilization_ratio)
    return _scaled(share, 1)


def _last_xid(entity: Entity) -> Reading:
    """Return the code of the last XID as the value, as DCGM does; 0 for none known, so that alerts have a series."""
    xids = entity.gpu.xids
    code = max(xids, key=lambda code: xids[code].last, default=0)
    return {(str(code), explain(code).meaning if code else "No Error"): code}


def _bar1_free(entity: Entity) -> float | None:
    size, used = entity.gpu.value(GpuReadings.bar1_size_bytes), entity.gpu.value(GpuReadings.bar1_used_bytes)
    return None if size is None or used is None else _scaled(size - used, MIB)


def _event_bits(entity: Entity) -> float | None:
    if not entity.gpu.values(GpuReadings.clock_event_active):
        return None
    return int(sum(CLOCK_EVENT_REASONS[name] for name in entity.gpu.active(GpuReadings.clock_event_active)))


def _compute_mode(entity: Entity) -> float | None:
    modes = entity.gpu.active(GpuReadings.compute_mode)
    return COMPUTE_MODES.get(modes[0]) if modes else None


def _ecc(kind: str, lifetime: str) -> Callable[[Entity], float | None]:
    """Return a reader that sums errors over locations, as DCGM's totals do."""

    def total(entity: Entity) -> float | None:
        errors = entity.gpu.values(GpuReadings.ecc_errors_total)
        found = [count for labels, count in errors.items() if labels[:2] == (kind, lifetime)]
        return sum(found) if found else None

    return total


def _flit_errors(entity: Entity) -> float | None:
    of_flits = entity.gpu.value(GpuReadings.nvlink_errors_total, "crc_flit")
    # Drivers that do not separate the two have one count of CRC errors.
    return entity.gpu.value(GpuReadings.nvlink_errors_total, "crc") if of_flits is None else of_flits


def _nvlink_megabytes(entity: Entity) -> float | None:
    rates = [
        entity.rates.rate(entity.gpu.identity.uuid, GpuReadings.nvlink_bytes_total, direction)
        for direction in ("transmit", "receive")
    ]
    known = [rate for rate in rates if rate is not None]
    return _scaled(sum(known), 1e-6) if known else None


# Counters that fields show as rates.
COUNTERS = (GpuReadings.pcie_bytes_total, GpuReadings.nvlink_bytes_total)


class DcgmReadings(Table[Entity], prefix="DCGM_FI_", key=LABELS):
    """GPU metrics under the names of dcgm-exporter, with `compat: dcgm`."""

    # fmt: off
    DEV_SM_CLOCK = _direct("DEV_SM_CLOCK", "gauge", "SM clock in MHz.", GpuReadings.clock_hertz, "sm", scale=MHZ)
    DEV_MEM_CLOCK = _direct("DEV_MEM_CLOCK", "gauge", "Memory clock in MHz.", GpuReadings.clock_hertz, "memory", scale=MHZ)
    DEV_VIDEO_CLOCK = _direct("DEV_VIDEO_CLOCK", "gauge", "Video clock in MHz.", GpuReadings.clock_hertz, "video", scale=MHZ)
    DEV_MAX_SM_CLOCK = _direct("DEV_MAX_SM_CLOCK", "gauge", "Maximum SM clock in MHz.", GpuReadings.clock_max_hertz, "sm", scale=MHZ)
    DEV_MAX_MEM_CLOCK = _direct("DEV_MAX_MEM_CLOCK", "gauge", "Maximum memory clock in MHz.", GpuReadings.clock_max_hertz, "memory", scale=MHZ)
    DEV_MAX_VIDEO_CLOCK = _direct("DEV_MAX_VIDEO_CLOCK", "gauge", "Maximum video clock in MHz.", GpuReadings.clock_max_hertz, "video", scale=MHZ)
    DEV_APP_SM_CLOCK = _direct("DEV_APP_SM_CLOCK", "gauge", "SM application clock in MHz.", GpuReadings.clock_application_hertz, "graphics", "current", scale=MHZ)
    DEV_APP_MEM_CLOCK = _direct("DEV_APP_MEM_CLOCK", "gauge", "Memory application clock in MHz.", GpuReadings.clock_application_hertz, "memory", "current", scale=MHZ)
    DEV_CLOCKS_EVENT_REASONS = _computed("DEV_CLOCKS_EVENT_REASONS", "gauge", "Clock event reasons, as a bit mask.", _event_bits, GpuReadings.clock_event_active)
    DEV_CLOCK_THROTTLE_REASONS = _computed("DEV_CLOCK_THROTTLE_REASONS", "gauge", "Clock event reasons, as a bit mask (older name).", _event_bits, GpuReadings.clock_event_active)
    DEV_POWER_VIOLATION = _direct("DEV_POWER_VIOLATION", "counter", "Time throttled by the power limit, in ns.", GpuReadings.clock_event_seconds_total, "sw_power_cap", scale=NANO)
    DEV_THERMAL_VIOLATION = _direct("DEV_THERMAL_VIOLATION", "counter", "Time throttled by heat, in ns.", GpuReadings.clock_event_seconds_total, "sw_thermal_slowdown", scale=NANO)
    DEV_SYNC_BOOST_VIOLATION = _direct("DEV_SYNC_BOOST_VIOLATION", "counter", "Time throttled by sync boost, in ns.", GpuReadings.clock_event_seconds_total, "sync_boost", scale=NANO)
    DEV_BOARD_LIMIT_VIOLATION = _direct("DEV_BOARD_LIMIT_VIOLATION", "counter", "Time throttled by the board limit, in ns.", GpuReadings.clock_event_seconds_total, "board_limit", scale=NANO)
    DEV_LOW_UTIL_VIOLATION = _direct("DEV_LOW_UTIL_VIOLATION", "counter", "Time throttled by low utilization, in ns.", GpuReadings.clock_event_seconds_total, "low_utilization", scale=NANO)
    DEV_RELIABILITY_VIOLATION = _direct("DEV_RELIABILITY_VIOLATION", "counter", "Time throttled for reliability, in ns.", GpuReadings.clock_event_seconds_total, "reliability", scale=NANO)
    DEV_PSTATE = _direct("DEV_PSTATE", "gauge", "Performance state: 0 is the fastest, 15 the slowest.", GpuReadings.performance_state)

    DEV_GPU_TEMP = _direct("DEV_GPU_TEMP", "gauge", "Core temperature in C.", GpuReadings.temperature_celsius, "core")
    DEV_MEMORY_TEMP = _direct("DEV_MEMORY_TEMP", "gauge", "Memory temperature in C.", GpuReadings.temperature_celsius, "memory")
    DEV_GPU_TEMP_LIMIT = _direct("DEV_GPU_TEMP_LIMIT", "gauge", "Degrees C left before throttling.", GpuReadings.temperature_margin_celsius)
    DEV_SLOWDOWN_TEMP = _direct("DEV_SLOWDOWN_TEMP", "gauge", "Core temperature at which the GPU throttles, in C.", GpuReadings.temperature_threshold_celsius, "slowdown")
    DEV_SHUTDOWN_TEMP = _direct("DEV_SHUTDOWN_TEMP", "gauge", "Core temperature at which the GPU shuts down, in C.", GpuReadings.temperature_threshold_celsius, "shutdown")
    DEV_GPU_MAX_OP_TEMP = _direct("DEV_GPU_MAX_OP_TEMP", "gauge", "Maximum operating core temperature in C.", GpuReadings.temperature_threshold_celsius, "max_operating")
    DEV_MEM_MAX_OP_TEMP = _direct("DEV_MEM_MAX_OP_TEMP", "gauge", "Maximum operating memory temperature in C.", GpuReadings.temperature_threshold_celsius, "memory_max_operating")
    DEV_FAN_SPEED = _direct("DEV_FAN_SPEED", "gauge", "Speed of the first fan in %.", GpuReadings.fan_speed_ratio, "0", scale=PERCENT)

    DEV_POWER_USAGE = _direct("DEV_POWER_USAGE", "gauge", "Power draw in W.", GpuReadings.power_usage_watts)
    DEV_POWER_USAGE_INSTANT = _direct("DEV_POWER_USAGE_INSTANT", "gauge", "Instantaneous power draw in W.", GpuReadings.power_instant_watts, "gpu")
    DEV_POWER_MGMT_LIMIT = _direct("DEV_POWER_MGMT_LIMIT", "gauge", "Requested power limit in W.", GpuReadings.power_limit_watts, "requested")
    DEV_POWER_MGMT_LIMIT_MIN = _direct("DEV_POWER_MGMT_LIMIT_MIN", "gauge", "Minimum power limit that can be requested, in W.", GpuReadings.power_limit_watts, "min")
    DEV_POWER_MGMT_LIMIT_MAX = _direct("DEV_POWER_MGMT_LIMIT_MAX", "gauge", "Maximum power limit that can be requested, in W.", GpuReadings.power_limit_watts, "max")
    DEV_POWER_MGMT_LIMIT_DEF = _direct("DEV_POWER_MGMT_LIMIT_DEF", "gauge", "Default power limit of the board in W.", GpuReadings.power_limit_watts, "default")
    DEV_ENFORCED_POWER_LIMIT = _direct("DEV_ENFORCED_POWER_LIMIT", "gauge", "Enforced power limit in W.", GpuReadings.power_limit_watts, "enforced")
    DEV_TOTAL_ENERGY_CONSUMPTION = _direct("DEV_TOTAL_ENERGY_CONSUMPTION", "counter", "Energy consumed since the driver loaded, in mJ.", GpuReadings.energy_joules_total, scale=MILLI)

    DEV_GPU_UTIL = _direct("DEV_GPU_UTIL", "gauge", "GPU utilization in %: time with a kernel running.", GpuReadings.utilization_ratio, scale=PERCENT)
    DEV_MEM_COPY_UTIL = _direct("DEV_MEM_COPY_UTIL", "gauge", "Memory utilization in %: time in which memory was read or written.", GpuReadings.memory_bandwidth_utilization_ratio, scale=PERCENT)
    DEV_ENC_UTIL = _direct("DEV_ENC_UTIL", "gauge", "Encoder utilization in %.", GpuReadings.engine_utilization_ratio, "encoder", scale=PERCENT)
    DEV_DEC_UTIL = _direct("DEV_DEC_UTIL", "gauge", "Decoder utilization in %.", GpuReadings.engine_utilization_ratio, "decoder", scale=PERCENT)

    DEV_FB_TOTAL = _divided("DEV_FB_TOTAL", "Device memory in MiB.", GpuReadings.memory_size_bytes, MigReadings.memory_size_bytes, scale=MIB)
    DEV_FB_FREE = _divided("DEV_FB_FREE", "Free device memory in MiB.", GpuReadings.memory_free_bytes, MigReadings.memory_free_bytes, scale=MIB)
    DEV_FB_USED = _divided("DEV_FB_USED", "Used device memory in MiB.", GpuReadings.memory_used_bytes, MigReadings.memory_used_bytes, scale=MIB)
    DEV_FB_RESERVED = _divided("DEV_FB_RESERVED", "Device memory reserved by the driver, in MiB.", GpuReadings.memory_reserved_bytes, MigReadings.memory_reserved_bytes, scale=MIB)
    DEV_FB_USED_PERCENT = DcgmMetric("DCGM_FI_DEV_FB_USED_PERCENT", "gauge", "", "Used fraction of the memory that is not reserved, 0 to 1.", _used_share, source="gpuwarden_gpu_memory_used_bytes, …_size_bytes, …_reserved_bytes, gpuwarden_mig_…")
    DEV_BAR1_TOTAL = _direct("DEV_BAR1_TOTAL", "gauge", "BAR1 memory in MiB.", GpuReadings.bar1_size_bytes, scale=MIB)
    DEV_BAR1_USED = _direct("DEV_BAR1_USED", "gauge", "BAR1 memory in use in MiB.", GpuReadings.bar1_used_bytes, scale=MIB)
    DEV_BAR1_FREE = _computed("DEV_BAR1_FREE", "gauge", "Free BAR1 memory in MiB.", _bar1_free, GpuReadings.bar1_size_bytes, GpuReadings.bar1_used_bytes)

    DEV_ECC_CURRENT = _direct("DEV_ECC_CURRENT", "gauge", "Whether ECC is enabled.", GpuReadings.ecc_mode, "current")
    DEV_ECC_PENDING = _direct("DEV_ECC_PENDING", "gauge", "Whether ECC is enabled after the next reset.", GpuReadings.ecc_mode, "pending")
    DEV_ECC_SBE_VOL_TOTAL = _computed("DEV_ECC_SBE_VOL_TOTAL", "counter", "Corrected memory errors since the driver loaded.", _ecc("corrected", "volatile"), GpuReadings.ecc_errors_total)
    DEV_ECC_DBE_VOL_TOTAL = _computed("DEV_ECC_DBE_VOL_TOTAL", "counter", "Uncorrected memory errors since the driver loaded.", _ecc("uncorrected", "volatile"), GpuReadings.ecc_errors_total)
    DEV_ECC_SBE_AGG_TOTAL = _computed("DEV_ECC_SBE_AGG_TOTAL", "counter", "Corrected memory errors over the lifetime of the board.", _ecc("corrected", "aggregate"), GpuReadings.ecc_errors_total)
    DEV_ECC_DBE_AGG_TOTAL = _computed("DEV_ECC_DBE_AGG_TOTAL", "counter", "Uncorrected memory errors over the lifetime of the board.", _ecc("uncorrected", "aggregate"), GpuReadings.ecc_errors_total)
    DEV_THRESHOLD_SRM = _direct("DEV_THRESHOLD_SRM", "gauge", "Whether SRAM (on-chip memory) errors exceed NVIDIA's threshold.", GpuReadings.ecc_sram_threshold_exceeded)
    DEV_RETIRED_SBE = _direct("DEV_RETIRED_SBE", "counter", "Pages retired for single-bit errors.", GpuReadings.retired_pages, "single_bit")
    DEV_RETIRED_DBE = _direct("DEV_RETIRED_DBE", "counter", "Pages retired for double-bit errors.", GpuReadings.retired_pages, "double_bit")
    DEV_RETIRED_PENDING = _direct("DEV_RETIRED_PENDING", "gauge", "Whether a page will be retired at the next reset.", GpuReadings.retired_pages_pending)
    DEV_CORRECTABLE_REMAPPED_ROWS = _direct("DEV_CORRECTABLE_REMAPPED_ROWS", "counter", "Rows remapped for corrected errors.", GpuReadings.remapped_rows, "correctable")
    DEV_UNCORRECTABLE_REMAPPED_ROWS = _direct("DEV_UNCORRECTABLE_REMAPPED_ROWS", "counter", "Rows remapped for uncorrected errors.", GpuReadings.remapped_rows, "uncorrectable")
    DEV_ROW_REMAP_FAILURE = _direct("DEV_ROW_REMAP_FAILURE", "gauge", "Whether remapping a row failed.", GpuReadings.row_remap_failed)
    DEV_ROW_REMAP_PENDING = _direct("DEV_ROW_REMAP_PENDING", "gauge", "Whether a row will be remapped at the next reset.", GpuReadings.row_remap_pending)
    DEV_BANKS_REMAP_ROWS_AVAIL_MAX = _direct("DEV_BANKS_REMAP_ROWS_AVAIL_MAX", "gauge", "Memory banks with all spare rows left.", GpuReadings.row_remap_banks, "max")
    DEV_BANKS_REMAP_ROWS_AVAIL_HIGH = _direct("DEV_BANKS_REMAP_ROWS_AVAIL_HIGH", "gauge", "Memory banks with many spare rows left.", GpuReadings.row_remap_banks, "high")
    DEV_BANKS_REMAP_ROWS_AVAIL_PARTIAL = _direct("DEV_BANKS_REMAP_ROWS_AVAIL_PARTIAL", "gauge", "Memory banks with some spare rows left.", GpuReadings.row_remap_banks, "partial")
    DEV_BANKS_REMAP_ROWS_AVAIL_LOW = _direct("DEV_BANKS_REMAP_ROWS_AVAIL_LOW", "gauge", "Memory banks with few spare rows left.", GpuReadings.row_remap_banks, "low")
    DEV_BANKS_REMAP_ROWS_AVAIL_NONE = _direct("DEV_BANKS_REMAP_ROWS_AVAIL_NONE", "gauge", "Memory banks with no spare row left.", GpuReadings.row_remap_banks, "none")

    DEV_XID_ERRORS = DcgmMetric("DCGM_FI_DEV_XID_ERRORS", "gauge", "", "Code of the last XID, 0 for none, also where gpuwarden_access says that XIDs cannot be read.", _whole(_last_xid), labels=("err_code", "err_msg"), source="gpuwarden_gpu_xid_events_total, gpuwarden_gpu_xid_last_event_timestamp_seconds")

    DEV_PCIE_REPLAY_COUNTER = _direct("DEV_PCIE_REPLAY_COUNTER", "counter", "PCIe retransmissions.", GpuReadings.pcie_replays_total)
    DEV_PCIE_LINK_GEN = _direct("DEV_PCIE_LINK_GEN", "gauge", "Current PCIe generation of the link.", GpuReadings.pcie_link_generation)
    DEV_PCIE_LINK_WIDTH = _direct("DEV_PCIE_LINK_WIDTH", "gauge", "Current number of PCIe lanes.", GpuReadings.pcie_link_width)
    DEV_PCIE_MAX_LINK_GEN = _direct("DEV_PCIE_MAX_LINK_GEN", "gauge", "Maximum PCIe generation of the link.", GpuReadings.pcie_link_max_generation, "link")
    DEV_PCIE_MAX_LINK_WIDTH = _direct("DEV_PCIE_MAX_LINK_WIDTH", "gauge", "Maximum number of PCIe lanes.", GpuReadings.pcie_link_max_width)
    DEV_PCIE_TX_THROUGHPUT = _pcie("DEV_PCIE_TX_THROUGHPUT", "Rate of data sent over PCIe in KB/s.", "transmit", scale=1e-3)
    DEV_PCIE_RX_THROUGHPUT = _pcie("DEV_PCIE_RX_THROUGHPUT", "Rate of data received over PCIe in KB/s.", "receive", scale=1e-3)
    PROF_PCIE_TX_BYTES = _pcie("PROF_PCIE_TX_BYTES", "Rate of data sent over PCIe in B/s.", "transmit")
    PROF_PCIE_RX_BYTES = _pcie("PROF_PCIE_RX_BYTES", "Rate of data received over PCIe in B/s.", "receive")

    DEV_NVLINK_BANDWIDTH_TOTAL = _computed("DEV_NVLINK_BANDWIDTH_TOTAL", "gauge", "Rate of data over all NVLinks, both ways, in MB/s.", _nvlink_megabytes, GpuReadings.nvlink_bytes_total)
    PROF_NVLINK_TX_BYTES = _rate("PROF_NVLINK_TX_BYTES", "Rate of data sent over NVLink in B/s.", GpuReadings.nvlink_bytes_total, "transmit")
    PROF_NVLINK_RX_BYTES = _rate("PROF_NVLINK_RX_BYTES", "Rate of data received over NVLink in B/s.", GpuReadings.nvlink_bytes_total, "receive")
    DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL = _computed("DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "counter", "NVLink CRC errors of flow control.", _flit_errors, GpuReadings.nvlink_errors_total)
    DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL = _direct("DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", "counter", "NVLink CRC errors of data.", GpuReadings.nvlink_errors_total, "crc_data")
    DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL = _direct("DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", "counter", "NVLink replays.", GpuReadings.nvlink_errors_total, "replay")
    DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL = _direct("DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL", "counter", "NVLink recoveries.", GpuReadings.nvlink_errors_total, "recovery")

    DEV_PERSISTENCE_MODE = _direct("DEV_PERSISTENCE_MODE", "gauge", "Whether the driver stays loaded for an idle GPU.", GpuReadings.persistence_mode)
    DEV_COMPUTE_MODE = _computed("DEV_COMPUTE_MODE", "gauge", "Who may open a context, by NVML's number.", _compute_mode, GpuReadings.compute_mode)
    DEV_MIG_MODE = _direct("DEV_MIG_MODE", "gauge", "Whether the GPU is divided into MIG instances.", GpuReadings.mig_mode, "current")

    PROF_GR_ENGINE_ACTIVE = DcgmMetric("DCGM_FI_PROF_GR_ENGINE_ACTIVE", "gauge", "", "Share of the time with any compute or graphics work, from 0 to 1.", _engine_share, source="gpuwarden_gpu_graphics_engine_active_ratio, gpuwarden_mig_graphics_engine_active_ratio, else gpuwarden_gpu_utilization_ratio")
    PROF_SM_ACTIVE = _divided("PROF_SM_ACTIVE", "Share of the SMs that were busy, from 0 to 1.", GpuReadings.sm_active_ratio, MigReadings.sm_active_ratio)
    PROF_SM_OCCUPANCY = _divided("PROF_SM_OCCUPANCY", "Active warps over the most that the SMs can hold, from 0 to 1.", GpuReadings.sm_occupancy_ratio, MigReadings.sm_occupancy_ratio)
    PROF_DRAM_ACTIVE = _divided("PROF_DRAM_ACTIVE", "Device memory's bandwidth in use over its most, from 0 to 1.", GpuReadings.dram_active_ratio, MigReadings.dram_active_ratio)
    PROF_PIPE_TENSOR_ACTIVE = _divided("PROF_PIPE_TENSOR_ACTIVE", "Share of the time that the tensor pipe was active, from 0 to 1.", GpuReadings.pipe_active_ratio, MigReadings.pipe_active_ratio, "tensor")
    PROF_PIPE_FP64_ACTIVE = _divided("PROF_PIPE_FP64_ACTIVE", "Share of the time that the FP64 pipe was active, from 0 to 1.", GpuReadings.pipe_active_ratio, MigReadings.pipe_active_ratio, "fp64")
    PROF_PIPE_FP32_ACTIVE = _divided("PROF_PIPE_FP32_ACTIVE", "Share of the time that the FP32 pipe was active, from 0 to 1.", GpuReadings.pipe_active_ratio, MigReadings.pipe_active_ratio, "fp32")
    PROF_PIPE_FP16_ACTIVE = _divided("PROF_PIPE_FP16_ACTIVE", "Share of the time that the FP16 pipe was active, from 0 to 1.", GpuReadings.pipe_active_ratio, MigReadings.pipe_active_ratio, "fp16")
    PROF_PIPE_INT_ACTIVE = _divided("PROF_PIPE_INT_ACTIVE", "Share of the time that the integer pipe was active, from 0 to 1.", GpuReadings.pipe_active_ratio, MigReadings.pipe_active_ratio, "integer")
    PROF_PIPE_TENSOR_IMMA_ACTIVE = _direct("PROF_PIPE_TENSOR_IMMA_ACTIVE", "gauge", "Share of the time that the tensor pipe did integer work, from 0 to 1.", GpuReadings.tensor_pipe_active_ratio, "imma")
    PROF_PIPE_TENSOR_HMMA_ACTIVE = _direct("PROF_PIPE_TENSOR_HMMA_ACTIVE", "gauge", "Share of the time that the tensor pipe did work in half precision, from 0 to 1.", GpuReadings.tensor_pipe_active_ratio, "hmma")
    PROF_PIPE_TENSOR_DFMA_ACTIVE = _direct("PROF_PIPE_TENSOR_DFMA_ACTIVE", "gauge", "Share of the time that the tensor pipe did work in double precision, from 0 to 1.", GpuReadings.tensor_pipe_active_ratio, "dfma")
    # fmt: on
