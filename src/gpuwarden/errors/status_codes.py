"""Status codes of CUDA and its libraries: the problem that each name, and each of CUDA's descriptions, shows.

Names and descriptions of CUDA are those of cuda.h and driver_types.h of CUDA 13.0 (cudaGetErrorName,
cudaGetErrorString), of 13.3 in the newest two; those of the libraries are from cublas_api.h, cudnn_graph.h (9),
cusolver_common.h, cusparse.h, cufft.h, nvrtc.h, nccl.h and nvml.h, as docs.nvidia.com documents them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gpuwarden.errors import compatibility_problems as compatibility
from gpuwarden.errors import device_problems as device
from gpuwarden.errors import memory_problems as memory
from gpuwarden.errors import run_problems as run
from gpuwarden.errors.problems import Problem

# By the driver's name without CUDA_ERROR_, or the runtime's without cudaError; most of them are alike.
_CUDA: Mapping[Problem, Mapping[str, str]] = {
    memory.DEVICE_OUT_OF_MEMORY: {"OUT_OF_MEMORY": "out of memory", "MemoryAllocation": ""},
    device.ECC_ERROR: {"ECC_UNCORRECTABLE": "uncorrectable ECC error encountered"},
    device.NVLINK_ERROR: {
        "NVLINK_UNCORRECTABLE": "uncorrectable NVLink error detected during the execution",
        "CONTAINED": "Invalid access of peer GPU memory over nvlink or a hardware error",
    },
    device.ILLEGAL_ADDRESS: {
        "ILLEGAL_ADDRESS": "an illegal memory access was encountered",
        "HARDWARE_STACK_ERROR": "hardware stack error",
        "ILLEGAL_INSTRUCTION": "an illegal instruction was encountered",
        "MISALIGNED_ADDRESS": "misaligned address",
        "INVALID_ADDRESS_SPACE": "operation not supported on global/shared address space",
        "INVALID_PC": "invalid program counter",
    },
    device.MPS_FAILED: {
        "MPS_CONNECTION_FAILED": "MPS client failed to connect to the MPS control daemon or the MPS server",
        "MPS_RPC_FAILURE": "the remote procedural call between the MPS server and the MPS client failed",
        "MPS_SERVER_NOT_READY": "MPS server is not ready to accept new MPS client requests",
        "MPS_MAX_CLIENTS_REACHED": "the hardware resources required to create MPS client have been exhausted",
        "MPS_MAX_CONNECTIONS_REACHED": "the hardware resources required to support device connections have been exhausted",
        "MPS_CLIENT_TERMINATED": "the MPS client has been terminated by the server",
    },
    compatibility.DRIVER_LIBRARY_MISMATCH: {
        "SYSTEM_DRIVER_MISMATCH": "system has unsupported display driver / cuda driver combination",
    },
    compatibility.DRIVER_TOO_OLD: {
        "InsufficientDriver": "CUDA driver version is insufficient for CUDA runtime version",
        "CALL_REQUIRES_NEWER_DRIVER": "API call is not supported in the installed CUDA driver",
        "UNSUPPORTED_PTX_VERSION": "the provided PTX was compiled with an unsupported toolchain.",
        "COMPAT_NOT_SUPPORTED_ON_DEVICE": "forward compatibility was attempted on non supported HW",
    },
    compatibility.UNSUPPORTED_COMPUTE_CAPABILITY: {
        "INVALID_IMAGE": "device kernel image is invalid",
        "InvalidKernelImage": "",
        "NO_BINARY_FOR_GPU": "no kernel image is available for execution on the device",
        "NoKernelImageForDevice": "",
        "INVALID_PTX": "a PTX JIT compilation failed",
        "INVALID_SOURCE": "",  # the words of INVALID_IMAGE
        "INVALID_HANDLE": "",  # XLA's, for a kernel that did not load
        "InvalidDeviceFunction": "invalid device function",
        "JIT_COMPILATION_DISABLED": "PTX JIT compilation was disabled",
    },
    compatibility.LIBRARY_NOT_FOUND: {
        "JIT_COMPILER_NOT_FOUND": "PTX JIT compiler library not found",
        "FILE_NOT_FOUND": "file not found",
    },
    compatibility.CUDA_MISMATCH: {
        "STUB_LIBRARY": "CUDA driver is a stub library",
        "SHARED_OBJECT_SYMBOL_NOT_FOUND": "shared object symbol not found",
        "SHARED_OBJECT_INIT_FAILED": "shared object initialization failed",
        "IncompatibleDriverContext": "incompatible driver context",
        "CDP_VERSION_MISMATCH": "unsupported interaction between different versions of CUDA Dynamic Parallelism",
    },
    device.DEVICE_BUSY: {
        "DEVICE_UNAVAILABLE": "CUDA-capable device(s) is/are busy or unavailable",
        "DevicesUnavailable": "all CUDA-capable devices are busy or unavailable",  # before CUDA 11
        "CONTEXT_ALREADY_IN_USE": "exclusive-thread device already in use by a different thread",
        "DeviceAlreadyInUse": "",
    },
    device.FABRIC_NOT_READY: {"SYSTEM_NOT_READY": "system not yet initialized"},
    device.CUDA_AFTER_FORK: {"NOT_INITIALIZED": "initialization error", "InitializationError": ""},
    device.DRIVER_INIT_FAILED: {
        "OPERATING_SYSTEM": "OS call failed or operation not supported on this OS",
        "NOT_FOUND": "named symbol not found",
        "SymbolNotFound": "",
        "StartupFailure": "startup failure in cuda runtime",
        "UNKNOWN": "unknown error",
    },
    device.NO_DEVICE_VISIBLE: {"NO_DEVICE": "no CUDA-capable device is detected"},
    device.INVALID_DEVICE: {"INVALID_DEVICE": "invalid device ordinal"},
    device.PEER_ACCESS: {
        "PEER_ACCESS_UNSUPPORTED": "peer access is not supported between these two devices",
        "PEER_ACCESS_ALREADY_ENABLED": "peer access is already enabled",
        "PEER_ACCESS_NOT_ENABLED": "peer access has not been enabled",
        "TOO_MANY_PEERS": "peer mapping resources exhausted",
    },
    device.DEVICE_ASSERT: {"ASSERT": "device-side assert triggered"},
    device.LAUNCH_TIMEOUT: {"LAUNCH_TIMEOUT": "the launch timed out and was terminated"},
    device.KERNEL_RESOURCES: {
        "InvalidConfiguration": "invalid configuration argument",
        "LAUNCH_OUT_OF_RESOURCES": "too many resources requested for launch",
        "COOPERATIVE_LAUNCH_TOO_LARGE": "too many blocks in cooperative launch",
        "INVALID_CLUSTER_SIZE": "a kernel launch error has occurred due to cluster misconfiguration",
        "LaunchMaxDepthExceeded": "launch would exceed maximum depth of nested launches",
        "LaunchPendingCountExceeded": "launch failed because launch would exceed cudaLimitDevRuntimePendingLaunchCount",
        "SyncDepthExceeded": "cudaDeviceSynchronize failed because caller's grid depth exceeds cudaLimitDevRuntimeSyncDepth",
    },
    device.KERNEL_LAUNCH_FAILED: {
        "LAUNCH_FAILED": "unspecified launch failure",
        "LaunchFailure": "",
        "PriorLaunchFailure": "unspecified launch failure in prior launch",
        "TENSOR_MEMORY_LEAK": "tensor memory not completely freed",
        "TIMEOUT": "wait operation timed out",
        "EXTERNAL_DEVICE": "an async error has occured in external entity outside of CUDA",
    },
    device.GRAPH_CAPTURE: {
        "STREAM_CAPTURE_UNSUPPORTED": "operation not permitted when stream is capturing",
        "STREAM_CAPTURE_INVALIDATED": "operation failed due to a previous error during capture",
        "STREAM_CAPTURE_MERGE": "operation would result in a merge of separate capture sequences",
        "STREAM_CAPTURE_UNMATCHED": "capture was not ended in the same stream as it began",
        "STREAM_CAPTURE_UNJOINED": "capturing stream has unjoined work",
        "STREAM_CAPTURE_ISOLATION": "dependency created on uncaptured work in another stream",
        "STREAM_CAPTURE_IMPLICIT": "operation would make the legacy stream depend on a capturing blocking stream",
        "CAPTURED_EVENT": "operation not permitted on an event last recorded in a capturing stream",
        "STREAM_CAPTURE_WRONG_THREAD": "attempt to terminate a thread-local capture sequence from another thread",
        "GRAPH_EXEC_UPDATE_FAILURE": "the graph update was not performed because it included changes which violated constraints",
        "GRAPH_RECAPTURE_FAILURE": "",
    },
    device.NOT_SUPPORTED_HERE: {
        "DEVICE_NOT_LICENSED": "device doesn't have valid Grid license",
        "SoftwareValidityNotEstablished": "integrity checks failed",
        "UNSUPPORTED_LIMIT": "limit is not supported on this architecture",
        "UNSUPPORTED_EXEC_AFFINITY": "the provided execution affinity is not supported",
        "UNSUPPORTED_DEVSIDE_SYNC": "the provided PTX contains unsupported call to cudaDeviceSynchronize",
        "NotYetImplemented": "feature not yet implemented",
        "NOT_PERMITTED": "operation not permitted",
        "NOT_SUPPORTED": "operation not supported",
        "CDP_NOT_SUPPORTED": "is using CUDA Dynamic Parallelism, but the current configuration, like MPS, does not support it",
        "KEY_ROTATION": "",
    },
    device.CALL_REFUSED: {
        "INVALID_VALUE": "invalid argument",
        "DEINITIALIZED": "driver shutting down",
        "CudartUnloading": "",
        "PROFILER_DISABLED": "profiler disabled while using external profiling tool",
        "PROFILER_NOT_INITIALIZED": "profiler not initialized: call cudaProfilerInitialize()",
        "PROFILER_ALREADY_STARTED": "profiler already started",
        "PROFILER_ALREADY_STOPPED": "profiler already stopped",
        "InvalidPitchValue": "invalid pitch argument",
        "InvalidSymbol": "invalid device symbol",
        "InvalidHostPointer": "invalid host pointer",
        "InvalidDevicePointer": "invalid device pointer",
        "InvalidMemcpyDirection": "invalid copy direction for memcpy",
        "MissingConfiguration": "__global__ function call is not configured",
        "INVALID_CONTEXT": "invalid device context",
        "DeviceUninitialized": "",
        "CONTEXT_ALREADY_CURRENT": "",
        "MAP_FAILED": "mapping of buffer object failed",
        "MapBufferObjectFailed": "",
        "UNMAP_FAILED": "unmapping of buffer object failed",
        "UnmapBufferObjectFailed": "",
        "ARRAY_IS_MAPPED": "array is mapped",
        "ALREADY_MAPPED": "resource already mapped",
        "ALREADY_ACQUIRED": "resource already acquired",
        "NOT_MAPPED": "resource not mapped",
        "NOT_MAPPED_AS_ARRAY": "resource not mapped as array",
        "NOT_MAPPED_AS_POINTER": "resource not mapped as pointer",
        "INVALID_GRAPHICS_CONTEXT": "invalid OpenGL or DirectX context",
        "InvalidResourceHandle": "invalid resource handle",
        "ILLEGAL_STATE": "the operation cannot be performed in the present state",
        "LOSSY_QUERY": "attempted introspection would be semantically lossy",
        "NOT_READY": "device not ready",
        "LAUNCH_INCOMPATIBLE_TEXTURING": "launch uses incompatible texturing mode",
        "PRIMARY_CONTEXT_ACTIVE": "cannot set while device is active in this process",
        "SetOnActiveProcess": "",
        "CONTEXT_IS_DESTROYED": "context is destroyed",
        "HOST_MEMORY_ALREADY_REGISTERED": "part or all of the requested memory range is already mapped",
        "HOST_MEMORY_NOT_REGISTERED": "pointer does not correspond to a registered memory region",
        "FUNCTION_NOT_LOADED": "the function handle is not loaded when calling an API that requires a loaded function",
        "INVALID_RESOURCE_TYPE": "one or more resources passed in are not valid resource types for the operation",
        "INVALID_RESOURCE_CONFIGURATION": "one or more resources are insufficient or non-applicable for the operation",
        "STREAM_DETACHED": "",
    },
}
# Longer names that begin with one of these are its refinements, as in cuDNN 9.
_LIBRARIES: Mapping[Problem, str] = {
    memory.DEVICE_OUT_OF_MEMORY: "CUBLAS_STATUS_ALLOC_FAILED CUDNN_STATUS_ALLOC_FAILED CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
    " CUSOLVER_STATUS_ALLOC_FAILED CUSPARSE_STATUS_ALLOC_FAILED CUSPARSE_STATUS_INSUFFICIENT_RESOURCES CUFFT_ALLOC_FAILED",
    memory.HOST_OUT_OF_MEMORY: "CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED NVRTC_ERROR_OUT_OF_MEMORY",
    device.GPU_LOST: "NVML_ERROR_GPU_IS_LOST NVML_ERROR_GPU_NOT_FOUND",
    device.DRIVER_HANGS: "NVML_ERROR_RESET_REQUIRED NVML_ERROR_IRQ_ISSUE NVML_ERROR_INSUFFICIENT_POWER NVML_ERROR_TIMEOUT"
    " NVML_ERROR_CORRUPTED_INFOROM",
    device.DRIVER_NOT_LOADED: "NVML_ERROR_DRIVER_NOT_LOADED NVML_ERROR_LIBRARY_NOT_FOUND NVML_ERROR_UNINITIALIZED",
    device.DEVICE_PERMISSION: "NVML_ERROR_NO_PERMISSION NVML_ERROR_OPERATING_SYSTEM NVML_ERROR_UNKNOWN",
    device.DEVICE_BUSY: "NVML_ERROR_IN_USE",
    device.NO_DEVICE_VISIBLE: "NVML_ERROR_NOT_FOUND",
    device.NOT_SUPPORTED_HERE: "NVML_ERROR_NOT_SUPPORTED NVML_ERROR_VGPU_ECC_NOT_SUPPORTED NVML_ERROR_FREQ_NOT_SUPPORTED"
    " NVML_ERROR_RESET_TYPE_NOT_SUPPORTED NVML_ERROR_DEPRECATED CUBLAS_STATUS_LICENSE_ERROR CUDNN_STATUS_LICENSE_ERROR"
    " CUFFT_LICENSE_ERROR CUFFT_NOT_IMPLEMENTED CUFFT_NOT_SUPPORTED",
    device.CALL_REFUSED: "NVML_ERROR_INVALID_ARGUMENT NVML_ERROR_ALREADY_INITIALIZED NVML_ERROR_INSUFFICIENT_SIZE"
    " NVML_ERROR_NO_DATA NVML_ERROR_NOT_READY NVML_ERROR_INVALID_STATE NVML_ERROR_MEMORY NVML_ERROR_INSUFFICIENT_RESOURCES"
    " CUSOLVER_STATUS_INVALID CUSOLVER_STATUS_NOT_SUPPORTED CUSOLVER_STATUS_MATRIX_TYPE_NOT_SUPPORTED"
    " CUSOLVER_STATUS_ZERO_PIVOT CUSOLVER_STATUS_IRS CUSPARSE_STATUS_INVALID_VALUE CUSPARSE_STATUS_ZERO_PIVOT"
    " CUSPARSE_STATUS_MATRIX_TYPE_NOT_SUPPORTED CUSPARSE_STATUS_NOT_SUPPORTED CUFFT_INVALID CUFFT_UNALIGNED_DATA"
    " CUFFT_INCOMPLETE_PARAMETER_LIST CUFFT_PARSE_ERROR CUFFT_NO_WORKSPACE CUFFT_MISSING_DEPENDENCY",
    compatibility.DRIVER_LIBRARY_MISMATCH: "NVML_ERROR_LIB_RM_VERSION_MISMATCH",
    compatibility.UNSUPPORTED_COMPUTE_CAPABILITY: "CUBLAS_STATUS_ARCH_MISMATCH CUDNN_STATUS_ARCH_MISMATCH"
    " CUDNN_STATUS_NOT_SUPPORTED_ARCH_MISMATCH CUSOLVER_STATUS_ARCH_MISMATCH CUSPARSE_STATUS_ARCH_MISMATCH",
    compatibility.XLA_COMPILE: "NVRTC_ERROR",
    compatibility.LIBRARY_INIT_FAILED: "CUBLAS_STATUS_NOT_INITIALIZED CUDNN_STATUS_NOT_INITIALIZED"
    " CUSOLVER_STATUS_NOT_INITIALIZED CUSPARSE_STATUS_NOT_INITIALIZED CUFFT_SETUP_FAILED",
    compatibility.CUDNN_MISMATCH: "CUDNN_STATUS_VERSION_MISMATCH CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH"
    " CUDNN_STATUS_SERIALIZATION_VERSION_MISMATCH CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED"
    " CUDNN_STATUS_RUNTIME_PREREQUISITE_MISSING CUDNN_STATUS_INTERNAL_ERROR_UNEXPECTED_VALUE",
    compatibility.CUDA_MISMATCH: "CUBLAS_STATUS_INVALID_VALUE CUBLAS_STATUS_NOT_SUPPORTED NVML_ERROR_FUNCTION_NOT_FOUND"
    " NVML_ERROR_ARGUMENT_VERSION_MISMATCH",
    device.KERNEL_LAUNCH_FAILED: "CUBLAS_STATUS_MAPPING_ERROR CUBLAS_STATUS_EXECUTION_FAILED CUBLAS_STATUS_INTERNAL_ERROR"
    " CUDNN_STATUS_BAD_PARAM CUDNN_STATUS_INVALID_VALUE CUDNN_STATUS_NOT_SUPPORTED CUDNN_STATUS_MAPPING_ERROR"
    " CUDNN_STATUS_EXECUTION_FAILED CUDNN_STATUS_INTERNAL_ERROR CUDNN_STATUS_RUNTIME_IN_PROGRESS"
    " CUDNN_STATUS_RUNTIME_FP_OVERFLOW CUSOLVER_STATUS_MAPPING_ERROR CUSOLVER_STATUS_EXECUTION_FAILED"
    " CUSOLVER_STATUS_INTERNAL_ERROR CUSPARSE_STATUS_MAPPING_ERROR CUSPARSE_STATUS_EXECUTION_FAILED"
    " CUSPARSE_STATUS_INTERNAL_ERROR CUFFT_INTERNAL_ERROR CUFFT_EXEC_FAILED",
    run.COLLECTIVE_FAILED: "ncclUnhandledCudaError ncclSystemError ncclInternalError ncclInvalidArgument ncclInvalidUsage"
    " ncclRemoteError ncclTimeout",
}
_NAME = re.compile(r"(?:CUDA|HIP|NVML|NVRTC)_?ERROR\w+|\bNCCL[A-Z]\w+|CU[A-Z]+_STATUS_\w+|CUFFT_\w+", re.IGNORECASE)


def _normalize(name: str) -> str:
    """Return a name in the one form for the driver's and the runtime's spelling; HIP's names are CUDA's."""
    return name.replace("_", "").lower().replace("hiperror", "cudaerror")


STATUS_NAMES: Mapping[str, Problem] = {
    **{_normalize(f"CUDA_ERROR_{name}"): problem for problem, rows in _CUDA.items() for name in rows},
    **{_normalize(name): problem for problem, names in _LIBRARIES.items() for name in names.split()},
}
_DESCRIPTIONS = {text.lower(): problem for problem, rows in _CUDA.items() for text in rows.values() if text}
# Many descriptions are common words, so that only those behind CUDA's name count: "CUDA error: ", "Cuda failure 801 '".
_DESCRIPTION = re.compile(
    rf"(?:CUDA|\bHIP)[^\n]{{0,80}}?[:'] ?({'|'.join(map(re.escape, sorted(_DESCRIPTIONS, key=len, reverse=True)))})",
    re.IGNORECASE,
)


def find_statuses(text: str) -> dict[str, re.Match[str]]:
    """Return where a text first shows a status code of each problem, by the problem's name."""
    found: dict[str, re.Match[str]] = {}
    for match in _NAME.finditer(text):
        name = _normalize(match[0])
        while name and name not in STATUS_NAMES:
            name = name[:-1]
        if name:
            found.setdefault(STATUS_NAMES[name].name, match)
    for match in _DESCRIPTION.finditer(text):
        found.setdefault(_DESCRIPTIONS[match[1].lower()].name, match)
    return found
