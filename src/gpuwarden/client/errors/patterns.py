"""Texts that distinguish the kinds of errors, and the ones that describe an allocation that failed.

Each is from the source named behind it or from a message in tests/error_messages; a new one is a row and a sample.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuwarden.protocol.messages import ErrorKind


@dataclass(frozen=True, slots=True)
class Pattern:
    """Text that means one kind of error; searched without regard to case, in the types' names and the message."""

    kind: ErrorKind
    regex: str


# The first that matches holds: what names the host before what names a device, a cause before its symptom.
PATTERNS = (
    # Named as memory by the loader, whose room for the threads' own variables in libraries loaded late is fixed.
    Pattern("library_mismatch", r"in static TLS block"),  # glibc's loader, above all on ARM
    # The host's memory. An input pipeline computes on the host, whatever its text says of devices.
    # tf.data
    Pattern("host_oom", r"passed to \w+(:\d+)? transformation(?s:.*?)(OOM when allocating|Failed to allocate)"),
    Pattern("host_oom", r"(\b|_Array)MemoryError\b"),  # Python, NumPy; inside of what a tf.data or torch worker raised
    Pattern("host_oom", r"Unable to allocate .{1,40} for an array"),  # NumPy
    Pattern("host_oom", r"DefaultCPUAllocator|alloc_cpu\.cpp|you tried to allocate \d+ bytes"),  # torch
    Pattern("host_oom", r"by allocator \w*(host|cuda_host)_bfc"),  # pinned memory: TensorFlow, XLA, NCCL
    Pattern("host_oom", r"pinned host memory|bytes on host: |cuMemHostAlloc"),  # pinned memory: TensorFlow, XLA, NCCL
    Pattern("host_oom", r"cudaHostAlloc|CUDA host alloc"),  # pinned memory: TensorFlow, XLA, NCCL
    Pattern("host_oom", r"std::bad_alloc|Cannot allocate memory"),  # C++, the operating system
    Pattern("host_oom", r"Not enough memory resources"),  # C++, the operating system
    Pattern("host_oom", r"out of shared memory|insufficient shared memory"),  # torch's loader, NCCL
    Pattern("host_oom", r"(shm|torch_\d|shared memory)(?s:.{0,200})No space left"),  # torch's loader, NCCL
    Pattern("host_oom", r"shared memory segment"),  # torch's loader, NCCL
    # torch's loader: the kernel ended its worker
    Pattern("host_oom", r"worker \(pid.{1,60}killed by signal: (Killed|Bus)"),
    # A kernel that touched what it may not.
    Pattern("illegal_address", r"ILLEGAL_ADDRESS|illegal memory access|illegal address"),  # CUDA
    Pattern("illegal_address", r"MISALIGNED_ADDRESS|misaligned address|INVALID_ADDRESS_SPACE"),  # CUDA
    Pattern("illegal_address", r"(specific|invalid) address space"),  # CUDA
    Pattern("illegal_address", r"CUDA_ERROR_INVALID_PC|invalid program counter|ILLEGAL_INSTRUCTION"),  # CUDA
    Pattern("illegal_address", r"illegal instruction was encountered|HARDWARE_STACK_ERROR"),  # CUDA
    Pattern("illegal_address", r"hardware stack error"),  # CUDA
    # The device's memory.
    Pattern("device_oom", r"OOM when allocating"),  # TensorFlow
    Pattern("device_oom", r"OutOfMemoryError"),  # torch, CuPy
    Pattern("device_oom", r"(CUDA|HIP|MPS backend|XPU|GPU) ((driver )?error: )?out of memory"),  # torch
    Pattern("device_oom", r"runtime error \(2\)|Triton Error \[\w+\]: out of memory"),  # torch, Triton
    Pattern("device_oom", r"Unable to find a valid cuDNN algorithm"),  # torch: none had room for its workspace
    Pattern("device_oom", r"Out of memory ((while )?trying to allocate|allocating \d)"),  # XLA, TensorFlow
    Pattern("device_oom", r"ran out of memory (in memory space|(while )?trying to)"),  # XLA, TensorFlow
    Pattern("device_oom", r"Failed to allocate (request for|memory)"),  # XLA, TensorFlow
    Pattern("device_oom", r"would exceed allowed memory"),  # torch, with an allocator that is CUDA's
    Pattern("device_oom", r"would exceed memory"),  # XLA on a TPU
    Pattern("device_oom", r"Attempting to (reserve|allocate) .{1,40} at the bottom of memory"),  # XLA on a TPU
    Pattern("device_oom", r"enough memory\. Requires"),  # XLA on a TPU
    Pattern("device_oom", r"ERROR_OUT_OF_MEMORY|ErrorMemoryAllocation|ErrorOutOfMemory"),  # CUDA, HIP, NCCL
    Pattern("device_oom", r"Cuda failure (2 )?'out of memory'"),  # CUDA, HIP, NCCL
    # TensorFlow, NCCL
    Pattern("device_oom", r"fail(ed)? to (CUDA )?(m|c)?alloc(ate)?( async)? .{1,60}(from device|bytes|device memory)"),
    Pattern("device_oom", r"unable to allocate output tensor"),  # TensorFlow, NCCL
    Pattern("device_oom", r"Dst tensor is not initialized|failed to allocate (the )?(scratch|workspace)"),  # TensorFlow
    Pattern("device_oom", r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUSPARSELT|NPP)\w*_ALLOC_FAILED"),  # CUDA libraries
    Pattern("device_oom", r"CUFFT_ALLOC_FAILED|CUSPARSE_STATUS_INSUFFICIENT_RESOURCES"),  # CUDA libraries
    # Parts that do not fit each other: driver, CUDA and its libraries, GPU, framework.
    Pattern("library_mismatch", r"version mismatch|kernel version .{1,40} does not match DSO"),  # driver
    Pattern("library_mismatch", r"SYSTEM_DRIVER_MISMATCH|unsupported display driver"),  # driver
    Pattern("library_mismatch", r"driver version is insufficient|driver .{1,40}too old|INSUFFICIENT_DRIVER"),  # driver
    Pattern("library_mismatch", r"forward compatibility was attempted|COMPAT_NOT_SUPPORTED"),  # driver
    Pattern("library_mismatch", r"unsupported toolchain|UNSUPPORTED_PTX"),  # GPU newer or older than the build
    Pattern("library_mismatch", r"INVALID_PTX|NO_BINARY_FOR_GPU|no kernel image"),  # GPU newer or older than the build
    Pattern("library_mismatch", r"INVALID_KERNEL_IMAGE|CUDA_ERROR_INVALID_HANDLE"),  # GPU newer or older than the build
    Pattern("library_mismatch", r"device kernel image is invalid"),  # GPU newer or older than the build
    # GPU newer or older than the build
    Pattern("library_mismatch", r"not built with CUDA kernel binaries|compiled for a different GPU"),
    # GPU newer or older than the build
    Pattern("library_mismatch", r"is not compatible with the current|ARCH_MISMATCH"),
    Pattern("library_mismatch", r"CUDA_ERROR_INVALID_SOURCE|ptxas"),  # GPU newer or older than the build
    # cuDNN
    Pattern(
        "library_mismatch", r"Loaded runtime CuDNN|Found cuDNN version|CuDNN .{0,40}incompatib|DNN library|DnnSupport"
    ),
    Pattern("library_mismatch", r"VERSION_MISMATCH|SUBLIBRARY_\w+|CUDNN_STATUS_NOT_INITIALIZED"),  # cuDNN
    Pattern("library_mismatch", r"cuDNN failed to initialize|No algorithm worked"),  # cuDNN
    Pattern("library_mismatch", r"unable to find an engine to execute"),  # cuDNN, by torch
    # libraries that could not start, often for want of memory
    Pattern("library_mismatch", r"could not create cudnn handle"),
    # libraries that could not start, often for want of memory
    Pattern("library_mismatch", r"failed to create cublas handle"),
    # libraries that could not start, often for want of memory
    Pattern("library_mismatch", r"CUBLAS_STATUS_NOT_INITIALIZED"),
    Pattern("library_mismatch", r"cublasCreate"),  # libraries that could not start, often for want of memory
    # libraries that could not start, often for want of memory
    Pattern("library_mismatch", r"(no|without) BLAS support"),
    Pattern("library_mismatch", r"libdevice"),  # libraries that are missing or of another version
    Pattern("library_mismatch", r"cannot open shared object file"),  # libraries that are missing or of another version
    # libraries that are missing or of another version
    Pattern("library_mismatch", r"Could not load (dynamic )?library"),
    Pattern("library_mismatch", r"Cannot dlopen"),  # libraries that are missing or of another version
    Pattern("library_mismatch", r"Unable to load any of"),  # libraries that are missing or of another version
    Pattern("library_mismatch", r"undefined symbol"),  # libraries that are missing or of another version
    Pattern("library_mismatch", r"version `\w+[^']*' not found"),  # libraries that are missing or of another version
    Pattern("library_mismatch", r"not compiled with \w+ support|CUDA extension"),  # builds
    Pattern("library_mismatch", r"API version .{0,40}framework|incompatible with jax version"),  # JAX
    Pattern("library_mismatch", r"binary incompatibility|compiled using NumPy"),  # builds
    # No GPU is available.
    Pattern("no_device", r"no CUDA-capable device|ERROR_NO_DEVICE|no CUDA GPUs|No visible GPU"),  # CUDA, torch, JAX
    Pattern("no_device", r"no NVIDIA driver|no supported devices|No GPUs? (was |were )?found"),  # CUDA, torch, JAX
    Pattern("no_device", r"GPU is lost"),  # CUDA, torch, JAX
    Pattern("no_device", r"invalid device ordinal|INVALID_DEVICE|invalid device id|busy or unavailable"),  # CUDA
    Pattern("no_device", r"DEVICE_UNAVAILABLE|system not yet initialized|SYSTEM_NOT_READY"),  # CUDA
    Pattern("no_device", r"failed call to cuInit"),  # CUDA
    Pattern("no_device", r"Could not satisfy (explicit )?device spec|No matching devices found"),  # TensorFlow
    # TensorFlow
    Pattern(
        "no_device", r"Unable to find any devices|Cannot assign a device for|unknown device|invalid device .{0,40}GPU"
    ),
    Pattern("no_device", r"Unable to initialize backend|Unknown backend|backend '?\w+'? failed to initialize"),  # JAX
    Pattern("no_device", r"no platforms that are instances"),  # JAX
    Pattern("no_device", r"deserialize object on (a )?CUDA device|cuda\.is_available\(\) (is|should)"),  # torch
    Pattern("no_device", r"not compiled with CUDA"),  # torch, built for machines without one
    # A kernel that could not be started, or failed as it ran.
    Pattern("kernel_launch", r"LAUNCH_FAILED|LAUNCH_TIMEOUT|LAUNCH_OUT_OF_RESOURCES|ErrorLaunch"),  # CUDA, TensorFlow
    Pattern("kernel_launch", r"launch fail(ed|ure)|fail(ed|ure) to launch|launch timed out"),  # CUDA, TensorFlow
    Pattern("kernel_launch", r"cu(da)?LaunchKernel"),  # CUDA, TensorFlow
    Pattern("kernel_launch", r"too many resources requested|invalid configuration argument"),  # CUDA, Triton
    Pattern("kernel_launch", r"out of resource: |device-side assert triggered|CUDA_ERROR_ASSERT"),  # CUDA, Triton
    Pattern("kernel_launch", r"cooperative launch"),  # CUDA, Triton
    Pattern("kernel_launch", r"STATUS_(EXECUTION|MAPPING|INTERNAL)_(FAILED|ERROR)"),  # CUDA libraries, XLA
    Pattern("kernel_launch", r"CUFFT_(EXEC_FAILED|INTERNAL_ERROR)|GPU sync failed"),  # CUDA libraries, XLA
    Pattern("kernel_launch", r"Failed to enqueue"),  # CUDA libraries, XLA
    Pattern("kernel_launch", r"failed to (run|execute) .{0,40}(kernel|cuDNN|cuBLAS)"),  # CUDA libraries, XLA
    # What the program asks for makes no sense.
    Pattern("other", r"in loading state_dict"),  # torch: the checkpoint of another model
    Pattern("shape_dtype", r"incompatible shapes?"),  # all
    # all
    Pattern(
        "shape_dtype",
        r"shapes?.{0,120}(incompatible|mismatch|must match|not aligned|do(es)? not match|must be equal|must have the same|cannot be broadcast)",
    ),
    Pattern("shape_dtype", r"(incompatible|mismatch(ed|ing)?) .{0,60}shapes?|shape mismatch"),  # all
    Pattern("shape_dtype", r"Matrix size-incompatible|logits and labels must"),  # TensorFlow, Keras
    # TensorFlow, Keras
    Pattern(
        "shape_dtype",
        r"Dimensions? .{0,60}(must be equal|should match|must match|not compatible|out of range|evenly divisible)",
    ),
    Pattern("shape_dtype", r"dimension size|must have the same (rank|shape|dtype|type|number of)"),  # TensorFlow, Keras
    Pattern("shape_dtype", r"same dtype"),  # TensorFlow, Keras
    Pattern("shape_dtype", r"incompatible with the layer|Negative dimension size"),  # Keras
    Pattern("shape_dtype", r"Computed output size would be negative|cardinality is ambiguous|must be rank"),  # Keras
    Pattern("shape_dtype", r"expected (min_)?ndim"),  # Keras
    Pattern("shape_dtype", r"reshape .{0,80}(tensor|array|shape|size)|Input to reshape"),  # TensorFlow, NumPy, JAX
    Pattern("shape_dtype", r"Cannot batch tensors|Can ?not squeeze"),  # TensorFlow, NumPy, JAX
    Pattern("shape_dtype", r"number of elements does not match"),  # TensorFlow, NumPy, JAX
    Pattern("shape_dtype", r"tensors? with different shapes"),  # TensorFlow, NumPy, JAX
    Pattern("shape_dtype", r"cannot be multiplied|size mismatch|sizes of tensors must match|size of tensor a"),  # torch
    Pattern("shape_dtype", r"is invalid for input of size|to be equal size|expanded size|same size"),  # torch
    Pattern("shape_dtype", r"Expected \d-?D|Expected .{0,40}batch_size|expected input.{0,60}channels"),  # torch
    Pattern("shape_dtype", r"Kernel size can't be greater"),  # torch
    Pattern("shape_dtype", r"could not be broadcast|cannot broadcast|inhomogeneous shape"),  # NumPy, JAX
    Pattern("shape_dtype", r"mismatch in its core dimension"),  # NumPy, JAX
    Pattern("shape_dtype", r"requires .{0,60}(dimension|shape)s? .{0,60}(equal|match|same|compatible)"),  # NumPy, JAX
    Pattern("shape_dtype", r"was expected to be an? \w+ tensor but|expected scalar type"),  # TensorFlow, torch, JAX
    Pattern("shape_dtype", r"Found dtype|not implemented for '|can't be cast"),  # TensorFlow, torch, JAX
    Pattern("shape_dtype", r"Input type .{1,80} and (weight|bias) type"),  # TensorFlow, torch, JAX
    Pattern("shape_dtype", r"expected .{1,60} to have (the same )?dtype"),  # TensorFlow, torch, JAX
    Pattern("shape_dtype", r"equal (data ?types|dtypes|types)"),  # TensorFlow, torch, JAX
    Pattern("shape_dtype", r"Tensor conversion requested dtype"),  # TensorFlow, Keras
    Pattern("shape_dtype", r"(has|have) (type|dtype|DataType) \S+ (that does not|not in)"),  # TensorFlow, Keras
    Pattern("shape_dtype", r"Unsupported object type|Unsupported numpy type"),  # TensorFlow, Keras
    # TensorFlow, Keras
    Pattern("shape_dtype", r"(Unrecognized|Invalid|incompatible|inconsistent|mismatched|unsupported) d?type"),
    Pattern("shape_dtype", r"(element|d)type mismatch"),  # TensorFlow, Keras
    Pattern("shape_dtype", r"Cannot convert .{1,80} to (EagerTensor of dtype|a? ?Tensor)"),  # TensorFlow, Keras
    Pattern("shape_dtype", r"Failed to convert a NumPy array"),  # TensorFlow, Keras
)

# Named groups: `size` and `unit`, or `bytes` where it is exact, `shape`, `dtype`, `device` or `gpu`, `allocator`, `op`.
# The first that matches is searched for throughout: several replicas may have failed.
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
