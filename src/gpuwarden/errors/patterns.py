"""Texts of errors, as exceptions have them.

A comment names the source of each: a library, or a message in tests/error_messages. To add one, add a line here and a
sample there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from gpuwarden.errors import compatibility_problems as compatibility
from gpuwarden.errors import device_problems as device
from gpuwarden.errors import memory_problems as memory
from gpuwarden.errors import program_problems as program
from gpuwarden.errors.problems import Pattern, Problem, list_patterns
from gpuwarden.errors.program_patterns import PROGRAM_PATTERNS
from gpuwarden.errors.status_codes import find_statuses


def find_pattern(text: str, patterns: Iterable[Pattern] | None = None) -> tuple[Problem, re.Match[str]] | None:
    """Return the first problem whose status code or text an exception has, and where; `text` begins with its type."""
    statuses = find_statuses(text)
    for pattern in PATTERNS if patterns is None else patterns:
        found = statuses.get(pattern.problem.name) or re.search(pattern.regex, text, re.IGNORECASE)
        if found:
            return pattern.problem, found
    return None


# The first match decides: host before device, cause before symptom.
PATTERNS = (
    # The loader's room for thread-local variables of libraries that are loaded late is fixed; its error mentions memory.
    *list_patterns(
        compatibility.PACKAGE_MISMATCH,
        r"in static TLS block",  # glibc's loader, above all on ARM
        r"OMP: Error #15|MKL_THREADING_LAYER",  # two OpenMP runtimes
    ),
    # The host's memory. An input pipeline computes on the host, whatever its text says of devices.
    *list_patterns(
        memory.INPUT_OUT_OF_MEMORY,
        r"passed to \w+(:\d+)? transformation(?s:.*?)(OOM when allocating|Failed to allocate)",  # tf.data
        # tf.data within a compiled step, which runs on the host even if the step does not
        r"(OOM when allocating|Failed to allocate memory)(?!.{0,400}(device:GPU|GPU_\d)).{0,400}\s+(\[\[\{\{node |\[Op:)\w*Iterator\w*GetNext",
        r"DataLoader worker (?s:.*)(\b|_Array)MemoryError\b",  # torch
        r"worker \(pid.{1,60}killed by signal: Killed",  # torch's loader: the kernel ended its worker
    ),
    *list_patterns(
        memory.SHARED_MEMORY_FULL,
        # torch's loader, NCCL
        r"out of shared memory(?!, )|insufficient shared memory",
        r"(shm|torch_\d|shared memory)(?s:.{0,200})No space left",
        r"shared memory segment",
        r"worker \(pid.{1,60}killed by signal: Bus",
    ),
    *list_patterns(
        memory.HOST_OUT_OF_MEMORY,
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
        r"running low on memory|OutOfMemoryError: Task was killed",  # Ray
        r"using all available RAM",  # Colab
    ),
    # The GPU's memory is damaged.
    *list_patterns(
        device.ECC_ERROR,
        r"uncorrectable ECC error",  # CUDA
    ),
    *list_patterns(
        device.NVLINK_ERROR,
        r"uncorrectable NVLink error|contained error",  # CUDA
    ),
    # A kernel accessed an invalid address.
    *list_patterns(
        device.ILLEGAL_ADDRESS,
        r"illegal memory access|illegal address|misaligned address|(specific|invalid) address space",  # CUDA
        r"invalid program counter|illegal instruction was encountered|hardware stack error",
    ),
    *list_patterns(
        device.MPS_FAILED,
        r"\bMPS (client|server|control daemon)\b.{0,80}(fail|terminated|not ready|exited)|cuda-mps-server exited",
    ),
    # The device's memory.
    *list_patterns(
        memory.DEVICE_OUT_OF_MEMORY,
        r"OOM when allocating",  # TensorFlow
        r"OutOfMemoryError",  # torch, CuPy
        r"NVML_SUCCESS == r INTERNAL ASSERT",  # torch, which asks the driver for its figures after a failed allocation
        r"(CUDA|HIP|MPS backend|XPU|GPU) ((driver )?error: )?out of memory",  # torch
        r"runtime error \(2\)|Triton Error \[\w+\]: out of memory",  # torch, Triton
        r"Unable to find a valid cuDNN algorithm",  # torch: no algorithm had memory for its workspace
        # XLA, TensorFlow
        r"Out of memory ((while )?trying to allocate|allocating \d)",
        r"ran out of memory (in memory space|(while )?trying to)",
        r"Failed to allocate (request for|memory)",
        r"Free memory on device .{1,60} is less than desired",  # vLLM, which reserves its part at the start
        r"would exceed allowed memory",  # torch, with an allocator that is CUDA's
        # XLA on a TPU
        r"would exceed memory",
        r"Attempting to (reserve|allocate) .{1,40} at the bottom of memory",
        r"enough memory\. Requires",
        r"RESOURCE_?.?EXHAUSTED: (Out of memory|OOM)|cudaMalloc failed|hipMalloc failed|not enough GPU memory",
        # CUDA, HIP, NCCL
        r"ErrorOutOfMemory",
        # TensorFlow, NCCL
        r"fail(ed)? to (CUDA )?(m|c)?alloc(ate)?( async)? .{1,60}(from device|bytes|device memory)",
        r"unable to allocate output tensor",
        r"Dst tensor is not initialized|failed to allocate (the )?(scratch|workspace)",  # TensorFlow
        r"(resource allocation failed|insufficient resources) when calling .?cusparse",  # cuSPARSE, by torch
    ),
    # cuDNN and kernels fail on tensors without elements, which is no matter of versions.
    *list_patterns(
        program.EMPTY_TENSOR,
        # TensorFlow's descriptors: {count: 1 feature_map_count: 32 spatial: 0 86 value_min: 0.000000
        r"cudnn.{0,300}?(count|spatial): ?(\d+ )*0 (?=[\w}])|descriptor.{0,20}\{count: \d.{0,80}spatial: ?(\d+ )*0 ",
        r"Check failed: work_element_count > 0(?! \(-)",  # TensorFlow
        r"Check failed: .{0,200}(\[(\d+,)*0(,\d+)+\]|\[(\d+,)+0\])",
        r"numel\(\) == 0|tensor of 0 elements|[Nn]on-empty .{0,40}tensor expected",  # torch
    ),
    # Versions that do not match: driver, CUDA and its libraries, GPU, framework.
    *list_patterns(
        compatibility.DRIVER_LIBRARY_MISMATCH,
        r"driver/library version mismatch|NVML/RM version mismatch",
        r"kernel version .{1,40} does not match DSO",
        r"unsupported display driver",
    ),
    *list_patterns(
        compatibility.DRIVER_TOO_OLD,
        r"driver version is insufficient|driver .{1,40}too old",
        r"forward compatibility was attempted",
        r"CUDA initialization failure with error: 35\b",  # TensorRT
        r"unsupported toolchain",  # a library's code is newer than the driver
    ),
    *list_patterns(
        compatibility.XLA_COMPILE,
        r"ptxas|libdevice",
        r"PTX (compilation provider|codegen)|XLA compilation|triton\.compiler|InductorError|BackendCompilerFailed|nvcc fatal",
        r"Error (building|compiling) (extension|objects for extension)|CUDA_HOME environment variable is not set",
    ),
    *list_patterns(
        compatibility.UNSUPPORTED_COMPUTE_CAPABILITY,
        # GPU newer or older than the build
        r"no kernel image|invalid device function|error=98\b",
        r"device kernel image is invalid",
        r"not built with CUDA kernel binaries|compiled for a different GPU",
        r"is not compatible with the current",
        r"minimum required Cuda capability|requires? (a )?(device|GPU|compute).{0,30} capability|no longer supports this GPU",
        r"PTX version \S+ does not support target|is not a recognized processor",  # LLVM, by XLA and Triton
        r"too old to be supported by the triton",  # torch
        r"only supports? (Ampere|Hopper|GPUs|devices of CUDA)|only supported on GPUs with|Unsupported gpu architecture",
    ),
    *list_patterns(
        compatibility.LIBRARY_INIT_FAILED,
        # libraries that failed to initialize, often because memory was short
        r"cuDNN failed to initialize|DNN library initialization failed",
        r"(could not|error before) (create|creating) cudnn handle",
        r"failed to create cublas handle|cuSolver (internal|initialization) error",
        r"cublasCreate|cusolverDnCreate",
        r"dnn != nullptr",  # XLA
        r"(no|without) BLAS support|Get(Convolve|Rnn)\w*Algorithms",  # TensorFlow
    ),
    *list_patterns(
        compatibility.CUDNN_MISMATCH,
        r"Loaded runtime CuDNN|Found cuDNN version|CuDNN .{0,40}incompatib|DNN library|DnnSupport",
        r"cuDNN version mismatch|Outdated cuDNN",
        r"No algorithm worked",
        r"unable to find an engine to execute",  # cuDNN, by torch
        r"Could not load (dynamic )?library .?libcudnn|libcudnn\S*: cannot open|Unable to load cuDNN",
    ),
    *list_patterns(
        compatibility.AUTOTUNING_FAILED,
        r"Autotuning failed|No valid config found|No configs could be compiled|No reference output found",  # XLA
        r"All algorithms tried for|Failed to determine best cudnn convolution algorithm",  # XLA
        r"No valid (engine|execution plan)",  # cuDNN
    ),
    *list_patterns(
        compatibility.PACKAGE_MISMATCH,
        r"undefined symbol: _Z|module 'numpy' has no attribute|numpy.dtype size changed",  # builds for another version
        r"Descriptors cannot (not )?be created|VersionConflict|DistributionNotFound|operator torchvision::",
        r"installed version of Keras is Keras 3|compiled with an? (older|different) version",
        r"API version .{0,40}framework|incompatible with jax version",  # JAX
        r"module compiled against A[BP]I version",  # NumPy
        r"this version of jax requires|but JAX was built against",  # JAX
        r"binary incompatibility|compiled using NumPy|compiled to use AVX",  # builds
        r"version `\w+[^']*' not found",
    ),
    *list_patterns(
        compatibility.LIBRARY_NOT_FOUND,
        r"cannot open shared object",
        r"Could not load (dynamic )?library",
        r"Cannot dlopen",
        r"Unable to load \w+\. Is it installed|The \w+ library was not found",  # JAX, cuSPARSE
        r"\.dll.{0,4} not found|DLL load failed|Failed to load .{1,60}\.(so|dll)",
    ),
    *list_patterns(
        compatibility.CUDA_MISMATCH,
        r"version mismatch|VERSION_MISMATCH|Outdated \w+ installation found",
        r"Unable to load any of",
        r"undefined symbol|cudaGetError\w+ symbol not found",
        r"were compiled with different CUDA|error: CUDNN_STATUS_SUCCESS",  # torch
        r"SharedObjectSymbolNotFound|with link time reference|mismatches the version that was used to compile|stub library",
        r"CUDA extension",
    ),
    *list_patterns(
        device.CPU_ONLY_BUILD,
        r"not compiled with \w+ support",  # builds
    ),
    # No GPU is available.
    *list_patterns(device.GPU_LOST, r"GPU is lost|fallen off the bus|Unable to determine the device handle for GPU"),
    *list_patterns(
        device.CPU_ONLY_BUILD,
        r"not compiled with CUDA|CUDA-enabled jaxlib is not installed",  # torch, JAX
    ),
    *list_patterns(device.DRIVER_HANGS, r"GPU requires (restart|reset)|GPU is in a bad state"),
    *list_patterns(device.DEVICE_PERMISSION, r"Insufficient Permissions"),  # NVML
    *list_patterns(device.DRIVER_NOT_LOADED, r"no NVIDIA driver|driver not loaded|nvidia-smi: (command )?not found"),
    *list_patterns(
        device.DEVICE_BUSY,
        r"busy or unavailable",
        r"Insufficient nvidia\.com/|requested devices unavailable for nvidia\.com/",  # Kubernetes
    ),
    *list_patterns(device.FABRIC_NOT_READY, r"system not yet initialized"),
    *list_patterns(
        device.CUDA_AFTER_FORK,
        r"re-initialize CUDA in forked subprocess|cudaSuccess \(3 vs",  # torch, Caffe
        r"(cudaGetDeviceCount\W|cuInit).{0,20}initialization error",
    ),
    *list_patterns(
        device.DRIVER_INIT_FAILED,
        r"CUDA unknown error|cudaGetDeviceCount\W.{0,20}unknown error|named symbol not found",
        r"implicit initialization on GPU:\d+ failed|cudaSuccess \(30 vs|driver initialization failed",
        r"Can't initialize NVML|CUDA initialization failure",  # torch, TensorRT
    ),
    *list_patterns(
        device.NO_DEVICE_VISIBLE,
        # CUDA, torch, JAX
        r"no CUDA.(capable|enabled) (device|GPU)|cuInit\W.{0,20}\b100\b|no CUDA GPUs|No visible GPU",
        r"no supported devices|No GPUs? (was |were )?found",
        r"No GPU/TPU found|No GPU (is |was )?(detected|available)|CUDA is not available|GPU will not be used",
        r"failed call to cuInit",
        r"Unable to initialize backend|Unknown backend|backend '?\w+'? failed to initialize",  # JAX
        r"no platforms that are instances",
        r"only supports? (the )?NHWC|No OpKernel was registered to support Op 'Cudnn",  # TensorFlow: the operation is on the CPU
        r"deserialize object on (a )?CUDA device|cuda\.is_available\(\) (is|should)",  # torch
        r"AssertionError: assert\W*torch\.cuda\.is_available",
        # TensorFlow: a GPU is requested, and the list of all devices has none; XLA_GPU is the driver's only
        r"device:GPU:\d(?s:.{0,300})available devices(:| are)? \[?( ?[^\s,\]]+(CPU|XLA_GPU):\d+,?)+\s*([\].\n]|$)",
    ),
    *list_patterns(
        device.INVALID_DEVICE,
        r"invalid device ordinal|invalid device id",  # CUDA
        # TensorFlow
        r"Could not satisfy (explicit )?device spec|No matching devices found",
        r"Unable to find any devices|Cannot assign a device for|unknown device|invalid device .{0,40}GPU",
    ),
    *list_patterns(
        device.PEER_ACCESS,
        r"peer access is not supported|peer access.{0,40}failed|CUDA peer mapping",
    ),
    # A kernel failed to launch, or failed while it ran.
    *list_patterns(
        device.DEVICE_ASSERT,
        r"device-side assert triggered",
        r"block: \[\d+,\d+,\d+\], thread: \[\d+,\d+,\d+\] Assertion",
    ),
    *list_patterns(device.LAUNCH_TIMEOUT, r"launch timed out"),
    *list_patterns(
        device.KERNEL_RESOURCES,
        r"too many resources requested|invalid configuration argument",
        r"out of resource: |cooperative launch",  # Triton, CUDA
    ),
    *list_patterns(
        device.CUBLAS_LAUNCH_FAILED,
        r"Blas \w+ launch failed|failed to (run|enqueue) cuBLAS",  # TensorFlow
    ),
    *list_patterns(
        device.KERNEL_LAUNCH_FAILED,
        # CUDA, TensorFlow
        r"launch fail(ed|ure)|fail(ed|ure) to launch",
        r"cu(da)?LaunchKernel",
        r"Unexpected Event status|GPU sync failed|in an error state|CUDNN_STATUS_SUCCESS \(",  # TensorFlow
        r"internal error when calling .?cusparse",  # cuSPARSE, by torch
        r"Failed to enqueue|Failed to call (Then|Do)Rnn|cublas error",
        r"failed to (run|execute) .{0,40}(kernel|cuDNN|cuBLAS)",
    ),
    *list_patterns(
        device.GRAPH_CAPTURE,
        r"when stream is capturing|during capture|Cannot prepare for replay during capturing",  # CUDA, torch
    ),
    *PROGRAM_PATTERNS,
)
