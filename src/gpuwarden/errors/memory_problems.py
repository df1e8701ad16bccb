"""Problems of memory, of the GPU and of the host."""

from __future__ import annotations

from gpuwarden.errors.problems import FRAMEWORK_REGEXES, Cause, Problem, Step

DEVICE_OUT_OF_MEMORY = Problem(
    "device_out_of_memory",
    "device_oom",
    "GPU memory exhausted",
    (
        Cause("Another process holds memory of the GPU.", ("memory.gpu", "memory.processes")),
        Cause("The batch, the model or the sequence length is too large for the GPU."),
        Cause("Memory leaks from step to step, e.g. losses or outputs kept in a list."),
    ),
    "End processes that should not be on the GPU, then use a smaller batch.",
    steps=(
        Step(
            r"Process (?P<pid>\d+) has (?P<held>[\d.]+ [KMG]iB) memory in use",  # torch
            "End process {pid} if it should not be on the GPU: it holds {held}; then use a smaller batch.",
        ),
        Step(
            r"Tried to allocate (?P<requested>[\d.]+ [KMG]iB)(?s:.*?) of which (?P<free>[\d.]+ [KMG]iB) is free",
            "Use a smaller batch: an allocation of {requested} failed with {free} free on the GPU.",
        ),
    ),
)
MEMORY_WAS_SHORT = Problem(
    "memory_was_short",
    "other",
    "GPU memory short for a moment, no failure",
    (Cause("An algorithm that needs more memory was tried, and another one taken."),),
    "Look elsewhere for the cause of a failure; with more free memory the operation may be faster.",
)
DEVICE_FRAGMENTATION = Problem(
    "device_fragmentation",
    "device_oom",
    "GPU memory fragmented",
    (
        Cause("The allocator holds more free memory than was requested, but not in one piece."),
        Cause("Shapes vary from step to step, e.g. sequence lengths or a smaller last batch."),
        Cause("Another process holds memory of the GPU.", ("memory.gpu",)),
    ),
    "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (torch) or TF_GPU_ALLOCATOR=cuda_malloc_async (TensorFlow).",
    steps=(
        Step(FRAMEWORK_REGEXES["torch"], "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."),
        Step(FRAMEWORK_REGEXES["tensorflow"], "Set TF_GPU_ALLOCATOR=cuda_malloc_async."),
    ),
)
HOST_OUT_OF_MEMORY = Problem(
    "host_out_of_memory",
    "host_oom",
    "host memory exhausted",
    (
        Cause("The program loads a whole data set or a very large array into host memory.", ("memory.host",)),
        Cause("The memory limit of the container or batch job is reached.", ("memory.host",)),
        Cause("Other processes use the host's memory.", ("memory.host",)),
    ),
    "Load the data in parts, or raise the memory limit of the container or job.",
)
CPU_OUT_OF_MEMORY = Problem(
    "cpu_out_of_memory",
    "host_oom",
    "host memory exhausted by operations of the model on the CPU",
    (
        Cause(
            "The framework sees no GPU, and computes in the memory of the host instead.",
            ("device.visible", "tensorflow.build", "tensorflow.libraries", "driver.module"),
        ),
        Cause("The program places the operation on the CPU, or the operation has no kernel for the GPU."),
        Cause("The memory limit of the container or batch job is reached.", ("memory.host",)),
    ),
    "Run `gpuwarden doctor` where the program runs: it says why TensorFlow sees no GPU. Where the CPU is meant, "
    "use a smaller batch.",
    (
        *("no_device_visible", "cpu_only_build", "driver_not_loaded", "driver_too_old", "driver_library_mismatch"),
        *("driver_init_failed", "library_not_found", "cudnn_mismatch", "device_permission", "container_runtime"),
    ),
)
INPUT_OUT_OF_MEMORY = Problem(
    "input_out_of_memory",
    "host_oom",
    "host memory exhausted in the input pipeline",
    (
        Cause("Shuffle buffers, caches or prefetched batches are too large."),
        Cause("Each loader worker holds a copy of the data set.", ("input.cpus",)),
        Cause("The memory limit of the container or batch job is reached.", ("memory.host",)),
    ),
    "Use smaller shuffle buffers and caches, and fewer loader workers.",
    ("host_out_of_memory", "killed_by_kernel", "shared_memory_full"),
)
SHARED_MEMORY_FULL = Problem(
    "shared_memory_full",
    "host_oom",
    "shared memory (/dev/shm) full",
    (
        Cause("The container has the default 64 MiB of /dev/shm.", ("input.shm",)),
        Cause("Files left by ended processes fill /dev/shm.", ("input.shm",)),
    ),
    "Start the container with `--shm-size=8g` or `--ipc=host`; elsewhere delete old files in /dev/shm.",
)
KILLED_BY_KERNEL = Problem(
    "killed_by_kernel",
    "host_oom",
    "process killed by the kernel for host memory",
    (
        Cause("The memory limit of the container or batch job is reached.", ("memory.host",)),
        Cause("The host has no memory left.", ("memory.host",)),
        Cause("Host memory leaks: the program's use grows until the kernel ends it."),
    ),
    "Raise the memory limit of the container or job, or load less data at once.",
    ("host_out_of_memory", "cpu_out_of_memory"),
)
