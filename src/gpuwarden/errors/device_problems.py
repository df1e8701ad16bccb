"""Problems of a GPU: not there, not usable, damaged, or a kernel that failed on it."""

from __future__ import annotations

from gpuwarden.errors.problems import FRAMEWORK_REGEXES, Cause, Problem, Step, install_steps

_NOT_USABLE = (  # reasons for a framework without a GPU
    *("no_device_visible", "cpu_only_build", "driver_not_loaded", "driver_too_old", "driver_library_mismatch"),
    *("driver_init_failed", "library_not_found", "cudnn_mismatch", "cuda_mismatch", "unsupported_compute_capability"),
    *("device_permission", "container_runtime", "gpu_lost", "package_mismatch", "fabric_not_ready", "mps_failed"),
    *("cuda_after_fork", "driver_hangs"),
)
HARDWARE = ("ecc_error", "gpu_lost", "gpu_fault", "gpu_recovery", "nvlink_error", "driver_hangs")

NO_DEVICE_VISIBLE = Problem(
    "no_device_visible",
    "no_device",
    "no GPU visible to the program",
    (
        Cause("CUDA_VISIBLE_DEVICES hides the GPUs.", ("device.visible",)),
        Cause("The process sees no driver: a container or batch job without GPUs.", ("driver.module", "device.nodes")),
        Cause("The framework is a CPU build, or its CUDA libraries did not load.", ("framework.build",)),
    ),
    "Run `nvidia-smi -L` where the program runs, and check CUDA_VISIBLE_DEVICES.",
    tuple(each for each in _NOT_USABLE if each != "no_device_visible"),
)
CPU_ONLY_BUILD = Problem(
    "cpu_only_build",
    "no_device",
    "framework built without CUDA",
    (
        Cause("The installed package is a CPU build.", ("framework.build",)),
        Cause("Several builds are installed, and the CPU build is imported.", ("framework.installed",)),
    ),
    "Install the CUDA build: `pip install 'tensorflow[and-cuda]'`, `pip install 'jax[cuda13]'`, or torch from its CUDA "
    "index.",
    steps=install_steps("Install the CUDA build: {}."),
)
DRIVER_NOT_LOADED = Problem(
    "driver_not_loaded",
    "no_device",
    "NVIDIA driver not loaded",
    (
        Cause("The kernel module is not loaded, e.g. after a kernel update without a rebuild.", ("driver.module",)),
        Cause("The machine has no NVIDIA driver, or no GPU.", ("driver.module",)),
        Cause("The container was started without GPUs.", ("machine.container", "device.nodes")),
    ),
    "Run `nvidia-smi`; if it fails too, load or reinstall the driver, and in a container add `--gpus all`.",
)
DRIVER_INIT_FAILED = Problem(
    "driver_init_failed",
    "no_device",
    "CUDA driver could not start",
    (
        Cause("The module nvidia_uvm is not loaded, or its device node is missing.", ("device.uvm",)),
        Cause("The driver lost the GPU, e.g. after suspend or an XID.", ("gpu.xids",)),
    ),
    "Run `sudo modprobe nvidia_uvm` and `nvidia-smi`; if that does not help, reboot.",
    ("driver_library_mismatch", *HARDWARE, "driver_not_loaded", "device_permission", "fabric_not_ready"),
)
FABRIC_NOT_READY = Problem(
    "fabric_not_ready",
    "no_device",
    "NVLink fabric not ready (error 802)",
    (
        Cause("The fabric manager does not run, or has another version than the driver.", ("gpu.fabric",)),
        Cause("An NVSwitch or a link failed.", ("gpu.xids",)),
        Cause("The machine has no NVSwitch (NV_WARN_NOTHING_TO_DO), and needs no fabric manager."),
    ),
    "Check `systemctl status nvidia-fabricmanager`; install the driver's exact version of it, and start it.",
    ("nvlink_error", "driver_library_mismatch"),
)
MPS_FAILED = Problem(
    "mps_failed",
    "no_device",
    "MPS server missing, full or lost",
    (
        Cause("No MPS server runs where CUDA_MPS_PIPE_DIRECTORY points, e.g. in a container."),
        Cause("The fault of another client ended the server, or all clients of a GPU."),
        Cause("More clients than a GPU allows."),
    ),
    "Restart the server (`echo quit | nvidia-cuda-mps-control`, then `nvidia-cuda-mps-control -d`), then all clients.",
    HARDWARE,
)
CUDA_AFTER_FORK = Problem(
    "cuda_after_fork",
    "no_device",
    "CUDA not usable in this process (fork)",
    (
        Cause("The parent used CUDA before it forked this process, such as a loader worker."),
        Cause("The driver could not start.", ("device.uvm", "gpu.xids")),
    ),
    "Start workers with the `spawn` method, and use CUDA only in them; if nothing forks, run `nvidia-smi`.",
    ("driver_library_mismatch", "driver_not_loaded", "device_permission", *HARDWARE),
)
INVALID_DEVICE = Problem(
    "invalid_device",
    "no_device",
    "a GPU that the process does not have",
    (
        Cause("The program uses a GPU number that does not exist, or more processes than GPUs.", ("device.count",)),
        Cause("CUDA_VISIBLE_DEVICES renumbers the GPUs: numbers start at 0 there.", ("device.visible",)),
        Cause("The framework found no GPU at all.", ("framework.build",)),
    ),
    "Compare the GPU number in the program with `nvidia-smi -L` and CUDA_VISIBLE_DEVICES.",
    _NOT_USABLE,
)
DEVICE_BUSY = Problem(
    "device_busy",
    "no_device",
    "GPU busy or in exclusive mode",
    (
        Cause("The GPU is in exclusive mode and another process uses it.", ("gpu.compute_mode", "memory.gpu")),
        Cause("An ended program's process still holds the GPU.", ("memory.processes", "memory.unlisted")),
        Cause("The GPU needs a reset.", ("gpu.xids",)),
    ),
    "Find the process that holds the GPU with `nvidia-smi`, and end it.",
    HARDWARE,
)
CONTAINER_RUNTIME = Problem(
    "container_runtime",
    "no_device",
    "container runtime cannot provide GPUs",
    (
        Cause("The NVIDIA Container Toolkit is not installed or not configured.", ("machine.container",)),
        Cause("The host's driver is missing, not loaded or too old for the image.", ("driver.module",)),
    ),
    "Install the NVIDIA Container Toolkit on the host, run `nvidia-ctk runtime configure`, and restart the container "
    "daemon.",
    ("driver_library_mismatch", "driver_too_old", "driver_not_loaded", "device_permission"),
    (
        Step(
            r"/(?P<library>lib(cuda|nvidia)[\w.-]*): file exists",
            "Build the image again without the driver's packages: it carries {library}, where the host's is mounted.",
        ),
        Step(
            r"libnvidia-ml\.so\S*: cannot open|driver not loaded|load library failed",
            "Install the host's driver, until `nvidia-smi` works there: the toolkit runs, and does not find it.",
        ),
        Step(
            r"nvidia-container-cli: |Auto-detected mode",
            "Run `nvidia-smi` and `nvidia-container-cli -k -d /dev/tty info` on the host: the toolkit failed.",
        ),
    ),
)
DEVICE_PERMISSION = Problem(
    "device_permission",
    "no_device",
    "no permission for the GPU's device nodes",
    (
        Cause("The user may not open /dev/nvidia*, or a node is missing.", ("device.nodes",)),
        Cause("The container lost its devices, e.g. after `systemctl daemon-reload` on the host.", ("device.nodes",)),
        Cause("The batch job's device limits exclude the GPU.", ("device.nodes",)),
    ),
    "Check `ls -l /dev/nvidia*` as the user of the program; restart a container that lost its GPU.",
)
ECC_ERROR = Problem(
    "ecc_error",
    "hardware",
    "uncorrectable error of the GPU's memory (ECC)",
    (Cause("The GPU's memory is damaged.", ("gpu.ecc", "gpu.xids")),),
    "Reset the GPU and run again; if it recurs, take the GPU out of use.",
)
GPU_LOST = Problem(
    "gpu_lost",
    "no_device",
    "GPU fell off the bus",
    (
        Cause("Power, heat, riser or slot: the GPU does not answer any longer.", ("gpu.xids", "gpu.pcie")),
        Cause("A defect of the GPU or a bug of its driver or firmware.", ("gpu.xids",)),
    ),
    "Reboot the machine; if it recurs, have the GPU, its slot and its power checked.",
)
GPU_FAULT = Problem(
    "gpu_fault",
    "hardware",
    "fault of the GPU reported by the driver (XID)",
    (
        Cause("A hardware or firmware fault of the GPU, its links or its power.", ("gpu.xids", "gpu.ecc")),
        Cause("A bug of the driver: it comes with one version of it, also on other GPUs of this kind."),
    ),
    "Find the XID in `journalctl -k`; `gpuwarden reference xid` has its action.",
)
GPU_RECOVERY = Problem(
    "gpu_recovery",
    "hardware",
    "recovery that the GPU needs (XID 154)",
    (Cause("The driver requires it after another fault, which the kernel log has before.", ("gpu.xids", "gpu.ecc")),),
    "Do what `nvidia-smi -q` has as GPU Recovery Action.",
    ("ecc_error", "gpu_lost", "gpu_fault"),
)
GPU_PROGRAM_FAULT = Problem(
    "gpu_program_fault",
    "kernel_launch",
    "program's fault on the GPU (XID)",
    (
        Cause("A bug of the program, or of a library that it uses."),
        Cause("The GPU has a fault, if other programs have it too.", ("gpu.xids", "gpu.ecc")),
    ),
    "Restart the program; if it happens again, look for a bug in it.",
    ("device_assert", "illegal_address"),
)
XID_NOTICE = Problem(
    "xid_notice",
    "other",
    "XID that needs no action",
    (Cause("The driver logs it for information, or after another XID or the end of a program."),),
    "Look for other XIDs of that time in `journalctl -k`.",
)
NVLINK_ERROR = Problem(
    "nvlink_error",
    "hardware",
    "error of NVLink or an NVSwitch",
    (
        Cause("A link, a GPU or an NVSwitch failed.", ("gpu.xids", "gpu.fabric")),
        Cause("The process at the other end of the link ended first."),
    ),
    "Find the link with `journalctl -k | grep -i xid` and `nvidia-smi nvlink -e`; after a fatal error reset all GPUs "
    "that share it, and restart the fabric manager.",
)
DRIVER_HANGS = Problem(
    "driver_hangs",
    "hardware",
    "GPU or driver that does not answer",
    (
        Cause("The GPU, its power or its firmware (GSP) failed.", ("gpu.xids", "gpu.pcie")),
        Cause("A bug of the driver."),
    ),
    "Read `journalctl -k` for the first line of NVRM, reset the GPU with `nvidia-smi -r`, or reboot.",
    ("ecc_error", "gpu_lost", "gpu_fault", "nvlink_error"),
)
ILLEGAL_ADDRESS = Problem(
    "illegal_address",
    "illegal_address",
    "kernel accessed memory that it may not access",
    (
        Cause("An index or label is out of range, or a custom kernel has a bug."),
        Cause("The framework or library has a bug with these shapes."),
        Cause("Kernels of several streams, e.g. of a custom operation, use the same memory at once."),
        Cause("The GPU has a fault.", ("gpu.xids", "gpu.ecc")),
    ),
    "Run once with CUDA_LAUNCH_BLOCKING=1, so that the traceback names the operation, and check its indices; if the "
    "error is gone then, kernels conflict: search the custom operations with `compute-sanitizer --tool racecheck`.",
    (*HARDWARE, "device_assert"),
)
DEVICE_ASSERT = Problem(
    "device_assert",
    "kernel_launch",
    "assertion failed in a kernel",
    (
        Cause("A label or an index is out of range: more classes in the data than outputs in the model."),
        Cause("A value is NaN or outside of [0, 1] where the loss needs a probability."),
    ),
    "Run the step on the CPU, where the message names the operation, and check labels and indices.",
)
PEER_ACCESS = Problem(
    "peer_access",
    "kernel_launch",
    "no direct access between two GPUs",
    (
        Cause("The GPUs, the board, the IOMMU or a container allow none.", ("gpu.fabric",)),
        Cause("More peers than a GPU allows."),
    ),
    "Compare `nvidia-smi topo -p2p r`, and run with NCCL_P2P_DISABLE=1.",
    HARDWARE,
)
GRAPH_CAPTURE = Problem(
    "graph_capture",
    "kernel_launch",
    "operation not allowed in a CUDA graph",
    (
        Cause("The captured step synchronizes, allocates or uses another stream."),
        Cause("An earlier error ended the capture."),
    ),
    "Run once without CUDA graphs: an earlier error shows then; exclude the operation from the capture.",
    (*HARDWARE, "illegal_address", "device_assert", "device_out_of_memory"),
)
NOT_SUPPORTED_HERE = Problem(
    "not_supported_here",
    "other",
    "operation not supported or permitted here",
    (
        Cause("A container, a virtual GPU (license), MIG or WSL lacks it."),
        Cause("The GPU or the driver is too old for it.", ("framework.driver", "framework.gpus")),
    ),
    "Find the operation in the traceback, try it outside of the container, and switch that feature off.",
    HARDWARE,
)
CALL_REFUSED = Problem(
    "call_refused",
    "other",
    "call that CUDA refused",
    (
        Cause("An argument, handle or context is not valid: a bug of an extension, or CUDA used as the process ends."),
        Cause("An earlier error left the context unusable."),
        Cause("Packages of different CUDA versions.", ("framework.packages",)),
    ),
    "Look for an earlier error; if there is none, run once with CUDA_LAUNCH_BLOCKING=1 to find the operation.",
    (
        *(*HARDWARE, "mps_failed", "illegal_address", "device_assert", "kernel_launch_failed", "device_out_of_memory"),
        *("host_out_of_memory", "launch_timeout", "cuda_after_fork"),
    ),
)
KERNEL_LAUNCH_FAILED = Problem(
    "kernel_launch_failed",
    "kernel_launch",
    "kernel failed on the GPU",
    (
        Cause("An earlier kernel failed; errors are reported later than they happen."),
        Cause("GPU memory is full, which cuBLAS and cuDNN report as a failed launch.", ("memory.gpu",)),
        Cause("The library does not fit the GPU, or the GPU has a fault.", ("framework.gpus", "gpu.xids")),
    ),
    "Restart the process, and run once with CUDA_LAUNCH_BLOCKING=1 to find the operation.",
    (
        *HARDWARE,
        *("illegal_address", "device_assert", "device_out_of_memory", "library_init_failed", "cudnn_mismatch"),
        *("unsupported_compute_capability", "cuda_mismatch"),
    ),
)
CUBLAS_LAUNCH_FAILED = Problem(
    "cublas_launch_failed",
    "kernel_launch",
    "matrix product failed on the GPU (cuBLAS)",
    (
        Cause(
            "Another process, e.g. an older notebook, holds the GPU's memory, so that cuBLAS has none.",
            ("memory.gpu", "memory.processes"),
        ),
        Cause("TensorFlow itself reserved all memory of the GPU before cuBLAS started."),
        Cause("The library does not fit the GPU, or the GPU has a fault.", ("framework.gpus", "gpu.xids")),
    ),
    "End other processes on the GPU (`nvidia-smi` lists them), and set TF_FORCE_GPU_ALLOW_GROWTH=true.",
    KERNEL_LAUNCH_FAILED.follows,
    (
        Step(
            FRAMEWORK_REGEXES["jax"],
            "End other processes on the GPU (`nvidia-smi` lists them), and set XLA_PYTHON_CLIENT_PREALLOCATE=false.",
        ),
    ),
)
KERNEL_RESOURCES = Problem(
    "kernel_resources",
    "kernel_launch",
    "kernel needs more than the GPU has",
    (
        Cause("A tensor is empty, or has a dimension beyond the limits of a grid."),
        Cause("The kernel's block size, registers or shared memory exceed the GPU's.", ("framework.gpus",)),
    ),
    "Check the tensors of this operation for empty or very large dimensions.",
)
LAUNCH_TIMEOUT = Problem(
    "launch_timeout",
    "kernel_launch",
    "kernel stopped by the driver's time limit",
    (
        Cause("A display runs on the GPU, so kernels have a time limit."),
        Cause("A kernel hangs, or the GPU is very slow.", ("gpu.throttling", "gpu.xids")),
    ),
    "Use a GPU without a display, or smaller kernels (a smaller batch).",
)
