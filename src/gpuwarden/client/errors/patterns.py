"""Text patterns that distinguish kinds of errors, and patterns that parse a failed allocation.

A comment names the source of each: a library, or a message in tests/error_messages. To add one, add a line here and a
sample there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gpuwarden.protocol.messages import ErrorKind


@dataclass(frozen=True, slots=True)
class Pattern:
    """Text of one kind of error, searched in the names of the exception's types and its message; case is ignored."""

    kind: ErrorKind
    regex: str


def _list_patterns(kind: ErrorKind, *regexes: str) -> Iterator[Pattern]:
    return (Pattern(kind, regex) for regex in regexes)


# The first match decides: host before device, cause before symptom.
PATTERNS = (
    # The loader's room for thread-local variables of libraries that are loaded late is fixed; its error mentions memory.
    *_list_patterns(
        "library_mismatch",
        r"in static TLS block",  # glibc's loader, above all on ARM
    ),
    # The host's memory. An input pipeline computes on the host, whatever its text says of devices.
    *_list_patterns(
        "host_oom",
        r"passed to \w+(:\d+)? transformation(?s:.*?)(OOM when allocating|Failed to allocate)",  # tf.data
        # tf.data within a compiled step, which runs on the host even if the step does not
        r"(OOM when allocating|Failed to allocate memory)(?!.{0,400}(device:GPU|GPU_\d)).{0,400}\n\s*\[\[\{\{node IteratorGetNext\b",
        r"(\b|_Array)MemoryError\b",  # Python, NumPy; inside of what a tf.data or torch worker raised
        r"Unable to allocate .{1,40} for an array",  # NumPy
        r"DefaultCPUAllocator|alloc_cpu\.cpp|you tried to allocate \d+ bytes",  # torch
        # pinned memory: TensorFlow, XLA, NCCL
        r"by allocator \w*(host|cuda_host)_bfc",
        r"pinned host memory|bytes on host: |cuMemHostAlloc",
        r"cudaHostAlloc|CUDA host alloc",
        # C++, the operating system
        r"std::bad_alloc|Cannot allocate memory",
        r"Not enough memory resources",
        # torch's loader, NCCL
        r"out of shared memory|insufficient shared memory",
        r"(shm|torch_\d|shared memory)(?s:.{0,200})No space left",
        r"shared memory segment",
        r"worker \(pid.{1,60}killed by signal: (Killed|Bus)",  # torch's loader: the kernel ended its worker
    ),
    # The GPU's memory is damaged.
    *_list_patterns(
        "hardware",
        r"ECC_?UNCORRECTABLE|uncorrectable ECC error",  # CUDA
    ),
    # A kernel accessed an invalid address.
    *_list_patterns(
        "illegal_address",
        # CUDA
        r"ILLEGAL_ADDRESS|illegal memory access|illegal address",
        r"MISALIGNED_ADDRESS|misaligned address|INVALID_ADDRESS_SPACE",
        r"(specific|invalid) address space",
        r"CUDA_ERROR_INVALID_PC|invalid program counter|ILLEGAL_INSTRUCTION",
        r"illegal instruction was encountered|HARDWARE_STACK_ERROR",
        r"hardware stack error",
    ),
    # The device's memory.
    *_list_patterns(
        "device_oom",
        r"OOM when allocating",  # TensorFlow
        r"OutOfMemoryError",  # torch, CuPy
        r"(CUDA|HIP|MPS backend|XPU|GPU) ((driver )?error: )?out of memory",  # torch
        r"runtime error \(2\)|Triton Error \[\w+\]: out of memory",  # torch, Triton
        r"Unable to find a valid cuDNN algorithm",  # torch: no algorithm had memory for its workspace
        # XLA, TensorFlow
        r"Out of memory ((while )?trying to allocate|allocating \d)",
        r"ran out of memory (in memory space|(while )?trying to)",
        r"Failed to allocate (request for|memory)",
        r"would exceed allowed memory",  # torch, with an allocator that is CUDA's
        # XLA on a TPU
        r"would exceed memory",
        r"Attempting to (reserve|allocate) .{1,40} at the bottom of memory",
        r"enough memory\. Requires",
        # CUDA, HIP, NCCL
        r"ERROR_OUT_OF_MEMORY|ErrorMemoryAllocation|ErrorOutOfMemory",
        r"Cuda failure (2 )?'out of memory'",
        # TensorFlow, NCCL
        r"fail(ed)? to (CUDA )?(m|c)?alloc(ate)?( async)? .{1,60}(from device|bytes|device memory)",
        r"unable to allocate output tensor",
        r"Dst tensor is not initialized|failed to allocate (the )?(scratch|workspace)",  # TensorFlow
        # CUDA libraries
        r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUSPARSELT|NPP)\w*_ALLOC_FAILED",
        r"CUFFT_ALLOC_FAILED|CUSPARSE_STATUS_INSUFFICIENT_RESOURCES",
        r"(resource allocation failed|insufficient resources) when calling .?cusparse",  # cuSPARSE, by torch
    ),
    # Versions that do not match: driver, CUDA and its libraries, GPU, framework.
    *_list_patterns(
        "library_mismatch",
        # driver
        r"version mismatch|kernel version .{1,40} does not match DSO",
        r"SYSTEM_DRIVER_MISMATCH|unsupported display driver",
        r"driver version is insufficient|driver .{1,40}too old|INSUFFICIENT_DRIVER",
        r"forward compatibility was attempted|COMPAT_NOT_SUPPORTED",
        # GPU newer or older than the build
        r"unsupported toolchain|UNSUPPORTED_PTX",
        r"INVALID_PTX|NO_BINARY_FOR_GPU|no kernel image",
        r"INVALID_KERNEL_IMAGE|CUDA_ERROR_INVALID_HANDLE",
        r"device kernel image is invalid",
        r"not built with CUDA kernel binaries|compiled for a different GPU",
        r"is not compatible with the current|ARCH_MISMATCH",
        r"CUDA_ERROR_INVALID_SOURCE|ptxas",
        # cuDNN
        r"Loaded runtime CuDNN|Found cuDNN version|CuDNN .{0,40}incompatib|DNN library|DnnSupport",
        r"VERSION_MISMATCH|SUBLIBRARY_\w+|CUDNN_STATUS_NOT_INITIALIZED",
        r"cuDNN failed to initialize|No algorithm worked",
        r"unable to find an engine to execute",  # cuDNN, by torch
        # libraries that failed to initialize, often because memory was short
        r"could not create cudnn handle",
        r"failed to create cublas handle",
        r"CUBLAS_STATUS_NOT_INITIALIZED",
        r"cublasCreate",
        r"(no|without) BLAS support",
        # libraries that are missing or of another version
        r"libdevice",
        r"cannot open shared object file",
        r"Could not load (dynamic )?library",
        r"Cannot dlopen",
        r"Unable to load any of",
        r"undefined symbol",
        r"version `\w+[^']*' not found",
        r"not compiled with \w+ support|CUDA extension",  # builds
        r"API version .{0,40}framework|incompatible with jax version",  # JAX
        r"this version of jax requires|but JAX was built against|Outdated \w+ installation found",  # JAX
        r"Unable to load \w+\. Is it installed|The \w+ library was not found",  # JAX, cuSPARSE
        r"binary incompatibility|compiled using NumPy",  # builds
    ),
    # No GPU is available.
    *_list_patterns(
        "no_device",
        # CUDA, torch, JAX
        r"no CUDA-capable device|ERROR_NO_DEVICE|no CUDA GPUs|No visible GPU",
        r"no NVIDIA driver|no supported devices|No GPUs? (was |were )?found",
        r"GPU is lost",
        # CUDA
        r"invalid device ordinal|INVALID_DEVICE|invalid device id|busy or unavailable",
        r"DEVICE_UNAVAILABLE|system not yet initialized|SYSTEM_NOT_READY",
        r"failed call to cuInit",
        # TensorFlow
        r"Could not satisfy (explicit )?device spec|No matching devices found",
        r"Unable to find any devices|Cannot assign a device for|unknown device|invalid device .{0,40}GPU",
        # JAX
        r"Unable to initialize backend|Unknown backend|backend '?\w+'? failed to initialize",
        r"no platforms that are instances",
        r"deserialize object on (a )?CUDA device|cuda\.is_available\(\) (is|should)",  # torch
        r"not compiled with CUDA",  # torch, built without CUDA
    ),
    # A kernel failed to launch, or failed while it ran.
    *_list_patterns(
        "kernel_launch",
        # CUDA, TensorFlow
        r"LAUNCH_FAILED|LAUNCH_TIMEOUT|LAUNCH_OUT_OF_RESOURCES|ErrorLaunch",
        r"launch fail(ed|ure)|fail(ed|ure) to launch|launch timed out",
        r"cu(da)?LaunchKernel",
        # CUDA, Triton
        r"too many resources requested|invalid configuration argument",
        r"out of resource: |device-side assert triggered|CUDA_ERROR_ASSERT",
        r"cooperative launch",
        # CUDA libraries, XLA
        r"STATUS_(EXECUTION|MAPPING|INTERNAL)_(FAILED|ERROR)",
        r"CUFFT_(EXEC_FAILED|INTERNAL_ERROR)|GPU sync failed",
        r"internal error when calling .?cusparse",  # cuSPARSE, by torch
        r"Failed to enqueue",
        r"failed to (run|execute) .{0,40}(kernel|cuDNN|cuBLAS)",
    ),
    # Wrong shapes or types in the program.
    *_list_patterns(
        "other",
        r"in loading state_dict",  # torch: the checkpoint of another model
    ),
    *_list_patterns(
        "shape_dtype",
        # all
        r"incompatible shapes?",
        r"shapes?.{0,120}(incompatible|mismatch|must match|not aligned|do(es)? not match|must be equal|must have the same|cannot be broadcast)",
        r"(incompatible|mismatch(ed|ing)?) .{0,60}shapes?|shape mismatch",
        # TensorFlow, Keras
        r"Matrix size-incompatible|logits and labels must",
        r"Dimensions? .{0,60}(must be equal|should match|must match|not compatible|out of range|evenly divisible)",
        r"dimension size|must have the same (rank|shape|dtype|type|number of)",
        r"same dtype",
        # Keras
        r"incompatible with the layer|Negative dimension size|must have rank \(ndim\)",
        r"shape with unknown rank|an unknown TensorShape",  # a rank that differs from an earlier fit's
        r"expects \d+ (named )?input|Missing data for input|requires inputs with matching shapes",
        r"total size of the tensor must be unchanged|`input_shape` with at least|have different structures",
        r"encountered when calling \w+\.call\(\)(?s:.*)tuple index out of range",
        r"Computed output size would be (zero or )?negative|cardinality is ambiguous|must be rank",
        r"expected (min_)?ndim",
        # TensorFlow, NumPy, JAX
        r"reshape .{0,80}(tensor|array|shape|size)|Input to reshape",
        r"Cannot batch tensors|Can ?not squeeze|must be \d-dimensional|expects a vector of size",
        r"Invalid reduction dimension|out of range using input dim",
        r"number of elements does not match",
        r"tensors? with different shapes",
        # torch
        r"cannot be multiplied|size mismatch|sizes of tensors must match|size of tensor a",
        r"is invalid for input of size|to be equal size|expanded size|same size",
        r"Expected \d-?D|Expected .{0,40}batch_size|expected input.{0,60}channels",
        r"Kernel size can't be greater",
        # NumPy, JAX
        r"could not be broadcast|cannot broadcast|inhomogeneous shape",
        r"mismatch in its core dimension",
        r"requires .{0,60}(dimension|shape)s? .{0,60}(equal|match|same|compatible)",
        # TensorFlow, torch, JAX
        r"was expected to be an? \w+ tensor but|expected scalar type",
        r"Found dtype|not implemented for '|can't be cast",
        r"Input type .{1,80} and (weight|bias) type",
        r"expected .{1,60} to have (the same )?dtype",
        r"equal (data ?types|dtypes|types)",
        # TensorFlow, Keras
        r"Tensor conversion requested dtype|Cast \w+ to \w+ is not supported",
        r"(has|have) (type|dtype|DataType) \S+ (that does not|not in)",
        r"Unsupported object type|Unsupported numpy type",
        r"(Unrecognized|Invalid|incompatible|inconsistent|mismatched|unsupported) (data )?d?type",
        r"(element|d)type mismatch",
        r"Cannot convert .{1,80} to (EagerTensor of dtype|a? ?Tensor)",
        r"Failed to convert a NumPy array",
    ),
)

# Named groups: `size` and `unit`, or `bytes` where it is exact, `shape`, `dtype`, `device` or `gpu`, `allocator`, `op`.
# All matches of the first pattern that matches are used: several replicas may have failed.
_SIZE = r"(?P<size>[\d.,]+) ?(?P<unit>bytes|[KMGTP]?i?B|[KMGTP])\b"
ALLOCATIONS = (
    r"OOM when allocating (?:temporary )?tensor (?:with shape|of shape) ?\[(?P<shape>[\d,]*)\](?: and type (?P<dtype>\w+))?(?: on (?P<device>\S+))?(?: by allocator (?P<allocator>\w+))?",
    r"from \S+ to (?P<device>\S*device:\S+) in order to run (?P<op>\w+): Dst tensor is not initialized",
    rf"(?<!you )Tried to allocate {_SIZE}(?:\. GPU (?P<gpu>\d+)| \((?:GPU (?P<gpu_too>\d+)))?",
    rf"Failed to allocate request for {_SIZE} \((?P<bytes>\d+)B\) on device ordinal (?P<gpu>\d+)",
    rf"Out of memory (?:while )?(?:trying to allocate|allocating) {_SIZE}",
    rf"Unable to allocate {_SIZE} for an array with shape \((?P<shape>[\d, ]*)\) and data type (?P<dtype>\w+)",
    rf"(?:(?P<allocator>\w+): .{{1,60}})?you tried to allocate {_SIZE}",
    rf"Allocation on device (?P<gpu>\d+) would exceed(?s:.*?)Requested +: {_SIZE}",
    rf"fail(?:ed)? to (?:CUDA )?(?:host )?[mc]?alloc(?:ate)?(?: async)? {_SIZE}(?: \((?P<bytes>\d+) bytes\))?",
    rf"(?:Attempting to (?:reserve|allocate)|unable to mmap|pinned host memory of size:) {_SIZE}",
    r"Allocation \(size=(?P<bytes>\d+)\) would exceed memory",
)
