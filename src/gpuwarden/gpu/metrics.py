"""Metrics of a GPU and of a MIG instance; endpoint, docs, rules and dashboards are made from these tables.

`gpu/readings` has the reader of each, by subject. Tiers: poll for values that explain a single second; slow for counters
that the driver keeps itself (they miss nothing between two readings), links, limits, modes and values that training
rarely needs; static for values that cannot change while the driver is loaded.
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

_MEMORY_SIZES = (1, 2**50)  # bytes
_MEMORY_ERRORS = (0, 1e9)
_PCIE_GENERATIONS = (1, 16)
_PCIE_WIDTHS = (1, 64)  # lanes
_MEMORY = "nvmlDeviceGetMemoryInfo_v2, else nvmlDeviceGetMemoryInfo, else /proc/meminfo"
_GPM = "GPM:"


class GpuReadings(Table[Device], prefix="gpuwarden_gpu_", key=("uuid",)):
    """GPU readings."""

    # fmt: off
    memory_size_bytes = Metric[Device](
        "gpuwarden_gpu_memory_size_bytes", "gauge", "bytes", "Device memory installed.",
        memory.size, source=_MEMORY, profile="minimal", bounds=_MEMORY_SIZES)
    memory_used_bytes = Metric[Device](
        "gpuwarden_gpu_memory_used_bytes", "gauge", "bytes", "Device memory allocated by all processes, including framework pools; before driver R510 also reserved memory.",
        memory.used, source=_MEMORY, profile="minimal", bounds=(0, memory_size_bytes))
    memory_free_bytes = Metric[Device](
        "gpuwarden_gpu_memory_free_bytes", "gauge", "bytes", "Device memory that no process has allocated.",
        memory.free, source=_MEMORY, profile="minimal", bounds=(0, memory_size_bytes))
    memory_reserved_bytes = Metric[Device](
        "gpuwarden_gpu_memory_reserved_bytes", "gauge", "bytes", "Device memory reserved by the driver.",
        memory.reserved, source="nvmlDeviceGetMemoryInfo_v2", profile="minimal", bounds=(0, memory_size_bytes))
    memory_unified = Metric[Device](
        "gpuwarden_gpu_memory_unified", "gauge", "", "Whether the GPU shares the host's memory with the CPU instead of having its own.",
        memory.unified, source="nvmlDeviceGetMemoryInfo unsupported; /proc/meminfo", tier="slow")
    memory_used_peak_bytes = Metric[Device](
        "gpuwarden_gpu_memory_used_peak_bytes", "gauge", "bytes", "Highest device memory use sampled within the window.",
        memory.peaks(memory_used_bytes), labels=("window",), source="nvmlDeviceGetMemoryInfo_v2, every poll.memory_interval; /proc/meminfo, every poll", tier="memory", bounds=(0, memory_size_bytes))
    memory_bus_width_bytes = Metric[Device](
        "gpuwarden_gpu_memory_bus_width_bytes", "gauge", "bytes", "Width of the device memory bus.",
        memory.bus_width, source="nvmlDeviceGetMemoryBusWidth", tier="static")
    memory_numa_node = Metric[Device](
        "gpuwarden_gpu_memory_numa_node", "gauge", "", "NUMA node that Linux assigned to the device memory, on machines that have one.",
        memory.numa_node, source="nvmlDeviceGetNumaNodeId", tier="static", bounds=(0, 1024))
    bar1_size_bytes = Metric[Device](
        "gpuwarden_gpu_bar1_size_bytes", "gauge", "bytes", "BAR1 size: device memory that the CPU and other devices can map at once.",
        memory.bar1_size, source="nvmlDeviceGetBAR1MemoryInfo", tier="slow")
    bar1_used_bytes = Metric[Device](
        "gpuwarden_gpu_bar1_used_bytes", "gauge", "bytes", "BAR1 memory in use: device memory mapped by the CPU and other devices.",
        memory.bar1_used, source="nvmlDeviceGetBAR1MemoryInfo", tier="slow", bounds=(0, bar1_size_bytes))

    utilization_ratio = Metric[Device](
        "gpuwarden_gpu_utilization_ratio", "gauge", "ratio", "Fraction of the driver's sample period with a kernel running.",
        utilization.kernels, source="nvmlDeviceGetUtilizationRates", profile="minimal")
    busy_seconds_total = Metric[Device](
        "gpuwarden_gpu_busy_seconds_total", "counter", "seconds", "Time with a kernel running: utilization integrated over polls.",
        utilization.busy_seconds(utilization_ratio), source="nvmlDeviceGetUtilizationRates")
    memory_bandwidth_utilization_ratio = Metric[Device](
        "gpuwarden_gpu_memory_bandwidth_utilization_ratio", "gauge", "ratio",
        "Fraction of the driver's sample period in which device memory was read or written.",
        utilization.bandwidth, source="nvmlDeviceGetUtilizationRates")
    engine_utilization_ratio = Metric[Device](
        "gpuwarden_gpu_engine_utilization_ratio", "gauge", "ratio", "Fraction of the driver's sample period in which the fixed-function engine was busy.",
        utilization.engines, labels=("engine",), source="nvmlDeviceGetEncoderUtilization, …DecoderUtilization, …JpgUtilization, …OfaUtilization", tier="slow")
    encoder_sessions = Metric[Device](
        "gpuwarden_gpu_encoder_sessions", "gauge", "", "Active video encoding sessions.",
        utilization.encoder_sessions, source="nvmlDeviceGetEncoderStats", tier="slow", bounds=(0, 1024))
    encoder_frame_rate_hertz = Metric[Device](
        "gpuwarden_gpu_encoder_frame_rate_hertz", "gauge", "hertz", "Frame rate of an encoding session, averaged over the sessions.",
        utilization.encoder_rate, source="nvmlDeviceGetEncoderStats", tier="slow")
    encoder_latency_seconds = Metric[Device](
        "gpuwarden_gpu_encoder_latency_seconds", "gauge", "seconds", "Time to encode a frame, averaged over the sessions.",
        utilization.encoder_latency, source="nvmlDeviceGetEncoderStats", tier="slow")

    temperature_celsius = Metric[Device](
        "gpuwarden_gpu_temperature_celsius", "gauge", "celsius", "Temperature, by sensor.",
        thermal.temperatures, labels=("sensor",), source="nvmlDeviceGetTemperature; field 82 with the slow tier", profile="minimal", minimal_labels=(("core",),))
    temperature_threshold_celsius = Metric[Device](
        "gpuwarden_gpu_temperature_threshold_celsius", "gauge", "celsius", "Temperature thresholds of the GPU.",
        thermal.thresholds, labels=("threshold",), source="nvmlDeviceGetTemperatureThreshold", tier="static")
    temperature_margin_celsius = Metric[Device](
        "gpuwarden_gpu_temperature_margin_celsius", "gauge", "celsius", "Degrees left before the GPU throttles.",
        thermal.margin, source="nvmlDeviceGetMarginTemperature, else slowdown threshold minus core temperature", tier="slow", profile="minimal")
    temperature_margin_threshold_celsius = Metric[Device](
        "gpuwarden_gpu_temperature_margin_threshold_celsius", "gauge", "celsius",
        "Temperature margin at which the GPU shuts down, is throttled by hardware, or is throttled by software at its maximum operating temperature.",
        thermal.margin_thresholds, labels=("threshold",), source="fields 193 to 196 (T.Limit)", tier="static")
    fan_speed_ratio = Metric[Device](
        "gpuwarden_gpu_fan_speed_ratio", "gauge", "ratio", "Commanded speed of the fan as a fraction of its rated speed; can exceed 1.",
        thermal.fan_speeds, labels=("fan",), source="nvmlDeviceGetFanSpeed_v2", tier="slow", bounds=(0, 2))

    power_usage_watts = Metric[Device](
        "gpuwarden_gpu_power_usage_watts", "gauge", "watts", "Power draw.",
        power.usage, source="nvmlDeviceGetPowerUsage", profile="minimal")
    power_instant_watts = Metric[Device](
        "gpuwarden_gpu_power_instant_watts", "gauge", "watts", "Instantaneous power draw of the GPU, of its module including the CPU, and of its memory.",
        power.instant, labels=("scope",), source="field 186", tier="slow")
    power_average_watts = Metric[Device](
        "gpuwarden_gpu_power_average_watts", "gauge", "watts", "Power draw averaged over the last second, of the GPU, of its module including the CPU, and of its memory.",
        power.average, labels=("scope",), source="field 185", tier="slow")
    power_limit_watts = Metric[Device](
        "gpuwarden_gpu_power_limit_watts", "gauge", "watts", "Power limits: enforced, requested, default of the board, minimum and maximum that can be requested.",
        power.limits, labels=("limit",), source="nvmlDeviceGetEnforcedPowerLimit, nvmlDeviceGetPowerManagementLimit, …DefaultLimit, …LimitConstraints", tier="slow")
    energy_joules_total = Metric[Device](
        "gpuwarden_gpu_energy_joules_total", "counter", "joules", "Energy consumed since the driver loaded.",
        power.energy, source="nvmlDeviceGetTotalEnergyConsumption", tier="slow")

    clock_hertz = Metric[Device](
        "gpuwarden_gpu_clock_hertz", "gauge", "hertz", "Current clock frequency.",
        clocks.current, labels=("clock",), source="nvmlDeviceGetClockInfo")
    clock_max_hertz = Metric[Device](
        "gpuwarden_gpu_clock_max_hertz", "gauge", "hertz", "Maximum clock frequency.",
        clocks.highest, labels=("clock",), source="nvmlDeviceGetMaxClockInfo", tier="static")
    clock_application_hertz = Metric[Device](
        "gpuwarden_gpu_clock_application_hertz", "gauge", "hertz", "Application clocks, as set and by default.",
        clocks.applications, labels=("clock", "setting"), source="nvmlDeviceGetApplicationsClock, nvmlDeviceGetDefaultApplicationsClock", tier="slow")
    clock_event_active = Metric[Device](
        "gpuwarden_gpu_clock_event_active", "gauge", "", "Whether the clock event reason limits the clocks now.",
        clocks.events, labels=("reason",), source="nvmlDeviceGetCurrentClocksEventReasons")
    clock_event_seconds_total = Metric[Device](
        "gpuwarden_gpu_clock_event_seconds_total", "counter", "seconds",
        "Time for which the clock event reason limited the clocks: since the driver loaded if the driver counts it, else summed over polls.",
        clocks.event_seconds, labels=("reason",), source="fields 74 to 79, else nvmlDeviceGetCurrentClocksEventReasons in every poll", tier="slow", profile="minimal", minimal_labels=(("hw_thermal_slowdown",),))
    performance_state = Metric[Device](
        "gpuwarden_gpu_performance_state", "gauge", "", "Performance state: 0 is the fastest, 15 the slowest.",
        clocks.performance_state, source="nvmlDeviceGetPerformanceState", tier="slow", bounds=(0, 15))

    pcie_link_generation = Metric[Device](
        "gpuwarden_gpu_pcie_link_generation", "gauge", "", "Current PCIe generation of the link; an idle GPU lowers it.",
        pcie.generation, source="nvmlDeviceGetCurrPcieLinkGeneration", tier="slow", bounds=_PCIE_GENERATIONS)
    pcie_link_width = Metric[Device](
        "gpuwarden_gpu_pcie_link_width", "gauge", "", "Current number of PCIe lanes.",
        pcie.width, source="nvmlDeviceGetCurrPcieLinkWidth", tier="slow", bounds=_PCIE_WIDTHS)
    pcie_link_max_generation = Metric[Device](
        "gpuwarden_gpu_pcie_link_max_generation", "gauge", "", "Maximum PCIe generation of the GPU itself, and of its link in this machine.",
        pcie.highest_generation, labels=("of",), source="nvmlDeviceGetGpuMaxPcieLinkGeneration, nvmlDeviceGetMaxPcieLinkGeneration", tier="static", bounds=_PCIE_GENERATIONS)
    pcie_link_max_width = Metric[Device](
        "gpuwarden_gpu_pcie_link_max_width", "gauge", "", "Maximum number of PCIe lanes of the link.",
        pcie.highest_width, source="nvmlDeviceGetMaxPcieLinkWidth", tier="static", bounds=_PCIE_WIDTHS)
    pcie_bytes_total = Metric[Device](
        "gpuwarden_gpu_pcie_bytes_total", "counter", "bytes", "Bytes transferred over PCIe since the driver loaded; only where the GPU counts them in more than 32 bits.",
        pcie.transferred, labels=("direction",), source="fields 197 and 198", tier="slow")
    pcie_throughput_bytes_per_second = Metric[Device](
        "gpuwarden_gpu_pcie_throughput_bytes_per_second", "gauge", "bytes_per_second", "PCIe throughput, measured in a blocking call of 20 ms.",
        pcie.throughput, labels=("direction",), source="nvmlDeviceGetPcieThroughput", tier="slow", opt_in="gpus.pcie_throughput")
    pcie_mean_throughput_bytes_per_second = Metric[Device](
        "gpuwarden_gpu_pcie_mean_throughput_bytes_per_second", "gauge", "bytes_per_second", "PCIe throughput including protocol overhead, averaged since the last reading.",
        activity.pcie, labels=("direction",), source=f"{_GPM} PCIE_TX_PER_SEC, PCIE_RX_PER_SEC", tier="slow", opt_in=GPM_OPTION)
    pcie_replays_total = Metric[Device](
        "gpuwarden_gpu_pcie_replays_total", "counter", "", "PCIe packets that were retransmitted.",
        pcie.replays, source="field 94", tier="slow", bounds=(0, 1e9))
    pcie_errors_total = Metric[Device](
        "gpuwarden_gpu_pcie_errors_total", "counter", "", "PCIe errors, by type.",
        pcie.errors, labels=("type",), source="fields 169, 173 to 183", tier="slow")

    nvlink_up = Metric[Device](
        "gpuwarden_gpu_nvlink_up", "gauge", "", "Whether the NVLink is up; a link without a partner is always down.",
        nvlink.states, labels=("link",), source="fields 91 and 165", tier="slow")
    nvlink_speed_bytes_per_second = Metric[Device](
        "gpuwarden_gpu_nvlink_speed_bytes_per_second", "gauge", "bytes_per_second", "Combined speed of all NVLinks that are up, in each direction.",
        nvlink.speed, source="field 164", tier="slow")
    nvlink_bytes_total = Metric[Device](
        "gpuwarden_gpu_nvlink_bytes_total", "counter", "bytes", "Data transferred over all NVLinks since the driver loaded.",
        nvlink.transferred, labels=("direction",), source="fields 138 and 139 over all links or by link, else 202 and 204", tier="slow")
    nvlink_errors_total = Metric[Device](
        "gpuwarden_gpu_nvlink_errors_total", "counter", "", "NVLink errors by type, summed over all links.",
        nvlink.errors, labels=("type",), source="fields 38, 45, 160, 161 to 163, 206 to 221", tier="slow")
    nvlink_link_errors_total = Metric[Device](
        "gpuwarden_gpu_nvlink_link_errors_total", "counter", "", "NVLink errors by link and type; only links that have had errors.",
        nvlink.link_errors, labels=("link", "type"), source="fields 161 to 163, 206 to 221", tier="slow")
    c2c_link_up = Metric[Device](
        "gpuwarden_gpu_c2c_link_up", "gauge", "", "Whether the GPU-to-CPU (C2C) link of a superchip is up.",
        nvlink.chip_links, labels=("link",), source="fields 170 and 171", tier="slow")

    c2c_speed_bytes_per_second = Metric[Device](
        "gpuwarden_gpu_c2c_speed_bytes_per_second", "gauge", "bytes_per_second", "Combined speed of all GPU-to-CPU (C2C) links of a superchip.",
        nvlink.chip_speed, source="field 172", tier="slow")
    c2c_errors_total = Metric[Device](
        "gpuwarden_gpu_c2c_errors_total", "counter", "", "Errors of the GPU-to-CPU (C2C) links of a superchip, by type.",
        nvlink.chip_errors, labels=("type",), source="fields 231 to 233", tier="slow")

    ecc_mode = Metric[Device](
        "gpuwarden_gpu_ecc_mode", "gauge", "", "Whether ECC is enabled, now and after the next reset.",
        memory_errors.ecc_mode, labels=("setting",), source="fields 1 and 2", tier="slow")
    ecc_errors_total = Metric[Device](
        "gpuwarden_gpu_ecc_errors_total", "counter", "",
        "ECC memory errors by type, location and lifetime (volatile = since the driver loaded, aggregate = lifetime of the board).",
        memory_errors.ecc_errors, labels=("type", "lifetime", "location"), source="nvmlDeviceGetMemoryErrorCounter, else fields 3 to 6", tier="slow", profile="minimal", minimal_labels=(("uncorrected", "volatile"),), bounds=_MEMORY_ERRORS)
    ecc_sram_errors_total = Metric[Device](
        "gpuwarden_gpu_ecc_sram_errors_total", "counter", "", "SRAM (on-chip memory) errors, by detection method and lifetime.",
        memory_errors.sram_errors, labels=("found_by", "lifetime"), source="nvmlDeviceGetSramEccErrorStatus", tier="slow", bounds=_MEMORY_ERRORS)
    ecc_sram_unit_errors_total = Metric[Device](
        "gpuwarden_gpu_ecc_sram_unit_errors_total", "counter", "", "Uncorrected SRAM (on-chip memory) errors over the lifetime of the board, by unit.",
        memory_errors.sram_unit_errors, labels=("unit",), source="nvmlDeviceGetSramEccErrorStatus", tier="slow", bounds=_MEMORY_ERRORS)
    ecc_sram_threshold_exceeded = Metric[Device](
        "gpuwarden_gpu_ecc_sram_threshold_exceeded", "gauge", "", "Whether SRAM (on-chip memory) errors exceed NVIDIA's threshold.",
        memory_errors.sram_threshold_exceeded, source="nvmlDeviceGetSramEccErrorStatus", tier="slow")
    remapped_rows = Metric[Device](
        "gpuwarden_gpu_remapped_rows", "gauge", "", "Device memory rows remapped to spare rows, by cause.",
        memory_errors.remapped_rows, labels=("cause",), source="fields 142 and 143", tier="slow", bounds=(0, 1e6))
    row_remap_pending = Metric[Device](
        "gpuwarden_gpu_row_remap_pending", "gauge", "", "Whether a row of device memory will be remapped at the next reset.",
        memory_errors.remap_pending, source="field 144", tier="slow")
    row_remap_failed = Metric[Device](
        "gpuwarden_gpu_row_remap_failed", "gauge", "", "Whether remapping a row of device memory failed.",
        memory_errors.remap_failed, source="field 145", tier="slow")
    row_remap_banks = Metric[Device](
        "gpuwarden_gpu_row_remap_banks", "gauge", "", "Device memory banks, by how many of their spare rows are left.",
        memory_errors.spare_rows, labels=("spare_rows",), source="nvmlDeviceGetRowRemapperHistogram", tier="slow", bounds=(0, 1e6))
    memory_unrepairable = Metric[Device](
        "gpuwarden_gpu_memory_unrepairable", "gauge", "", "Whether device memory has errors that row remapping cannot repair.",
        memory_errors.unrepairable, source="nvmlDeviceGetUnrepairableMemoryFlag_v1", tier="slow")
    repair_pending = Metric[Device](
        "gpuwarden_gpu_repair_pending", "gauge", "", "Whether a memory channel or a group of SMs (TPC) will be repaired at the next reset.",
        memory_errors.repairs_pending, labels=("part",), source="nvmlDeviceGetRepairStatus", tier="slow")
    retired_pages = Metric[Device](
        "gpuwarden_gpu_retired_pages", "gauge", "", "Retired pages of device memory, by cause; newer GPUs remap rows instead.",
        memory_errors.retired_pages, labels=("cause",), source="fields 29 and 30", tier="slow", bounds=(0, 1e6))
    retired_pages_pending = Metric[Device](
        "gpuwarden_gpu_retired_pages_pending", "gauge", "", "Whether a page of device memory will be retired at the next reset.",
        memory_errors.retirement_pending, source="field 31", tier="slow")

    persistence_mode = Metric[Device](
        "gpuwarden_gpu_persistence_mode", "gauge", "", "Whether persistence mode is on: the driver stays loaded while no program uses the GPU.",
        modes.persistence, source="nvmlDeviceGetPersistenceMode", tier="slow")
    compute_mode = Metric[Device](
        "gpuwarden_gpu_compute_mode", "gauge", "", "Compute mode, which limits who can open a context on the GPU: 1 for the current mode.",
        modes.compute, labels=("mode",), source="nvmlDeviceGetComputeMode", tier="slow")
    mig_mode = Metric[Device](
        "gpuwarden_gpu_mig_mode", "gauge", "", "Whether MIG is enabled, now and after the next reset.",
        modes.mig, labels=("setting",), source="nvmlDeviceGetMigMode", tier="slow")
    addressing_mode = Metric[Device](
        "gpuwarden_gpu_addressing_mode", "gauge", "", "Addressing mode, by which the GPU accesses host memory of processes: 1 for the current mode.",
        modes.addressing, labels=("mode",), source="nvmlDeviceGetAddressingMode", tier="static")
    virtualization_mode = Metric[Device](
        "gpuwarden_gpu_virtualization_mode", "gauge", "", "Virtualization mode of the GPU: 1 for the current mode.",
        modes.virtualization, labels=("mode",), source="nvmlDeviceGetVirtualizationMode", tier="static")
    accounting_mode = Metric[Device](
        "gpuwarden_gpu_accounting_mode", "gauge", "", "Whether the driver keeps accounting data of processes that ended.",
        modes.accounting, source="nvmlDeviceGetAccountingMode", tier="slow")
    display_active = Metric[Device](
        "gpuwarden_gpu_display_active", "gauge", "", "Whether the GPU drives a display, which uses some of its memory and time.",
        modes.display, source="nvmlDeviceGetDisplayActive", tier="slow")
    recovery_action = Metric[Device](
        "gpuwarden_gpu_recovery_action", "gauge", "", "Action that the driver requires before the GPU is used again: 1 for that action.",
        modes.recovery, labels=("action",), source="field 230", tier="slow")
    reset_required = Metric[Device](
        "gpuwarden_gpu_reset_required", "gauge", "", "Whether the driver requires a GPU reset.",
        modes.reset_required, source="field 230, else 226 and 227", tier="slow")
    fabric_state = Metric[Device](
        "gpuwarden_gpu_fabric_state", "gauge", "", "NVLink fabric registration state: 1 for the current state.",
        modes.fabric_state, labels=("state",), source="nvmlDeviceGetGpuFabricInfoV", tier="slow")
    fabric_joined = Metric[Device](
        "gpuwarden_gpu_fabric_joined", "gauge", "", "Whether the GPU has registered with its NVLink fabric without an error.",
        modes.fabric_joined, source="nvmlDeviceGetGpuFabricInfoV", tier="slow")
    fabric_info = Metric[Device](
        "gpuwarden_gpu_fabric_info", "info", "", "NVLink fabric clique of the GPU; GPUs in one clique can reach each other.",
        modes.fabric_place, labels=("clique",), source="nvmlDeviceGetGpuFabricInfoV", tier="slow")
    fabric_fault = Metric[Device](
        "gpuwarden_gpu_fabric_fault", "gauge", "", "NVLink fabric faults of the GPU that the fabric manager reports.",
        modes.fabric_faults, labels=("fault",), source="nvmlDeviceGetGpuFabricInfoV", tier="slow")
    cores = Metric[Device](
        "gpuwarden_gpu_cores", "gauge", "", "Number of CUDA cores.",
        modes.cores, source="nvmlDeviceGetNumGpuCores", tier="static", bounds=(1, 1e7))
    inforom_info = Metric[Device](
        "gpuwarden_gpu_inforom_info", "info", "", "Versions of the board's InfoROM: the image and its parts.",
        modes.inforom, labels=("image", "oem", "ecc", "power"), source="nvmlDeviceGetInforomImageVersion, nvmlDeviceGetInforomVersion", tier="static")

    graphics_engine_active_ratio = Metric[Device](
        "gpuwarden_gpu_graphics_engine_active_ratio", "gauge", "ratio", "Fraction of time with any compute or graphics work, since the last reading.",
        activity.graphics_engine, source=f"{_GPM} GRAPHICS_UTIL", tier="slow", opt_in=GPM_OPTION)
    sm_active_ratio = Metric[Device](
        "gpuwarden_gpu_sm_active_ratio", "gauge", "ratio", "Fraction of SMs that were busy, averaged since the last reading.",
        activity.sm_active, source=f"{_GPM} SM_UTIL", tier="slow", opt_in=GPM_OPTION)
    sm_occupancy_ratio = Metric[Device](
        "gpuwarden_gpu_sm_occupancy_ratio", "gauge", "ratio", "Active warps as a fraction of the SMs' maximum, averaged since the last reading.",
        activity.sm_occupancy, source=f"{_GPM} SM_OCCUPANCY", tier="slow", opt_in=GPM_OPTION)
    pipe_active_ratio = Metric[Device](
        "gpuwarden_gpu_pipe_active_ratio", "gauge", "ratio", "Fraction of time for which this pipe of the SMs was active, averaged since the last reading; fp64, fp32 and fp16 exclude tensor operations.",
        activity.pipes, labels=("pipe",), source=f"{_GPM} ANY_TENSOR_UTIL, FP64_UTIL, FP32_UTIL, FP16_UTIL, INTEGER_UTIL", tier="slow", opt_in=GPM_OPTION)
    tensor_pipe_active_ratio = Metric[Device](
        "gpuwarden_gpu_tensor_pipe_active_ratio", "gauge", "ratio", "Fraction of time for which the tensor pipe was active, by operation, averaged since the last reading.",
        activity.tensor_operations, labels=("operation",), source=f"{_GPM} DFMA_TENSOR_UTIL, HMMA_…, DMMA_…, IMMA_…", tier="slow", opt_in=GPM_OPTION)
    dram_active_ratio = Metric[Device](
        "gpuwarden_gpu_dram_active_ratio", "gauge", "ratio", "Fraction of the device memory's bandwidth in use, averaged since the last reading.",
        activity.dram, source=f"{_GPM} DRAM_BW_UTIL", tier="slow", opt_in=GPM_OPTION)
    # fmt: on


class MigReadings(Table[MigDevice], prefix="gpuwarden_mig_", key=("uuid",)):
    """MIG instances.

    `uuid` is the instance's own. Activity is that of its GPU instance, which its compute instances share.
    """

    # fmt: off
    info = Metric[MigDevice](
        "gpuwarden_mig_info", "info", "", "Identity of the MIG instance and of its GPU; join on uuid.",
        instance.info,
        labels=("gpu_uuid", "gpu_instance", "compute_instance", "profile"),
        source="nvmlDeviceGetMigDeviceHandleByIndex, nvmlDeviceGetUUID, …GpuInstanceId, …ComputeInstanceId, …Name", tier="slow", profile="minimal")
    multiprocessors = Metric[MigDevice](
        "gpuwarden_mig_multiprocessors", "gauge", "", "SMs of the instance.",
        instance.multiprocessors, source="nvmlDeviceGetAttributes_v2", tier="slow", bounds=(0, 1e5))
    slices = Metric[MigDevice](
        "gpuwarden_mig_slices", "gauge", "", "Slices of the GPU that the instance has, and slices of the SMs that its compute instance has.",
        instance.slices, labels=("kind",), source="nvmlDeviceGetAttributes_v2", tier="slow", bounds=(0, 1024))
    engines = Metric[MigDevice](
        "gpuwarden_mig_engines", "gauge", "", "Engines available to the instance; compute instances of one GPU instance share them.",
        instance.engines, labels=("engine",), source="nvmlDeviceGetAttributes_v2", tier="slow", bounds=(0, 1024))
    memory_size_bytes = Metric[MigDevice](
        "gpuwarden_mig_memory_size_bytes", "gauge", "bytes", "Device memory of the instance.",
        instance.memory_size, source="nvmlDeviceGetMemoryInfo_v2", profile="minimal", bounds=_MEMORY_SIZES)
    memory_used_bytes = Metric[MigDevice](
        "gpuwarden_mig_memory_used_bytes", "gauge", "bytes", "Device memory in use in the instance.",
        instance.memory_used, source="nvmlDeviceGetMemoryInfo_v2", profile="minimal", bounds=(0, memory_size_bytes))
    memory_free_bytes = Metric[MigDevice](
        "gpuwarden_mig_memory_free_bytes", "gauge", "bytes", "Free device memory of the instance.",
        instance.memory_free, source="nvmlDeviceGetMemoryInfo_v2", profile="minimal", bounds=(0, memory_size_bytes))
    memory_reserved_bytes = Metric[MigDevice](
        "gpuwarden_mig_memory_reserved_bytes", "gauge", "bytes", "Device memory of the instance reserved by driver and firmware.",
        instance.memory_reserved, source="nvmlDeviceGetMemoryInfo_v2", bounds=(0, memory_size_bytes))
    graphics_engine_active_ratio = Metric[MigDevice](
        "gpuwarden_mig_graphics_engine_active_ratio", "gauge", "ratio", "Fraction of time with any compute or graphics work, since the last reading.",
        activity.graphics_engine, source=f"{_GPM} GRAPHICS_UTIL", tier="slow", opt_in=GPM_OPTION)
    sm_active_ratio = Metric[MigDevice](
        "gpuwarden_mig_sm_active_ratio", "gauge", "ratio", "Fraction of SMs that were busy, averaged since the last reading.",
        activity.sm_active, source=f"{_GPM} SM_UTIL", tier="slow", opt_in=GPM_OPTION)
    sm_occupancy_ratio = Metric[MigDevice](
        "gpuwarden_mig_sm_occupancy_ratio", "gauge", "ratio", "Active warps as a fraction of the SMs' maximum, averaged since the last reading.",
        activity.sm_occupancy, source=f"{_GPM} SM_OCCUPANCY", tier="slow", opt_in=GPM_OPTION)
    pipe_active_ratio = Metric[MigDevice](
        "gpuwarden_mig_pipe_active_ratio", "gauge", "ratio", "Fraction of time for which this pipe of the SMs was active, averaged since the last reading.",
        activity.pipes, labels=("pipe",),
        source=f"{_GPM} ANY_TENSOR_UTIL, FP64_UTIL, FP32_UTIL, FP16_UTIL, INTEGER_UTIL", tier="slow", opt_in=GPM_OPTION)
    dram_active_ratio = Metric[MigDevice](
        "gpuwarden_mig_dram_active_ratio", "gauge", "ratio", "Fraction of the device memory's bandwidth in use, averaged since the last reading.",
        activity.dram, source=f"{_GPM} DRAM_BW_UTIL", tier="slow", opt_in=GPM_OPTION)
    pcie_throughput_bytes_per_second = Metric[MigDevice](
        "gpuwarden_mig_pcie_throughput_bytes_per_second", "gauge", "bytes_per_second", "PCIe throughput, averaged since the last reading.",
        activity.pcie, labels=("direction",), source=f"{_GPM} PCIE_TX_PER_SEC, PCIE_RX_PER_SEC", tier="slow", opt_in=GPM_OPTION)
    # fmt: on
