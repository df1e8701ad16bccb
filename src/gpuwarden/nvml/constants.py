"""Constants of NVML, by label value where a metric shows them."""

from __future__ import annotations

import pynvml

# label value -> NVML's number
CLOCKS = {
    "graphics": pynvml.NVML_CLOCK_GRAPHICS,
    "sm": pynvml.NVML_CLOCK_SM,
    "memory": pynvml.NVML_CLOCK_MEM,
    "video": pynvml.NVML_CLOCK_VIDEO,
}
TEMPERATURE_THRESHOLDS = {
    "shutdown": pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN,
    "slowdown": pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN,
    "max_operating": pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX,
    "memory_max_operating": pynvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX,
}
MEMORY_LOCATIONS = {
    "l1_cache": pynvml.NVML_MEMORY_LOCATION_L1_CACHE,
    "l2_cache": pynvml.NVML_MEMORY_LOCATION_L2_CACHE,
    "dram": pynvml.NVML_MEMORY_LOCATION_DRAM,
    "register_file": pynvml.NVML_MEMORY_LOCATION_REGISTER_FILE,
    "texture": pynvml.NVML_MEMORY_LOCATION_TEXTURE_MEMORY,
    "shared_memory": pynvml.NVML_MEMORY_LOCATION_TEXTURE_SHM,
    "cbu": pynvml.NVML_MEMORY_LOCATION_CBU,
    "sram": pynvml.NVML_MEMORY_LOCATION_SRAM,
}
ECC_TYPES = {
    "corrected": pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
    "uncorrected": pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
}
ECC_LIFETIMES = {"volatile": pynvml.NVML_VOLATILE_ECC, "aggregate": pynvml.NVML_AGGREGATE_ECC}
PCIE_DIRECTIONS = {"transmit": pynvml.NVML_PCIE_UTIL_TX_BYTES, "receive": pynvml.NVML_PCIE_UTIL_RX_BYTES}
COMPUTE_MODES = {
    "default": pynvml.NVML_COMPUTEMODE_DEFAULT,
    "exclusive_thread": pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD,
    "prohibited": pynvml.NVML_COMPUTEMODE_PROHIBITED,
    "exclusive_process": pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
}
INFOROM_PARTS = {
    "oem": pynvml.NVML_INFOROM_OEM,
    "ecc": pynvml.NVML_INFOROM_ECC,
    "power": pynvml.NVML_INFOROM_POWER,
}
# Numbers, as older releases of nvidia-ml-py lack the names.
ADDRESSING_MODES = {"none": 0, "hmm": 1, "ats": 2}
VIRTUALIZATION_MODES = {"none": 0, "passthrough": 1, "vgpu": 2, "host_vgpu": 3, "host_vsga": 4}
ARCHITECTURES = {
    2: "Kepler", 3: "Maxwell", 4: "Pascal", 5: "Volta", 6: "Turing", 7: "Ampere", 8: "Ada Lovelace", 9: "Hopper",
    10: "Blackwell", 13: "Rubin",
}  # fmt: skip
BRANDS = {
    1: "Quadro", 2: "Tesla", 3: "NVS", 5: "GeForce", 6: "Titan", 7: "NVIDIA vApps", 8: "NVIDIA vPC", 9: "NVIDIA vCS",
    10: "NVIDIA vWS", 11: "NVIDIA Cloud Gaming", 12: "Quadro RTX", 13: "NVIDIA RTX", 14: "NVIDIA", 15: "GeForce RTX",
    16: "Titan RTX",
}  # fmt: skip
RECOVERY_ACTIONS = {  # also the cases of XID 154 in xid/codes.py
    "none": 0, "gpu_reset": 1, "node_reboot": 2, "drain_p2p": 3, "drain_and_reset": 4, "recover_imex_domain": 5,
    "bus_reset": 6, "system_reboot": 7,
}  # fmt: skip
FABRIC_STATES = {"not_started": 1, "in_progress": 2, "completed": 3}  # 0: the GPU belongs to no fabric
CLOCK_EVENT_REASONS = {
    "gpu_idle": pynvml.nvmlClocksEventReasonGpuIdle,
    "applications_clocks_setting": pynvml.nvmlClocksEventReasonApplicationsClocksSetting,
    "sw_power_cap": pynvml.nvmlClocksEventReasonSwPowerCap,
    "hw_slowdown": pynvml.nvmlClocksThrottleReasonHwSlowdown,
    "sync_boost": pynvml.nvmlClocksEventReasonSyncBoost,
    "sw_thermal_slowdown": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
    "hw_thermal_slowdown": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
    "hw_power_brake_slowdown": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    "display_clock_setting": pynvml.nvmlClocksEventReasonDisplayClockSetting,
    "board_limit": 0x200,  # these two have a name in newer releases of nvidia-ml-py only
    "reliability": 0x400,
}
# GPM metrics in percent; label value -> NVML's number. "tensor" is any of the tensor operations.
GPM_GRAPHICS_ENGINE: int = pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL
GPM_SM_ACTIVE: int = pynvml.NVML_GPM_METRIC_SM_UTIL
GPM_SM_OCCUPANCY: int = pynvml.NVML_GPM_METRIC_SM_OCCUPANCY
GPM_DRAM_ACTIVE: int = pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL
GPM_PIPES = {
    "tensor": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "fp64": pynvml.NVML_GPM_METRIC_FP64_UTIL,
    "fp32": pynvml.NVML_GPM_METRIC_FP32_UTIL,
    "fp16": pynvml.NVML_GPM_METRIC_FP16_UTIL,
    "integer": pynvml.NVML_GPM_METRIC_INTEGER_UTIL,
}
GPM_TENSOR_OPERATIONS = {
    "dfma": pynvml.NVML_GPM_METRIC_DFMA_TENSOR_UTIL,
    "hmma": pynvml.NVML_GPM_METRIC_HMMA_TENSOR_UTIL,
    "dmma": 8,  # a name in newer releases of nvidia-ml-py only
    "imma": pynvml.NVML_GPM_METRIC_IMMA_TENSOR_UTIL,
}
# GPM metrics in MiB a second
GPM_PCIE = {"transmit": pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC, "receive": pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC}
GPM_REQUEST_VERSION: int = pynvml.NVML_GPM_METRICS_GET_VERSION
MIG_ENABLED: int = pynvml.NVML_DEVICE_MIG_ENABLE
NO_INSTANCE = 0xFFFFFFFF  # id for "no MIG instance"
XID_EVENT: int = pynvml.nvmlEventTypeXidCriticalError
# Operational events, in newer releases of nvidia-ml-py only: values from NVIDIA's "GPU Operational Events" of R615.
OPERATIONAL_EVENT = 1  # type of data
LEGACY_XID_CONTEXT = 1
OPERATIONAL_SEVERITIES = {10: "informational", 20: "corrected", 30: "recoverable", 40: "fatal"}
OPERATIONAL_CATEGORIES = {
    1: "timeout",
    2: "memory_integrity_error",
    3: "interconnect_error",
    4: "corruption_detected",
    5: "security_error",
}
OPERATIONAL_PROPAGATED, OPERATIONAL_PRIMARY, OPERATIONAL_OVERFLOW = 1 << 2, 1 << 5, 1 << 6
OPERATIONAL_GROUP_PREVIOUS, OPERATIONAL_GROUP_SIMULATED = 1 << 1, 1 << 2
# System events, a mask; numbers, as older releases of nvidia-ml-py lack the names.
SYSTEM_UNBIND, SYSTEM_BIND = 1, 2
TEMPERATURE_CORE: int = pynvml.NVML_TEMPERATURE_GPU
MEMORY_V2: int = pynvml.nvmlMemory_v2
PERFORMANCE_STATE_UNKNOWN: int = pynvml.NVML_PSTATE_UNKNOWN
NOT_AVAILABLE = 0xFFFFFFFF  # NVML_VALUE_NOT_AVAILABLE, -1, as an unsigned int
NOT_AVAILABLE_LONG = 0xFFFFFFFFFFFFFFFF  # likewise, as an unsigned long long
