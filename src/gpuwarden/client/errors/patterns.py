"""The words that tell one kind of error from another, and the ones that tell of an allocation that failed.

Each text stands in the framework's source or in a message that somebody met; to know a new one, add a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuwarden.protocol.messages import ErrorKind


@dataclass(frozen=True, slots=True)
class Pattern:
    """A text that means one kind of error; searched without regard to case, in the types' names and the message."""

    regex: str
    kind: ErrorKind
    seen: str  # where


# The first that matches holds: what names the host before what names a device, a cause before its symptom.
PATTERNS = (
    # Named as memory by the loader, whose room for the threads' own variables in libraries loaded late is fixed.
    Pattern(r"in static TLS block", "library_mismatch", "glibc's loader, above all on ARM"),
    # The host's memory. An input pipeline computes on the host, whatever its text says of devices.
    Pattern(
        r"passed to \w+(:\d+)? transformation(?s:.*?)(OOM when allocating|Failed to allocate)", "host_oom", "tf.data"
    ),
    Pattern(r"(\b|_Array)MemoryError\b", "host_oom", "Python, NumPy; inside of what a tf.data or torch worker raised"),
    Pattern(r"Unable to allocate .{1,40} for an array", "host_oom", "NumPy"),
    Pattern(r"DefaultCPUAllocator|alloc_cpu\.cpp|you tried to allocate \d+ bytes", "host_oom", "torch"),
    Pattern(r"by allocator \w*(host|cuda_host)_bfc", "host_oom", "pinned memory: TensorFlow, XLA, NCCL"),
    Pattern(r"pinned host memory|bytes on host: |cuMemHostAlloc", "host_oom", "pinned memory: TensorFlow, XLA, NCCL"),
    Pattern(r"cudaHostAlloc|CUDA host alloc", "host_oom", "pinned memory: TensorFlow, XLA, NCCL"),
    Pattern(r"std::bad_alloc|Cannot allocate memory", "host_oom", "C++, the operating system"),
    Pattern(r"Not enough memory resources", "host_oom", "C++, the operating system"),
    Pattern(r"out of shared memory|insufficient shared memory", "host_oom", "torch's loader, NCCL"),
    Pattern(r"(shm|torch_\d|shared memory)(?s:.{0,200})No space left", "host_oom", "torch's loader, NCCL"),
    Pattern(r"shared memory segment", "host_oom", "torch's loader, NCCL"),
    Pattern(
        r"worker \(pid.{1,60}killed by signal: (Killed|Bus)", "host_oom", "torch's loader: the kernel ended its worker"
    ),
    # A kernel that touched what it may not.
    Pattern(r"ILLEGAL_ADDRESS|illegal memory access|illegal address", "illegal_address", "CUDA"),
    Pattern(r"MISALIGNED_ADDRESS|misaligned address|INVALID_ADDRESS_SPACE", "illegal_address", "CUDA"),
    Pattern(r"(specific|invalid) address space", "illegal_address", "CUDA"),
    Pattern(r"CUDA_ERROR_INVALID_PC|invalid program counter|ILLEGAL_INSTRUCTION", "illegal_address", "CUDA"),
    Pattern(r"illegal instruction was encountered|HARDWARE_STACK_ERROR", "illegal_address", "CUDA"),
    Pattern(r"hardware stack error", "illegal_address", "CUDA"),
    # The device's memory.
    Pattern(r"OOM when allocating", "device_oom", "TensorFlow"),
    Pattern(r"OutOfMemoryError", "device_oom", "torch, CuPy"),
    Pattern(r"(CUDA|HIP|MPS backend|XPU|GPU) ((driver )?error: )?out of memory", "device_oom", "torch"),
    Pattern(r"runtime error \(2\)|Triton Error \[\w+\]: out of memory", "device_oom", "torch, Triton"),
    Pattern(r"Unable to find a valid cuDNN algorithm", "device_oom", "torch: none had room for its workspace"),
    Pattern(r"Out of memory ((while )?trying to allocate|allocating \d)", "device_oom", "XLA, TensorFlow"),
    Pattern(r"ran out of memory (in memory space|(while )?trying to)", "device_oom", "XLA, TensorFlow"),
    Pattern(r"Failed to allocate (request for|memory)", "device_oom", "XLA, TensorFlow"),
    Pattern(r"would exceed allowed memory", "device_oom", "torch, with an allocator that is CUDA's"),
    Pattern(r"would exceed memory", "device_oom", "XLA on a TPU"),
    Pattern(r"Attempting to (reserve|allocate) .{1,40} at the bottom of memory", "device_oom", "XLA on a TPU"),
    Pattern(r"enough memory\. Requires", "device_oom", "XLA on a TPU"),
    Pattern(r"ERROR_OUT_OF_MEMORY|ErrorMemoryAllocation|ErrorOutOfMemory", "device_oom", "CUDA, HIP, NCCL"),
    Pattern(r"Cuda failure (2 )?'out of memory'", "device_oom", "CUDA, HIP, NCCL"),
    Pattern(
        r"fail(ed)? to (CUDA )?(m|c)?alloc(ate)?( async)? .{1,60}(from device|bytes|device memory)",
        "device_oom",
        "TensorFlow, NCCL",
    ),
    Pattern(r"unable to allocate output tensor", "device_oom", "TensorFlow, NCCL"),
    Pattern(r"Dst tensor is not initialized|failed to allocate (the )?(scratch|workspace)", "device_oom", "TensorFlow"),
    Pattern(r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUSPARSELT|NPP)\w*_ALLOC_FAILED", "device_oom", "CUDA libraries"),
    Pattern(r"CUFFT_ALLOC_FAILED|CUSPARSE_STATUS_INSUFFICIENT_RESOURCES", "device_oom", "CUDA libraries"),
    # Parts that do not fit each other: driver, CUDA and its libraries, GPU, framework.
    Pattern(r"version mismatch|kernel version .{1,40} does not match DSO", "library_mismatch", "driver"),
    Pattern(r"SYSTEM_DRIVER_MISMATCH|unsupported display driver", "library_mismatch", "driver"),
    Pattern(r"driver version is insufficient|driver .{1,40}too old|INSUFFICIENT_DRIVER", "library_mismatch", "driver"),
    Pattern(r"forward compatibility was attempted|COMPAT_NOT_SUPPORTED", "library_mismatch", "driver"),
    Pattern(r"unsupported toolchain|UNSUPPORTED_PTX", "library_mismatch", "GPU newer or older than the build"),
    Pattern(r"INVALID_PTX|NO_BINARY_FOR_GPU|no kernel image", "library_mismatch", "GPU newer or older than the build"),
    Pattern(r"INVALID_KERNEL_IMAGE|CUDA_ERROR_INVALID_HANDLE", "library_mismatch", "GPU newer or older than the build"),
    Pattern(r"device kernel image is invalid", "library_mismatch", "GPU newer or older than the build"),
    Pattern(
        r"not built with CUDA kernel binaries|compiled for a different GPU",
        "library_mismatch",
        "GPU newer or older than the build",
    ),
    Pattern(
        r"is not compatible with the current|ARCH_MISMATCH", "library_mismatch", "GPU newer or older than the build"
    ),
    Pattern(r"CUDA_ERROR_INVALID_SOURCE|ptxas", "library_mismatch", "GPU newer or older than the build"),
    Pattern(
        r"Loaded runtime CuDNN|Found cuDNN version|CuDNN .{0,40}incompatib|DNN library|DnnSupport",
        "library_mismatch",
        "cuDNN",
    ),
    Pattern(r"VERSION_MISMATCH|SUBLIBRARY_\w+|CUDNN_STATUS_NOT_INITIALIZED", "library_mismatch", "cuDNN"),
    Pattern(r"cuDNN failed to initialize|No algorithm worked", "library_mismatch", "cuDNN"),
    Pattern(r"unable to find an engine to execute", "library_mismatch", "cuDNN, by torch"),
    Pattern(
        r"could not create cudnn handle", "library_mismatch", "libraries that could not start, often for want of memory"
    ),
    Pattern(
        r"failed to create cublas handle",
        "library_mismatch",
        "libraries that could not start, often for want of memory",
    ),
    Pattern(
        r"CUBLAS_STATUS_NOT_INITIALIZED", "library_mismatch", "libraries that could not start, often for want of memory"
    ),
    Pattern(r"cublasCreate", "library_mismatch", "libraries that could not start, often for want of memory"),
    Pattern(
        r"(no|without) BLAS support", "library_mismatch", "libraries that could not start, often for want of memory"
    ),
    Pattern(r"libdevice", "library_mismatch", "libraries that are missing or of another version"),
    Pattern(r"cannot open shared object file", "library_mismatch", "libraries that are missing or of another version"),
    Pattern(
        r"Could not load (dynamic )?library", "library_mismatch", "libraries that are missing or of another version"
    ),
    Pattern(r"Cannot dlopen", "library_mismatch", "libraries that are missing or of another version"),
    Pattern(r"Unable to load any of", "library_mismatch", "libraries that are missing or of another version"),
    Pattern(r"undefined symbol", "library_mismatch", "libraries that are missing or of another version"),
    Pattern(r"version `\w+[^']*' not found", "library_mismatch", "libraries that are missing or of another version"),
    Pattern(r"not compiled with \w+ support|CUDA extension", "library_mismatch", "builds"),
    Pattern(r"API version .{0,40}framework|incompatible with jax version", "library_mismatch", "JAX"),
    Pattern(r"binary incompatibility|compiled using NumPy", "library_mismatch", "builds"),
    # No GPU to be had.
    Pattern(r"no CUDA-capable device|ERROR_NO_DEVICE|no CUDA GPUs|No visible GPU", "no_device", "CUDA, torch, JAX"),
    Pattern(r"no NVIDIA driver|no supported devices|No GPUs? (was |were )?found", "no_device", "CUDA, torch, JAX"),
    Pattern(r"GPU is lost", "no_device", "CUDA, torch, JAX"),
    Pattern(r"invalid device ordinal|INVALID_DEVICE|invalid device id|busy or unavailable", "no_device", "CUDA"),
    Pattern(r"DEVICE_UNAVAILABLE|system not yet initialized|SYSTEM_NOT_READY", "no_device", "CUDA"),
    Pattern(r"failed call to cuInit", "no_device", "CUDA"),
    Pattern(r"Could not satisfy (explicit )?device spec|No matching devices found", "no_device", "TensorFlow"),
    Pattern(
        r"Unable to find any devices|Cannot assign a device for|unknown device|invalid device .{0,40}GPU",
        "no_device",
        "TensorFlow",
    ),
    Pattern(r"Unable to initialize backend|Unknown backend|backend '?\w+'? failed to initialize", "no_device", "JAX"),
    Pattern(r"no platforms that are instances", "no_device", "JAX"),
    Pattern(r"deserialize object on (a )?CUDA device|cuda\.is_available\(\) (is|should)", "no_device", "torch"),
    Pattern(r"not compiled with CUDA", "no_device", "torch, built for machines without one"),
    # A kernel that could not be started, or failed as it ran.
    Pattern(r"LAUNCH_FAILED|LAUNCH_TIMEOUT|LAUNCH_OUT_OF_RESOURCES|ErrorLaunch", "kernel_launch", "CUDA, TensorFlow"),
    Pattern(r"launch fail(ed|ure)|fail(ed|ure) to launch|launch timed out", "kernel_launch", "CUDA, TensorFlow"),
    Pattern(r"cu(da)?LaunchKernel", "kernel_launch", "CUDA, TensorFlow"),
    Pattern(r"too many resources requested|invalid configuration argument", "kernel_launch", "CUDA, Triton"),
    Pattern(r"out of resource: |device-side assert triggered|CUDA_ERROR_ASSERT", "kernel_launch", "CUDA, Triton"),
    Pattern(r"cooperative launch", "kernel_launch", "CUDA, Triton"),
    Pattern(r"STATUS_(EXECUTION|MAPPING|INTERNAL)_(FAILED|ERROR)", "kernel_launch", "CUDA libraries, XLA"),
    Pattern(r"CUFFT_(EXEC_FAILED|INTERNAL_ERROR)|GPU sync failed", "kernel_launch", "CUDA libraries, XLA"),
    Pattern(r"Failed to enqueue", "kernel_launch", "CUDA libraries, XLA"),
    Pattern(r"failed to (run|execute) .{0,40}(kernel|cuDNN|cuBLAS)", "kernel_launch", "CUDA libraries, XLA"),
    # What the program asks for makes no sense.
    Pattern(r"in loading state_dict", "other", "torch: the checkpoint of another model"),
    Pattern(r"incompatible shapes?", "shape_dtype", "all"),
    Pattern(
        r"shapes?.{0,120}(incompatible|mismatch|must match|not aligned|do(es)? not match|must be equal|must have the same|cannot be broadcast)",
        "shape_dtype",
        "all",
    ),
    Pattern(r"(incompatible|mismatch(ed|ing)?) .{0,60}shapes?|shape mismatch", "shape_dtype", "all"),
    Pattern(r"Matrix size-incompatible|logits and labels must", "shape_dtype", "TensorFlow, Keras"),
    Pattern(
        r"Dimensions? .{0,60}(must be equal|should match|must match|not compatible|out of range|evenly divisible)",
        "shape_dtype",
        "TensorFlow, Keras",
    ),
    Pattern(r"dimension size|must have the same (rank|shape|dtype|type|number of)", "shape_dtype", "TensorFlow, Keras"),
    Pattern(r"same dtype", "shape_dtype", "TensorFlow, Keras"),
    Pattern(r"incompatible with the layer|Negative dimension size", "shape_dtype", "Keras"),
    Pattern(r"Computed output size would be negative|cardinality is ambiguous|must be rank", "shape_dtype", "Keras"),
    Pattern(r"expected (min_)?ndim", "shape_dtype", "Keras"),
    Pattern(r"reshape .{0,80}(tensor|array|shape|size)|Input to reshape", "shape_dtype", "TensorFlow, NumPy, JAX"),
    Pattern(r"Cannot batch tensors|Can ?not squeeze", "shape_dtype", "TensorFlow, NumPy, JAX"),
    Pattern(r"number of elements does not match", "shape_dtype", "TensorFlow, NumPy, JAX"),
    Pattern(r"tensors? with different shapes", "shape_dtype", "TensorFlow, NumPy, JAX"),
    Pattern(r"cannot be multiplied|size mismatch|sizes of tensors must match|size of tensor a", "shape_dtype", "torch"),
    Pattern(r"is invalid for input of size|to be equal size|expanded size|same size", "shape_dtype", "torch"),
    Pattern(r"Expected \d-?D|Expected .{0,40}batch_size|expected input.{0,60}channels", "shape_dtype", "torch"),
    Pattern(r"Kernel size can't be greater", "shape_dtype", "torch"),
    Pattern(r"could not be broadcast|cannot broadcast|inhomogeneous shape", "shape_dtype", "NumPy, JAX"),
    Pattern(r"mismatch in its core dimension", "shape_dtype", "NumPy, JAX"),
    Pattern(r"requires .{0,60}(dimension|shape)s? .{0,60}(equal|match|same|compatible)", "shape_dtype", "NumPy, JAX"),
    Pattern(r"was expected to be an? \w+ tensor but|expected scalar type", "shape_dtype", "TensorFlow, torch, JAX"),
    Pattern(r"Found dtype|not implemented for '|can't be cast", "shape_dtype", "TensorFlow, torch, JAX"),
    Pattern(r"Input type .{1,80} and (weight|bias) type", "shape_dtype", "TensorFlow, torch, JAX"),
    Pattern(r"expected .{1,60} to have (the same )?dtype", "shape_dtype", "TensorFlow, torch, JAX"),
    Pattern(r"equal (data ?types|dtypes|types)", "shape_dtype", "TensorFlow, torch, JAX"),
    Pattern(r"Tensor conversion requested dtype", "shape_dtype", "TensorFlow, Keras"),
    Pattern(r"(has|have) (type|dtype|DataType) \S+ (that does not|not in)", "shape_dtype", "TensorFlow, Keras"),
    Pattern(r"Unsupported object type|Unsupported numpy type", "shape_dtype", "TensorFlow, Keras"),
    Pattern(
        r"(Unrecognized|Invalid|incompatible|inconsistent|mismatched|unsupported) d?type",
        "shape_dtype",
        "TensorFlow, Keras",
    ),
    Pattern(r"(element|d)type mismatch", "shape_dtype", "TensorFlow, Keras"),
    Pattern(r"Cannot convert .{1,80} to (EagerTensor of dtype|a? ?Tensor)", "shape_dtype", "TensorFlow, Keras"),
    Pattern(r"Failed to convert a NumPy array", "shape_dtype", "TensorFlow, Keras"),
)

# Named groups: `size` and `unit`, or `bytes` where it is told exactly, `shape`, `dtype`, `device` or `gpu`, `allocator`, `op`.
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
