"""Every reading of a GPU, declared once; the page, docs, rules and dashboards follow this table."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpuwarden.gpu.device import Device
from gpuwarden.gpu.gpm import OPTION as GPM_OPTION
from gpuwarden.gpu.mig import Instance, mig_enabled
from gpuwarden.gpu.nvml import (
    CLOCK_EVENT_REASONS,
    CLOCKS,
    GPM_DRAM_ACTIVE,
    GPM_GRAPHICS_ENGINE,
    GPM_PIPES,
    GPM_SM_ACTIVE,
    GPM_SM_OCCUPANCY,
    GPM_TENSOR_OPERATIONS,
    MEMORY_V2,
    PERFORMANCE_STATE_UNKNOWN,
    TEMPERATURE_CORE,
    TEMPERATURE_THRESHOLDS,
    Memory,
)
from gpuwarden.metric import Labels, Metric, Table

_GPM = "nvmlGpmSampleGet, nvmlGpmMetricsGet:"
_MIG_GPM = "nvmlGpmMigSampleGet, nvmlGpmMetricsGet:"


def _memory(gpu: Device) -> Memory | None:
    # Version 2 tells the driver's own share apart; drivers before R510 have version 1 alone.
    ask = gpu.nvml.nvmlDeviceGetMemoryInfo
    return gpu.supported(ask, MEMORY_V2) or gpu.supported(ask)


def _size(gpu: Device) -> float:
    memory = _memory(gpu)
    return gpu.host_memory().size if memory is None else memory.total


def _used(gpu: Device) -> float:
    memory = _memory(gpu)
    if memory is not None:
        return memory.used
    host = gpu.host_memory()
    return host.size - host.available


def _free(gpu: Device) -> float:
    memory = _memory(gpu)
    return gpu.host_memory().available if memory is None else memory.free


def _reserved(gpu: Device) -> float | None:
    memory = gpu.supported(gpu.nvml.nvmlDeviceGetMemoryInfo, MEMORY_V2)
    return None if memory is None else memory.reserved


def _peaks(gpu: Device) -> Mapping[Labels, float]:
    gpu.peaks.look(_used(gpu))
    return gpu.peaks.highest()


def _slowdown(gpu: Device) -> int | None:
    threshold = gpu.supported(gpu.nvml.nvmlDeviceGetTemperatureThreshold, TEMPERATURE_THRESHOLDS["slowdown"])
    return threshold or None  # 0 stands for "not set" on some boards


def _margin(gpu: Device) -> float | None:
    """Degrees left before slowdown: the driver's own margin, else the distance to the slowdown threshold.

    A margin of 0 or less is reported by healthy H100 boards (leptonai/gpud), so then the threshold decides.
    """
    margin = gpu.supported(gpu.nvml.nvmlDeviceGetMarginTemperature)
    if margin is not None and margin > 0:
        return margin
    slowdown = _slowdown(gpu)
    return None if slowdown is None else slowdown - gpu.query(gpu.nvml.nvmlDeviceGetTemperature, TEMPERATURE_CORE)


def _thresholds(gpu: Device) -> dict[Labels, float]:
    found = {
        (name,): gpu.supported(gpu.nvml.nvmlDeviceGetTemperatureThreshold, number)
        for name, number in TEMPERATURE_THRESHOLDS.items()
    }
    return {name: celsius for name, celsius in found.items() if celsius}


def _limits(gpu: Device) -> dict[Labels, float]:
    found = {
        ("enforced",): gpu.supported(gpu.nvml.nvmlDeviceGetEnforcedPowerLimit),
        ("requested",): gpu.supported(gpu.nvml.nvmlDeviceGetPowerManagementLimit),
        ("default",): gpu.supported(gpu.nvml.nvmlDeviceGetPowerManagementDefaultLimit),
    }
    return {name: milliwatts / 1000 for name, milliwatts in found.items() if milliwatts is not None}


def _clocks(gpu: Device) -> dict[Labels, float]:
    found = {(name,): gpu.supported(gpu.nvml.nvmlDeviceGetClockInfo, number) for name, number in CLOCKS.items()}
    return {name: megahertz * 1e6 for name, megahertz in found.items() if megahertz is not None}


def _max_clocks(gpu: Device) -> dict[Labels, float]:
    found = {(name,): gpu.supported(gpu.nvml.nvmlDeviceGetMaxClockInfo, number) for name, number in CLOCKS.items()}
    return {name: megahertz * 1e6 for name, megahertz in found.items() if megahertz is not None}


def _clock_events(gpu: Device) -> dict[Labels, float]:
    # Drivers before R535 know the same bits under the older name.
    active = gpu.supported(gpu.nvml.nvmlDeviceGetCurrentClocksEventReasons)
    if active is None:
        active = gpu.query(gpu.nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
    known = gpu.supported(gpu.nvml.nvmlDeviceGetSupportedClocksEventReasons)
    if known is None:
        known = gpu.supported(gpu.nvml.nvmlDeviceGetSupportedClocksThrottleReasons)
    if known is None:
        known = ~0
    return {(name,): float(bool(active & bit)) for name, bit in CLOCK_EVENT_REASONS.items() if known & bit}


def _performance_state(gpu: Device) -> int | None:
    state = gpu.query(gpu.nvml.nvmlDeviceGetPerformanceState)
    return None if state == PERFORMANCE_STATE_UNKNOWN else state


def _active(gpu: Device, metric: int) -> float | None:
    """Return a GPM metric of the undivided GPU; a divided one is sampled by instance."""
    return gpu.gpm.share(gpu.handle, metric, divided=lambda: mig_enabled(gpu))


def _each_active(gpu: Device, metrics: Mapping[str, int]) -> dict[Labels, float]:
    return _known({(name,): _active(gpu, number) for name, number in metrics.items()})


def _known(readings: Mapping[Labels, float | None]) -> dict[Labels, float]:
    return {labels: value for labels, value in readings.items() if value is not None}


def _instance_memory(amount: Callable[[Memory], float]) -> Callable[[Instance], float | None]:
    return lambda mig: None if mig.memory is None else amount(mig.memory)


def _slices(mig: Instance) -> dict[Labels, float] | None:
    has = mig.attributes
    return None if has is None else {("gpu",): has.gpuInstanceSliceCount, ("compute",): has.computeInstanceSliceCount}


def _engines(mig: Instance) -> dict[Labels, float] | None:
    has = mig.attributes
    if has is None:
        return None
    return {
        ("copy",): has.sharedCopyEngineCount,
        ("decoder",): has.sharedDecoderCount,
        ("encoder",): has.sharedEncoderCount,
        ("jpeg",): has.sharedJpegCount,
        ("ofa",): has.sharedOfaCount,
    }


class GpuReadings(Table[Device], prefix="gpuwarden_gpu_", key=("uuid",)):
    """What the driver answers for one GPU in one poll."""

    # fmt: off
    memory_size_bytes = Metric[Device](
        "gpuwarden_gpu_memory_size_bytes", "gauge", "bytes", "Device memory installed.",
        _size, source="nvmlDeviceGetMemoryInfo_v2")
    memory_used_bytes = Metric[Device](
        "gpuwarden_gpu_memory_used_bytes", "gauge", "bytes", "Device memory allocated by all processes, frameworks' pools included.",
        _used, source="nvmlDeviceGetMemoryInfo_v2")
    memory_free_bytes = Metric[Device](
        "gpuwarden_gpu_memory_free_bytes", "gauge", "bytes", "Device memory that no process has allocated.",
        _free, source="nvmlDeviceGetMemoryInfo_v2")
    memory_reserved_bytes = Metric[Device](
        "gpuwarden_gpu_memory_reserved_bytes", "gauge", "bytes", "Device memory the driver keeps for itself.",
        _reserved, source="nvmlDeviceGetMemoryInfo_v2")
    memory_unified = Metric[Device](
        "gpuwarden_gpu_memory_unified", "gauge", "", "Whether the GPU has no memory of its own: then its memory is the machine's, which programs on the CPU use too.",
        lambda gpu: float(_memory(gpu) is None), source="nvmlDeviceGetMemoryInfo unsupported; /proc/meminfo", tier="slow")
    memory_used_peak_bytes = Metric[Device](
        "gpuwarden_gpu_memory_used_peak_bytes", "gauge", "bytes", "Most device memory in use at any look in the window that ends now.",
        _peaks, labels=("window",), source="nvmlDeviceGetMemoryInfo_v2, every poll.memory_interval", tier="memory")
    utilization_ratio = Metric[Device](
        "gpuwarden_gpu_utilization_ratio", "gauge", "ratio", "Share of the driver's sample period with a kernel running.",
        lambda gpu: gpu.query(gpu.nvml.nvmlDeviceGetUtilizationRates).gpu / 100, source="nvmlDeviceGetUtilizationRates")
    busy_seconds_total = Metric[Device](
        "gpuwarden_gpu_busy_seconds_total", "counter", "seconds", "Time with a kernel running: utilization, added up over the polls.",
        lambda gpu: gpu.integral("busy", gpu.query(gpu.nvml.nvmlDeviceGetUtilizationRates).gpu / 100), source="nvmlDeviceGetUtilizationRates")
    memory_bandwidth_utilization_ratio = Metric[Device](
        "gpuwarden_gpu_memory_bandwidth_utilization_ratio", "gauge", "ratio",
        "Share of the driver's sample period with device memory being read or written.",
        lambda gpu: gpu.query(gpu.nvml.nvmlDeviceGetUtilizationRates).memory / 100, source="nvmlDeviceGetUtilizationRates")
    temperature_celsius = Metric[Device](
        "gpuwarden_gpu_temperature_celsius", "gauge", "celsius", "Temperature by sensor.",
        lambda gpu: {("core",): gpu.query(gpu.nvml.nvmlDeviceGetTemperature, TEMPERATURE_CORE)},
        labels=("sensor",), source="nvmlDeviceGetTemperature")
    temperature_threshold_celsius = Metric[Device](
        "gpuwarden_gpu_temperature_threshold_celsius", "gauge", "celsius", "The device's own temperature thresholds.",
        _thresholds, labels=("threshold",), source="nvmlDeviceGetTemperatureThreshold")
    temperature_margin_celsius = Metric[Device](
        "gpuwarden_gpu_temperature_margin_celsius", "gauge", "celsius", "Degrees left before the device slows itself down.",
        _margin, source="nvmlDeviceGetMarginTemperature, else slowdown threshold minus core temperature")
    power_usage_watts = Metric[Device](
        "gpuwarden_gpu_power_usage_watts", "gauge", "watts", "Power drawn.",
        lambda gpu: gpu.query(gpu.nvml.nvmlDeviceGetPowerUsage) / 1000, source="nvmlDeviceGetPowerUsage")
    power_limit_watts = Metric[Device](
        "gpuwarden_gpu_power_limit_watts", "gauge", "watts", "Power limits: the one enforced, the one asked for, the board's default.",
        _limits, labels=("limit",), source="nvmlDeviceGetEnforcedPowerLimit, nvmlDeviceGetPowerManagementLimit, …DefaultLimit")
    energy_joules_total = Metric[Device](
        "gpuwarden_gpu_energy_joules_total", "counter", "joules", "Energy drawn since the driver loaded.",
        lambda gpu: gpu.query(gpu.nvml.nvmlDeviceGetTotalEnergyConsumption) / 1000, source="nvmlDeviceGetTotalEnergyConsumption")
    clock_hertz = Metric[Device](
        "gpuwarden_gpu_clock_hertz", "gauge", "hertz", "Current clocks.",
        _clocks, labels=("clock",), source="nvmlDeviceGetClockInfo")
    clock_max_hertz = Metric[Device](
        "gpuwarden_gpu_clock_max_hertz", "gauge", "hertz", "Highest clocks of this device.",
        _max_clocks, labels=("clock",), source="nvmlDeviceGetMaxClockInfo")
    clock_event_active = Metric[Device](
        "gpuwarden_gpu_clock_event_active", "gauge", "", "Whether a clock event reason holds the clocks down now.",
        _clock_events, labels=("reason",), source="nvmlDeviceGetCurrentClocksEventReasons")
    performance_state = Metric[Device](
        "gpuwarden_gpu_performance_state", "gauge", "", "Performance state: 0 is the fastest, 15 the slowest.",
        _performance_state, source="nvmlDeviceGetPerformanceState")
    graphics_engine_active_ratio = Metric[Device](
        "gpuwarden_gpu_graphics_engine_active_ratio", "gauge", "ratio", "Share of the time with any compute or graphics work under way, since the reading before.",
        lambda gpu: _active(gpu, GPM_GRAPHICS_ENGINE), source=f"{_GPM} GRAPHICS_UTIL", tier="slow", opt_in=GPM_OPTION)
    sm_active_ratio = Metric[Device](
        "gpuwarden_gpu_sm_active_ratio", "gauge", "ratio", "Share of the SMs that were busy, mean since the reading before.",
        lambda gpu: _active(gpu, GPM_SM_ACTIVE), source=f"{_GPM} SM_UTIL", tier="slow", opt_in=GPM_OPTION)
    sm_occupancy_ratio = Metric[Device](
        "gpuwarden_gpu_sm_occupancy_ratio", "gauge", "ratio", "Active warps over the most that the SMs can hold, mean since the reading before.",
        lambda gpu: _active(gpu, GPM_SM_OCCUPANCY), source=f"{_GPM} SM_OCCUPANCY", tier="slow", opt_in=GPM_OPTION)
    pipe_active_ratio = Metric[Device](
        "gpuwarden_gpu_pipe_active_ratio", "gauge", "ratio", "Share of the time that the SMs' pipes were active, mean since the reading before; fp64, fp32 and fp16 leave tensor operations out.",
        lambda gpu: _each_active(gpu, GPM_PIPES), labels=("pipe",), source=f"{_GPM} ANY_TENSOR_UTIL, FP64_UTIL, FP32_UTIL, FP16_UTIL, INTEGER_UTIL", tier="slow", opt_in=GPM_OPTION)
    tensor_pipe_active_ratio = Metric[Device](
        "gpuwarden_gpu_tensor_pipe_active_ratio", "gauge", "ratio", "Share of the time that the tensor pipe was active, by its operation, mean since the reading before.",
        lambda gpu: _each_active(gpu, GPM_TENSOR_OPERATIONS), labels=("operation",), source=f"{_GPM} DFMA_TENSOR_UTIL, HMMA_…, DMMA_…, IMMA_…", tier="slow", opt_in=GPM_OPTION)
    dram_active_ratio = Metric[Device](
        "gpuwarden_gpu_dram_active_ratio", "gauge", "ratio", "Device memory's bandwidth in use over its most, mean since the reading before.",
        lambda gpu: _active(gpu, GPM_DRAM_ACTIVE), source=f"{_GPM} DRAM_BW_UTIL", tier="slow", opt_in=GPM_OPTION)
    # fmt: on


class MigReadings(Table[Instance], prefix="gpuwarden_mig_", key=("uuid",)):
    """A MIG instance, by its own UUID. Activity is of its GPU instance, which compute instances of one share."""

    # fmt: off
    info = Metric[Instance](
        "gpuwarden_mig_info", "info", "", "Identity of a MIG instance, and the GPU it is a part of; join on uuid.",
        lambda mig: {(mig.gpu_uuid, str(mig.identity.gpu_instance), str(mig.identity.compute_instance), mig.identity.profile): 1},
        labels=("gpu_uuid", "gpu_instance", "compute_instance", "profile"),
        source="nvmlDeviceGetMigDeviceHandleByIndex, nvmlDeviceGetUUID, …GpuInstanceId, …ComputeInstanceId, …Name", tier="slow")
    multiprocessors = Metric[Instance](
        "gpuwarden_mig_multiprocessors", "gauge", "", "SMs of the instance.",
        lambda mig: None if mig.attributes is None else mig.attributes.multiprocessorCount, source="nvmlDeviceGetAttributes_v2", tier="slow")
    slices = Metric[Instance](
        "gpuwarden_mig_slices", "gauge", "", "Slices that the instance has of the GPU, and its compute instance of the SMs.",
        _slices, labels=("kind",), source="nvmlDeviceGetAttributes_v2", tier="slow")
    engines = Metric[Instance](
        "gpuwarden_mig_engines", "gauge", "", "Engines that the instance can use, which compute instances of one GPU instance share.",
        _engines, labels=("engine",), source="nvmlDeviceGetAttributes_v2", tier="slow")
    memory_size_bytes = Metric[Instance](
        "gpuwarden_mig_memory_size_bytes", "gauge", "bytes", "Device memory of the instance in total.",
        _instance_memory(lambda memory: memory.total), source="nvmlDeviceGetMemoryInfo_v2")
    memory_used_bytes = Metric[Instance](
        "gpuwarden_mig_memory_used_bytes", "gauge", "bytes", "Device memory of the instance in use.",
        _instance_memory(lambda memory: memory.used), source="nvmlDeviceGetMemoryInfo_v2")
    memory_free_bytes = Metric[Instance](
        "gpuwarden_mig_memory_free_bytes", "gauge", "bytes", "Free device memory of the instance.",
        _instance_memory(lambda memory: memory.free), source="nvmlDeviceGetMemoryInfo_v2")
    memory_reserved_bytes = Metric[Instance](
        "gpuwarden_mig_memory_reserved_bytes", "gauge", "bytes", "Device memory of the instance that driver and firmware hold.",
        lambda mig: getattr(mig.memory, "reserved", None), source="nvmlDeviceGetMemoryInfo_v2")
    graphics_engine_active_ratio = Metric[Instance](
        "gpuwarden_mig_graphics_engine_active_ratio", "gauge", "ratio", "Share of the time with any compute or graphics work under way, since the reading before.",
        lambda mig: mig.share(GPM_GRAPHICS_ENGINE), source=f"{_MIG_GPM} GRAPHICS_UTIL", tier="slow", opt_in=GPM_OPTION)
    sm_active_ratio = Metric[Instance](
        "gpuwarden_mig_sm_active_ratio", "gauge", "ratio", "Share of the SMs that were busy, mean since the reading before.",
        lambda mig: mig.share(GPM_SM_ACTIVE), source=f"{_MIG_GPM} SM_UTIL", tier="slow", opt_in=GPM_OPTION)
    sm_occupancy_ratio = Metric[Instance](
        "gpuwarden_mig_sm_occupancy_ratio", "gauge", "ratio", "Active warps over the most that the SMs can hold, mean since the reading before.",
        lambda mig: mig.share(GPM_SM_OCCUPANCY), source=f"{_MIG_GPM} SM_OCCUPANCY", tier="slow", opt_in=GPM_OPTION)
    pipe_active_ratio = Metric[Instance](
        "gpuwarden_mig_pipe_active_ratio", "gauge", "ratio", "Share of the time that the SMs' pipes were active, mean since the reading before.",
        lambda mig: _known({(name,): mig.share(number) for name, number in GPM_PIPES.items()}), labels=("pipe",),
        source=f"{_MIG_GPM} ANY_TENSOR_UTIL, FP64_UTIL, FP32_UTIL, FP16_UTIL, INTEGER_UTIL", tier="slow", opt_in=GPM_OPTION)
    dram_active_ratio = Metric[Instance](
        "gpuwarden_mig_dram_active_ratio", "gauge", "ratio", "Device memory's bandwidth in use over its most, mean since the reading before.",
        lambda mig: mig.share(GPM_DRAM_ACTIVE), source=f"{_MIG_GPM} DRAM_BW_UTIL", tier="slow", opt_in=GPM_OPTION)
    # fmt: on
