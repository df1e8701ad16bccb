"""Interface to the driver: the functions of NVML that gpuwarden calls, by nvidia-ml-py's names.

The driver's binding (module pynvml), a capture and the simulation all answer to `Nvml`; nothing above knows which.
Every call may block in the driver and is made on a thread of its own (nvml/call_pool.py), never on the event loop.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NewType, Protocol, TypeAlias

import pynvml

NVMLError: type[Exception] = pynvml.NVMLError
Handle = NewType("Handle", object)
GpmSample = NewType("GpmSample", object)
EventSet = NewType("EventSet", object)
Field: TypeAlias = "tuple[int, int]"  # a field's number, and the scope it is asked of: a link, say; 0 where it has none
FieldValue: TypeAlias = "tuple[int, float | None]"  # NVML's return code, and the value


class MemoryInfo(Protocol):
    """nvmlMemory_t in bytes; `reserved` stands in version 2 only, where `used` does not include it."""

    total: int
    free: int
    used: int
    reserved: int


class Utilization(Protocol):
    """nvmlUtilization_t in percent of the driver's sample period."""

    gpu: int
    memory: int


class ProcessInfo(Protocol):
    """nvmlProcessInfo_t; `usedGpuMemory` in bytes, None where the driver does not tell.

    The ids name a MIG instance; a process that is on none has NO_INSTANCE or, on drivers before R450, no such fields.
    """

    pid: int
    usedGpuMemory: int | None  # noqa: N815 - the fields' names in nvidia-ml-py
    gpuInstanceId: int | None  # noqa: N815
    computeInstanceId: int | None  # noqa: N815


class PciInfo(Protocol):
    """nvmlPciInfo_t; `busId` as domain:bus:device.function."""

    busId: str | bytes  # noqa: N815 - the field's name in nvidia-ml-py


class Bar1Memory(Protocol):
    """nvmlBAR1Memory_t in bytes."""

    bar1Total: int  # noqa: N815 - the fields' names in nvidia-ml-py
    bar1Free: int  # noqa: N815
    bar1Used: int  # noqa: N815


class SramErrors(Protocol):
    """nvmlEccSramErrorStatus_v1_t: errors since the driver loaded (volatile) and of the board's life (aggregate)."""

    volatileCor: int  # noqa: N815 - the fields' names in nvidia-ml-py
    volatileUncParity: int  # noqa: N815
    volatileUncSecDed: int  # noqa: N815
    aggregateCor: int  # noqa: N815
    aggregateUncParity: int  # noqa: N815
    aggregateUncSecDed: int  # noqa: N815
    aggregateUncBucketL2: int  # noqa: N815
    aggregateUncBucketSm: int  # noqa: N815
    aggregateUncBucketPcie: int  # noqa: N815
    aggregateUncBucketMcu: int  # noqa: N815
    aggregateUncBucketOther: int  # noqa: N815
    bThresholdExceeded: int  # noqa: N815


class SpareRows(Protocol):
    """nvmlRowRemapperHistogramValues_t: banks of device memory by how many of their spare rows are left."""

    max: int
    high: int
    partial: int
    low: int
    none: int


class FabricInfo(Protocol):
    """nvmlGpuFabricInfo_v2_t; `status` is a return code, and counts once `state` says that the GPU has registered."""

    status: int
    state: int
    cliqueId: int  # noqa: N815 - the fields' names in nvidia-ml-py
    healthMask: int  # noqa: N815


class GpmSupport(Protocol):
    """nvmlGpmSupport_t."""

    isSupportedDevice: int  # noqa: N815 - the field's name in nvidia-ml-py


class GpmMetric(Protocol):
    """nvmlGpmMetric_t; `value` in the metric's own unit, percent mostly."""

    metricId: int  # noqa: N815 - the fields' names in nvidia-ml-py
    nvmlReturn: int  # noqa: N815
    value: float


class GpmRequest(Protocol):
    """nvmlGpmMetricsGet_t: two samples, and as many of `metrics` as `numMetrics` says, filled in by the driver."""

    version: int
    numMetrics: int  # noqa: N815 - the field's name in nvidia-ml-py
    sample1: GpmSample
    sample2: GpmSample

    @property
    def metrics(self) -> Mapping[int, GpmMetric] | Sequence[GpmMetric]: ...


class Attributes(Protocol):
    """nvmlDeviceAttributes_t of a MIG instance."""

    multiprocessorCount: int  # noqa: N815 - the fields' names in nvidia-ml-py
    sharedCopyEngineCount: int  # noqa: N815
    sharedDecoderCount: int  # noqa: N815
    sharedEncoderCount: int  # noqa: N815
    sharedJpegCount: int  # noqa: N815
    sharedOfaCount: int  # noqa: N815
    gpuInstanceSliceCount: int  # noqa: N815
    computeInstanceSliceCount: int  # noqa: N815


class EventData(Protocol):
    """nvmlEventData_t; of an XID `eventData` is the code."""

    device: Handle
    eventType: int  # noqa: N815 - the field's name in nvidia-ml-py
    eventData: int  # noqa: N815 - likewise


class Nvml(Protocol):
    """Functions of NVML that gpuwarden calls. Every method raises pynvml.NVMLError with the driver's return code.

    Where nvidia-ml-py wants a struct to fill, or hands out a union, the answer here is what it holds
    (nvml/driver.py): field values are pairs of a return code and the value, None where the driver has none now.
    """

    # fmt: off
    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlSystemGetDriverVersion(self) -> str: ...
    def nvmlSystemGetCudaDriverVersion_v2(self) -> int: ...
    def nvmlDeviceGetCount(self) -> int: ...
    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> Handle: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str, /) -> Handle: ...
    def nvmlDeviceGetUUID(self, handle: Handle, /) -> str: ...
    def nvmlDeviceGetName(self, handle: Handle, /) -> str: ...
    def nvmlDeviceGetPciInfo(self, handle: Handle, /) -> PciInfo: ...
    def nvmlDeviceGetVbiosVersion(self, handle: Handle, /) -> str: ...
    def nvmlDeviceGetBrand(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetArchitecture(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetCudaComputeCapability(self, handle: Handle, /) -> Sequence[int]: ...
    def nvmlDeviceGetMinorNumber(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetSerial(self, handle: Handle, /) -> str: ...
    def nvmlDeviceGetBoardPartNumber(self, handle: Handle, /) -> str: ...
    def nvmlDeviceGetInforomImageVersion(self, handle: Handle, /) -> str: ...
    def nvmlDeviceGetInforomVersion(self, handle: Handle, part: int, /) -> str: ...
    def nvmlDeviceGetGspFirmwareVersion(self, handle: Handle, /) -> str: ...
    def nvmlDeviceGetNumGpuCores(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetMemoryBusWidth(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetNumaNodeId(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Handle, version: int | None = None, /) -> MemoryInfo: ...
    def nvmlDeviceGetBAR1MemoryInfo(self, handle: Handle, /) -> Bar1Memory: ...
    def nvmlDeviceGetUtilizationRates(self, handle: Handle, /) -> Utilization: ...
    def nvmlDeviceGetEncoderUtilization(self, handle: Handle, /) -> Sequence[int]: ...
    def nvmlDeviceGetDecoderUtilization(self, handle: Handle, /) -> Sequence[int]: ...
    def nvmlDeviceGetJpgUtilization(self, handle: Handle, /) -> Sequence[int]: ...
    def nvmlDeviceGetOfaUtilization(self, handle: Handle, /) -> Sequence[int]: ...
    def nvmlDeviceGetEncoderStats(self, handle: Handle, /) -> Sequence[int]: ...
    def nvmlDeviceGetTemperature(self, handle: Handle, sensor: int, /) -> int: ...
    def nvmlDeviceGetTemperatureThreshold(self, handle: Handle, threshold: int, /) -> int: ...
    def nvmlDeviceGetMarginTemperature(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetNumFans(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetFanSpeed_v2(self, handle: Handle, fan: int, /) -> int: ...
    def nvmlDeviceGetPowerUsage(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetPowerManagementLimit(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: Handle, /) -> Sequence[int]: ...
    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetClockInfo(self, handle: Handle, clock: int, /) -> int: ...
    def nvmlDeviceGetMaxClockInfo(self, handle: Handle, clock: int, /) -> int: ...
    def nvmlDeviceGetApplicationsClock(self, handle: Handle, clock: int, /) -> int: ...
    def nvmlDeviceGetDefaultApplicationsClock(self, handle: Handle, clock: int, /) -> int: ...
    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetSupportedClocksEventReasons(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetSupportedClocksThrottleReasons(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetPerformanceState(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetGpuMaxPcieLinkGeneration(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetPcieThroughput(self, handle: Handle, direction: int, /) -> int: ...
    def nvmlDeviceGetMemoryErrorCounter(self, handle: Handle, kind: int, lifetime: int, location: int, /) -> int: ...
    def nvmlDeviceGetSramEccErrorStatus(self, handle: Handle, /) -> SramErrors: ...
    def nvmlDeviceGetRowRemapperHistogram(self, handle: Handle, /) -> SpareRows: ...
    def nvmlDeviceGetGpuFabricInfoV(self, handle: Handle, /) -> FabricInfo: ...
    def nvmlDeviceGetPersistenceMode(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetComputeMode(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetMigMode(self, handle: Handle, /) -> Sequence[int]: ...
    def nvmlDeviceGetAccountingMode(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetDisplayActive(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetVirtualizationMode(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetRepairStatus(self, handle: Handle, /) -> Sequence[int]: ...
    def nvmlDeviceGetUnrepairableMemoryFlag_v1(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetAddressingMode(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetFieldValues(self, handle: Handle, fields: Sequence[Field], /) -> Iterable[FieldValue]: ...
    def nvmlDeviceGetComputeRunningProcesses(self, handle: Handle, /) -> list[ProcessInfo]: ...
    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Handle, /) -> list[ProcessInfo]: ...
    def nvmlGpmQueryDeviceSupport(self, handle: Handle, /) -> GpmSupport: ...
    def nvmlGpmSampleAlloc(self) -> GpmSample: ...
    def nvmlGpmSampleFree(self, sample: GpmSample, /) -> None: ...
    def nvmlGpmSampleGet(self, handle: Handle, sample: GpmSample, /) -> object: ...
    def nvmlGpmMigSampleGet(self, handle: Handle, gpu_instance: int, sample: GpmSample, /) -> object: ...
    def nvmlGpmMetricsGet(self, request: GpmRequest, /) -> object: ...
    def c_nvmlGpmMetricsGet_t(self) -> GpmRequest: ...
    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Handle, index: int, /) -> Handle: ...
    def nvmlDeviceGetGpuInstanceId(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetComputeInstanceId(self, handle: Handle, /) -> int: ...
    def nvmlDeviceGetAttributes_v2(self, handle: Handle, /) -> Attributes: ...
    def nvmlEventSetCreate(self) -> EventSet: ...
    def nvmlDeviceRegisterEvents(self, handle: Handle, types: int, events: EventSet, /) -> None: ...
    def nvmlEventSetWait_v2(self, events: EventSet, milliseconds: int, /) -> EventData: ...
    def nvmlEventSetFree(self, events: EventSet, /) -> None: ...
    # fmt: on


FUNCTIONS = tuple(name for name in vars(Nvml) if name.startswith("nvml"))
# Those that answer with a text.
TEXTS = (
    "nvmlSystemGetDriverVersion",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetVbiosVersion",
    "nvmlDeviceGetSerial",
    "nvmlDeviceGetBoardPartNumber",
    "nvmlDeviceGetInforomImageVersion",
    "nvmlDeviceGetInforomVersion",
    "nvmlDeviceGetGspFirmwareVersion",
)

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
# Written as numbers, as older releases of nvidia-ml-py lack the names.
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
RECOVERY_ACTIONS = {
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
NO_INSTANCE = 0xFFFFFFFF  # the id of no MIG instance
XID_EVENT: int = pynvml.nvmlEventTypeXidCriticalError
TEMPERATURE_CORE: int = pynvml.NVML_TEMPERATURE_GPU
MEMORY_V2: int = pynvml.nvmlMemory_v2
PERFORMANCE_STATE_UNKNOWN: int = pynvml.NVML_PSTATE_UNKNOWN
NOT_AVAILABLE = 0xFFFFFFFF  # NVML_VALUE_NOT_AVAILABLE, -1, as an unsigned int
NOT_AVAILABLE_LONG = 0xFFFFFFFFFFFFFFFF  # likewise, as an unsigned long long

_ERROR_NAMES: dict[int, str] = {
    number: name.removeprefix("NVML_ERROR_").lower()
    for name, number in vars(pynvml).items()
    if name.startswith("NVML_ERROR_")
}
# The device or driver does not have this reading: no sample, no error.
UNSUPPORTED = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_DEPRECATED,
        pynvml.NVML_ERROR_INVALID_ARGUMENT,  # thresholds and clocks that this model does not know
        pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
    }
)
# What an index of a MIG device answers where there is none: profiles take up several.
NO_MIG_DEVICE = UNSUPPORTED | {pynvml.NVML_ERROR_NOT_FOUND}
# The GPU itself does not answer: asking it for more is in vain.
GPU_GONE = frozenset(
    {
        pynvml.NVML_ERROR_GPU_IS_LOST,
        pynvml.NVML_ERROR_RESET_REQUIRED,
        28,  # NVML_ERROR_GPU_NOT_FOUND, which older releases of nvidia-ml-py do not name
    }
)
# The driver below all GPUs went away, or was replaced: only a new nvmlInit helps.
DRIVER_GONE = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
    }
)
# The library that is loaded and the kernel module are of different versions of the driver.
LIBRARY_MISMATCH: int = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
NO_EVENT: int = pynvml.NVML_ERROR_TIMEOUT  # what a wait says that ended without an event


def code_of(error: BaseException) -> int:
    """Return NVML's return code."""
    return int(getattr(error, "value", pynvml.NVML_ERROR_UNKNOWN))


def error_name(error: BaseException) -> str:
    """Return the error's name in NVML, in lower case: the value of the label `error`."""
    return _ERROR_NAMES.get(code_of(error), f"code_{code_of(error)}")


def nvml_error(code: int) -> Exception:
    """Make the exception that nvidia-ml-py raises for a return code."""
    return NVMLError(code)


def handle_key(handle: Handle) -> Hashable:
    """Return what is equal for two handles of the same GPU: nvidia-ml-py's, being pointers, are not."""
    return ctypes.cast(handle, ctypes.c_void_p).value if isinstance(handle, ctypes._Pointer) else handle  # noqa: SLF001 - the class has no public name
