"""Metrics of a GPU and of a MIG instance; the page, docs, rules and dashboards follow these tables.

How each is taken stands in `readings`, by subject. Tiers: what explains a second is read in every poll; counters of the
driver's own, which miss nothing between two readings, links, limits, modes, and what one who trains seldom asks for are
slow; what cannot change while the driver is loaded is static.
"""

from __future__ import annotations

from gpuwarden.gpu.readings import (
    activity,
    clocks,
    instance,
    memory,
    memory_errors,
    modes,
    nvlink,
    pcie,
    power,
    thermal,
    utilization,
)
from gpuwarden.gpu.readings.instance import MigDevice
from gpuwarden.metrics.model import Metric, Table
from gpuwarden.nvml.device import Device
from gpuwarden.nvml.gpm import OPTION as GPM_OPTION

_MEMORY = "nvmlDeviceGetMemoryInfo_v2, else nvmlDeviceGetMemoryInfo, else /proc/meminfo"
_GPM = "nvmlGpmSampleGet, nvmlGpmMetricsGet:"
_MIG_GPM = "nvmlGpmMigSampleGet, nvmlGpmMetricsGet:"


class GpuReadings(Table[Device], prefix="gpuwarden_gpu_", key=("uuid",)):
    """Readings of one GPU that the driver answers in one poll."""

    # fmt: off
    memory_size_bytes = Metric[Device](
        "gpuwarden_gpu_memory_size_bytes", "gauge", "bytes", "Device memory installed.",
        memory.size, source=_MEMORY)
    memory_used_bytes = Metric[Device](
        "gpuwarden_gpu_memory_used_bytes", "gauge", "bytes", "Device memory allocated by all processes, frameworks' pools included; drivers before R510 count what is reserved too.",
        memory.used, source=_MEMORY)
    memory_free_bytes = Metric[Device](
        "gpuwarden_gpu_memory_free_bytes", "gauge", "bytes", "Device memory that no process has allocated.",
        memory.free, source=_MEMORY)
    memory_reserved_bytes = Metric[Device](
        "gpuwarden_gpu_memory_reserved_bytes", "gauge", "bytes", "Device memory the driver keeps for itself.",
        memory.reserved, source="nvmlDeviceGetMemoryInfo_v2")
    memory_unified = Metric[Device](
        "gpuwarden_gpu_memory_unified", "gauge", "", "Whether the GPU has no memory of its own: then its memory is the machine's, which programs on the CPU use too.",
        memory.unified, source="nvmlDeviceGetMemoryInfo unsupported; /proc/meminfo", tier="slow")
    memory_used_peak_bytes = Metric[Device](
        "gpuwarden_gpu_memory_used_peak_bytes", "gauge", "bytes", "Most device memory in use at any look in the window that ends now.",
        memory.peaks, labels=("window",), source="nvmlDeviceGetMemoryInfo_v2, every poll.memory_interval; /proc/meminfo, every poll", tier="memory")
    memory_bus_width_bytes = Metric[Device](
        "gpuwarden_gpu_memory_bus_width_bytes", "gauge", "bytes", "Bytes that the bus to device memory moves at once.",
        memory.bus_width, source="nvmlDeviceGetMemoryBusWidth", tier="static")
    memory_numa_node = Metric[Device](
        "gpuwarden_gpu_memory_numa_node", "gauge", "", "NUMA node that Linux has made of device memory, on machines that do so.",
        memory.numa_node, source="nvmlDeviceGetNumaNodeId", tier="static")
    bar1_size_bytes = Metric[Device](
        "gpuwarden_gpu_bar1_size_bytes", "gauge", "bytes", "Device memory that the CPU and other devices can map at once (BAR1).",
        memory.bar1_size, source="nvmlDeviceGetBAR1MemoryInfo", tier="slow")
    bar1_used_bytes = Metric[Device](
        "gpuwarden_gpu_bar1_used_bytes", "gauge", "bytes", "Device memory that the CPU and other devices have mapped (BAR1).",
        memory.bar1_used, source="nvmlDeviceGetBAR1MemoryInfo", tier="slow")

    utilization_ratio = Metric[Device](
        "gpuwarden_gpu_utilization_ratio", "gauge", "ratio", "Share of the driver's sample period with a kernel running.",
        utilization.kernels, source="nvmlDeviceGetUtilizationRates")
    busy_seconds_total = Metric[Device](
        "gpuwarden_gpu_busy_seconds_total", "counter", "seconds", "Time with a kernel running: utilization, added up over the polls.",
        utilization.busy_seconds, source="nvmlDeviceGetUtilizationRates")
    memory_bandwidth_utilization_ratio = Metric[Device](
        "gpuwarden_gpu_memory_bandwidth_utilization_ratio", "gauge", "ratio",
        "Share of the driver's sample period with device memory being read or written.",
        utilization.bandwidth, source="nvmlDeviceGetUtilizationRates")
    engine_utilization_ratio = Metric[Device](
        "gpuwarden_gpu_engine_utilization_ratio", "gauge", "ratio", "Share of the driver's sample period that a fixed-function engine was busy.",
        utilization.engines, labels=("engine",), source="nvmlDeviceGetEncoderUtilization, …DecoderUtilization, …JpgUtilization, …OfaUtilization", tier="slow")
    encoder_sessions = Metric[Device](
        "gpuwarden_gpu_encoder_sessions", "gauge", "", "Video encoding sessions.",
        utilization.encoder_sessions, source="nvmlDeviceGetEncoderStats", tier="slow")
    encoder_frame_rate_hertz = Metric[Device](
        "gpuwarden_gpu_encoder_frame_rate_hertz", "gauge", "hertz", "Frames a second of an encoding session, on average over the sessions.",
        utilization.encoder_rate, source="nvmlDeviceGetEncoderStats", tier="slow")
    encoder_latency_seconds = Metric[Device](
        "gpuwarden_gpu_encoder_latency_seconds", "gauge", "seconds", "Time that a frame takes to encode, on average over the sessions.",
        utilization.encoder_latency, source="nvmlDeviceGetEncoderStats", tier="slow")

    temperature_celsius = Metric[Device](
        "gpuwarden_gpu_temperature_celsius", "gauge", "celsius", "Temperature by sensor.",
        thermal.temperatures, labels=("sensor",), source="nvmlDeviceGetTemperature; field 82 with the slow tier")
    temperature_threshold_celsius = Metric[Device](
        "gpuwarden_gpu_temperature_threshold_celsius", "gauge", "celsius", "The device's own temperature thresholds.",
        thermal.thresholds, labels=("threshold",), source="nvmlDeviceGetTemperatureThreshold", tier="static")
    temperature_margin_celsius = Metric[Device](
        "gpuwarden_gpu_temperature_margin_celsius", "gauge", "celsius", "Degrees left before the device slows itself down.",
        thermal.margin, source="nvmlDeviceGetMarginTemperature, else slowdown threshold minus core temperature", tier="slow")
    temperature_margin_threshold_celsius = Metric[Device](
        "gpuwarden_gpu_temperature_margin_threshold_celsius", "gauge", "celsius",
        "Margin at which the device does something about its heat: it shuts down, is slowed by hardware, or by software at its highest operating temperature.",
        thermal.margin_thresholds, labels=("threshold",), source="fields 193 to 196 (T.Limit)", tier="static")
    fan_speed_ratio = Metric[Device](
        "gpuwarden_gpu_fan_speed_ratio", "gauge", "ratio", "Speed that each fan is told to run at; above 1 it is told to outrun its rated speed.",
        thermal.fan_speeds, labels=("fan",), source="nvmlDeviceGetFanSpeed_v2", tier="slow")

    power_usage_watts = Metric[Device](
        "gpuwarden_gpu_power_usage_watts", "gauge", "watts", "Power drawn.",
        power.usage, source="nvmlDeviceGetPowerUsage")
    power_instant_watts = Metric[Device](
        "gpuwarden_gpu_power_instant_watts", "gauge", "watts", "Power drawn at the moment, by the GPU, by its module with the CPU on it, and by its memory.",
        power.instant, labels=("scope",), source="field 186", tier="slow")
    power_average_watts = Metric[Device](
        "gpuwarden_gpu_power_average_watts", "gauge", "watts", "Power drawn in the last second on average, by the GPU, by its module with the CPU on it, and by its memory.",
        power.average, labels=("scope",), source="field 185", tier="slow")
    power_limit_watts = Metric[Device](
        "gpuwarden_gpu_power_limit_watts", "gauge", "watts", "Power limits: the one enforced, the one asked for, the board's default, and the least and the most that can be asked for.",
        power.limits, labels=("limit",), source="nvmlDeviceGetEnforcedPowerLimit, nvmlDeviceGetPowerManagementLimit, …DefaultLimit, …LimitConstraints", tier="slow")
    energy_joules_total = Metric[Device](
        "gpuwarden_gpu_energy_joules_total", "counter", "joules", "Energy drawn since the driver loaded.",
        power.energy, source="nvmlDeviceGetTotalEnergyConsumption", tier="slow")

    clock_hertz = Metric[Device](
        "gpuwarden_gpu_clock_hertz", "gauge", "hertz", "Current clocks.",
        clocks.current, labels=("clock",), source="nvmlDeviceGetClockInfo")
    clock_max_hertz = Metric[Device](
        "gpuwarden_gpu_clock_max_hertz", "gauge", "hertz", "Highest clocks of this device.",
        clocks.highest, labels=("clock",), source="nvmlDeviceGetMaxClockInfo", tier="static")
    clock_application_hertz = Metric[Device](
        "gpuwarden_gpu_clock_application_hertz", "gauge", "hertz", "Clocks that applications are given, as set and by default.",
        clocks.applications, labels=("clock", "setting"), source="nvmlDeviceGetApplicationsClock, nvmlDeviceGetDefaultApplicationsClock", tier="slow")
    clock_event_active = Metric[Device](
        "gpuwarden_gpu_clock_event_active", "gauge", "", "Whether a clock event reason holds the clocks down now.",
        clocks.events, labels=("reason",), source="nvmlDeviceGetCurrentClocksEventReasons")
    clock_event_seconds_total = Metric[Device](
        "gpuwarden_gpu_clock_event_seconds_total", "counter", "seconds",
        "Time that a clock event reason has held the clocks down: since the driver loaded where it counts that itself, else added up over the polls.",
        clocks.event_seconds, labels=("reason",), source="fields 74 to 79, else nvmlDeviceGetCurrentClocksEventReasons in every poll", tier="slow")
    performance_state = Metric[Device](
        "gpuwarden_gpu_performance_state", "gauge", "", "Performance state: 0 is the fastest, 15 the slowest.",
        clocks.performance_state, source="nvmlDeviceGetPerformanceState", tier="slow")

    pcie_link_generation = Metric[Device](
        "gpuwarden_gpu_pcie_link_generation", "gauge", "", "PCIe generation that the link runs at, which an idle GPU lowers.",
        pcie.generation, source="nvmlDeviceGetCurrPcieLinkGeneration", tier="slow")
    pcie_link_width = Metric[Device](
        "gpuwarden_gpu_pcie_link_width", "gauge", "", "PCIe lanes in use.",
        pcie.width, source="nvmlDeviceGetCurrPcieLinkWidth", tier="slow")
    pcie_link_max_generation = Metric[Device](
        "gpuwarden_gpu_pcie_link_max_generation", "gauge", "", "Highest PCIe generation of the GPU by itself, and of its link in this machine.",
        pcie.highest_generation, labels=("of",), source="nvmlDeviceGetGpuMaxPcieLinkGeneration, nvmlDeviceGetMaxPcieLinkGeneration", tier="static")
    pcie_link_max_width = Metric[Device](
        "gpuwarden_gpu_pcie_link_max_width", "gauge", "", "PCIe lanes of the link.",
        pcie.highest_width, source="nvmlDeviceGetMaxPcieLinkWidth", tier="static")
    pcie_bytes_total = Metric[Device](
        "gpuwarden_gpu_pcie_bytes_total", "counter", "bytes", "Bytes moved over PCIe since the driver loaded, where the device counts them in more than 32 bits.",
        pcie.transferred, labels=("direction",), source="fields 197 and 198", tier="slow")
    pcie_throughput_bytes_per_second = Metric[Device](
        "gpuwarden_gpu_pcie_throughput_bytes_per_second", "gauge", "bytes_per_second", "Bytes a second over PCIe, counted for 20 ms in which the call blocks.",
        pcie.throughput, labels=("direction",), source="nvmlDeviceGetPcieThroughput", tier="slow", opt_in="gpus.pcie_throughput")
    pcie_mean_throughput_bytes_per_second = Metric[Device](
        "gpuwarden_gpu_pcie_mean_throughput_bytes_per_second", "gauge", "bytes_per_second", "Bytes a second over PCIe, what the protocol adds included, mean since the reading before.",
        activity.pcie, labels=("direction",), source=f"{_GPM} PCIE_TX_PER_SEC, PCIE_RX_PER_SEC", tier="slow", opt_in=GPM_OPTION)
    pcie_replays_total = Metric[Device](
        "gpuwarden_gpu_pcie_replays_total", "counter", "", "PCIe packets that were sent again.",
        pcie.replays, source="field 94", tier="slow")
    pcie_errors_total = Metric[Device](
        "gpuwarden_gpu_pcie_errors_total", "counter", "", "PCIe errors by type.",
        pcie.errors, labels=("type",), source="fields 169, 173 to 183", tier="slow")

    nvlink_up = Metric[Device](
        "gpuwarden_gpu_nvlink_up", "gauge", "", "Whether an NVLink is up; one without a partner never is.",
        nvlink.states, labels=("link",), source="fields 91 and 165", tier="slow")
    nvlink_speed_bytes_per_second = Metric[Device](
        "gpuwarden_gpu_nvlink_speed_bytes_per_second", "gauge", "bytes_per_second", "Bytes a second that all NVLinks that are up can move in each direction.",
        nvlink.speed, source="field 164", tier="slow")
    nvlink_bytes_total = Metric[Device](
        "gpuwarden_gpu_nvlink_bytes_total", "counter", "bytes", "Bytes of data moved over all NVLinks since the driver loaded.",
        nvlink.transferred, labels=("direction",), source="fields 138 and 139, else 202 and 204", tier="slow")
    nvlink_errors_total = Metric[Device](
        "gpuwarden_gpu_nvlink_errors_total", "counter", "", "NVLink errors by type, over all links.",
        nvlink.errors, labels=("type",), source="fields 38, 45, 160, 161 to 163, 206 to 221", tier="slow")
    nvlink_link_errors_total = Metric[Device](
        "gpuwarden_gpu_nvlink_link_errors_total", "counter", "", "NVLink errors by link and type, of links that have any.",
        nvlink.link_errors, labels=("link", "type"), source="fields 161 to 163, 206 to 221", tier="slow")
    c2c_link_up = Metric[Device](
        "gpuwarden_gpu_c2c_link_up", "gauge", "", "Whether a link between GPU and CPU of a superchip is up.",
        nvlink.chip_links, labels=("link",), source="fields 170 and 171", tier="slow")

    c2c_speed_bytes_per_second = Metric[Device](
        "gpuwarden_gpu_c2c_speed_bytes_per_second", "gauge", "bytes_per_second", "Bytes a second that all links between GPU and CPU of a superchip can move.",
        nvlink.chip_speed, source="field 172", tier="slow")
    c2c_errors_total = Metric[Device](
        "gpuwarden_gpu_c2c_errors_total", "counter", "", "Errors of the links between GPU and CPU of a superchip, by type.",
        nvlink.chip_errors, labels=("type",), source="fields 231 to 233", tier="slow")

    ecc_mode = Metric[Device](
        "gpuwarden_gpu_ecc_mode", "gauge", "", "Whether memory is checked for errors (ECC), and whether it will be after the next reset.",
        memory_errors.ecc_mode, labels=("setting",), source="fields 1 and 2", tier="slow")
    ecc_errors_total = Metric[Device](
        "gpuwarden_gpu_ecc_errors_total", "counter", "",
        "Memory errors by type, lifetime (volatile: since the driver loaded, aggregate: of the board's life) and location.",
        memory_errors.ecc_errors, labels=("type", "lifetime", "location"), source="nvmlDeviceGetMemoryErrorCounter, else fields 3 to 6", tier="slow")
    ecc_sram_errors_total = Metric[Device](
        "gpuwarden_gpu_ecc_sram_errors_total", "counter", "", "Errors of memory on the chip by how they were found, and by lifetime.",
        memory_errors.sram_errors, labels=("found_by", "lifetime"), source="nvmlDeviceGetSramEccErrorStatus", tier="slow")
    ecc_sram_unit_errors_total = Metric[Device](
        "gpuwarden_gpu_ecc_sram_unit_errors_total", "counter", "", "Uncorrected errors of memory on the chip in the board's life, by the unit it belongs to.",
        memory_errors.sram_unit_errors, labels=("unit",), source="nvmlDeviceGetSramEccErrorStatus", tier="slow")
    ecc_sram_threshold_exceeded = Metric[Device](
        "gpuwarden_gpu_ecc_sram_threshold_exceeded", "gauge", "", "Whether errors of memory on the chip are more than NVIDIA holds acceptable.",
        memory_errors.sram_threshold_exceeded, source="nvmlDeviceGetSramEccErrorStatus", tier="slow")
    remapped_rows = Metric[Device](
        "gpuwarden_gpu_remapped_rows", "gauge", "", "Rows of device memory that a spare one stands in for, by the errors that led to it.",
        memory_errors.remapped_rows, labels=("cause",), source="fields 142 and 143", tier="slow")
    row_remap_pending = Metric[Device](
        "gpuwarden_gpu_row_remap_pending", "gauge", "", "Whether a row of device memory waits for the next reset to be replaced.",
        memory_errors.remap_pending, source="field 144", tier="slow")
    row_remap_failed = Metric[Device](
        "gpuwarden_gpu_row_remap_failed", "gauge", "", "Whether a row of device memory could not be replaced.",
        memory_errors.remap_failed, source="field 145", tier="slow")
    row_remap_banks = Metric[Device](
        "gpuwarden_gpu_row_remap_banks", "gauge", "", "Banks of device memory by how many of their spare rows are left.",
        memory_errors.spare_rows, labels=("spare_rows",), source="nvmlDeviceGetRowRemapperHistogram", tier="slow")
    memory_unrepairable = Metric[Device](
        "gpuwarden_gpu_memory_unrepairable", "gauge", "", "Whether device memory has errors that no spare row can stand in for.",
        memory_errors.unrepairable, source="nvmlDeviceGetUnrepairableMemoryFlag_v1", tier="slow")
    repair_pending = Metric[Device](
        "gpuwarden_gpu_repair_pending", "gauge", "", "Whether a memory channel or a group of SMs (TPC) waits for the next reset to be repaired.",
        memory_errors.repairs_pending, labels=("part",), source="nvmlDeviceGetRepairStatus", tier="slow")
    retired_pages = Metric[Device](
        "gpuwarden_gpu_retired_pages", "gauge", "", "Pages of device memory taken out of use, by the errors that led to it; newer GPUs remap rows.",
        memory_errors.retired_pages, labels=("cause",), source="fields 29 and 30", tier="slow")
    retired_pages_pending = Metric[Device](
        "gpuwarden_gpu_retired_pages_pending", "gauge", "", "Whether a page of device memory waits for the next reset to be taken out of use.",
        memory_errors.retirement_pending, source="field 31", tier="slow")

    persistence_mode = Metric[Device](
        "gpuwarden_gpu_persistence_mode", "gauge", "", "Whether the driver stays loaded for a GPU that nobody uses.",
        modes.persistence, source="nvmlDeviceGetPersistenceMode", tier="slow")
    compute_mode = Metric[Device](
        "gpuwarden_gpu_compute_mode", "gauge", "", "Who may open a context on the GPU: 1 for the mode it is in.",
        modes.compute, labels=("mode",), source="nvmlDeviceGetComputeMode", tier="slow")
    mig_mode = Metric[Device](
        "gpuwarden_gpu_mig_mode", "gauge", "", "Whether the GPU is divided into MIG instances, and whether it will be after the next reset.",
        modes.mig, labels=("setting",), source="nvmlDeviceGetMigMode", tier="slow")
    addressing_mode = Metric[Device](
        "gpuwarden_gpu_addressing_mode", "gauge", "", "How the GPU sees memory of processes on the CPU: 1 for the mode it is in.",
        modes.addressing, labels=("mode",), source="nvmlDeviceGetAddressingMode", tier="static")
    virtualization_mode = Metric[Device](
        "gpuwarden_gpu_virtualization_mode", "gauge", "", "How the GPU is given to a virtual machine, if it is: 1 for the mode it is in.",
        modes.virtualization, labels=("mode",), source="nvmlDeviceGetVirtualizationMode", tier="static")
    accounting_mode = Metric[Device](
        "gpuwarden_gpu_accounting_mode", "gauge", "", "Whether the driver keeps account of processes that have ended.",
        modes.accounting, source="nvmlDeviceGetAccountingMode", tier="slow")
    display_active = Metric[Device](
        "gpuwarden_gpu_display_active", "gauge", "", "Whether the GPU draws a display, which takes of its memory and time.",
        modes.display, source="nvmlDeviceGetDisplayActive", tier="slow")
    recovery_action = Metric[Device](
        "gpuwarden_gpu_recovery_action", "gauge", "", "What the driver wants done before the GPU is used again: 1 for that action.",
        modes.recovery, labels=("action",), source="field 230", tier="slow")
    reset_required = Metric[Device](
        "gpuwarden_gpu_reset_required", "gauge", "", "Whether the driver wants the GPU reset.",
        modes.reset_required, source="field 230, else 226 and 227", tier="slow")
    fabric_state = Metric[Device](
        "gpuwarden_gpu_fabric_state", "gauge", "", "How far the GPU has come in joining its NVLink fabric: 1 for that state.",
        modes.fabric_state, labels=("state",), source="nvmlDeviceGetGpuFabricInfoV", tier="slow")
    fabric_joined = Metric[Device](
        "gpuwarden_gpu_fabric_joined", "gauge", "", "Whether the GPU has joined its NVLink fabric without an error.",
        modes.fabric_joined, source="nvmlDeviceGetGpuFabricInfoV", tier="slow")
    fabric_info = Metric[Device](
        "gpuwarden_gpu_fabric_info", "info", "", "Place of the GPU in its NVLink fabric: GPUs in one clique can reach each other.",
        modes.fabric_place, labels=("clique",), source="nvmlDeviceGetGpuFabricInfoV", tier="slow")
    fabric_fault = Metric[Device](
        "gpuwarden_gpu_fabric_fault", "gauge", "", "Faults of the GPU's place in its NVLink fabric, of those that the fabric manager tells.",
        modes.fabric_faults, labels=("fault",), source="nvmlDeviceGetGpuFabricInfoV", tier="slow")
    cores = Metric[Device](
        "gpuwarden_gpu_cores", "gauge", "", "Cores that NVIDIA names CUDA cores.",
        modes.cores, source="nvmlDeviceGetNumGpuCores", tier="static")
    inforom_info = Metric[Device](
        "gpuwarden_gpu_inforom_info", "info", "", "Versions of what is written into the board's own store: the image and its parts.",
        modes.inforom, labels=("image", "oem", "ecc", "power"), source="nvmlDeviceGetInforomImageVersion, nvmlDeviceGetInforomVersion", tier="static")

    graphics_engine_active_ratio = Metric[Device](
        "gpuwarden_gpu_graphics_engine_active_ratio", "gauge", "ratio", "Share of the time with any compute or graphics work under way, since the reading before.",
        activity.graphics_engine, source=f"{_GPM} GRAPHICS_UTIL", tier="slow", opt_in=GPM_OPTION)
    sm_active_ratio = Metric[Device](
        "gpuwarden_gpu_sm_active_ratio", "gauge", "ratio", "Share of the SMs that were busy, mean since the reading before.",
        activity.sm_active, source=f"{_GPM} SM_UTIL", tier="slow", opt_in=GPM_OPTION)
    sm_occupancy_ratio = Metric[Device](
        "gpuwarden_gpu_sm_occupancy_ratio", "gauge", "ratio", "Active warps over the most that the SMs can hold, mean since the reading before.",
        activity.sm_occupancy, source=f"{_GPM} SM_OCCUPANCY", tier="slow", opt_in=GPM_OPTION)
    pipe_active_ratio = Metric[Device](
        "gpuwarden_gpu_pipe_active_ratio", "gauge", "ratio", "Share of the time that the SMs' pipes were active, mean since the reading before; fp64, fp32 and fp16 leave tensor operations out.",
        activity.pipes, labels=("pipe",), source=f"{_GPM} ANY_TENSOR_UTIL, FP64_UTIL, FP32_UTIL, FP16_UTIL, INTEGER_UTIL", tier="slow", opt_in=GPM_OPTION)
    tensor_pipe_active_ratio = Metric[Device](
        "gpuwarden_gpu_tensor_pipe_active_ratio", "gauge", "ratio", "Share of the time that the tensor pipe was active, by its operation, mean since the reading before.",
        activity.tensor_operations, labels=("operation",), source=f"{_GPM} DFMA_TENSOR_UTIL, HMMA_…, DMMA_…, IMMA_…", tier="slow", opt_in=GPM_OPTION)
    dram_active_ratio = Metric[Device](
        "gpuwarden_gpu_dram_active_ratio", "gauge", "ratio", "Device memory's bandwidth in use over its most, mean since the reading before.",
        activity.dram, source=f"{_GPM} DRAM_BW_UTIL", tier="slow", opt_in=GPM_OPTION)
    # fmt: on


class MigReadings(Table[MigDevice], prefix="gpuwarden_mig_", key=("uuid",)):
    """A MIG instance, by its own UUID. Activity is of its GPU instance, which compute instances of one share."""

    # fmt: off
    info = Metric[MigDevice](
        "gpuwarden_mig_info", "info", "", "Identity of a MIG instance, and the GPU it is a part of; join on uuid.",
        instance.info,
        labels=("gpu_uuid", "gpu_instance", "compute_instance", "profile"),
        source="nvmlDeviceGetMigDeviceHandleByIndex, nvmlDeviceGetUUID, …GpuInstanceId, …ComputeInstanceId, …Name", tier="slow")
    multiprocessors = Metric[MigDevice](
        "gpuwarden_mig_multiprocessors", "gauge", "", "SMs of the instance.",
        instance.multiprocessors, source="nvmlDeviceGetAttributes_v2", tier="slow")
    slices = Metric[MigDevice](
        "gpuwarden_mig_slices", "gauge", "", "Slices that the instance has of the GPU, and its compute instance of the SMs.",
        instance.slices, labels=("kind",), source="nvmlDeviceGetAttributes_v2", tier="slow")
    engines = Metric[MigDevice](
        "gpuwarden_mig_engines", "gauge", "", "Engines that the instance can use, which compute instances of one GPU instance share.",
        instance.engines, labels=("engine",), source="nvmlDeviceGetAttributes_v2", tier="slow")
    memory_size_bytes = Metric[MigDevice](
        "gpuwarden_mig_memory_size_bytes", "gauge", "bytes", "Device memory of the instance in total.",
        instance.memory_size, source="nvmlDeviceGetMemoryInfo_v2")
    memory_used_bytes = Metric[MigDevice](
        "gpuwarden_mig_memory_used_bytes", "gauge", "bytes", "Device memory of the instance in use.",
        instance.memory_used, source="nvmlDeviceGetMemoryInfo_v2")
    memory_free_bytes = Metric[MigDevice](
        "gpuwarden_mig_memory_free_bytes", "gauge", "bytes", "Free device memory of the instance.",
        instance.memory_free, source="nvmlDeviceGetMemoryInfo_v2")
    memory_reserved_bytes = Metric[MigDevice](
        "gpuwarden_mig_memory_reserved_bytes", "gauge", "bytes", "Device memory of the instance that driver and firmware hold.",
        instance.memory_reserved, source="nvmlDeviceGetMemoryInfo_v2")
    graphics_engine_active_ratio = Metric[MigDevice](
        "gpuwarden_mig_graphics_engine_active_ratio", "gauge", "ratio", "Share of the time with any compute or graphics work under way, since the reading before.",
        activity.graphics_engine, source=f"{_MIG_GPM} GRAPHICS_UTIL", tier="slow", opt_in=GPM_OPTION)
    sm_active_ratio = Metric[MigDevice](
        "gpuwarden_mig_sm_active_ratio", "gauge", "ratio", "Share of the SMs that were busy, mean since the reading before.",
        activity.sm_active, source=f"{_MIG_GPM} SM_UTIL", tier="slow", opt_in=GPM_OPTION)
    sm_occupancy_ratio = Metric[MigDevice](
        "gpuwarden_mig_sm_occupancy_ratio", "gauge", "ratio", "Active warps over the most that the SMs can hold, mean since the reading before.",
        activity.sm_occupancy, source=f"{_MIG_GPM} SM_OCCUPANCY", tier="slow", opt_in=GPM_OPTION)
    pipe_active_ratio = Metric[MigDevice](
        "gpuwarden_mig_pipe_active_ratio", "gauge", "ratio", "Share of the time that the SMs' pipes were active, mean since the reading before.",
        activity.pipes, labels=("pipe",),
        source=f"{_MIG_GPM} ANY_TENSOR_UTIL, FP64_UTIL, FP32_UTIL, FP16_UTIL, INTEGER_UTIL", tier="slow", opt_in=GPM_OPTION)
    dram_active_ratio = Metric[MigDevice](
        "gpuwarden_mig_dram_active_ratio", "gauge", "ratio", "Device memory's bandwidth in use over its most, mean since the reading before.",
        activity.dram, source=f"{_MIG_GPM} DRAM_BW_UTIL", tier="slow", opt_in=GPM_OPTION)
    pcie_throughput_bytes_per_second = Metric[MigDevice](
        "gpuwarden_mig_pcie_throughput_bytes_per_second", "gauge", "bytes_per_second", "Bytes a second over PCIe, mean since the reading before.",
        activity.pcie, labels=("direction",), source=f"{_MIG_GPM} PCIE_TX_PER_SEC, PCIE_RX_PER_SEC", tier="slow", opt_in=GPM_OPTION)
    # fmt: on
