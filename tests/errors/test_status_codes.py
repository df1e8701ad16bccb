"""Status codes of CUDA and its libraries: each name of the public headers has a problem, in every framework's words."""

from __future__ import annotations

import io
import re

import pynvml
import pytest

from gpuwarden.errors.explanation import explain_events
from gpuwarden.errors.patterns import PATTERNS
from gpuwarden.errors.program_patterns import OTHER_PATTERNS
from gpuwarden.errors.status_codes import STATUS_NAMES, find_statuses
from gpuwarden.explain.events import read_events

# cuda.h of CUDA 13.3, enum CUresult, without CUDA_ERROR_.
DRIVER_NAMES = """
    INVALID_VALUE OUT_OF_MEMORY NOT_INITIALIZED DEINITIALIZED PROFILER_DISABLED PROFILER_NOT_INITIALIZED
    PROFILER_ALREADY_STARTED PROFILER_ALREADY_STOPPED STUB_LIBRARY CALL_REQUIRES_NEWER_DRIVER DEVICE_UNAVAILABLE
    NO_DEVICE INVALID_DEVICE DEVICE_NOT_LICENSED INVALID_IMAGE INVALID_CONTEXT CONTEXT_ALREADY_CURRENT MAP_FAILED
    UNMAP_FAILED ARRAY_IS_MAPPED ALREADY_MAPPED NO_BINARY_FOR_GPU ALREADY_ACQUIRED NOT_MAPPED NOT_MAPPED_AS_ARRAY
    NOT_MAPPED_AS_POINTER ECC_UNCORRECTABLE UNSUPPORTED_LIMIT CONTEXT_ALREADY_IN_USE PEER_ACCESS_UNSUPPORTED INVALID_PTX
    INVALID_GRAPHICS_CONTEXT NVLINK_UNCORRECTABLE JIT_COMPILER_NOT_FOUND UNSUPPORTED_PTX_VERSION
    JIT_COMPILATION_DISABLED UNSUPPORTED_EXEC_AFFINITY UNSUPPORTED_DEVSIDE_SYNC CONTAINED INVALID_SOURCE FILE_NOT_FOUND
    SHARED_OBJECT_SYMBOL_NOT_FOUND SHARED_OBJECT_INIT_FAILED OPERATING_SYSTEM INVALID_HANDLE ILLEGAL_STATE LOSSY_QUERY
    NOT_FOUND NOT_READY ILLEGAL_ADDRESS LAUNCH_OUT_OF_RESOURCES LAUNCH_TIMEOUT LAUNCH_INCOMPATIBLE_TEXTURING
    PEER_ACCESS_ALREADY_ENABLED PEER_ACCESS_NOT_ENABLED PRIMARY_CONTEXT_ACTIVE CONTEXT_IS_DESTROYED ASSERT
    TOO_MANY_PEERS HOST_MEMORY_ALREADY_REGISTERED HOST_MEMORY_NOT_REGISTERED HARDWARE_STACK_ERROR ILLEGAL_INSTRUCTION
    MISALIGNED_ADDRESS INVALID_ADDRESS_SPACE INVALID_PC LAUNCH_FAILED COOPERATIVE_LAUNCH_TOO_LARGE TENSOR_MEMORY_LEAK
    NOT_PERMITTED NOT_SUPPORTED SYSTEM_NOT_READY SYSTEM_DRIVER_MISMATCH COMPAT_NOT_SUPPORTED_ON_DEVICE
    MPS_CONNECTION_FAILED MPS_RPC_FAILURE MPS_SERVER_NOT_READY MPS_MAX_CLIENTS_REACHED MPS_MAX_CONNECTIONS_REACHED
    MPS_CLIENT_TERMINATED CDP_NOT_SUPPORTED CDP_VERSION_MISMATCH STREAM_CAPTURE_UNSUPPORTED STREAM_CAPTURE_INVALIDATED
    STREAM_CAPTURE_MERGE STREAM_CAPTURE_UNMATCHED STREAM_CAPTURE_UNJOINED STREAM_CAPTURE_ISOLATION
    STREAM_CAPTURE_IMPLICIT CAPTURED_EVENT STREAM_CAPTURE_WRONG_THREAD TIMEOUT GRAPH_EXEC_UPDATE_FAILURE EXTERNAL_DEVICE
    INVALID_CLUSTER_SIZE FUNCTION_NOT_LOADED INVALID_RESOURCE_TYPE INVALID_RESOURCE_CONFIGURATION KEY_ROTATION
    STREAM_DETACHED GRAPH_RECAPTURE_FAILURE UNKNOWN
"""
# driver_types.h of CUDA 13.0, enum cudaError, without cudaError: those that are no driver's name in another spelling.
RUNTIME_NAMES = """
    MemoryAllocation InitializationError CudartUnloading InvalidConfiguration InvalidPitchValue InvalidSymbol
    InvalidHostPointer InvalidDevicePointer InvalidMemcpyDirection InsufficientDriver DevicesUnavailable
    IncompatibleDriverContext MissingConfiguration PriorLaunchFailure LaunchMaxDepthExceeded SyncDepthExceeded
    LaunchPendingCountExceeded InvalidDeviceFunction SoftwareValidityNotEstablished StartupFailure InvalidKernelImage
    DeviceUninitialized MapBufferObjectFailed UnmapBufferObjectFailed NoKernelImageForDevice DeviceAlreadyInUse
    InvalidResourceHandle SymbolNotFound SetOnActiveProcess LaunchFailure NotYetImplemented
"""
# cublas_api.h, cudnn_graph.h, cusolver_common.h, cusparse.h, cufft.h, nvrtc.h and nccl.h.
LIBRARY_NAMES = """
    CUBLAS_STATUS_NOT_INITIALIZED CUBLAS_STATUS_ALLOC_FAILED CUBLAS_STATUS_INVALID_VALUE CUBLAS_STATUS_ARCH_MISMATCH
    CUBLAS_STATUS_MAPPING_ERROR CUBLAS_STATUS_EXECUTION_FAILED CUBLAS_STATUS_INTERNAL_ERROR CUBLAS_STATUS_NOT_SUPPORTED
    CUBLAS_STATUS_LICENSE_ERROR CUDNN_STATUS_NOT_INITIALIZED CUDNN_STATUS_ALLOC_FAILED CUDNN_STATUS_BAD_PARAM
    CUDNN_STATUS_BAD_PARAM_NULL_POINTER CUDNN_STATUS_INTERNAL_ERROR CUDNN_STATUS_INVALID_VALUE
    CUDNN_STATUS_ARCH_MISMATCH CUDNN_STATUS_MAPPING_ERROR CUDNN_STATUS_EXECUTION_FAILED
    CUDNN_STATUS_EXECUTION_FAILED_CUDART CUDNN_STATUS_NOT_SUPPORTED CUDNN_STATUS_NOT_SUPPORTED_SHAPE
    CUDNN_STATUS_LICENSE_ERROR CUDNN_STATUS_RUNTIME_PREREQUISITE_MISSING CUDNN_STATUS_RUNTIME_IN_PROGRESS
    CUDNN_STATUS_RUNTIME_FP_OVERFLOW CUDNN_STATUS_VERSION_MISMATCH CUDNN_STATUS_SUBLIBRARY_VERSION_MISMATCH
    CUDNN_STATUS_SERIALIZATION_VERSION_MISMATCH CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED
    CUSOLVER_STATUS_NOT_INITIALIZED CUSOLVER_STATUS_ALLOC_FAILED CUSOLVER_STATUS_INVALID_VALUE
    CUSOLVER_STATUS_ARCH_MISMATCH CUSOLVER_STATUS_EXECUTION_FAILED CUSOLVER_STATUS_INTERNAL_ERROR
    CUSPARSE_STATUS_NOT_INITIALIZED CUSPARSE_STATUS_ALLOC_FAILED CUSPARSE_STATUS_INVALID_VALUE
    CUSPARSE_STATUS_INSUFFICIENT_RESOURCES CUSPARSE_STATUS_INTERNAL_ERROR CUFFT_INVALID_PLAN CUFFT_ALLOC_FAILED
    CUFFT_INTERNAL_ERROR CUFFT_EXEC_FAILED CUFFT_SETUP_FAILED CUFFT_INVALID_SIZE NVRTC_ERROR_COMPILATION
    NVRTC_ERROR_INVALID_OPTION ncclUnhandledCudaError ncclSystemError ncclInternalError ncclInvalidArgument
    ncclInvalidUsage ncclRemoteError
"""
NVML_NAMES = [name for name in vars(pynvml) if name.startswith("NVML_ERROR_")]
NAMES = [
    *(f"CUDA_ERROR_{name}" for name in DRIVER_NAMES.split()),
    *(f"cudaError{name.title().replace('_', '')}" for name in DRIVER_NAMES.split()),
    *(f"cudaError{name}" for name in RUNTIME_NAMES.split()),
    *LIBRARY_NAMES.split(),
    *NVML_NAMES,
]
TRACEBACK = 'Traceback (most recent call last):\n  File "/srv/train.py", line 7, in <module>\n    step(batch)\n'


def explain(text: str) -> str:
    """Return the problem that `gpuwarden explain` shows for a log."""
    explanation = explain_events(read_events(io.BytesIO(text.encode())))
    return explanation.root.problem.name if explanation else ""


@pytest.mark.parametrize(
    "form",
    [
        TRACEBACK + "jax.errors.JaxRuntimeError: INTERNAL: Failed call to a library: {}\n",
        TRACEBACK + "RuntimeError: library error: {} when calling `step(handle)`\n",
        "2026-01-02 03:04:05.678901: E external/local_xla/xla/stream_executor/cuda/cuda_x.cc:79] call failed: {}\n",
    ],
    ids=["jax", "torch", "tensorflow"],
)
def test_each_name_has_its_problem(form: str) -> None:
    """No status code of the headers is an error of the program, however a framework prints it."""
    found = {name: explain(form.format(name)) for name in NAMES}
    assert {name for name, problem in found.items() if problem in {"", "program_error"}} == set()


def test_names_and_descriptions_agree() -> None:
    """A description has the problem of its name, so that torch, which prints no names, gets the same answer."""
    pairs = {
        "CUDA_ERROR_NVLINK_UNCORRECTABLE": "CUDA error: uncorrectable NVLink error detected during the execution",
        "cudaErrorContained": "CUDA error: Invalid access of peer GPU memory over nvlink or a hardware error",
        "CUDA_ERROR_MPS_CLIENT_TERMINATED": "CUDA error: the MPS client has been terminated by the server",
        "CUDA_ERROR_SYSTEM_NOT_READY": "from cudaGetDeviceCount(). Error 802: system not yet initialized",
        "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": "Cuda failure 'peer access is not supported between these two devices'",
        "hipErrorNotSupported": "HIP error: operation not supported",
        "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": "CUDA error: operation not permitted when stream is capturing",
        "CUDA_ERROR_NOT_PERMITTED": "CUDA error: operation not permitted",
    }
    for name, text in pairs.items():
        assert explain(f"RuntimeError: {text}") == explain(f"RuntimeError: {name}") == next(iter(find_statuses(name)))


def test_common_words_count_only_behind_cuda() -> None:
    """Descriptions such as "file not found" are everybody's words."""
    for text in (
        "file not found",
        "load: operation not permitted",
        "RPC error: invalid argument",
        "ship: unknown error",
    ):
        assert find_statuses(text) == {}


def test_every_problem_of_a_status_has_a_place_in_the_order() -> None:
    """The order of the patterns decides between several status codes, so that each problem has a pattern."""
    placed = {pattern.problem.name for pattern in (*PATTERNS, *OTHER_PATTERNS)}
    assert {problem.name for problem in STATUS_NAMES.values()} <= placed


def test_an_unknown_error_of_cuda_is_not_the_program_s() -> None:
    """Words and names of a later CUDA are still CUDA's."""
    for text in ("CUDA error: words of a later version", "INTERNAL: CUDA_ERROR_OF_A_LATER_VERSION"):
        assert explain(f"{TRACEBACK}RuntimeError: {text}\n") == "call_refused"
    assert not any(re.search(r"[^a-z0-9]", name) for name in STATUS_NAMES)
